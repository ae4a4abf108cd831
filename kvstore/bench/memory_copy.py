"""`numpy.copyto` in as many threads over the same bytes: the most that a load which ends in memory can come to."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvstore.bench.contestant import Contestant
from kvstore.bench.workload import page_aligned_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore.types import BlockKey

__all__ = ["MemoryCopy"]


class MemoryCopy(Contestant):
    """Blocks in memory of its own, copied in and out. Nothing is checked, nothing outlives the process."""

    name: ClassVar[str] = "copy"

    def __init__(self, block_bytes: int) -> None:
        self.notes = ["copy: numpy.copyto between two places in memory, nothing checked"]
        self._block_bytes = block_bytes
        self._free: list[NDArray[np.uint8]] = []
        self._rows: dict[BlockKey, NDArray[np.uint8]] = {}

    def expect(self, keys: Sequence[BlockKey]) -> None:
        if len(self._free) < len(keys):
            self._free.extend(page_aligned_rows(len(keys) - len(self._free), self._block_bytes))
        self._rows |= {key: self._free.pop()[: self._block_bytes] for key in keys}

    def store(self, keys: Sequence[BlockKey], sources: Sequence[memoryview]) -> None:
        for key, source in zip(keys, sources, strict=True):
            np.copyto(self._rows[key], np.frombuffer(source, np.uint8))

    def load(self, keys: Sequence[BlockKey], targets: Sequence[memoryview]) -> None:
        for key, target in zip(keys, targets, strict=True):
            np.copyto(np.frombuffer(target, np.uint8), self._rows[key])

    def clear(self, keys: Sequence[BlockKey]) -> None:
        self._free += [self._rows.pop(key) for key in keys]

    def close(self) -> None:
        self._rows.clear()
        self._free.clear()
