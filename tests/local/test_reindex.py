"""Blocks that came by a plain copy of a tree are known after `kvstore reindex`, and what went is forgotten."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from kvstore import open_store
from kvstore.cli import cli
from kvstore.errors import StoreAccessError
from kvstore.testing.supply import MIB, SPACE, get, held, keys, writes
from kvstore.types import GetOutcome, PutOutcome
from kvstore_zarr import LocalZarrStore
from kvstore_zarr.format import PAGE
from kvstore_zarr.metadata import NamespaceTree
from kvstore_zarr.tails import TailReader, block_files, block_folders
from kvstore_zarr.tier import draft_prefix

if TYPE_CHECKING:
    from kvstore import BlockStore
    from kvstore_zarr.reindex import Reindexed

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS


def reindex(store: BlockStore) -> Reindexed:
    assert isinstance(store, LocalZarrStore)
    return store.reindex()


@pytest.fixture
def copied(tmp_path: Path) -> str:
    """A tier with block 9 of its own, into whose folder the tree of another with blocks 0 to 4 was copied."""
    here, there = tmp_path / "here", tmp_path / "there"
    with open_store(f"file://{there}") as store:
        store.put_many(SPACE, writes(range(5)))
    with open_store(f"file://{here}") as store:
        store.put_many(SPACE, writes([9]))
    shutil.copytree(there / SPACE.name, here / SPACE.name, dirs_exist_ok=True)
    return f"file://{here}"


def test_copied_blocks_are_hits_afterwards_and_count(copied: str) -> None:
    with open_store(copied) as store:
        assert store.contains_many(SPACE, keys([0, 9])) == [False, True]
        found = reindex(store)
        assert (found.added, found.removed, found.unreadable) == (5, 0, 0)
        assert get(store, [*range(5), 9]) == [HIT] * 6
        assert store.usage().blocks == 6
        assert store.usage().used == sum(info.stored_bytes for info in store.scan(SPACE))
        assert store.put_many(SPACE, writes([4, 5])) == [PutOutcome.EXISTS, PutOutcome.STORED]


def test_what_was_removed_behind_the_tiers_back_is_forgotten(copied: str, tmp_path: Path) -> None:
    with open_store(copied) as store:
        reindex(store)
        gone = next(iter((tmp_path / "here" / SPACE.name).rglob("*.0")))
        gone.unlink()
        assert reindex(store).removed == 1
        assert store.usage().blocks == len(held(store)) == 5


def test_a_folder_that_was_removed_is_forgotten_and_each_block_is_compared_once(copied: str, tmp_path: Path) -> None:
    with open_store(copied) as store:
        assert isinstance(store, LocalZarrStore)
        compared: list[int] = []
        assert store.reindex(compared.append).added == 5
        assert sum(compared) == 6
        block = next(iter((tmp_path / "here" / SPACE.name).rglob("*.0")))
        lost = len(list(block.parent.glob("*.0")))
        shutil.rmtree(block.parent)
        assert store.reindex().removed == lost
        assert store.usage().blocks == len(held(store)) == 6 - lost


def test_what_is_no_block_is_left_where_it_is(copied: str, tmp_path: Path) -> None:
    other = next(iter((tmp_path / "there" / SPACE.name).rglob("*.0")))
    place = tmp_path / "here" / other.relative_to(tmp_path / "there")
    place.write_bytes(other.read_bytes()[:4096])
    with open_store(copied) as store:
        found = reindex(store)
        assert (found.added, found.unreadable) == (4, 1)
        assert place.stat().st_size == 4096


def test_drafts_that_came_with_a_copy_go_and_those_of_puts_stay(copied: str, tmp_path: Path) -> None:
    with open_store(copied) as store:
        assert isinstance(store, LocalZarrStore)
        folder = next(iter((tmp_path / "here" / SPACE.name).rglob("*.0"))).parent
        copy = folder / "draft-00112233445566778899aabbccddeeff-7-0"
        copy.write_bytes(bytes(PAGE))
        with store._tier.catalog.write() as change:
            intent = change.reserve(store._tier.presence.lease, PAGE, b"")
        mine = folder / f"{draft_prefix(intent)}0"
        mine.write_bytes(bytes(PAGE))
        reindex(store)
        assert (copy.exists(), mine.exists()) == (False, True)


def test_a_copy_over_the_capacity_is_evicted_down_to_it(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}/there") as store:
        store.put_many(SPACE, writes(range(100)))
    url = f"file://{tmp_path}/here"
    with open_store(url, capacity=4 * MIB) as store:
        store.put_many(SPACE, writes([200]))
        shutil.copytree(tmp_path / "there" / SPACE.name, tmp_path / "here" / SPACE.name, dirs_exist_ok=True)
        assert reindex(store).added == 100
        usage = store.usage()
        assert usage.used + usage.reserved + usage.overhead <= 4 * MIB
        assert get(store, [200]) == [HIT]  # the youngest


def test_a_read_only_tier_is_not_reindexed(copied: str) -> None:
    with open_store(copied, readonly=True) as store, pytest.raises(StoreAccessError, match="read-only"):
        reindex(store)


def test_the_command_says_what_it_found(copied: str) -> None:
    done = CliRunner().invoke(cli, ["reindex", copied, "--json"])
    assert json.loads(done.stdout) == {"url": copied, "added": 5, "removed": 0, "unreadable": 0}
    with open_store(copied) as store:
        assert get(store, range(5)) == [HIT] * 5


def test_a_store_without_a_catalogue_has_nothing_to_reindex() -> None:
    done = CliRunner().invoke(cli, ["reindex", "memory://nothing"])
    assert done.exit_code != 0
    assert "nothing there needs to be reindexed" in str(done.exception or done.output)


def test_tails_are_read_the_same_by_one_thread_and_by_several(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}") as store:
        store.put_many(SPACE, writes(range(70)))
    tree = NamespaceTree(SPACE)
    files = [
        file for group, folder in block_folders(tree) for file in block_files(tmp_path, tree, group, folder)[0].values()
    ]
    Path(files[3].path).unlink()
    os.truncate(files[4].path, 100)
    with TailReader() as reader:
        alone = reader.read(tree, files)
        reader._waiting = True  # as where the device had to be read
        assert reader.read(tree, files) == alone
        assert not reader._waiting
    assert [tail.file for tail in alone] == files
    assert [number for number, tail in enumerate(alone) if tail.entry is None] == [3, 4]
    assert (alone[3].gone, alone[4].gone) == (True, False)
