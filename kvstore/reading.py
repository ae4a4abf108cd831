"""Reading many blocks of a store in little memory: its scan in batches, and aligned memory that a thread keeps.

For commands that go through whole tiers (`kvstore verify`, `kvstore cp`).
"""

from __future__ import annotations

import mmap
import threading
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo

__all__ = ["ThreadMemory", "batches"]


def batches(namespace: Namespace, infos: Iterable[BlockInfo], most_bytes: int) -> Iterator[list[BlockInfo]]:
    """`infos` in their order, as many at a time as have at most `most_bytes` of payload, and at least one."""
    batch: list[BlockInfo] = []
    room = most_bytes
    for info in infos:
        nbytes = namespace.block_bytes(info.key.group)
        if batch and nbytes > room:
            yield batch
            batch, room = [], most_bytes
        batch.append(info)
        room -= nbytes
    if batch:
        yield batch


class ThreadMemory:
    """Page-aligned memory to read into, one piece for each thread that asks. Thread-safe."""

    def __init__(self) -> None:
        self._kept = threading.local()

    def lend(self, sizes: Sequence[int]) -> list[memoryview]:
        """Writable, page-aligned buffers of `sizes` bytes; this thread's until it asks again."""
        starts = list(accumulate((-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE for nbytes in sizes), initial=0))
        memory = self._of(starts[-1])
        return [memory[start : start + nbytes].data for start, nbytes in zip(starts, sizes, strict=False)]

    def _of(self, nbytes: int) -> NDArray[np.uint8]:
        memory: NDArray[np.uint8] | None = getattr(self._kept, "memory", None)
        if memory is None or memory.nbytes < nbytes:
            memory = self._kept.memory = np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)
        return memory
