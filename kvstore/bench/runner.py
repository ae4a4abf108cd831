"""The race: the same blocks for every contestant, in turns A B A B …, medians with their range.

A round is: fresh bytes and keys; every contestant stores them; every contestant loads them cold; all is removed.
Writing back and dropping the page cache happen before each timed step and outside it, so that no contestant pays for
what another left in memory.
"""

from __future__ import annotations

import mmap
import os
import secrets
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.types import BlockKey

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from numpy.typing import NDArray

    from kvstore.bench.contestant import Contestant

__all__ = ["Figure", "Workload", "race"]

_SOURCE_BYTES = 256 << 20
_DROP_CACHES = "/proc/sys/vm/drop_caches"


@dataclass(frozen=True, slots=True)
class Workload:
    """`blocks` blocks of `block_bytes` bytes, moved by `threads` threads in calls of `batch` blocks, `rounds` times."""

    block_bytes: int
    blocks: int
    threads: int
    batch: int
    rounds: int

    @classmethod
    def of(cls, *, block_bytes: int, total: int, threads: int, batch_bytes: int, rounds: int) -> Workload:
        """`total` and `batch_bytes` in bytes, rounded to whole blocks; no thread is idle for want of a call."""
        blocks = max(1, total // block_bytes)
        batch = max(1, min(batch_bytes // block_bytes, -(-blocks // threads)))
        return cls(block_bytes, blocks, threads, batch, rounds)


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


@dataclass(frozen=True, slots=True)
class _Lap:
    gb_per_s: float
    cpu_s_per_gb: float


def race(
    contestants: Sequence[Contestant], reference: str, load: Workload, advance: Callable[[], object] = lambda: None
) -> tuple[list[Figure], list[str]]:
    """Run all rounds; figures by operation and contestant, and notes on how cold the loads were.

    `reference` names the contestant that ratios refer to; `advance` is called after each timed step.
    """
    laps: dict[tuple[str, str], list[_Lap]] = {}
    notes: set[str] = set()
    memory = _memory(load)
    source, targets = _Source(load, memory), _Targets(load, memory)
    for contestant in contestants:
        contestant.lend(memory)
    with _pool(load.threads) as pool:
        for _ in range(load.rounds):
            source.refill()
            keys = [BlockKey(secrets.token_bytes(32)) for _ in range(load.blocks)]
            for contestant in contestants:
                contestant.expect(keys)
            for op in ("store", "load_cold"):
                for contestant in contestants:
                    contestant.cool()
                    notes.add(_settle(contestant))
                    work = _store(contestant, source) if op == "store" else _load(contestant, targets)
                    laps.setdefault((op, contestant.name), []).append(_lap(pool, work, load, keys))
                    advance()
            for contestant in contestants:
                contestant.clear(keys)
    return [_figure(load, laps, op, name, reference) for op, name in laps], sorted(notes)


@contextmanager
def _pool(threads: int) -> Generator[ThreadPoolExecutor]:
    """What has not begun when the race ends, by an error or Ctrl-C, is not begun."""
    pool = ThreadPoolExecutor(threads)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _lap(
    pool: ThreadPoolExecutor, work: Callable[[int, list[BlockKey]], None], load: Workload, keys: list[BlockKey]
) -> _Lap:
    starts = range(0, load.blocks, load.batch)
    batches = [keys[start : start + load.batch] for start in starts]
    began, cpu = time.perf_counter(), time.process_time()
    for _ in pool.map(work, starts, batches):
        pass
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    gigabytes = load.blocks * load.block_bytes / 1e9
    return _Lap(gigabytes / seconds, cpu / gigabytes)


def _store(contestant: Contestant, source: _Source) -> Callable[[int, list[BlockKey]], None]:
    return lambda start, keys: contestant.store(keys, [source.block(start + offset) for offset in range(len(keys))])


def _load(contestant: Contestant, targets: _Targets) -> Callable[[int, list[BlockKey]], None]:
    return lambda _, keys: contestant.load(keys, targets.of_this_thread()[: len(keys)])


def _figure(
    load: Workload, laps: dict[tuple[str, str], list[_Lap]], op: str, contestant: str, reference: str
) -> Figure:
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


def _memory(load: Workload) -> NDArray[np.uint8]:
    """Page-aligned blocks in one piece of memory, every page of it touched: first what is stored, then targets."""
    stride = -(-load.block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    rows = _sources(load) + load.threads * load.batch
    memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, rows * stride), np.uint8).reshape(rows, stride)
    memory.fill(1)
    return memory


class _Source:
    """What is stored: random bytes, other ones in each round; more blocks than fit repeat them under other keys."""

    def __init__(self, load: Workload, memory: NDArray[np.uint8]) -> None:
        self._random = np.random.default_rng()
        self._blocks: list[memoryview] = [row[: load.block_bytes].data for row in memory[: _sources(load)]]

    def refill(self) -> None:
        for block in self._blocks:
            words = np.frombuffer(block, np.float64, block.nbytes // 8)
            self._random.random(out=words)

    def block(self, index: int) -> memoryview:
        return self._blocks[index % len(self._blocks)]


class _Targets:
    """What is loaded into: a batch of blocks for each thread, handed to it at its first load."""

    def __init__(self, load: Workload, memory: NDArray[np.uint8]) -> None:
        blocks: list[memoryview] = [row[: load.block_bytes].data for row in memory[_sources(load) :]]
        self._free: Iterator[list[memoryview]] = iter(
            [blocks[start : start + load.batch] for start in range(0, len(blocks), load.batch)]
        )
        self._taking = threading.Lock()
        self._own = threading.local()

    def of_this_thread(self) -> list[memoryview]:
        if not hasattr(self._own, "blocks"):
            with self._taking:
                self._own.blocks = next(self._free)
        blocks: list[memoryview] = self._own.blocks
        return blocks


def _settle(contestant: Contestant) -> str:
    """Write back what is dirty and drop the page cache; what was possible, in words."""
    os.sync()
    try:
        with open(_DROP_CACHES, "w") as switch:
            switch.write("3")
    except OSError:
        return _advise_away(contestant)
    return "page cache dropped before each step"


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
