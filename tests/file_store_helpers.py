"""A `file://` store of 64 KiB blocks, what is put into it, and what of it lies on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore import (
    BlockKey,
    BlockLayout,
    BlockRead,
    BlockStore,
    BlockWrite,
    GetOutcome,
    Namespace,
    PutOutcome,
)
from kvstore_zarr.metadata import NamespaceTree

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


HIT, MISS, CORRUPT = GetOutcome.HIT, GetOutcome.MISS, GetOutcome.CORRUPT
STORED, EXISTS, FULL = PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.FULL

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 64 * KIB
SPACE = Namespace("model", "revision-1", (BlockLayout.opaque(BLOCK),), block_tokens=16)
TREE = NamespaceTree(SPACE)


def key(number: int) -> BlockKey:
    return BlockKey(np.random.default_rng(number).bytes(32))


def content(number: int) -> np.ndarray:
    return np.random.default_rng(1000 + number).integers(0, 256, BLOCK, np.uint8)


def put(store: BlockStore, numbers: Iterable[int]) -> list[PutOutcome]:
    return store.put_many(
        SPACE, [BlockWrite(key(n), content(n), position=n, parent=key(n + 5000).digest) for n in numbers]
    )


def get(store: BlockStore, numbers: Sequence[int]) -> list[GetOutcome | str]:
    buffers = [np.empty(BLOCK, np.uint8) for _ in numbers]
    outcomes = store.get_many_into(SPACE, [BlockRead(key(n), into) for n, into in zip(numbers, buffers, strict=True)])
    wrong = [
        outcome is HIT and not np.array_equal(into, content(n))
        for outcome, into, n in zip(outcomes, buffers, numbers, strict=True)
    ]
    return ["wrong bytes" if is_wrong else outcome for outcome, is_wrong in zip(outcomes, wrong, strict=True)]


def file_of(root: Path, number: int) -> Path:
    return root / TREE.block(key(number))


def occupied(root: Path) -> int:
    """What the tree occupies on the device, directories included."""
    return sum(path.lstat().st_blocks * 512 for path in (root, *root.rglob("*")))


def fill(store: BlockStore, start: int = 0) -> int:
    """Put blocks until the first is evicted; the number of the next block."""
    number = start
    while True:
        assert put(store, [number]) == [STORED]
        number += 1
        if store.contains_many(SPACE, [key(start)]) == [False]:
            return number
