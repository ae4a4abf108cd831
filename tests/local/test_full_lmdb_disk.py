"""An `lmdb://` tier on a disk that others have filled: what makes room does so as far as it can, or says what helps."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import lmdb
import pytest

from kvstore import Mark, open_store
from kvstore.cli import EXIT_NOT_INTACT, EXIT_OK, EXIT_USAGE, run
from kvstore.errors import StoreFullError
from kvstore.testing.supply import KIB, MIB, SPACE, get, keys, writes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BLOCKS = 250


@pytest.fixture
def disk(small_disk: Callable[[int], Path]) -> Path:
    """A disk of 48 MiB with a tier that has no free page, and a neighbour has taken the rest."""
    place = small_disk(48 * MIB)
    with open_store(f"lmdb://{place}/kv") as store:
        for first in range(0, BLOCKS, 50):
            store.put_many(SPACE, writes(range(first, first + 50)))
        store.mark_many(SPACE, keys(range(20)), Mark("handbook"))
    (place / "copy").mkdir()
    with lmdb.open(str(place / "kv"), max_dbs=16) as environment:
        environment.copy(str(place / "copy"), compact=True)
    (place / "copy" / "data.mdb").replace(place / "kv" / "data.mdb")
    (place / "kv" / "lock.mdb").unlink()
    open_store(f"lmdb://{place}/kv?readonly=true").close()  # makes the lock file
    with (place / "neighbour").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4 * KIB))
    return place


def give_back(disk: Path, nbytes: int) -> None:
    path = disk / "neighbour"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 4096 * 4096 - nbytes)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


def count(disk: Path) -> int:
    with open_store(f"lmdb://{disk}/kv?readonly=true") as store:
        return store.usage().blocks


@pytest.mark.parametrize(
    "words",
    [["gc", "--capacity", "4MB", "--yes"], ["pin", "--label", "handbook"], ["purge", "--all", "--yes"]],
    ids=lambda w: w[0],
)
def test_the_disk_is_named_and_what_helps_does(
    disk: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = [words[0], f"lmdb://{disk}/kv", *words[1:]]
    assert run(command) in (EXIT_USAGE, EXIT_NOT_INTACT)
    answer = said(capsys)
    assert "its disk is full" in answer
    assert "free 256 KiB on it and do this again" in answer
    assert "reader" not in answer
    assert count(disk) == BLOCKS
    give_back(disk, 256 * KIB)
    assert run(command) == EXIT_OK
    assert "full" not in said(capsys)
    assert (count(disk) < BLOCKS) is (words[0] != "pin")


def test_few_free_pages_are_enough_to_take_blocks_out_one_by_one(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    give_back(disk, 64 * KIB)
    assert run(["gc", f"lmdb://{disk}/kv", "--capacity", "4MB", "--yes"]) == EXIT_OK, said(capsys)
    assert count(disk) < 70


@pytest.mark.parametrize(
    ("free", "capacity"),
    [(0, 8 * MIB), (32 * KIB, 8 * MIB), (256 * KIB, 14 * MIB)],
    ids=["no page", "too few pages for a block to go", "no copy"],
)
def test_a_lower_capacity_for_which_there_is_no_room_changes_nothing(disk: Path, free: int, capacity: int) -> None:
    give_back(disk, free)
    with pytest.raises(StoreFullError, match="nothing was changed"):
        open_store(f"lmdb://{disk}/kv", capacity=capacity)
    with open_store(f"lmdb://{disk}/kv") as store:
        assert (store.usage().blocks, store.usage().capacity) == (BLOCKS, None)


def test_a_lower_capacity_for_which_there_is_room_holds(disk: Path) -> None:
    give_back(disk, 96 * KIB)
    with open_store(f"lmdb://{disk}/kv", capacity=8 * MIB) as store:
        assert 100 < store.usage().blocks < 120
        assert len(get(store, range(BLOCKS))) == BLOCKS
    assert sum(path.stat().st_blocks * 512 for path in (disk / "kv").iterdir()) <= 8 * MIB


def test_a_copy_that_fails_leaves_the_capacity_as_it_was(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_back(disk, 256 * KIB)
    monkeypatch.setattr("kvstore.compaction.give_back_free_pages", lambda _: None)  # as where no holes are to be had
    with pytest.raises(StoreFullError, match=r"\d+ blocks went for it, and the capacity is as it was"):
        open_store(f"lmdb://{disk}/kv", capacity=8 * MIB)
    left = count(disk)
    with open_store(f"lmdb://{disk}/kv") as store:
        assert (store.usage().blocks, store.usage().capacity) == (left, None)
