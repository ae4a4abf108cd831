"""What is to go from a tier, and its going: `survey` looks, `collect` removes. `kvstore gc` and sweeps are these two.

    store.scan_ages ──► survey ──► Survey: up to which moment ──► collect: scan_ages again ──► store.remove_unused

The rules come down to a moment for each tier: what was used (or stored) before it goes. So nothing has to be kept in
memory but a time and a size for each block, and whoever is interrupted loses nothing: the next one finds the rest.
Pinned blocks stay, unless their namespace goes as a whole.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from kvstore.retention import Limit, moment_of, now_ns, oldest_beyond

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo, Leftover, Unseen

__all__ = ["Collected", "Rules", "SpaceSurvey", "Survey", "collect", "survey"]

T = TypeVar("T")

RECORDS_BYTES = 64 << 10
"""So much more goes where something goes, or a hundredth of the capacity, if the store counts exactly: what a small
catalogue with no free page takes for the transactions that remove.
"""
AT_ONCE = 1000
"""Blocks removed in one call."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What is to be kept. `ttl` in seconds, `capacity` in bytes; None: no such rule. `from_stored`: uses count not."""

    ttl: float | None = None
    from_stored: bool = False
    capacity: int | None = None
    down_to: float = 1.0
    """The part of `capacity` that is left where there is more than all of it."""


@dataclass(slots=True)
class SpaceSurvey:
    """One namespace: what is in it, and what of it is to go. Times are seconds since the epoch."""

    namespace: str
    model: str
    blocks: int = 0
    bytes: int = 0
    pinned: int = 0
    oldest: float | None = None
    expired: int = 0
    expired_bytes: int = 0
    over: int = 0
    """Blocks that have not expired and go for the capacity."""
    over_bytes: int = 0
    dropped: bool = False
    """It goes as a whole, pinned blocks included."""

    @property
    def empty(self) -> bool:
        """It has no blocks."""
        return not self.blocks

    @property
    def going(self) -> int:
        """How many of its blocks are to go."""
        return self.blocks if self.dropped else self.expired + self.over


@dataclass(slots=True)
class Survey:
    """What is to go, by which rules."""

    rules: Rules
    cutoff: float = float("-inf")
    limit: Limit = field(default_factory=Limit)
    spaces: list[SpaceSurvey] = field(default_factory=list[SpaceSurvey])
    leftovers: list[Leftover] = field(default_factory=list["Leftover"])
    unseen: list[Unseen] = field(default_factory=list["Unseen"])
    """What could not be looked into: by no rule does it go."""
    excess: int = 0
    """Bytes over the capacity that removing all that may go would leave: pinned ones, and the store's own."""

    @property
    def blocks(self) -> int:
        """How many blocks are to go."""
        return sum(space.going for space in self.spaces)

    @property
    def bytes(self) -> int:
        """How many bytes are to go, with leftovers."""
        blocks = sum(space.bytes if space.dropped else space.expired_bytes + space.over_bytes for space in self.spaces)
        return blocks + sum(leftover.nbytes for leftover in self.leftovers)


@dataclass(slots=True)
class Collected:
    """What went. `kept` blocks were to go and were used, pinned or removed by others meanwhile."""

    expired: int = 0
    over: int = 0
    dropped: int = 0
    kept: int = 0
    bytes: int = 0
    namespaces: int = 0
    leftovers: int = 0
    seconds: float = 0.0


class _Over:
    """Which blocks go for the capacity: all before the limit's moment, and of those just then as many as it takes."""

    def __init__(self, limit: Limit) -> None:
        self._before, self._tie_bytes = limit.before, limit.tie_bytes

    def takes(self, moment: float, nbytes: int) -> bool:
        if moment == self._before and self._tie_bytes > 0:
            self._tie_bytes -= nbytes
            return True
        return moment < self._before


class _Ages:
    """Time, size and namespace of each block that has not expired: 20 bytes each."""

    def __init__(self) -> None:
        self.moments, self.sizes, self.spaces = array("d"), array("q"), array("i")

    def add(self, moment: float, nbytes: int, space: int) -> None:
        self.moments.append(moment)
        self.sizes.append(nbytes)
        self.spaces.append(space)


def survey(
    store: BlockStore,
    rules: Rules,
    *,
    drop: Sequence[Namespace] = (),
    advance: Callable[[int], object] = lambda _: None,
) -> Survey:
    """Look at every block, and change nothing. The namespaces `drop` are to go as a whole, whatever the rules say.

    `advance` is called with each number of blocks that were looked at.
    """
    found = Survey(rules, cutoff=float("-inf") if rules.ttl is None else now_ns() / 1e9 - rules.ttl)
    dropped = {space.fingerprint for space in drop}
    ages = _Ages()
    for number, space in enumerate(store.namespaces()):
        seen = SpaceSurvey(space.name, space.model, dropped=space.fingerprint in dropped)
        found.spaces.append(seen)
        for some in _batches(store.scan_ages(space)):
            for info in some:
                _count(found, seen, info, number, ages)
            advance(len(some))
    if rules.capacity is not None:
        _find_limit(found, store, rules.capacity, ages)
    found.leftovers, found.unseen = store.leftovers(), store.unseen()
    return found


def _count(found: Survey, seen: SpaceSurvey, info: BlockInfo, number: int, ages: _Ages) -> None:
    moment = moment_of(info, from_stored=found.rules.from_stored)
    seen.blocks += 1
    seen.bytes += info.stored_bytes
    seen.oldest = moment if seen.oldest is None else min(seen.oldest, moment)
    seen.pinned += info.pinned
    if info.pinned or seen.dropped:
        return
    if moment <= found.cutoff:
        seen.expired += 1
        seen.expired_bytes += info.stored_bytes
    elif found.rules.capacity is not None:
        # What goes first is what was used longest ago, whatever the ttl counts from.
        ages.add(moment_of(info, from_stored=False), info.stored_bytes, number)


def _find_limit(found: Survey, store: BlockStore, capacity: int, ages: _Ages) -> None:
    going = sum(space.bytes if space.dropped else space.expired_bytes for space in found.spaces)
    excess = store.excess(capacity) - going
    records = min(RECORDS_BYTES, capacity // 100) if store.capabilities.capacity_is_exact else 0
    to_free = excess + max(records, int(capacity * (1 - found.rules.down_to))) if excess > 0 else 0
    found.limit = oldest_beyond(zip(ages.moments, ages.sizes, strict=True), to_free)
    over = _Over(found.limit)
    for moment, nbytes, number in zip(ages.moments, ages.sizes, ages.spaces, strict=True):
        if over.takes(moment, nbytes):
            found.spaces[number].over += 1
            found.spaces[number].over_bytes += nbytes
    found.excess = max(0, excess - sum(space.over_bytes for space in found.spaces))


def collect(
    store: BlockStore,
    found: Survey,
    *,
    drop: Sequence[Namespace] = (),
    done: Collected | None = None,
    advance: Callable[[int], object] = lambda _: None,
) -> Collected:
    """Remove what `survey` found, as far as it is still so; and namespaces that are empty, where that does no harm.

    `advance` is called with each number of blocks that were dealt with. Interrupted, it has removed a part, which
    `done` counts, if it is given, and a later survey finds the rest.
    """
    began, done = time.monotonic(), done or Collected()
    dropped = {space.fingerprint for space in drop}
    over = _Over(found.limit)
    going = {space.namespace for space in found.spaces if space.going}
    for space in store.namespaces():
        if space.fingerprint in dropped:
            done.dropped += (blocks := store.drop_namespace(space))
            advance(blocks)
        elif space.name in going:
            _collect_blocks(store, space, found, over, done, advance)
        elif any(seen.empty for seen in found.spaces if seen.namespace == space.name):
            store.drop_namespace(space, only_if_empty=True)
    if found.leftovers:
        gone = store.leftovers(remove=True)
        done.leftovers += len(gone)
        done.bytes += sum(leftover.nbytes for leftover in gone)
    left = {space.name for space in store.namespaces()}
    done.namespaces += sum(seen.namespace not in left for seen in found.spaces)
    done.bytes += sum(seen.bytes for seen in found.spaces if seen.dropped)
    done.seconds += time.monotonic() - began
    return done


def _collect_blocks(
    store: BlockStore, space: Namespace, found: Survey, over: _Over, done: Collected, advance: Callable[[int], object]
) -> None:
    def verdict(info: BlockInfo) -> str | None:
        if info.pinned:
            return None
        if moment_of(info, from_stored=found.rules.from_stored) <= found.cutoff:
            return "expired"
        return "over" if over.takes(moment_of(info, from_stored=False), info.stored_bytes) else None

    judged = ((info, why) for info in store.scan_ages(space) if (why := verdict(info)) is not None)
    for some in _batches(judged):
        removed = store.remove_unused(space, [info for info, _ in some])
        for (info, why), gone in zip(some, removed, strict=True):
            done.expired += gone and why == "expired"
            done.over += gone and why == "over"
            done.kept += not gone
            done.bytes += info.stored_bytes if gone else 0
        advance(len(some))


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while some := list(islice(rest, AT_ONCE)):
        yield some
