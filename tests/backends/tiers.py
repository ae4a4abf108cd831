"""The tiers that the contract is tested on, and blocks to put into them.

A `Tier` is one location. Tests open it as often, and from as many processes, as they need; whatever a backend cannot do
stands in its `Capabilities`, never in its name.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore import BlockKey, BlockLayout, BlockRead, BlockStore, BlockWrite, GetOutcome, Namespace, open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

KIB = 1 << 10
MIB = 1 << 20

SPACE = Namespace("model", "revision-1", (BlockLayout.opaque(64 * KIB),), block_tokens=16)


@dataclass(frozen=True)
class Tier:
    """One location for one store: its URL and, where it is on disk, its path."""

    url: str
    path: Path | None = None

    def open(self, **options: Any) -> BlockStore:
        """A store of its own on this location, with further URL options."""
        return open_store(self.url, **options)


def key(number: int, *, group: int = 0, digest_bytes: int = 32) -> BlockKey:
    """The `number`-th of an endless supply of keys."""
    return BlockKey(hashlib.shake_256(f"key {number}".encode()).digest(digest_bytes), group)


def content(number: int, nbytes: int = SPACE.block_bytes()) -> NDArray[np.uint8]:
    """Bytes that belong to key `number` and to no other."""
    return np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)


def write(number: int, space: Namespace = SPACE, group: int = 0, **facts: Any) -> BlockWrite:
    """The put of block `number` with its content."""
    name = key(number, group=group, digest_bytes=space.digest_bytes)
    return BlockWrite(name, content(number, space.block_bytes(group)), **facts)


def writes(numbers: Iterable[int], space: Namespace = SPACE) -> list[BlockWrite]:
    """The puts of several blocks."""
    return [write(number, space) for number in numbers]


def keys(numbers: Iterable[int], space: Namespace = SPACE) -> list[BlockKey]:
    """The keys of several blocks."""
    return [key(number, digest_bytes=space.digest_bytes) for number in numbers]


def get(store: BlockStore, numbers: Sequence[int], space: Namespace = SPACE, group: int = 0) -> list[GetOutcome | str]:
    """One get of several blocks; a HIT whose bytes are not the block's is reported as `wrong bytes`."""
    buffers = [np.empty(space.block_bytes(group), np.uint8) for _ in numbers]
    names = [key(number, group=group, digest_bytes=space.digest_bytes) for number in numbers]
    outcomes = store.get_many_into(space, list(map(BlockRead, names, buffers)))
    return [
        "wrong bytes"
        if outcome is GetOutcome.HIT and not np.array_equal(buffer, content(number, len(buffer)))
        else outcome
        for outcome, buffer, number in zip(outcomes, buffers, numbers, strict=True)
    ]


def held(store: BlockStore, space: Namespace = SPACE) -> set[BlockKey]:
    """The keys that a scan finds."""
    return {info.key for info in store.scan(space)}


def open_descriptors() -> list[str]:
    """What this process has open, to see that a closed store left nothing."""
    found: list[str] = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            found.append(str(entry.readlink()))
    return sorted(found)
