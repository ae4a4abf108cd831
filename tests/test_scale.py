"""Field report 5: millions of files in one directory, and lookups that get dearer with every block."""

from __future__ import annotations

import hashlib
import time
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from kvstore import BlockKey, BlockLayout, BlockStore, BlockWrite, Namespace, PutOutcome, open_store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SPACE = Namespace("model", "revision", (BlockLayout.opaque(64),), block_tokens=16)
FEW, MANY = 1_000, 60_000


def keys(start: int, stop: int) -> list[BlockKey]:
    return [BlockKey(hashlib.sha256(str(number).encode()).digest()) for number in range(start, stop)]


def fill(store: BlockStore, wanted: Sequence[BlockKey]) -> None:
    block = np.zeros(64, np.uint8).data
    for start in range(0, len(wanted), 2_000):
        outcomes = store.put_many(SPACE, [BlockWrite(key, block) for key in wanted[start : start + 2_000]])
        assert set(outcomes) == {PutOutcome.STORED}


def cost_of_a_lookup(store: BlockStore, wanted: Sequence[BlockKey]) -> float:
    def once() -> float:
        begin = time.process_time()
        store.contains_many(SPACE, wanted)
        return time.process_time() - begin

    return median(once() for _ in range(15))


def test_sixty_times_the_blocks_make_no_lookup_dearer(tmp_path: Path) -> None:
    # Both local tiers answer lookups from the same catalogue; this one fills faster.
    present, absent = keys(0, FEW), keys(MANY, MANY + FEW)
    with open_store(f"lmdb://{tmp_path}/kv") as store:
        fill(store, present)
        small_hit, small_miss = cost_of_a_lookup(store, present), cost_of_a_lookup(store, absent)
        fill(store, keys(FEW, MANY))
        assert (
            cost_of_a_lookup(store, present) < 6 * small_hit
        )  # more steps, and colder ones; one in proportion would be 60 times as dear
        assert cost_of_a_lookup(store, absent) < 6 * small_miss


def test_blocks_fan_out_over_many_folders(tmp_path: Path) -> None:
    blocks = 1_024
    with open_store(f"file://{tmp_path}/kv") as store:
        fill(store, keys(0, blocks))
    folders = [path for path in (tmp_path / "kv" / SPACE.name / "g0").iterdir() if path.is_dir()]
    files = [len([file for file in folder.iterdir() if file.name != "zarr.json"]) for folder in folders]
    assert sum(files) == blocks
    assert len(folders) > 200
    assert max(files) < blocks / 32
