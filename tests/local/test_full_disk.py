"""A disk that is full, by the tier itself or by a neighbour: it costs room and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from local_helpers import FULL, HIT, MISS, STORED

from kvstore import BlockLayout, Namespace, PutOutcome, open_store
from kvstore.errors import StoreFullError
from kvstore.testing.supply import KIB, MIB, SPACE, get, keys, writes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SMALL = Namespace("small", "revision-1", (BlockLayout.opaque(8 * KIB),), block_tokens=16)


def stored(outcomes: list[PutOutcome]) -> int:
    assert set(outcomes) <= {STORED, FULL}
    return outcomes.count(STORED)


def fill_up(disk: Path) -> None:
    """What a neighbour does."""
    with (disk / "neighbour").open("wb", buffering=0) as file:
        for size in (1 * MIB, 4 * KIB):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


class TestFullDisk:
    @pytest.mark.parametrize("batch", [1, 300])
    def test_a_cap_beyond_the_disk_evicts_and_goes_on(
        self, scheme: str, small_disk: Callable[[int], Path], batch: int
    ) -> None:
        disk = small_disk(4 * MIB)
        with open_store(f"{scheme}://{disk}/tier?capacity=1GB") as store:
            for start in range(0, 900, batch):
                outcomes = store.put_many(SMALL, writes(range(start, start + batch), SMALL))
                assert set(outcomes) == {STORED}, start
            assert get(store, [899], SMALL) == [HIT]
            assert store.usage().blocks >= 80

    def test_a_neighbour_that_fills_the_disk_costs_room_and_nothing_else(
        self, scheme: str, small_disk: Callable[[int], Path]
    ) -> None:
        disk = small_disk(12 * MIB)
        with open_store(f"{scheme}://{disk}/tier?capacity=8MB") as store:
            store.put_many(SPACE, writes(range(60)))
            fill_up(disk)
            assert [store.put_many(SPACE, writes([number])) for number in range(100, 200)] == [[STORED]] * 100
            assert get(store, [199]) == [HIT]

    def test_one_put_into_a_small_empty_disk_stores_what_fits(
        self, scheme: str, small_disk: Callable[[int], Path]
    ) -> None:
        disk = small_disk(4 * MIB)
        with open_store(f"{scheme}://{disk}/tier") as store:
            assert stored(store.put_many(SMALL, writes(range(400), SMALL))) >= 180
            known = store.contains_many(SMALL, keys(range(400)))
            assert get(store, range(400), SMALL) == [HIT if there else MISS for there in known]
            assert all(store.delete_many(SMALL, keys(number for number in range(400) if known[number])))
            assert stored(store.put_many(SMALL, writes(range(100), SMALL))) == 100

    @pytest.mark.parametrize("capacity", ["", "?capacity=8MB"])
    def test_a_tier_opens_on_a_full_disk_and_serves_its_blocks(
        self, scheme: str, small_disk: Callable[[int], Path], capacity: str
    ) -> None:
        disk = small_disk(12 * MIB)
        with open_store(f"{scheme}://{disk}/tier{capacity}") as store:
            store.put_many(SPACE, writes(range(60)))
        fill_up(disk)
        with open_store(f"{scheme}://{disk}/tier") as store:
            for _ in range(5):  # notes of use that cannot be written fail no read
                assert get(store, range(60)) == [HIT] * 60
            outcomes = [store.put_many(SPACE, writes([number]))[0] for number in range(100, 110)]
            assert outcomes == [STORED if capacity else FULL] * 10
        with open_store(f"{scheme}://{disk}/tier") as store:
            assert get(store, [109 if capacity else 59]) == [HIT]

    def test_what_a_full_disk_says_names_no_file_that_is_none(
        self, scheme: str, small_disk: Callable[[int], Path]
    ) -> None:
        disk = small_disk(1 * MIB)
        fill_up(disk)
        with pytest.raises(StoreFullError, match="make room") as caught:
            open_store(f"{scheme}://{disk}/tier")
        assert "None" not in str(caught.value)
