"""A purge of a tier that four processes read and write: no wrong byte, no error, and none of the blocks afterwards."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from purge_helpers import found, in_use

import kvstore
from kvstore.purging import Request, purge
from kvstore.testing.supply import SPACE, get, keys, writes

if TYPE_CHECKING:
    from pathlib import Path

USERS = 4


def _purge_in_use(url: str, tier: Path, seconds: float, rounds: int, **options: object) -> None:
    numbers = range(48)
    for _ in range(rounds):
        with in_use(url, numbers, USERS, **options) as users:
            users.wait_for_work(USERS)
            receipt = purge([url], Request(all=True), dry_run=False)
            with kvstore.open_store(url) as store:  # blocks that were not in the tier at that moment
                store.purge_many(SPACE, keys(numbers))
                users.purged()
                assert set(get(store, numbers)) == {kvstore.GetOutcome.MISS}
                assert {outcome.value for outcome in store.put_many(SPACE, writes(numbers))} == {"refused"}
            time.sleep(seconds)
        counts = sum(map(Counter, users.counts), Counter[str]())
        assert receipt.complete
        assert receipt.tiers[0].blocks > 0
        assert counts["put stored"]
        assert counts["put refused"]
        assert counts["get hit"]
        assert set(counts) <= {"put stored", "put exists", "put refused", "put full", "get hit", "get miss"}, counts
        with kvstore.open_store(url) as store:
            store.finish_purge()
            assert store.usage().blocks == 0
        assert found(tier, numbers) == set()
        _remove(tier)


def _remove(tier: Path) -> None:
    """The tier, tombstones and all: the next round is to have something to purge."""
    for path in sorted(tier.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    for path in tier.with_name(f"{tier.name}-users").iterdir():
        path.unlink()
    tier.with_name(f"{tier.name}-users").rmdir()
    tier.rmdir()


@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_none_of_the_purged_blocks_is_read_while_four_processes_put_and_get_them(kind: str, tmp_path: Path) -> None:
    _purge_in_use(f"{kind}://{tmp_path}/kv", tmp_path / "kv", 0.2, rounds=1)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capacity", [None, "3MB"])
@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_nor_in_many_rounds_and_under_a_capacity(kind: str, capacity: str | None, tmp_path: Path) -> None:
    options = {} if capacity is None else {"capacity": capacity}
    _purge_in_use(f"{kind}://{tmp_path}/kv", tmp_path / "kv", 1.0, rounds=8, **options)
