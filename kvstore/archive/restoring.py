"""From an archive back into a tier: every block checked, none written twice, positions and label as they were.

::

    an object ──► checked ──► put_many (side by side)          two shards in memory: one read, one written

The last blocks of a shard are written beside the first ones of the next, so that no writer waits for another. A shard
all of whose blocks the tier has is not read at all, so that what was interrupted is gone on with.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.archive.creating import READERS
from kvstore.archive.document import silent
from kvstore.archive.matching import check_namespace, check_one_of
from kvstore.archive.overlapping import check_apart
from kvstore.archive.reading import Archive, open_archive
from kvstore.errors import ConfigurationError, StoreFullError
from kvstore.marks import Mark, MarkOutcome
from kvstore.types import BlockWrite, PutOutcome
from kvstore.url import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvstore.abc import BlockStore
    from kvstore.archive.document import ArchiveInfo
    from kvstore.archive.reading import LoadedShard, Shard
    from kvstore.namespace import Namespace
    from kvstore.types import BlockKey
    from kvstore.url import TierURL

__all__ = ["RestoreReport", "restore", "restore_archive", "warm"]

MARKS_AT_ONCE = 1024

T = TypeVar("T")
_Put = tuple[list["PutOutcome"], int]
"""What became of some blocks, and how many were damaged in the archive."""


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What became of an archive's blocks in a tier.

    `restored` were written, `there` the tier had already, `corrupt` are damaged in the archive and were not written,
    `refused` the tier did not take (`full`: for want of room, after which no more were tried; or it was purged of them
    a short while ago). `labelled` have the archive's label and the tenant that was given now; None where there is
    neither, or the tier keeps none. `pinned` are pinned under it; None where that was not asked for.
    """

    archive: ArchiveInfo
    restored: int
    there: int
    corrupt: int
    refused: int
    full: bool
    labelled: int | None
    pinned: int | None = None

    @property
    def complete(self) -> bool:
        """Whether the tier has all blocks of the archive now, pinned where that was asked for."""
        return self.restored + self.there == self.archive.blocks and self.pinned in (None, self.archive.blocks)


def restore(
    archive_url: str | Mapping[str, Any] | TierURL,
    store: BlockStore,
    *,
    namespace: Namespace | None = None,
    tenant: str = "",
    pin: bool = False,
    progress: Callable[[int], object] | None = None,
) -> RestoreReport:
    """Put the blocks of an archive into `store`, under the keys that they have, and mark them with its label.

    What is there is not written again, so that an interrupted call is continued by the same call. With `namespace`, an
    archive of another one raises `NamespaceMismatchError`, before anything is written. An archive keeps neither tenants
    nor pins: `tenant` says whose the blocks are here, `pin` that they stay, as far as pins go (`kvstore.marks`).
    `progress` is told of numbers of blocks that are done. Memory: two shards, about 128 MiB.

    Raises what `open_archive` raises, `StoreFullError` for a tier whose capacity is less than the archive,
    `ConfigurationError` where it keeps no marks and is to, or the archive has no label to pin by, or archive and tier
    stand in each other, and what the store raises.
    """
    with open_archive(archive_url) as archive:
        if namespace is not None:
            check_namespace(namespace, archive.namespace, archive.info.url)
        return restore_archive(archive, store, tenant=tenant, pin=pin, progress=progress)


def warm(
    store: BlockStore,
    namespace: Namespace | None,
    archive_urls: Sequence[str | Mapping[str, Any] | TierURL],
    *,
    tenant: str = "",
    pin: bool = False,
    progress: Callable[[int], object] | None = None,
) -> list[RestoreReport]:
    """`restore` several archives for an engine whose blocks are in `namespace`; one report for each, in order.

    None: for whichever engines have blocks in `store`. One where there is none yet takes every archive.

    An archive that is of no use there raises `NamespaceMismatchError`, which names each field that differs, before any
    of them is restored.
    """
    ours = store.namespaces() if namespace is None else [namespace]
    for url in archive_urls:
        with open_archive(url) as archive:
            check_one_of(ours, archive.namespace, archive.info.url)
            _mark_of(archive, store, tenant, pin)
    return [restore(url, store, tenant=tenant, pin=pin, progress=progress) for url in archive_urls]


def restore_archive(
    archive: Archive,
    store: BlockStore,
    *,
    tenant: str = "",
    pin: bool = False,
    progress: Callable[[int], object] | None = None,
    stopped: Callable[[], bool] | None = None,
) -> RestoreReport:
    """`restore` of an open archive; `stopped` is asked between shards whether to end early."""
    check_apart(archive.place, store.url)
    mark = _mark_of(archive, store, tenant, pin)
    capacity = store.usage().capacity
    if capacity is not None and archive.info.nbytes > capacity:
        raise StoreFullError(
            f"{store.url} has a capacity of {format_size(capacity)}, less than the"
            f" {format_size(archive.info.nbytes)} of {archive.info.url}: restore it into a larger tier"
        )
    return _Restoration(archive, store, mark, tenant, progress or silent, stopped or _never).run()


def _mark_of(archive: Archive, store: BlockStore, tenant: str, pin: bool) -> Mark:
    """What is said of the blocks; nothing in a store that keeps none. Raises `ConfigurationError`."""
    label = archive.info.label
    able = store.capabilities
    if not able.marks and (pin or (tenant and not able.sealed)):  # an encrypted one seals under the tenant's key
        raise ConfigurationError(f"{store.url} keeps neither tenants nor pins: use a file:// or lmdb:// tier")
    if pin and not label:
        raise ConfigurationError(
            f"{archive.info.url} has no label, by which pins are taken back: restore it without, and pin the blocks"
            " with `kvstore pin --keys`"
        )
    try:
        mark = Mark(label, pinned=pin, tenant=tenant)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    return mark if able.marks else Mark()


class _Threads:
    """Daemon threads that do what they are given, in its order: a call that hangs holds up no exit."""

    def __init__(self, count: int) -> None:
        self._given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._count = count
        for _ in range(count):
            threading.Thread(target=self._work, name="kvstore-archive", daemon=True).start()

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """What `call` will have returned or raised."""
        result: Future[T] = Future()

        def act() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(call())
            except BaseException as error:  # raised again, where somebody waits for it
                result.set_exception(error)

        self._given.put(act)
        return result

    def _work(self) -> None:
        while (act := self._given.get()) is not None:
            act()
            del act  # and with it the shard that it held

    def close(self) -> None:
        """Nothing more is given; nobody waits for what is under way."""
        for _ in range(self._count):
            self._given.put(None)


class _Restoration:
    """One archive on its way into one tier, by the calling thread with helpers."""

    def __init__(
        self,
        archive: Archive,
        store: BlockStore,
        mark: Mark,
        tenant: str,
        progress: Callable[[int], object],
        stopped: Callable[[], bool],
    ) -> None:
        self._archive, self._store, self._mark, self._tenant = archive, store, mark, tenant
        self._progress, self._stopped = progress, stopped
        self._counts: Counter[PutOutcome] = Counter()
        self._there = self._corrupt = 0

    def run(self) -> RestoreReport:
        reader, writers = _Threads(1), _Threads(READERS)
        before: list[Future[_Put]] = []
        under_way: list[Future[_Put]] = []
        try:
            todo = self._missing()
            following = next(todo, None)
            ahead = following and reader.begin(partial(self._archive.load, following[0]))
            while following is not None and ahead is not None:
                (shard, wanted), loaded = following, ahead.result()
                ahead = None
                if self._counts[PutOutcome.FULL] or self._stopped():
                    break
                before, under_way = under_way, self._put(writers, loaded, shard, wanted)
                del loaded  # there are to be no more than two in memory
                self._count(before)
                following = next(todo, None)
                ahead = following and reader.begin(partial(self._archive.load, following[0]))
            self._count(under_way)
        except BaseException as error:
            running = [one for one in (*before, *under_way) if not one.cancel()]
            if isinstance(error, Exception):  # and not Ctrl-C: whoever sees it may close the store, or try again
                wait(running)
            raise
        finally:
            reader.close()
            writers.close()
        return self._report()

    def _missing(self) -> Iterator[tuple[Shard, list[int]]]:
        """Each shard with a block that the tier has not, and the places of those."""
        for shard in self._archive.shards():
            found = self._store.contains_many(self._archive.namespace, shard.keys)
            wanted = [place for place, there in enumerate(found) if not there]
            self._there += len(found) - len(wanted)
            self._progress(len(found) - len(wanted))
            if wanted:
                yield shard, wanted

    def _put(self, writers: _Threads, loaded: LoadedShard, shard: Shard, wanted: Sequence[int]) -> list[Future[_Put]]:
        size = self._archive.namespace.block_bytes(shard.group)
        most = max(1, self._store.capabilities.batch_bytes // size)
        pieces = [wanted[start : start + most] for start in range(0, len(wanted), most)]
        return [writers.begin(partial(self._put_piece, loaded, shard, piece)) for piece in pieces]

    def _count(self, begun: list[Future[_Put]]) -> None:
        """Wait for what was begun, in its order."""
        while begun:
            outcomes, corrupt = begun.pop(0).result()
            self._counts.update(outcomes)
            self._corrupt += corrupt
            self._progress(len(outcomes) + corrupt)

    def _put_piece(self, loaded: LoadedShard, shard: Shard, places: Sequence[int]) -> _Put:
        writes: list[BlockWrite] = []
        for place in places:
            block = self._archive.block(loaded, shard, place)
            if block is not None:
                position, parent = self._archive.position(shard.group, shard.start + place)
                writes.append(BlockWrite(shard.keys[place], block.data, position, parent, self._tenant))
        outcomes = self._store.put_many(self._archive.namespace, writes) if writes else []
        return outcomes, len(places) - len(writes)

    def _report(self) -> RestoreReport:
        said = self._marked()
        return RestoreReport(
            archive=self._archive.info,
            restored=self._counts[PutOutcome.STORED],
            there=self._there + self._counts[PutOutcome.EXISTS],
            corrupt=self._corrupt,
            refused=sum(self._counts[refusal] for refusal in (PutOutcome.FULL, PutOutcome.FAILED, PutOutcome.REFUSED)),
            full=bool(self._counts[PutOutcome.FULL]),
            labelled=None if said is None else said[MarkOutcome.MARKED] + said[MarkOutcome.UNPINNED],
            pinned=None if said is None or not self._mark.pinned else said[MarkOutcome.MARKED],
        )

    def _marked(self) -> Counter[MarkOutcome] | None:
        if self._mark == Mark():
            return None
        keys: list[BlockKey] = self._archive.keys
        said: Counter[MarkOutcome] = Counter()
        for start in range(0, len(keys), MARKS_AT_ONCE):
            some = keys[start : start + MARKS_AT_ONCE]
            said.update(self._store.mark_many(self._archive.namespace, some, self._mark))
        return said


def _never() -> bool:
    return False
