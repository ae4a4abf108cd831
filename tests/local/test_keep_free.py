"""`keep_free`: what a tier leaves of its disk, whoever fills it, with a capacity and without one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from local_helpers import FULL, HIT, STORED

from kvstore import BlockLayout, Namespace, open_store
from kvstore.errors import InvalidOptionError
from kvstore.testing.supply import KIB, MIB, get, writes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SMALL = Namespace("small", "revision-1", (BlockLayout.opaque(8 * KIB),), block_tokens=16)
KEPT = 5 * MIB


def free(disk: Path) -> int:
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize


@pytest.mark.parametrize("capacity", ["", "&capacity=1GB"])
def test_a_tier_that_has_grown_to_it_evicts_and_goes_on(
    scheme: str, small_disk: Callable[[int], Path], capacity: str
) -> None:
    disk = small_disk(12 * MIB)
    with open_store(f"{scheme}://{disk}/tier?keep_free=5MiB{capacity}") as store:
        for start in range(0, 1500, 50):
            assert set(store.put_many(SMALL, writes(range(start, start + 50), SMALL))) == {STORED}, start
            assert free(disk) >= KEPT - MIB // 4, start
        assert get(store, [1499], SMALL) == [HIT]
        assert store.usage().blocks >= 150


def test_a_share_of_the_disk(scheme: str, small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(12 * MIB)
    with open_store(f"{scheme}://{disk}/tier?keep_free=50%") as store:
        for start in range(0, 1000, 50):
            store.put_many(SMALL, writes(range(start, start + 50), SMALL))
        assert 5.5 * MIB <= free(disk) <= 8 * MIB


def test_a_neighbour_that_takes_more_is_given_way_to(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(16 * MIB)
    with open_store(f"file://{disk}/tier?keep_free=4MiB") as store:
        for start in range(0, 1200, 50):
            store.put_many(SMALL, writes(range(start, start + 50), SMALL))
        before = store.usage().blocks
        (disk / "neighbour").write_bytes(bytes(3 * MIB))
        number = 2000
        while free(disk) < 4 * MIB - MIB // 4 and number < 2100:
            assert set(store.put_many(SMALL, writes([number], SMALL))) <= {STORED, FULL}
            number += 1
        assert free(disk) >= 4 * MIB - MIB // 4
        assert 0 < store.usage().blocks < before
        assert store.put_many(SMALL, writes([3000], SMALL)) == [STORED]


def test_without_it_and_without_a_capacity_a_full_disk_sheds_what_comes_and_keeps_what_is_there(
    scheme: str, small_disk: Callable[[int], Path]
) -> None:
    disk = small_disk(6 * MIB)
    with open_store(f"{scheme}://{disk}/tier") as store:
        outcomes = [store.put_many(SMALL, writes([number], SMALL))[0] for number in range(900)]
        assert outcomes[0] == STORED
        assert outcomes[-1] == FULL
        assert get(store, [0], SMALL) == [HIT]


@pytest.mark.parametrize("wrong", ["0", "much", "101%", "", "100%", "9000TB"])
def test_what_makes_no_sense_is_an_error(scheme: str, tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(InvalidOptionError, match="keep_free"):
        open_store(f"{scheme}://{tmp_path}/tier", keep_free=wrong)
