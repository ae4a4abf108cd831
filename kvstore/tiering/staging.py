"""Staging: memory of a tier's own, for calls that may never come back.

A call that waits for a network is lent this memory in place of a slot of the primary tier, so that whatever it writes,
and whenever it does, it touches nobody's block. A load is copied from here into its slot, a store from its slot into
here (see `kvstore.tiering.jobs`). A buffer is lent to one call at a time and comes back when that call has returned:
what hung calls hold is missing until then, and a tier that has nothing left to lend sheds stores and misses loads.
Calls that come while there is too little wait here, in line (`wait`, `served`).
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.tiering.jobs import Load
from kvstore.tiering.primary import page_aligned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.tiering.jobs import Transfer

__all__ = ["Buffer", "Staging"]

DEFAULT_BYTES = 256 << 20
"""Enough for a fast network; pages that were never lent cost no memory."""
DEFAULT_BUFFERS = 8
"""At least as many of them, however large a block is."""


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """Memory for one block."""

    index: int
    memory: NDArray[np.uint8]


class Staging:
    """`nbytes` of page-aligned memory in buffers of `buffer_bytes` each, the one that came back last lent first.

    `shared`: memory that another process can be given; all of it is `memory`.
    Raises `ValueError` when `nbytes` are not enough for two buffers. Threads: the manager's makes all calls.
    """

    def __init__(self, nbytes: int | None, buffer_bytes: int, *, shared: bool = False) -> None:
        stride = -(-buffer_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if nbytes is None:
            nbytes = max(DEFAULT_BYTES, DEFAULT_BUFFERS * stride)
        self.buffers = nbytes // stride
        if self.buffers < 2:
            raise ValueError(
                f"staging_bytes={nbytes} is too little: it has to hold two blocks of {buffer_bytes} bytes,"
                f" that is at least {2 * stride}"
            )
        self.buffer_bytes = buffer_bytes
        self._stride = stride
        self.memory = page_aligned(self.buffers * stride, shared=shared)
        self._free = list(range(self.buffers - 1, -1, -1))
        self.waiting: list[Transfer] = []

    @property
    def share(self) -> int:
        """Buffers that stores leave to loads, and the most that one call is lent."""
        return max(1, self.buffers // 4)

    @property
    def for_stores_bytes(self) -> int:
        """Memory that stores can be lent, together."""
        return (self.buffers - self.share) * self.buffer_bytes

    @property
    def lent_bytes(self) -> int:
        """Memory that calls have, and that may be in use for the last time or for ever."""
        return (self.buffers - len(self._free)) * self._stride

    def wait(self, job: Transfer) -> None:
        """It is lent one buffer for each of its blocks as soon as there are enough."""
        self.waiting.append(job)

    def served(self) -> Iterator[Transfer]:
        """Those that have theirs now, loads first, to be begun; who was cancelled meanwhile waits no more."""
        line = sorted((job for job in self.waiting if not job.claim.taken), key=lambda job: not isinstance(job, Load))
        self.waiting = []
        for job in line:
            buffers = self.take(job.sizes, leave=0 if isinstance(job, Load) else self.share)
            if buffers is None:
                self.waiting.append(job)
            else:
                job.buffers = buffers
                yield job

    def take(self, sizes: Sequence[int], leave: int = 0) -> list[Buffer] | None:
        """One buffer for each size in bytes, cut to it; None if fewer than `leave` would be left afterwards."""
        if len(self._free) < len(sizes) + leave:
            return None
        return [self._buffer(self._free.pop(), size) for size in sizes]

    def give_back(self, buffers: Sequence[Buffer]) -> None:
        """The call that they were lent to has returned."""
        self._free.extend(buffer.index for buffer in buffers)

    def _buffer(self, index: int, size: int) -> Buffer:
        start = index * self._stride
        return Buffer(index, self.memory[start : start + size])
