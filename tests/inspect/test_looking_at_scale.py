"""A hundred thousand blocks are looked at in seconds: one scan, one table, one tree, and no more HTML than is read."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
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


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


@pytest.fixture(
    scope="module", params=["lmdb", pytest.param("file", marks=[pytest.mark.soak, pytest.mark.timeout(600)])]
)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tier with all of them."""
    place = f"{request.param}://{tmp_path_factory.mktemp('scale')}/kv"
    with open_store(place) as store:
        writes = list(conversations(BLOCKS))
        for start in range(0, BLOCKS, 2_000):
            store.put_many(SPACE, writes[start : start + 2_000])
    return place


def test_a_hundred_thousand_blocks_are_looked_at_in_seconds(url: str) -> None:
    some = next(block.key for number, block in enumerate(conversations(10)) if number == 7)
    with kvstore.inspect.open(url) as look:
        space = look.namespace()
        space.block(some.digest.hex()[:20])
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


def test_the_command_the_tree_and_its_picture_take_seconds_together(url: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason='pip install "kvstore-tiers[inspect]"')
    from kvstore.inspect.pictures import prefix_tree

    command = [sys.executable, "-m", "kvstore", "ls", url, "--json"]
    began = cpu_seconds()
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    with kvstore.inspect.open(url) as look:
        tree = look.namespace().tree()
        prefix_tree(tree).savefig(tmp_path / "tree.png")
    taken = cpu_seconds() - began
    assert [space["blocks"] for space in json.loads(listed)["namespaces"]] == [BLOCKS]
    assert tree.blocks == BLOCKS
    assert (tmp_path / "tree.png").stat().st_size > 10_000
    assert taken < MOST_S
