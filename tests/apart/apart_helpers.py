"""What tests of stores apart share: processes that are looked at, and blocks in memory that two of them have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tiering_helpers import BLOCK, SPACE, content

from kvstore import BlockRead, BlockWrite
from kvstore.apart import shared_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore import BlockKey, BlockStore, GetOutcome, PutOutcome
    from kvstore.apart import StoreApart


def rows(count: int) -> NDArray[np.uint8]:
    """Memory that can be shared, in blocks."""
    return shared_memory(count * BLOCK).reshape(count, BLOCK)


def put(store: BlockStore, names: Sequence[BlockKey], memory: NDArray[np.uint8]) -> list[PutOutcome]:
    """Store their blocks out of `memory`."""
    for name, row in zip(names, memory, strict=False):
        np.copyto(row, content(name))
    return store.put_many(SPACE, [BlockWrite(name, row.data) for name, row in zip(names, memory, strict=False)])


def get(store: BlockStore, names: Sequence[BlockKey], memory: NDArray[np.uint8]) -> list[GetOutcome]:
    """Load them into `memory`."""
    return store.get_many_into(SPACE, [BlockRead(name, row.data) for name, row in zip(names, memory, strict=False)])


def process_of(store: StoreApart) -> int:
    """Its process, which is there."""
    process = store.process
    assert process is not None
    return process


def alive(process: int) -> bool:
    """Whether it is there and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def descriptors() -> int:
    """How many this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only counted
