"""What the tests of `lmdb://` share: blocks of four sizes, whose bytes are known, and what an outsider sees."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore import BlockKey, BlockLayout, BlockRead, BlockWrite, GetOutcome, Namespace, PutOutcome, open_store
from kvstore_lmdb import LMDBStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

KIB, MIB = 1 << 10, 1 << 20

SPACE = Namespace(
    "model",
    "revision",
    (BlockLayout.opaque(64 * KIB), BlockLayout.opaque(300_000), BlockLayout.opaque(2 * MIB), BlockLayout.opaque(100)),
    block_tokens=16,
)


def key(number: int, group: int = 0) -> BlockKey:
    return BlockKey(random.Random(number).randbytes(32), group)


def content(number: int, group: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng([number, group]).integers(0, 256, SPACE.block_bytes(group), np.uint8)


def opened(directory: Path, **options: Any) -> LMDBStore:
    store = open_store(f"lmdb://{directory}", **options)
    assert isinstance(store, LMDBStore)
    return store


def put(store: LMDBStore, numbers: Sequence[int], group: int = 0) -> list[PutOutcome]:
    return store.put_many(SPACE, [BlockWrite(key(number, group), content(number, group)) for number in numbers])


def get(store: LMDBStore, numbers: Sequence[int], group: int = 0) -> list[GetOutcome]:
    reads = [BlockRead(key(number, group), np.empty(SPACE.block_bytes(group), np.uint8)) for number in numbers]
    outcomes = store.get_many_into(SPACE, reads)
    for number, read, outcome in zip(numbers, reads, outcomes, strict=True):
        assert outcome is not GetOutcome.HIT or np.array_equal(np.asarray(read.into), content(number, group))
    return outcomes


def occupied(directory: Path) -> int:
    """What an outsider sees: `st_blocks` of the folder and everything in it."""
    blocks = directory.stat().st_blocks
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                blocks += entry.stat().st_blocks
            except FileNotFoundError:
                continue
    return 512 * blocks
