"""A hundred thousand blocks are looked at in seconds: one scan, one table, one tree, and no more HTML than is read."""

from __future__ import annotations

import hashlib
import random
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("pandas", reason='pip install "kvstore-tiers[inspect]"')

import kvstore.inspect
from kvstore import BlockKey, BlockLayout, BlockWrite, Namespace, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPACE = Namespace("model", "revision", (BlockLayout.opaque(64),), block_tokens=16)
BLOCKS = 100_000
MOST_S = 5.0
"""Of CPU, for all of it; about 1.7 here."""


def conversations(blocks: int) -> Iterator[BlockWrite]:
    """Prompts of 5 to 60 blocks, of which more than half go on from some block of an earlier one."""
    chance, data = random.Random(1), np.zeros(64, np.uint8).data
    known: list[tuple[bytes, int]] = []
    made = 0
    while made < blocks:
        parent, position = chance.choice(known) if known and chance.random() < 0.6 else (b"", -1)
        for _ in range(min(chance.randint(5, 60), blocks - made)):
            digest, position, made = hashlib.sha256(str(made).encode()).digest(), position + 1, made + 1
            yield BlockWrite(BlockKey(digest), data, position, parent)
            parent = digest
            if chance.random() < 0.05:
                known.append((digest, position))


@pytest.mark.parametrize("scheme", ["lmdb", pytest.param("file", marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
def test_a_hundred_thousand_blocks_are_looked_at_in_seconds(scheme: str, tmp_path: Path) -> None:
    url = f"{scheme}://{tmp_path}/kv"
    with open_store(url) as store:
        writes = list(conversations(BLOCKS))
        for start in range(0, BLOCKS, 2_000):
            store.put_many(SPACE, writes[start : start + 2_000])
    with kvstore.inspect.open(url) as look:
        space = look.namespace()
        space.block(writes[7].key.digest.hex()[:20])
        began = time.process_time()
        space.refresh()
        blocks, tree, prefixes = space.blocks(), space.tree(), space.prefixes()
        shown = repr(space) + repr(tree) + space._repr_html_() + tree._repr_html_()
        taken = time.process_time() - began
    assert len(blocks) == tree.blocks == BLOCKS
    assert len(prefixes) > BLOCKS / 60
    assert prefixes.complete.all()
    assert len(shown) < 100_000
    assert taken < MOST_S
