"""What goes on in a tier, seen from outside: samples that cost the engine beside nothing.

Totals come from `usage`, at once. Everything else comes from a scan that rolls on: each sample reads the next `AT_ONCE`
blocks' facts, in short read transactions that nobody waits for, and takes up the scan where the last one left it. Where
a tier has no more blocks than that, every sample has seen all of it; of a larger one, tables are as old as the last
whole pass, and rates are estimated from the part that was just read: digests are hashes, so any part is a fair one.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from kvstore.types import NO_PARENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo, Usage

__all__ = ["AT_ONCE", "HOTTEST", "WINDOW_S", "Hot", "Sample", "SpaceCount", "Watcher"]

AT_ONCE = 10_000
"""Blocks whose facts one sample reads, about 50 ms of a core."""

HOTTEST = 10
"""Prefixes that a sample names."""

WINDOW_S = 60.0
"""Rates are those of the last minute: of a part of a tier, a shorter time has too few blocks in it to count."""


@dataclass(frozen=True, slots=True, order=True)
class Hot:
    """A prefix by its first block."""

    hits: int
    last_used: float
    namespace: str
    group: int
    digest: str
    labels: tuple[str, ...]
    pinned: bool


@dataclass(slots=True)
class SpaceCount:
    """What was counted in one namespace."""

    namespace: str
    model: str
    blocks: int = 0
    bytes: int = 0
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """A tier at one moment (seconds since the epoch)."""

    time: float
    usage: Usage
    stores_per_s: float
    """Over the last `WINDOW_S`, of blocks that are still there."""
    evictions_per_s: float | None
    """Evictions and removals, as stores that the number of blocks does not show; None for a first sample."""
    scanned: int
    """Blocks read for this sample."""
    exact: bool
    """Those were all: rates are counted, not estimated."""
    complete: bool
    """`hottest` and `namespaces` are of all blocks, not yet of a part."""
    hottest: tuple[Hot, ...]
    namespaces: tuple[SpaceCount, ...]

    @property
    def taken(self) -> int:
        """Bytes that count against the capacity."""
        return self.usage.used + self.usage.reserved + self.usage.overhead


@dataclass(slots=True)
class _Pass:
    """One way through all blocks, as far as it has come."""

    blocks: Iterator[tuple[Namespace, BlockInfo]]
    counts: dict[bytes, SpaceCount] = field(default_factory=dict["bytes", SpaceCount])
    hot: list[Hot] = field(default_factory=list[Hot])
    """A heap: the least hot of them is the first."""

    def see(self, space: Namespace, info: BlockInfo) -> None:
        count = self.counts.get(space.fingerprint)
        if count is None:
            count = self.counts[space.fingerprint] = SpaceCount(space.name, space.model)
        count.blocks += 1
        count.bytes += info.stored_bytes
        count.pinned += info.pinned
        full = len(self.hot) == HOTTEST
        if info.parent != NO_PARENT or not info.hits or (full and info.hits <= self.hot[0].hits):
            return
        digest = info.key.digest.hex()
        hot = Hot(info.hits, info.last_used, space.name, info.key.group, digest, info.labels, info.pinned)
        (heapq.heappushpop if full else heapq.heappush)(self.hot, hot)

    def begun_with(self, scanned: int) -> bool:
        """Whether all that it has seen are the last so many."""
        return scanned == sum(count.blocks for count in self.counts.values())

    def hottest(self) -> tuple[Hot, ...]:
        return tuple(sorted(self.hot, reverse=True))

    def namespaces(self) -> tuple[SpaceCount, ...]:
        return tuple(sorted(self.counts.values(), key=lambda count: -count.bytes))


class Watcher:
    """Samples of one store, for one thread. Opens and closes nothing; `clock` gives seconds since the epoch."""

    def __init__(self, store: BlockStore, *, at_once: int = AT_ONCE, clock: Callable[[], float] = time.time) -> None:
        self._store, self._at_once, self._clock = store, at_once, clock
        self._current = _Pass(self._all())
        self._whole: _Pass | None = None
        self._history: deque[tuple[float, int]] = deque()

    def sample(self) -> Sample:
        """What is there now. Raises `TierUnavailable` where the store cannot tell."""
        now, usage = self._clock(), self._store.usage()
        before = self._remember(now, usage.blocks)
        seen, exact = self._read_on()
        scanned, stored = len(seen), sum(created >= now - WINDOW_S for created in seen)
        since = 0 if before is None else sum(created > before[0] for created in seen)
        scale = 1.0 if exact else usage.blocks / max(scanned, 1)
        shown = self._whole or self._current
        return Sample(
            time=now,
            usage=usage,
            stores_per_s=scale * stored / WINDOW_S,
            evictions_per_s=None if before is None else _evictions(now, usage.blocks, scale * since, *before),
            scanned=scanned,
            exact=exact,
            complete=self._whole is not None,
            hottest=shown.hottest(),
            namespaces=shown.namespaces(),
        )

    def _read_on(self) -> tuple[list[float], bool]:
        """When the next blocks were stored, and whether they are all there are. Behind the last comes the first."""
        seen: list[float] = []
        while True:
            current, before = self._current, len(seen)
            for space, info in islice(current.blocks, self._at_once - before):
                current.see(space, info)
                seen.append(info.created)
            if len(seen) == self._at_once:
                return seen, False
            self._whole, self._current = current, _Pass(self._all())
            if current.begun_with(len(seen) - before):
                return seen, before == 0

    def _remember(self, now: float, blocks: int) -> tuple[float, int] | None:
        """The earliest time in the window, and how many blocks there were; None at first."""
        history = self._history
        while history and history[0][0] < now - WINDOW_S:
            history.popleft()
        before = history[0] if history else None
        history.append((now, blocks))
        return before

    def _all(self) -> Iterator[tuple[Namespace, BlockInfo]]:
        for space in self._store.namespaces():
            for info in self._store.scan(space):
                yield space, info


def _evictions(now: float, blocks: int, stored: float, then: float, blocks_then: int) -> float:
    """What was stored since and did not make the tier grow, a second."""
    return max(0.0, stored - (blocks - blocks_then)) / max(now - then, 1e-9)
