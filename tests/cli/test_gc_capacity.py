"""`kvstore gc --capacity` of local tiers: by what blocks occupy, and not by what files keep for blocks to come."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from cli_helpers import machine

from kvstore import BlockKey, open_store
from kvstore.catalog import Entry, address_of
from kvstore.cli import EXIT_OK, run
from kvstore.testing.supply import MIB, SPACE, writes
from kvstore_zarr import LocalZarrStore

if TYPE_CHECKING:
    from pathlib import Path

CAPACITY = 8 * MIB


def count(url: str, **options: int) -> int:
    with open_store(url, **options) as store:
        return store.usage().blocks


def test_what_removals_write_down_costs_the_next_run_no_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The catalogue has no free page, and takes more of them than were foreseen: more blocks go for those at once."""
    url = f"file://{tmp_path}/kv"
    with open_store(url) as store:
        assert isinstance(store, LocalZarrStore)
        store.put_many(SPACE, writes(range(20)))
        with store._tier.catalog.write() as change:
            keys = [BlockKey(number.to_bytes(32, "little")) for number in range(2000)]
            change.publish([Entry(address_of(SPACE, key), 4096, 1, 1) for key in keys])
        capacity = store.excess(0) - 300 * 4096
    told = machine(capsys, "gc", url, "--capacity", str(capacity))["to_go"]["blocks"]
    went = machine(capsys, "gc", url, "--capacity", str(capacity), "--yes")["removed"]["over"]
    assert 300 <= told < went < 600
    with open_store(url) as store:
        assert store.excess(capacity) <= 0
    assert machine(capsys, "gc", url, "--capacity", str(capacity))["to_go"]["blocks"] == 0


@pytest.mark.parametrize("scheme_", ["file", "lmdb"])
@pytest.mark.parametrize("options", ["", "?capacity=64MiB"], ids=["no capacity", "a larger one"])
def test_once_it_fits_nothing_more_goes(
    scheme_: str, options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{scheme_}://{tmp_path}/kv"
    with open_store(url + options) as store:
        store.put_many(SPACE, writes(range(200)))
    to_go = machine(capsys, "gc", url, "--capacity", str(CAPACITY))["to_go"]["blocks"]
    assert 70 < to_go < 130
    first = machine(capsys, "gc", url, "--capacity", str(CAPACITY), "--yes")
    assert (first["removed"]["over"], first["left_over_capacity"]) == (to_go, 0)
    assert count(url) == 200 - to_go
    for words in ([], ["--yes"], ["--yes"]):
        again = machine(capsys, "gc", url, "--capacity", str(CAPACITY), *words)
        assert (again["to_go"]["blocks"], again["left_over_capacity"]) == (0, 0)
    assert count(url) == 200 - to_go


def test_an_lmdb_tier_with_that_capacity_has_no_more_to_evict_and_then_a_smaller_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, data = f"lmdb://{tmp_path}/kv", tmp_path / "kv" / "data.mdb"
    with open_store(url) as store:
        store.put_many(SPACE, writes(range(200)))
    greatest = data.stat().st_size
    assert run(["gc", url, "--capacity", str(CAPACITY), "--yes"]) == EXIT_OK
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"the tier.s file stays as large as it is, 14\.\d MB in all", said)
    assert "opens the tier alone with a capacity below its size" in said
    assert data.stat().st_size >= greatest
    left = count(url)
    assert count(url, capacity=CAPACITY) == left
    assert data.stat().st_size <= CAPACITY
    kept = machine(capsys, "gc", url)["file_keeps_its_size"]
    assert left * 65536 < kept["bytes"] <= CAPACITY
    assert machine(capsys, "gc", url, "--capacity", str(CAPACITY))["to_go"]["blocks"] == 0


def test_what_an_opening_gives_back_of_a_catalogue_is_in_no_blocks_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/kv"
    with open_store(url) as store:
        store.put_many(SPACE, writes(range(20)))
        assert isinstance(store, LocalZarrStore)
        catalog, keys = store._tier.catalog, [BlockKey(number.to_bytes(32, "little")) for number in range(12000)]
        entries = [Entry(address_of(SPACE, key), 0, 1, 1) for key in keys]
        with catalog.write() as change:
            change.publish(entries)
        with catalog.write() as change:
            change.discard([entry.address for entry in entries])
            store._tier.account(change)
    with open_store(f"{url}?readonly=true") as store:
        usage = store.usage()
    assert usage.overhead > 3 * MIB
    said = machine(capsys, "gc", url, "--capacity", str(usage.used + MIB))
    assert (said["to_go"]["blocks"], said["left_over_capacity"]) == (0, 0)
    said = machine(capsys, "gc", url, "--capacity", str(usage.used + MIB), "--yes")
    assert said["removed"]["over"] == 0
    assert sum(path.lstat().st_blocks * 512 for path in (tmp_path / "kv").rglob("*")) <= usage.used + MIB
