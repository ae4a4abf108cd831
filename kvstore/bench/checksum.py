"""The checksum alone: one pass over the same bytes, nothing moved. What a check costs can be no less than this."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvstore.bench.contestant import Contestant
from kvstore.integrity import crc32c

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.types import BlockKey

__all__ = ["ChecksumAlone"]


class ChecksumAlone(Contestant):
    """CRC-32C over what is to be stored, and over the memory that is loaded into. It stores and loads nothing."""

    name: ClassVar[str] = "crc"

    def __init__(self) -> None:
        self.notes = ["crc: one pass of the checksum over the blocks in memory; nothing is stored or loaded"]

    def store(self, keys: Sequence[BlockKey], sources: Sequence[memoryview]) -> None:
        del keys
        for source in sources:
            crc32c(np.frombuffer(source, np.uint8))

    def load(self, keys: Sequence[BlockKey], targets: Sequence[memoryview]) -> None:
        self.store(keys, targets)

    def clear(self, keys: Sequence[BlockKey]) -> None:
        del keys

    def close(self) -> None:
        """Nothing is there to remove."""
