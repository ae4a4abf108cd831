"""Something that cannot be removed (an immutable file, a folder on a failing device) costs its own room and no more."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from local_helpers import FAILED, HIT, STORED, file_of, occupied

from kvstore import open_store
from kvstore.cli import EXIT_NOT_INTACT, run
from kvstore.testing.supply import MIB, SPACE, get, keys, writes
from kvstore_zarr import LocalZarrStore

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

CAPACITY = 8 * MIB


@contextmanager
def immutable(path: Path) -> Generator[None]:
    """Nobody, root included, may change, rename or remove it, nor what stands in it."""
    done = subprocess.run(["chattr", "+i", path], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be made immutable here: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", path], check=True)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_evictions_go_on_beside_it(root: Path, what: str) -> None:
    if os.geteuid():
        pytest.skip("immutable files take root")
    url = f"file://{root}?capacity={CAPACITY}"
    with open_store(url) as store:
        store.put_many(SPACE, writes(range(40)))
        stuck = file_of(root, 0)
        with immutable(stuck if what == "file" else stuck.parent):
            outcomes = [store.put_many(SPACE, writes([number]))[0] for number in range(1000, 1400)]
            assert occupied(root) <= CAPACITY
            assert outcomes.count(STORED) >= 390
            assert set(outcomes) <= {STORED, FAILED}
            assert get(store, [1399]) == [HIT]
            assert set(store.contains_many(SPACE, keys(range(1, 40)))) == {False}
        assert [store.put_many(SPACE, writes([number]))[0] for number in range(2000, 2100)] == [STORED] * 100
    with open_store(url) as store:
        usage = store.usage()
        assert (usage.reserved, usage.blocks) == (0, len(list(store.scan(SPACE))))
        assert sum(path.stat().st_blocks * 512 for path in root.rglob("*.0")) == usage.used


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_tier_with_it_opens_and_is_used(root: Path, what: str) -> None:
    if os.geteuid():
        pytest.skip("immutable files take root")
    url = f"file://{root}"
    with open_store(url, capacity=CAPACITY) as store:
        store.put_many(SPACE, writes(range(100)))
        (stuck, *_) = (file for number in range(100) if (file := file_of(root, number)).exists())
    with immutable(stuck if what == "file" else stuck.parent):
        for start in (1000, 2000):
            with open_store(url) as store:
                outcomes = [store.put_many(SPACE, writes([number]))[0] for number in range(start, start + 200)]
                assert outcomes.count(STORED) >= 190
                assert occupied(root) <= CAPACITY
        with open_store(url, capacity=CAPACITY // 2) as store:  # trimmed at once, but for what cannot go
            assert occupied(root) <= CAPACITY // 2
    with open_store(url, capacity=CAPACITY // 2) as store:
        assert store.usage().reserved == 0
        assert sum(path.stat().st_blocks * 512 for path in root.rglob("*.0")) == store.usage().used


@pytest.mark.timeout(60)
def test_a_collection_ends_beside_it(root: Path) -> None:
    """It is over the capacity still, by what cannot go, however often that is looked at."""
    if os.geteuid():
        pytest.skip("immutable files take root")
    url = f"file://{root}"
    with open_store(url) as store:
        assert isinstance(store, LocalZarrStore)
        store.put_many(SPACE, writes(range(8)))
        capacity = store.excess(0) - MIB // 2
    with immutable(file_of(root, 0)):
        assert run(["gc", url, "--capacity", str(capacity), "--yes"]) == EXIT_NOT_INTACT
    with open_store(url) as store:
        assert 0 < store.usage().blocks < 8
