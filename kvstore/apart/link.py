"""The process that a store has to itself, seen from its owner: started, asked, listened to, and started again.

A call is one message there and one back. Who asks never waits: `send` sends as much as the socket takes, the rest is a
sender's, a thread that also makes the messages which take long (`later`). One more thread listens, and says to whoever
asked what came of it. It has the process too: when that ends, by whatever hand, each call under way has failed with
`TierUnavailable`, and the next one is made in a new process.

**Nothing is written after the end was seen.** The socket has no other end once every thread of the process has let go
of its descriptors, which a thread does after it has left its last system call and its memory (in the kernel: `exit_mm`,
then `exit_files`). What it could write into, it has written by then.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import threading
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from kvstore.apart.memory import Lent
from kvstore.apart.messages import Frames, frame
from kvstore.apart.process import OPEN, launched, opened, put_down, received
from kvstore.background import Bell
from kvstore.errors import StoreClosedError, TierUnavailable

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.abc import Capabilities
    from kvstore.apart.memory import Region
    from kvstore.namespace import Namespace
    from kvstore.url import TierURL

    Done = Callable[[Any, BaseException | None], None]

__all__ = ["Answer", "Link"]

log = logging.getLogger(__name__)

TOGETHER_BYTES = 1 << 14
_send = ctypes.PyDLL(None, use_errno=True).send
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send.restype = ctypes.c_ssize_t


@dataclass(frozen=True, slots=True)
class _Message:
    """On its way to the process; that of a call has its `ticket`."""

    data: bytes
    ticket: int | None = None
    descriptor: int | None = None


class Answer(Bell):
    """What one caller waits for: called with it once."""

    def __init__(self) -> None:
        super().__init__()
        self._value: Any = None
        self._error: BaseException | None = None

    def __call__(self, value: Any, error: BaseException | None) -> None:
        self._value, self._error = value, error
        self.ring()

    def wait(self, timeout: float = -1) -> bool:
        """Whether it is there within `timeout` seconds; it stays there."""
        there = super().wait(timeout)
        if there:
            self.ring()
        return there

    def value(self) -> Any:
        """As long as it takes: the value, or raises the error."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value


class Link:
    """The store at `url`, opened in a process of its own. Raises whatever opening it there raises.

    `restarts` counts the processes after the first. Threads: any may call `begin`, one at a time the rest.
    """

    def __init__(self, url: TierURL) -> None:
        self.shown = str(url)
        self.restarts = 0
        self.lent = Lent()
        self.about: tuple[TierURL, Capabilities]
        self._url = url
        self._owner = os.getpid()
        self._namespaces: dict[Namespace, int] = {}
        self._naming = threading.Lock()
        self._tickets = count(OPEN + 1)
        self._asked: dict[int, Done] = {}
        self._outbox: deque[_Message] = deque()
        self._sending = threading.Lock()
        self._wanted, self._stuffed = Bell(), Bell()
        self._later: deque[Callable[[], object]] = deque()
        self._wire: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._frames = Frames()
        self._ended = False
        self._start()
        self._listener = self._thread(self._listen, "link")
        self._thread(self._send_on, "sender")

    @property
    def process(self) -> int | None:
        """Its number, while there is one."""
        process = self._process
        return None if process is None else process.pid

    def lend(self, memory: NDArray[np.uint8]) -> None:
        """Have it mapped there. Raises `ConfigurationError` where that cannot be, and whatever mapping it raises."""
        answered, ticket = Answer(), next(self._tickets)
        with self._naming:
            region = self.lent.add(memory)
        try:
            self._asking(ticket, _lending(region, ticket), answered)
            self.send()
            answered.value()
        except BaseException:
            with self._naming:
                self.lent.remove(region)
            raise

    def number(self, namespace: Namespace) -> int:
        """What messages call it."""
        known = self._namespaces.get(namespace)
        if known is None:
            with self._naming:
                known = self._namespaces.get(namespace)
                if known is not None:  # another thread's, just now: a second number would be the next namespace's, too
                    return known
                known = len(self._namespaces)
                self._outbox.append(_Message(frame(("name", known, namespace))))
                self._namespaces[namespace] = known  # last: whoever finds it here may use it at once
        return known

    def begin(self, verb: str, arguments: tuple[Any, ...], options: dict[str, Any], done: Done) -> None:
        """Have a call made once `send` is called, too; `done` is called with its value or its error, by the thread that
        listens.

        Raises `StoreClosedError` after `end` and in a forked child: `done` is not called then.
        """
        ticket = next(self._tickets)
        self._asking(ticket, _Message(frame(("call", ticket, verb, arguments, options)), ticket), done)

    def _asking(self, ticket: int, message: _Message, done: Done) -> None:
        if self._owner != os.getpid():  # the socket is the owner's
            raise StoreClosedError(f"{self.shown} was opened by the process that this one was forked from")
        self._asked[ticket] = done  # in this order: see _fail
        self._outbox.append(message)
        if self._ended and self._asked.pop(ticket, None) is not None:
            raise StoreClosedError(f"{self.shown} was closed: open it again")

    def send(self) -> None:
        """Send what was begun. What the thread that listens begins, it sends. In a forked child nothing happens."""
        if self._owner != os.getpid():
            return
        if self._wire is None:
            self._wanted.ring()
        while self._outbox and self._wire is not None and self._sending.acquire(blocking=False):
            try:
                if not self._sent(socket.MSG_DONTWAIT):
                    self._stuffed.ring()
                    return
            finally:
                self._sending.release()

    def later(self, work: Callable[[], object]) -> bool:
        """Have `work` done by the sender. False after `end` and in a forked child, which have none: then it is not
        done.
        """
        if self._ended or self._owner != os.getpid():
            return False
        self._later.append(work)
        self._stuffed.ring()
        if self._ended:  # just now: the sender may have looked for the last time
            with contextlib.suppress(IndexError):
                self._later.popleft()()
        return True

    def end(self) -> None:
        """End the process, now; whoever still waits for an answer is told. In a forked child nothing happens."""
        if self._owner != os.getpid():
            return
        self._ended = True
        self._wanted.ring()
        self._stuffed.ring()
        process = self._process
        if process is not None:
            process.kill()
        wire = self._wire
        if wire is not None:
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_WR)

    def ended(self, timeout: float) -> bool:
        """After `end`: wait until it has, and everybody was told; False if it is still there after `timeout` seconds,
        in a call that the kernel does not let go of.
        """
        self._listener.join(timeout)
        return not self._listener.is_alive()

    def _thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=work, name=f"kvstore-{self._url.scheme}-{name}", daemon=True)
        thread.start()
        return thread

    # Sending.

    def _send_on(self) -> None:
        """What takes long to put into a message, and what did not fit into the socket."""
        while not self._ended or self._later:
            try:
                self._stuffed.wait()
                while self._later:
                    self._later.popleft()()
                with self._sending:
                    self._sent(0)
                self.send()
            except BaseException:  # nobody would be told that nothing is sent any more
                self._give_up()

    def _sent(self, flags: int) -> bool:
        """Whether all of it went; under `_sending`. Small ones go together."""
        wire = self._wire
        while self._outbox and wire is not None:
            message = self._outbox.popleft()
            if message.ticket is not None and message.ticket not in self._asked:
                continue  # who asked was told that it failed
            if message.descriptor is None:
                message = self._with_more(message)
            try:
                if message.descriptor is None and flags:
                    went = _sent_at_once(wire, message.data)
                elif message.descriptor is None:
                    went = wire.send(message.data)
                else:
                    went = socket.send_fds(wire, [message.data], [message.descriptor], flags)
            except BlockingIOError:
                self._outbox.appendleft(_Message(message.data, None, message.descriptor))
                return False
            except OSError:  # it has ended; who listens sees to that
                return True
            if went < len(message.data):
                self._outbox.appendleft(_Message(message.data[went:]))
        return True

    def _with_more(self, message: _Message) -> _Message:
        parts, nbytes = [message.data], len(message.data)
        while nbytes < TOGETHER_BYTES and self._outbox and self._outbox[0].descriptor is None:
            another = self._outbox.popleft()
            if another.ticket is None or another.ticket in self._asked:
                parts.append(another.data)
                nbytes += len(another.data)
        return _Message(b"".join(parts))

    # Listening.

    def _listen(self) -> None:
        try:
            self._hear()
        except BaseException:  # nobody would ever be told anything again
            self._give_up()
            wire = self._wire
            while wire is not None and received(wire):
                pass  # until it has ended: it may still write
        self._lost()
        self.lent.clear()

    def _give_up(self) -> None:
        log.exception("%s: its I/O process is ended", self.shown)
        self.end()

    def _hear(self) -> None:
        while True:
            wire = self._wire
            if wire is None:
                if self._ended:
                    return
                self._wanted.wait()
                if self._asked and not self._ended:
                    self._restart()
                    self.send()
                continue
            came = received(wire)
            for ticket, value, error in self._frames.add(came):
                done = self._asked.pop(ticket, None)
                if done is not None:
                    done(value, error)
                del done, value, error  # an idle thread keeps no buffer alive
            if not came:
                self._lost()
            self.send()

    def _lost(self) -> None:
        """The process has ended: none of its calls has an answer, and nothing of it touches any memory."""
        with self._sending:
            wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        self._frames = Frames()
        process = self._process
        if process is not None:
            status = put_down(process)
            if not self._ended:
                log.warning("%s: its I/O process %d ended (exit status %s)", self.shown, process.pid, status)
        self._fail("was closed" if self._ended else "lost its I/O process; the next call starts another")
        self._process = None  # last: a call of whoever finds that is not one of those that failed

    def _restart(self) -> None:
        try:
            self._start()
        except Exception as error:
            if self._ended:
                return
            log.warning("%s: its I/O process cannot be started again: %s", self.shown, error)
            self._fail(f": its I/O process cannot be started again: {error}")
            return
        self.restarts += 1

    def _fail(self, why: str) -> None:
        """Tell all that have asked, and see to it that what they asked for is never done: their memory is somebody
        else's from now on.

        Who asks meanwhile is known before its message is: either both are gone here, or a message that is left has
        nobody who asked (and is not sent), or both stay.
        """
        with self._sending:
            self._outbox.clear()
            told: list[Done] = []
            with contextlib.suppress(KeyError):
                while True:
                    told.append(self._asked.popitem()[1])
        for done in told:
            try:
                done(None, TierUnavailable(f"{self.shown} {why}"))
            except BaseException:  # the others are told all the same
                log.exception("%s: who was told that it %s failed", self.shown, why)

    # Starting.

    def _start(self) -> None:
        """A process that has opened the store, with all that was said to the last one."""
        wire, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        process: subprocess.Popen[bytes] | None = None
        try:
            self._process = process = launched(theirs, self._url)
            if self._ended:  # just now, and without knowing of this one
                process.kill()
            self.about = opened(wire, process, self._url)
        except BaseException:
            wire.close()
            self._process = None
            if process is not None:
                put_down(process)
            raise
        with self._naming, self._sending:
            names = [_Message(frame(("name", number, space))) for space, number in self._namespaces.items()]
            self._outbox.extendleft([*names, *map(_lending, self.lent)])
            self._wire, self._frames = wire, Frames()


def _sent_at_once(wire: socket.socket, data: bytes) -> int:
    """`socket.send` without waiting, and without letting go of the GIL for a system call of 5 µs: beside a thread that
    wants it all the time it comes back 5 ms later.
    """
    went: int = _send(wire.fileno(), data, len(data), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    if went < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))  # BlockingIOError where that is what it is
    return went


def _lending(region: Region, ticket: int = OPEN) -> _Message:
    return _Message(frame(("lend", ticket, region.number, region.nbytes, region.offset)), None, region.descriptor)
