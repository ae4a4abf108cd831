"""The race: the same blocks for every contestant, in turns A B A B …, medians with their range.

A round is: fresh bytes and keys; every contestant stores them; every contestant loads them cold, then warm, twice; all
is removed. Writing back and dropping the page cache happen before each store and each cold load and outside of what is
timed, so that no contestant pays for what another left in memory. Before the warm loads all blocks are read once,
untimed, and the page cache is kept.
"""

from __future__ import annotations

import os
import secrets
import statistics
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvstore.bench.workload import Lap, Targets, Workload, page_aligned_rows, pool, run_lap
from kvstore.types import BlockKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from numpy.typing import NDArray

    from kvstore.bench.contestant import Contestant

__all__ = ["OPERATIONS", "Figure", "race"]

WARM = ("load_warm_1", "load_warm_2")
OPERATIONS = ("store", "load_cold", *WARM)
"""What is timed, in this order: a store, a load with the page cache dropped, and two passes with it kept."""

_SOURCE_BYTES = 256 << 20
_DROP_CACHES = "/proc/sys/vm/drop_caches"


@dataclass(frozen=True, slots=True)
class Figure:
    """One contestant at one operation: medians over the rounds, speeds in 10^9 payload bytes a second.

    `cpu_s_per_gb` counts user and system time of this process. `ratio` is the median, over the rounds, of this
    contestant's speed divided by the reference's in the same round.
    """

    op: str
    contestant: str
    block_bytes: int
    threads: int
    gb_per_s: float
    gb_per_s_min: float
    gb_per_s_max: float
    cpu_s_per_gb: float
    ratio: float


Laps = dict[tuple[str, str], list[Lap]]
"""By operation and contestant, a lap for each round."""


def race(
    contestants: Sequence[Contestant],
    reference: str,
    load: Workload,
    advance: Callable[[], object] = lambda: None,
    operations: Sequence[str] = OPERATIONS,
) -> tuple[list[Figure], list[str]]:
    """Run all rounds; figures by operation and contestant, and notes on how cold and how warm the loads were.

    `reference` names the contestant that ratios refer to; `advance` is called after each timed step. `operations` begin
    with a store; both warm passes or none.
    """
    laps: Laps = {}
    notes: set[str] = set()
    sources = _sources(load)
    memory = page_aligned_rows(sources + load.threads * load.batch, load.block_bytes)
    source, targets = _Source(load, memory[:sources]), Targets(load, memory[sources:])
    for contestant in contestants:
        contestant.lend(memory)
    with pool(load.threads) as executor:
        for _ in range(load.rounds):
            source.refill()
            keys = [BlockKey(secrets.token_bytes(32)) for _ in range(load.blocks)]
            for contestant in contestants:
                contestant.expect(keys)
            for op in (op for op in operations if op not in WARM):
                for contestant in contestants:
                    with contestant.cooling():
                        notes.add(_settle(contestant))
                    work = partial(_store, contestant, source) if op == "store" else partial(_load, contestant, targets)
                    laps.setdefault((op, contestant.name), []).append(run_lap(executor, work, load, keys))
                    advance()
            if WARM[0] in operations:
                notes.add("load_warm: all blocks were read just before, the page cache is kept; two passes")
                for contestant in contestants:
                    for op, lap in zip(WARM, _warm(contestant, targets, executor, load, keys), strict=True):
                        laps.setdefault((op, contestant.name), []).append(lap)
                        advance()
            for contestant in contestants:
                contestant.clear(keys)
    names = [contestant.name for contestant in contestants]
    return [_figure(load, laps, op, name, reference) for op in operations for name in names], sorted(notes)


def _warm(
    contestant: Contestant, targets: Targets, executor: ThreadPoolExecutor, load: Workload, keys: list[BlockKey]
) -> Sequence[Lap]:
    """A pass that is not counted, and those that are."""
    work = partial(_load, contestant, targets)
    run_lap(executor, work, load, keys)
    return contestant.warm_elsewhere(load, keys, len(WARM)) or [run_lap(executor, work, load, keys) for _ in WARM]


def _store(contestant: Contestant, source: _Source, start: int, keys: Sequence[BlockKey]) -> None:
    contestant.store(keys, [source.block(start + offset) for offset in range(len(keys))])


def _load(contestant: Contestant, targets: Targets, _: int, keys: Sequence[BlockKey]) -> None:
    contestant.load(keys, targets.of_this_thread(len(keys)))


def _figure(load: Workload, laps: Laps, op: str, contestant: str, reference: str) -> Figure:
    own = [lap.gb_per_s for lap in laps[op, contestant]]
    against = [lap.gb_per_s for lap in laps[op, reference]]
    return Figure(
        op=op,
        contestant=contestant,
        block_bytes=load.block_bytes,
        threads=load.threads,
        gb_per_s=statistics.median(own),
        gb_per_s_min=min(own),
        gb_per_s_max=max(own),
        cpu_s_per_gb=statistics.median(lap.cpu_s_per_gb for lap in laps[op, contestant]),
        ratio=statistics.median(mine / theirs for mine, theirs in zip(own, against, strict=True)),
    )


def _sources(load: Workload) -> int:
    return min(load.blocks, max(1, _SOURCE_BYTES // load.block_bytes))


class _Source:
    """What is stored: random bytes, other ones in each round; more blocks than fit repeat them under other keys."""

    def __init__(self, load: Workload, memory: NDArray[np.uint8]) -> None:
        self._random = np.random.default_rng()
        self._blocks: list[memoryview] = [row[: load.block_bytes].data for row in memory]

    def refill(self) -> None:
        for block in self._blocks:
            words = np.frombuffer(block, np.float64, block.nbytes // 8)
            self._random.random(out=words)

    def block(self, index: int) -> memoryview:
        return self._blocks[index % len(self._blocks)]


def _settle(contestant: Contestant) -> str:
    """Write back what is dirty and drop the page cache; what was possible, in words."""
    os.sync()
    try:
        with open(_DROP_CACHES, "w") as switch:
            switch.write("3")
    except OSError:
        return _advise_away(contestant)
    return "page cache dropped before each store and each cold load"


def _advise_away(contestant: Contestant) -> str:
    if not hasattr(os, "posix_fadvise"):
        return "page cache NOT dropped (not permitted, no posix_fadvise): loads may be warm"
    for path in contestant.files():
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return f"{_DROP_CACHES} not permitted: files advised out of the page cache one by one; loads may be partly warm"
