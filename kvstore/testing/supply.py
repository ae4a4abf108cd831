"""An endless supply of keys and of blocks that belong to them, for tests of anything that keeps blocks.

Everything is derived from a number, in every process alike, so that a test in one process knows what another must read.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvstore.layout import BlockLayout
from kvstore.namespace import Namespace
from kvstore.types import BlockKey, BlockRead, BlockWrite, GetOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvstore.abc import BlockStore

__all__ = ["KIB", "MIB", "SPACE", "buffer", "content", "get", "held", "key", "keys", "write", "writes"]

KIB = 1 << 10
MIB = 1 << 20

SPACE = Namespace("model", "revision-1", (BlockLayout.opaque(64 * KIB),), block_tokens=16)
"""Where blocks go unless a test says otherwise: 64 KiB each, one group, digests of 32 bytes."""


def key(number: int, *, group: int = 0, digest_bytes: int = 32) -> BlockKey:
    """The `number`-th of an endless supply of keys."""
    return BlockKey(hashlib.shake_256(f"key {number}".encode()).digest(digest_bytes), group)


def buffer(array: NDArray[Any]) -> Buffer:
    """The array itself: that it is a buffer is something type checkers believe from Python 3.12 on."""
    return cast("Buffer", array)


def content(number: int, nbytes: int = SPACE.block_bytes()) -> NDArray[np.uint8]:
    """Bytes that belong to key `number` and to no other."""
    return np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)


def write(number: int, space: Namespace = SPACE, group: int = 0, **facts: Any) -> BlockWrite:
    """The put of block `number` with its content."""
    name = key(number, group=group, digest_bytes=space.digest_bytes)
    return BlockWrite(name, buffer(content(number, space.block_bytes(group))), **facts)


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
    outcomes = store.get_many_into(
        space, [BlockRead(name, buffer(into)) for name, into in zip(names, buffers, strict=True)]
    )
    return [
        "wrong bytes" if outcome is GetOutcome.HIT and not np.array_equal(into, content(number, len(into))) else outcome
        for outcome, into, number in zip(outcomes, buffers, numbers, strict=True)
    ]


def held(store: BlockStore, space: Namespace = SPACE) -> set[BlockKey]:
    """The keys that a scan finds."""
    return {info.key for info in store.scan(space)}
