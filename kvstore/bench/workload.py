"""What one lap of a race is: its blocks, the memory they lie in, the threads that move them, and what that took.

`kvstore.bench.runner` runs laps in the process of the race, `kvstore.bench.fresh` in one of their own.
"""

from __future__ import annotations

import mmap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.apart import shared_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from numpy.typing import NDArray

    from kvstore.types import BlockKey

__all__ = ["Lap", "Targets", "Workload", "page_aligned_rows", "pool", "run_lap"]


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
class Lap:
    """What moving all blocks once came to, in 10^9 payload bytes; CPU is user and system time of the process."""

    gb_per_s: float
    cpu_s_per_gb: float


@contextmanager
def pool(threads: int) -> Generator[ThreadPoolExecutor]:
    """What has not begun when the race ends, by an error or Ctrl-C, is not begun."""
    executor = ThreadPoolExecutor(threads)
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def run_lap(
    executor: ThreadPoolExecutor, work: Callable[[int, Sequence[BlockKey]], None], load: Workload, keys: list[BlockKey]
) -> Lap:
    """`work` with the index of a call's first block and the keys of its blocks, for all calls, side by side."""
    starts = range(0, load.blocks, load.batch)
    batches = [keys[start : start + load.batch] for start in starts]
    began, cpu = time.perf_counter(), time.process_time()
    for _ in executor.map(work, starts, batches):
        pass
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    gigabytes = load.blocks * load.block_bytes / 1e9
    return Lap(gigabytes / seconds, cpu / gigabytes)


def page_aligned_rows(rows: int, block_bytes: int, *, shared: bool = False) -> NDArray[np.uint8]:
    """`rows` blocks in one piece of memory, each on whole pages, every one of which has been touched. `shared`: memory
    that another process can be given.
    """
    stride = -(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    flat = shared_memory(rows * stride) if shared else np.frombuffer(mmap.mmap(-1, rows * stride), np.uint8)
    memory: NDArray[np.uint8] = flat.reshape(rows, stride)
    memory.fill(1)
    return memory


class Targets:
    """What is loaded into: a batch of blocks for each thread, handed to it at its first load."""

    def __init__(self, load: Workload, memory: NDArray[np.uint8]) -> None:
        """`memory`: `threads` times `batch` rows."""
        blocks: list[memoryview] = [row[: load.block_bytes].data for row in memory]
        self._free: Iterator[list[memoryview]] = iter(
            [blocks[start : start + load.batch] for start in range(0, len(blocks), load.batch)]
        )
        self._taking = threading.Lock()
        self._own = threading.local()

    def of_this_thread(self, count: int) -> list[memoryview]:
        """The first `count` of this thread's blocks."""
        if not hasattr(self._own, "blocks"):
            with self._taking:
                self._own.blocks = next(self._free)
        blocks: list[memoryview] = self._own.blocks
        return blocks[:count]
