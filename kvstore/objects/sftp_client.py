"""Objects on an SSH server, through fsspec's file system on paramiko: a connection for each call under way.

paramiko's SFTP client belongs to one thread at a time: of two who wait on it, one takes the other's answer, and both
wait for ever. So there are several, made when they are needed, and one that did not answer, or lost its server, is not
used again.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.objects.faults import Kind, RequestFailed
from kvstore.objects.fsspec_client import FsspecClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.objects.settings import Place
    from kvstore.url import TierURL

__all__ = ["SftpClient"]

T = TypeVar("T")

CONNECTIONS = 8
"""Most of them. An sshd turns guests away at random where ten are at its door (MaxStartups)."""


class SftpClient(FsspecClient):
    """One directory on one server. Whoever comes when all connections are taken waits for one."""

    def _open(self, url: TierURL, place: Place) -> tuple[Any, str]:
        self._url, self._place = url, place
        self._idle: list[Any] = []
        self._free = threading.BoundedSemaphore(CONNECTIONS)
        self._changed = threading.Condition()
        self._connecting = self._over = False
        filesystem, root = self._connected()
        self._idle.append(filesystem)
        return filesystem, root

    def _words(self) -> dict[str, Any]:
        return dict.fromkeys(("timeout", "banner_timeout", "auth_timeout", "channel_timeout"), self.attempt_timeout)

    def _connected(self) -> tuple[Any, str]:
        filesystem, root = super()._open(self._url, self._place)
        filesystem.ftp.get_channel().settimeout(self.attempt_timeout)
        return filesystem, root

    def _disconnect(self) -> None:
        self._over = True
        while self._idle:
            _close(self._idle.pop())

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of a file system that nobody else is using."""
        if not self._free.acquire(timeout=self.attempt_timeout):
            raise RequestFailed(Kind.TIMEOUT, f"{CONNECTIONS} connections, and all are taken")
        try:
            filesystem = self._taken()
            try:
                return getattr(filesystem, method)(*args, **kwargs)
            except (TimeoutError, EOFError):
                _close(filesystem)  # what it was asked may still be answered, to whoever asks next
                raise
            finally:
                self._give_back(filesystem)
        finally:
            self._free.release()

    def _taken(self) -> Any:
        """One that is idle, or a new one; while somebody else makes a connection, whichever can be had first."""
        deadline = time.monotonic() + self.attempt_timeout
        with self._changed:
            while True:
                with suppress(IndexError):
                    while not _is_alive(filesystem := self._idle.pop()):
                        _close(filesystem)
                    return filesystem
                if not self._connecting:
                    self._connecting = True
                    break
                if not self._changed.wait(deadline - time.monotonic()):
                    raise RequestFailed(Kind.TIMEOUT, "another connection is being made all the while")
        try:
            return _apart(self._connected)[0]
        finally:
            with self._changed:
                self._connecting = False
                self._changed.notify()

    def _give_back(self, filesystem: Any) -> None:
        if self._over or not _is_alive(filesystem):
            _close(filesystem)
            return
        with self._changed:
            self._idle.append(filesystem)
            self._changed.notify()


def _apart(call: Callable[[], T]) -> T:
    """The result of `call`, made on a thread of its own.

    paramiko tries a key as one kind after another, and what that raised stays, in a cycle with the frames of everybody
    who called, until garbage is collected: here nobody's block is among them.
    """
    done: Future[T] = Future()
    threading.Thread(target=_answer, args=(done, call), daemon=True).start()
    try:
        return done.result()
    finally:
        del done  # an error and the frame it was raised in would hold each other


def _answer(done: Future[T], call: Callable[[], T]) -> None:
    try:
        done.set_result(call())
    except BaseException as error:  # raised again, where somebody waits for it
        done.set_exception(error)


def _is_alive(filesystem: Any) -> bool:
    transport = filesystem.client.get_transport()
    return transport is not None and bool(transport.is_active())


def _close(filesystem: Any) -> None:
    with suppress(Exception):
        filesystem.client.close()
