"""What an archive's blocks are compressed with: a codec that stock zarr knows by the same name, or nothing."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.errors import InvalidOptionError
from kvstore.layout import DTYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.layout import BlockLayout

__all__ = ["Compression"]

_LEVELS = {"zstd": (3, 1, 22), "blosc": (5, 0, 9)}
"""Codec: usual level, least, most."""


@dataclass(frozen=True, slots=True)
class Compression:
    """A codec and its level; `codec` is empty for none. `blosc` shuffles bytes and then uses zstd."""

    codec: str = ""
    level: int = 0

    @classmethod
    def parse(cls, text: str | None) -> Compression:
        """From `none`, `zstd`, `blosc`, or one of them with a level, `zstd:9`. Raises `InvalidOptionError`."""
        if text in (None, "", "none"):
            return cls()
        match = re.fullmatch(r"([a-z]+)(?::([0-9]{1,2}))?", text)
        if match is None or match[1] not in _LEVELS:
            raise InvalidOptionError(f"compression {text!r}: it is none, zstd, blosc, or with a level zstd:9")
        usual, least, most = _LEVELS[match[1]]
        level = int(match[2]) if match[2] else usual
        if not least <= level <= most:
            raise InvalidOptionError(f"compression {text!r}: levels of {match[1]} are {least} to {most}")
        return cls(match[1], level)

    def __str__(self) -> str:
        return f"{self.codec}:{self.level}" if self.codec else "none"

    def most(self, nbytes: int) -> int:
        """The most bytes that `nbytes` become."""
        return nbytes + nbytes // 128 + 4096 if self.codec else nbytes

    def zarr_codec(self, layout: BlockLayout) -> list[dict[str, Any]]:
        """As it stands in a `zarr.json`, between `bytes` and `crc32c`."""
        match self.codec:
            case "zstd":
                return [{"name": "zstd", "configuration": {"level": self.level, "checksum": False}}]
            case "blosc":
                words = {"cname": "zstd", "clevel": self.level, "shuffle": "shuffle", "blocksize": 0}
                return [{"name": "blosc", "configuration": {"typesize": DTYPES[layout.dtype], **words}}]
            case _:
                return []

    def encode(self, block: NDArray[np.uint8], layout: BlockLayout) -> NDArray[np.uint8]:
        """`block` compressed, in memory of its own."""
        words: NDArray[Any] = block.view(f"u{DTYPES[layout.dtype]}")
        return np.frombuffer(self._made().encode(words), np.uint8)

    def decode_into(self, packed: NDArray[np.uint8], into: NDArray[np.uint8]) -> bool:
        """Undo `encode`; False where `packed` is nothing of the kind, or does not become as many bytes."""
        try:
            unpacked = np.frombuffer(self._made().decode(packed), np.uint8)
        except (RuntimeError, ValueError):
            return False
        if unpacked.nbytes != into.nbytes:
            return False
        into[:] = unpacked
        return True

    def _made(self) -> Any:
        if self.codec == "zstd":
            return importlib.import_module("numcodecs.zstd").Zstd(self.level)
        blosc: Any = importlib.import_module("numcodecs.blosc")
        return blosc.Blosc("zstd", self.level, blosc.Blosc.SHUFFLE)
