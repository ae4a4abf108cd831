"""From one tier to another: `copy` reads blocks through their checks and puts them, with what is known of them.

    source.scan ──► batches ──► threads: target.contains, source.get, target.put, target.mark ──► CopyReport

What the target has is passed over, so that a copy which was interrupted, however hard, goes on where it was when it is
started again. `kvstore cp` is this function.
"""

from __future__ import annotations

import enum
import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.errors import ConfigurationError, TierUnavailable
from kvstore.marks import MarkOutcome
from kvstore.reading import ThreadMemory, batches
from kvstore.sealing import Keyring, check_options
from kvstore.types import BlockRead, BlockWrite, GetOutcome, PutOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from kvstore.abc import BlockStore
    from kvstore.marks import Mark
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo, BlockKey, Unseen

__all__ = ["THREADS", "CopyReport", "Fate", "SpaceReport", "copy", "mark_again"]

THREADS = 8
"""Batches under way at a time: some are read while others are written."""

REFUSED = 64
"""Blocks that a target may refuse before anything else was put: then it refuses everything."""


class Fate(enum.Enum):
    """What became of one block of a copy."""

    COPIED = "copied"
    PRESENT = "present"
    """The target had it. It has the source's marks now, too."""
    CORRUPT = "corrupt"
    """The source's block failed its checks; it is not copied."""
    MISSING = "missing"
    """The source lists it and cannot find it."""
    LATER = "of a later version"
    """A later kvstore wrote it, and has to copy it."""
    GONE = "gone"
    """The source evicted or removed it meanwhile."""
    FAILED = "failed"
    """The target's device refused it."""
    FULL = "full"
    """The target has no room for it."""
    REFUSED = "refused"
    """It was purged from the target a short while ago, which does not take it yet."""


@dataclass(slots=True)
class SpaceReport:
    """What became of the blocks of one namespace."""

    namespace: Namespace
    fates: Counter[Fate] = field(default_factory=Counter["Fate"])
    bytes: int = 0
    """Payload that was copied, or would be."""
    marks: Counter[MarkOutcome] = field(default_factory=Counter["MarkOutcome"])
    """What became of marks, one for each block and mark. `MISSING`: the target keeps none."""
    bad: dict[Fate, list[BlockKey]] = field(default_factory=dict["Fate", "list[BlockKey]"])
    """Which blocks were `CORRUPT`, `MISSING`, `LATER`, `FAILED` and `REFUSED`."""

    @property
    def blocks(self) -> int:
        """Blocks that were looked at."""
        return self.fates.total()


@dataclass(slots=True)
class CopyReport:
    """What a copy did. Everything that was chosen is in the target now if it is `ok`."""

    spaces: list[SpaceReport] = field(default_factory=list["SpaceReport"])
    full: bool = False
    """The copy ended early: the target had no room."""
    seconds: float = 0.0
    unseen: list[Unseen] = field(default_factory=list["Unseen"])
    """What of the source could not be looked into, and was not copied."""

    @property
    def ok(self) -> bool:
        """Whether every block is intact and in the target."""
        return not (self.full or self.unseen or any(report.bad for report in self.spaces))

    @property
    def fates(self) -> Counter[Fate]:
        """Blocks by what became of them, over all namespaces."""
        return sum((report.fates for report in self.spaces), Counter[Fate]())

    @property
    def marks(self) -> Counter[MarkOutcome]:
        """Marks by what became of them, over all namespaces."""
        return sum((report.marks for report in self.spaces), Counter[MarkOutcome]())

    @property
    def bytes(self) -> int:
        """Payload copied, over all namespaces."""
        return sum(report.bytes for report in self.spaces)

    def of(self, fate: Fate) -> list[tuple[Namespace, BlockKey]]:
        """The blocks that were `CORRUPT`, `MISSING`, `LATER`, `FAILED` or `REFUSED`."""
        return [(report.namespace, key) for report in self.spaces for key in report.bad.get(fate, ())]


def copy(
    source: BlockStore,
    target: BlockStore,
    *,
    named: Callable[[str], bool] = lambda _: True,
    blocks: Callable[[Namespace], Iterable[BlockInfo]] | None = None,
    threads: int = THREADS,
    evict: bool = False,
    dry_run: bool = False,
    plaintext: bool = False,
    advance: Callable[[int], object] = lambda _: None,
) -> CopyReport:
    """Put into `target` each block of `source` that it does not have, with its position, parent and marks.

    `named` says of a namespace's name whether it is copied, `blocks` (`source.scan`) which of its blocks are. Ages and
    hits are not: a copy is as young as it is. Every block is checked as it is read; of a source that was opened for
    writing, corrupt ones are removed and the others count as used, as by any get. With `dry_run` nothing is read but
    the two stores' records.

    From an encrypted source into a target on a device that is not, only with `plaintext`: `ConfigurationError` else.
    Into an encrypted one each block goes under the key of the tenant under whose key it was, else of its first mark's.

    Memory: `threads` batches of the smaller `batch_bytes` of the two. Ends early, with `CopyReport.full`, where a block
    finds no room; unless `evict` that is where something would have to go for it, and nothing does (others who put
    evict as ever). Such a copy ends with a block that found none while nothing else was under way; what the same copy
    again finds is room for some that cost less, or what an opening has made.
    `advance(blocks)` is called as blocks are done with. Raises `TierUnavailable` when a store cannot tell, or when the
    target refuses everything; what was put until then stays, and the next copy passes it over.
    """
    check_plaintext(source, target, plaintext=plaintext)
    started = time.monotonic()
    report = CopyReport(unseen=[one for one in source.unseen() if named(one.namespace)])
    chosen = [space for space in source.namespaces() if named(space.name)]
    step = None if evict or dry_run else _step(target)
    most = min(source.capabilities.batch_bytes, target.capabilities.batch_bytes, *([] if step is None else [step]))
    with _owners(source, target) as owners, _pool(threads) as pool:
        work = _Work(source, target, dry_run, evict, owners)
        pending: deque[tuple[SpaceReport, Future[_Batch]]] = deque()

        def settle() -> None:
            space, done = pending.popleft()
            batch = done.result()
            if step is not None and Fate.FULL in batch.fates:
                wait([one for _, one in pending])  # those beside it may have reserved what they did not take
                batch = work.again(space.namespace, batch)
            _record(space, batch)
            report.full |= Fate.FULL in batch.fates
            _check_accepted(target, report)
            advance(len(batch.infos))

        for space, infos in _all_batches(source, chosen, blocks, most):
            if not report.spaces or report.spaces[-1].namespace != space:
                report.spaces.append(SpaceReport(space))
            pending.append((report.spaces[-1], pool.submit(work.move, space, infos)))
            while len(pending) > 2 * threads:
                settle()
            if report.full:
                break
        if report.full:
            pending = deque(one for one in pending if not one[1].cancel())
        while pending:
            settle()
    report.seconds = time.monotonic() - started
    return report


def check_plaintext(source: BlockStore, target: BlockStore, *, plaintext: bool) -> None:
    """Raise `ConfigurationError` where blocks of an encrypted tier would come to stand somewhere as they are."""
    if source.capabilities.sealed and target.capabilities.persistent and not (target.capabilities.sealed or plaintext):
        raise ConfigurationError(
            f"{source.url} is encrypted and {target.url} is not: give the target encryption= and keyring=, or say"
            " --plaintext (plaintext=True) if its blocks may stand there as they are"
        )


@contextmanager
def _owners(source: BlockStore, target: BlockStore) -> Generator[Keyring | None]:
    """The keyring that tells whose a sealed block is, where it is to be sealed again."""
    given = check_options(source.url) if source.capabilities.sealed and target.capabilities.sealed else None
    if given is None:
        yield None
        return
    operator_key, path = given
    with Keyring.open(path, operator_key, create=False) as keyring:
        yield keyring


@contextmanager
def _pool(threads: int) -> Generator[ThreadPoolExecutor]:
    """What is under way is waited for, as it uses the stores; what has not begun when the body fails never does."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-copy")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _all_batches(
    source: BlockStore,
    namespaces: Iterable[Namespace],
    blocks: Callable[[Namespace], Iterable[BlockInfo]] | None,
    most: int,
) -> Iterator[tuple[Namespace, list[BlockInfo]]]:
    for space in namespaces:
        for infos in batches(space, (blocks or source.scan)(space), most):
            yield space, infos


@dataclass(slots=True)
class _Batch:
    """Some blocks of one namespace, what became of each, and of their marks."""

    infos: Sequence[BlockInfo]
    fates: list[Fate]
    marks: Counter[MarkOutcome]


@dataclass(frozen=True, slots=True)
class _Work:
    """What a thread does with a batch."""

    source: BlockStore
    target: BlockStore
    dry_run: bool
    evict: bool
    owners: Keyring | None
    """The source's keyring, if the target seals what it is given."""
    memory: ThreadMemory = field(default_factory=ThreadMemory)

    def again(self, space: Namespace, batch: _Batch) -> _Batch:
        """The blocks of a batch that found no room, once more; the batch with what became of them now."""
        full = [info for info, fate in zip(batch.infos, batch.fates, strict=True) if fate is Fate.FULL]
        late = self.move(space, full)
        fates = iter(late.fates)
        now = [next(fates) if fate is Fate.FULL else fate for fate in batch.fates]
        return _Batch(batch.infos, now, batch.marks + late.marks)

    def move(self, space: Namespace, infos: Sequence[BlockInfo]) -> _Batch:
        there = self.target.contains_many(space, [info.key for info in infos])
        fates = dict.fromkeys((info.key for info in infos), Fate.PRESENT)
        wanted = [info for info, present in zip(infos, there, strict=True) if not present]
        if self.dry_run:
            fates |= dict.fromkeys((info.key for info in wanted), Fate.COPIED)
            return _Batch(infos, [fates[info.key] for info in infos], Counter())
        if wanted:
            fates |= self._copied(space, wanted)
        # Those that were there as well: an earlier copy may have ended before it marked them.
        arrived = [info for info in infos if fates[info.key] in (Fate.COPIED, Fate.PRESENT)]
        return _Batch(infos, [fates[info.key] for info in infos], mark_again(self.target, space, arrived))

    def _copied(self, space: Namespace, infos: Sequence[BlockInfo]) -> dict[BlockKey, Fate]:
        buffers = self.memory.lend([space.block_bytes(info.key.group) for info in infos])
        reads = [BlockRead(info.key, buffer) for info, buffer in zip(infos, buffers, strict=True)]
        got = self.source.get_many_into(space, reads)
        writes = [
            BlockWrite(info.key, buffer, info.position, info.parent, tenant)
            for info, buffer, outcome, tenant in zip(infos, buffers, got, self._tenants(space, infos), strict=True)
            if outcome is GetOutcome.HIT
        ]
        store = self.target.put_many if self.evict else self.target.put_if_room
        put = store(space, writes) if writes else []
        fates = {write.key: _FATES[outcome] for write, outcome in zip(writes, put, strict=True)}
        for info, outcome in zip(infos, got, strict=True):
            if outcome is GetOutcome.CORRUPT:
                fates[info.key] = Fate.CORRUPT
        unread = [info.key for info, outcome in zip(infos, got, strict=True) if outcome is GetOutcome.MISS]
        return fates | (self._unread(space, unread) if unread else {})

    def _unread(self, space: Namespace, keys: Sequence[BlockKey]) -> dict[BlockKey, Fate]:
        """What became of blocks that the source does not give."""
        asked = zip(
            keys, self.source.contains_many(space, keys), self.source.of_later_version(space, keys), strict=True
        )
        return {key: (Fate.LATER if later else Fate.MISSING) if still else Fate.GONE for key, still, later in asked}

    def _tenants(self, space: Namespace, infos: Sequence[BlockInfo]) -> list[str]:
        """Whose each block is: under whose key it is sealed, else what its marks say."""
        marked = [next(iter(info.tenants), "") for info in infos]
        if self.owners is None:
            return marked
        tenants = self.owners.ring().tenants
        ids = self.source.sealed_with(space, [info.key for info in infos])
        return [tenants.get(key_id or b"", tenant) for key_id, tenant in zip(ids, marked, strict=True)]


def mark_again(target: BlockStore, space: Namespace, infos: Iterable[BlockInfo]) -> Counter[MarkOutcome]:
    """Give blocks of `target` the marks that `infos` say they had; what became of them, one for each block and mark."""
    marked: dict[Mark, list[BlockKey]] = {}
    for info in infos:
        for mark in info.marks:
            marked.setdefault(mark, []).append(info.key)
    return Counter(outcome for mark, keys in marked.items() for outcome in target.mark_many(space, keys, mark))


_FATES = {
    PutOutcome.STORED: Fate.COPIED,
    PutOutcome.EXISTS: Fate.PRESENT,
    PutOutcome.FULL: Fate.FULL,
    PutOutcome.FAILED: Fate.FAILED,
    PutOutcome.REFUSED: Fate.REFUSED,
}


def _record(space: SpaceReport, batch: _Batch) -> None:
    space.fates.update(batch.fates)
    space.marks.update(batch.marks)
    for info, fate in zip(batch.infos, batch.fates, strict=True):
        if fate is Fate.COPIED:
            space.bytes += space.namespace.block_bytes(info.key.group)
        elif fate in (Fate.CORRUPT, Fate.MISSING, Fate.LATER, Fate.FAILED, Fate.REFUSED):
            space.bad.setdefault(fate, []).append(info.key)


def _check_accepted(target: BlockStore, report: CopyReport) -> None:
    """Not to read a whole tier for a target that takes nothing."""
    fates = report.fates
    if fates[Fate.FAILED] >= REFUSED and not fates[Fate.COPIED]:
        raise TierUnavailable(
            f"{target.url} refused each of the first {fates[Fate.FAILED]} blocks: is it read-only here, or is its"
            " device broken? kvstore doctor looks into it"
        )


def _step(target: BlockStore) -> int | None:
    """Bytes in a batch at most, where puts keep a capacity: what is under way is to be a small part of that."""
    can = target.capabilities
    if can.can_hang or not can.capacity_is_exact:  # a bucket would be listed for the question
        return None
    capacity = target.usage().capacity
    return None if capacity is None else max(1, capacity // 256)
