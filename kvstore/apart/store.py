"""`StoreApart`: a `BlockStore` whose store is in another process. Each verb is a message, its answer another one.

A caller of a verb waits for the answer, as of any store; who must not wait begins a call and is told (`begin`), which
is how the tiers do it (`kvstore.tiering.pool_apart`).
"""

from __future__ import annotations

import contextlib
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from kvstore.abc import REFUSE_S, BlockStore
from kvstore.apart.link import Answer, Link
from kvstore.apart.messages import KEYS, READS, SCANS, WRITES, keys, places, reads, writes
from kvstore.apart.process import END_S
from kvstore.apart.serving import SCAN_CHUNK
from kvstore.errors import StoreClosedError
from kvstore.inuse import InUse
from kvstore.layout import as_bytes
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvstore.apart.link import Done
    from kvstore.marks import Mark, MarkOutcome
    from kvstore.namespace import Namespace
    from kvstore.repairing import Repaired
    from kvstore.scrub import Scrubbed
    from kvstore.types import (
        BlockInfo,
        BlockKey,
        BlockRead,
        BlockWrite,
        GetOutcome,
        Leftover,
        PutOutcome,
        ResealOutcome,
        Residue,
        Unseen,
        Usage,
    )

T = TypeVar("T")

__all__ = ["StoreApart"]

CLOSE_S = 10.0
"""Seconds that calls under way may take to end, and then the store there to close; its process is ended then."""


class StoreApart(BlockStore):
    """The store that `url` names, opened in a process that is started for it and ends with this one.

    Buffers that lie in memory that was lent (`memory`, `lend`) are read and written there; bytes of any other buffer
    are sent along. Capabilities, URL and errors are those of the store there. When its process dies, calls under way
    raise `TierUnavailable`, and the next one is made in a new process.

    Raises what `open_store` raises, and a `ConfigurationError` for memory that no other process can be given.
    """

    def __init__(self, url: str | Mapping[str, Any] | TierURL, memory: Sequence[Buffer] = ()) -> None:
        self._link = Link(TierURL.parse(url))
        super().__init__(self._link.about[0])
        self.capabilities = self._link.about[1]
        self._in_use = InUse(self.url)
        self._finalizer = weakref.finalize(self, Link.end, self._link)
        try:
            for one in memory:
                self.lend(one)
        except BaseException:
            self.close()
            raise

    @property
    def process(self) -> int | None:
        """The number of its process; None while none runs."""
        return self._link.process

    @property
    def restarts(self) -> int:
        """How often a process was started after one had died."""
        return self._link.restarts

    def lend(self, memory: Buffer) -> None:
        """Let the process use `memory`, which stays mapped until `close`. Raises a `ConfigurationError` where that
        cannot be: private memory cannot, `kvstore.apart.shared_memory` can.
        """
        with self._in_use:
            self._link.lend(as_bytes(memory))

    def begin(self, verb: str, arguments: tuple[Any, ...], done: Done) -> None:
        """Have a verb called with `arguments`, soon after `send`, without waiting. `done(value, error)` is called when
        it has ended, on a thread that must not be kept; what that begins is sent.

        Raises `InvalidBlockError` or `StoreClosedError` before anything is done. `copy_many` is a verb here: pairs of
        arrays in lent memory, into and from.
        """
        message, deliver = self._message(verb, arguments)

        def told(value: Any, error: BaseException | None) -> None:
            if error is None:
                try:
                    value = deliver(value)
                except BaseException as raised:  # of an answer that is none: whoever waits has to be told
                    error = raised
            done(value, error)

        self._link.begin(verb, message, {}, told)

    def send(self) -> None:
        """Send all that was begun, at once: a message for each call would be a system call, and a turn at the GIL."""
        self._link.send()

    def later(self, work: Callable[[], object]) -> bool:
        """Have `work`, which begins a call, done by a thread of this store's, soon and without waiting. False after
        `close`: then it is not done.
        """
        return self._link.later(work)

    def _ask(self, verb: str, *arguments: Any, **options: Any) -> T:  # type: ignore[type-var] # pyright: ignore[reportInvalidTypeVarUse]
        """The answer, waited for; of the type that the verb has."""
        with self._in_use:
            message, deliver = self._message(verb, arguments)
            answered = Answer()
            self._link.begin(verb, message, options, answered)
            self._link.send()
            self._wait(answered)
            answer: T = deliver(answered.value())  # here: no other thread holds a buffer once the caller goes on
            return answer

    def _wait(self, answered: Answer) -> None:
        try:
            answered.wait()
        except BaseException:  # Ctrl-C: who goes on now has its buffers back
            if not answered.wait(CLOSE_S):
                self.abandon()
            raise

    def _message(self, verb: str, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], Callable[[Any], Any]]:
        """The arguments as they are sent, and what makes of the answer what the verb returns."""
        lent = self._link.lent
        if verb == "copy_many":
            into, source = zip(*arguments[0], strict=True) if arguments[0] else ((), ())
            return ([*zip(places(lent, into), places(lent, source), strict=True)],), _as_it_is
        if not arguments or verb in SCANS:
            return arguments, _as_it_is
        namespace, *rest = arguments  # every other verb with arguments is about a namespace
        deliver: Callable[[Any], Any] = _as_it_is
        if verb in READS:
            rest[0], buffers = reads(lent, namespace, rest[0])
            deliver = partial(_delivered, buffers)
        elif verb in WRITES:
            rest[0] = writes(lent, namespace, rest[0])
        elif verb in KEYS:
            rest[0] = keys(rest[0])
        return (self._link.number(namespace), *rest), deliver

    def ensure_open(self) -> None:
        with self._in_use:
            pass

    def namespaces(self) -> list[Namespace]:
        return self._ask("namespaces")

    def contains_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        return self._ask("contains_many", namespace, keys)

    def put_many(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[PutOutcome]:
        return self._ask("put_many", namespace, blocks)

    def put_if_room(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[PutOutcome]:
        return self._ask("put_if_room", namespace, blocks)

    def get_many_into(self, namespace: Namespace, blocks: Sequence[BlockRead]) -> list[GetOutcome]:
        return self._ask("get_many_into", namespace, blocks)

    def check_many(self, namespace: Namespace, blocks: Sequence[BlockRead]) -> list[GetOutcome]:
        return self._ask("check_many", namespace, blocks)

    def of_later_version(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        return self._ask("of_later_version", namespace, keys)

    def delete_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        return self._ask("delete_many", namespace, keys)

    def touch_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
        self._ask("touch_many", namespace, keys)

    def mark_many(self, namespace: Namespace, keys: Sequence[BlockKey], mark: Mark) -> list[MarkOutcome]:
        return self._ask("mark_many", namespace, list(keys), mark)

    def unmark_many(self, namespace: Namespace, keys: Sequence[BlockKey], mark: Mark) -> list[bool]:
        return self._ask("unmark_many", namespace, list(keys), mark)

    def scan(self, namespace: Namespace) -> Iterator[BlockInfo]:
        return self._scanned("scan", namespace)

    def scan_marked(self, namespace: Namespace, mark: Mark) -> Iterator[BlockInfo]:
        return self._scanned("scan_marked", namespace, mark)

    def scan_ages(self, namespace: Namespace) -> Iterator[BlockInfo]:
        return self._scanned("scan_ages", namespace)

    def _scanned(self, verb: str, *arguments: Any) -> Iterator[BlockInfo]:
        with self._in_use:  # at once, like any verb
            scan = self._went_on(self._ask(verb, *arguments))
            next(scan)  # one that was never begun would not be dropped there
            return cast("Iterator[BlockInfo]", scan)

    def _went_on(self, scan: int) -> Iterator[BlockInfo | None]:
        try:
            yield None
            while True:
                some: list[BlockInfo] = self._ask("next", scan)
                yield from some
                if len(some) < SCAN_CHUNK:
                    return
        finally:
            with contextlib.suppress(StoreClosedError):  # a forked child drops what is its parent's
                if self._link.process is not None:  # no other one has it
                    self._link.begin("drop", (scan,), {}, lambda _, __: None)
                    self._link.send()

    def usage(self) -> Usage:
        return self._ask("usage")

    def excess(self, capacity: int) -> int:
        return self._ask("excess", capacity=capacity)

    def remove_unused(self, namespace: Namespace, infos: Sequence[BlockInfo]) -> list[bool]:
        return self._ask("remove_unused", namespace, list(infos))

    def drop_namespace(self, namespace: Namespace, *, only_if_empty: bool = False) -> int:
        return self._ask("drop_namespace", namespace, only_if_empty=only_if_empty)

    def purge_many(
        self, namespace: Namespace, keys: Sequence[BlockKey], *, refuse_s: float = REFUSE_S, overwrite: bool = True
    ) -> list[bool]:
        return self._ask("purge_many", namespace, list(keys), refuse_s=refuse_s, overwrite=overwrite)

    def finish_purge(
        self, *, overwrite: bool = True, advance: Callable[[int], object] = lambda _: None
    ) -> list[Residue]:
        del advance  # one message has one answer
        return self._ask("finish_purge", overwrite=overwrite)

    def sealed_with(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bytes | None]:
        return self._ask("sealed_with", namespace, list(keys))

    def reseal_many(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[ResealOutcome]:
        return self._ask("reseal_many", namespace, blocks)

    def leftovers(self, *, remove: bool = False) -> list[Leftover]:
        return self._ask("leftovers", remove=remove)

    def repair(self) -> list[Repaired]:
        return self._ask("repair")

    def unseen(self) -> list[Unseen]:
        return self._ask("unseen")

    def take_in(self, *, blocks: bool) -> None:
        self._ask("take_in", blocks=blocks)

    def purge_unseen(
        self, *, names: Collection[str], refuse_s: float = REFUSE_S, overwrite: bool = True
    ) -> list[Unseen]:
        return self._ask("purge_unseen", names=sorted(names), refuse_s=refuse_s, overwrite=overwrite)

    def scrubbed(self) -> Scrubbed | None:
        return self._ask("scrubbed")

    def close(self) -> None:
        """Bounded: calls that have not ended after `CLOSE_S` seconds go with the process, and so does a store that has
        not closed after as many more.
        """
        if self._finalizer.detach() is None:  # closed before, or another thread is at it
            return
        if self._in_use.end(CLOSE_S) and self._link.process is not None:
            answered = Answer()
            with contextlib.suppress(StoreClosedError):  # its process was ended already
                self._link.begin("close", (), {}, answered)
                self._link.send()
                answered.wait(CLOSE_S)
        self.abandon()

    def abandon(self) -> bool:
        """End the process in the middle of whatever it does; False if it is in a call that the kernel does not end."""
        self._finalizer.detach()
        self._in_use.end(0.0)
        self._link.end()
        return self._link.ended(END_S)


def _as_it_is(value: Any) -> Any:
    return value


def _delivered(buffers: list[NDArray[np.uint8]], value: tuple[list[GetOutcome], dict[int, bytes]]) -> list[GetOutcome]:
    """The outcomes of reads; bytes that came along are put where they are wanted."""
    outcomes, along = value
    for number, data in along.items():
        np.copyto(buffers[number], np.frombuffer(data, np.uint8))
    return outcomes
