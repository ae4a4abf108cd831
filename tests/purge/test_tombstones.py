"""Tombstones: in the catalogue, in documents beside the blocks, and above both: in tiers, copies, restored archives."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from purge_helpers import found

import kvstore
import kvstore.tombs
from kvstore import GetOutcome, PutOutcome
from kvstore.catalog import DATABASES, Catalog, Entry
from kvstore.copying import Fate, copy
from kvstore.environment import Environment
from kvstore.graveyard import Graveyard
from kvstore.retention import now_ns
from kvstore.testing.clock import MovableClock, movable_clock
from kvstore.testing.supply import SPACE, get, key, keys, writes
from kvstore.tiering import TieringManager
from kvstore.tombs import Remembered
from kvstore_lmdb.put import Puts
from kvstore_zarr import steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from kvstore import BlockKey
    from kvstore.tiering.counters import TierStats

MISS, HIT = GetOutcome.MISS, GetOutcome.HIT
STORED, EXISTS, REFUSED = PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.REFUSED
MINUTE = 60_000_000_000


@pytest.fixture
def clock() -> Iterator[MovableClock]:
    with movable_clock() as clock:
        yield clock


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    environment = Environment.open(tmp_path, DATABASES)
    catalog = Catalog(environment)
    catalog.prepare(None, alone=True)
    yield catalog
    environment.close()


def address(number: int) -> bytes:
    return SPACE.fingerprint + b"\0\0" + key(number).digest


def entry(number: int) -> Entry:
    return Entry(address(number), 4096, 1, 1)


def entries(catalog: Catalog) -> int:
    with catalog.environment.read() as txn:
        return int(txn.stat(catalog.environment.databases["tombs"])["entries"])


def test_what_is_buried_is_not_published_until_its_tombstone_has_ended(catalog: Catalog, clock: MovableClock) -> None:
    with catalog.write() as change:
        assert change.tombs.bury([address(1), address(2)], now_ns() + MINUTE) == 2
    with catalog.write() as change:
        assert change.publish([entry(1), entry(3)]) == [False, True]
        assert change.tombs.buried([address(1), address(3), address(9)]) == {address(1)}
        assert change.totals().blocks == 1
    clock.advance(61)
    with catalog.write() as change:
        assert change.publish([entry(1)]) == [True]
    assert entries(catalog) == 0


def test_tombstones_that_have_ended_are_collected_a_few_with_each_put(catalog: Catalog, clock: MovableClock) -> None:
    with catalog.write() as change:
        change.tombs.bury([address(number) for number in range(100)], now_ns() + MINUTE)
        change.tombs.bury([address(1000)], now_ns() + 9 * MINUTE)
    clock.advance(61)
    left = [entries(catalog)]
    for number in range(4):
        with catalog.write() as change:
            change.publish([entry(2000 + number)])
        left.append(entries(catalog))
    assert left == [202, 138, 74, 10, 2]


def test_they_are_bounded_and_the_receipt_of_it_is_how_many_were_laid(
    catalog: Catalog, clock: MovableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvstore.tombs, "MOST_TOMBSTONES", 10)
    with catalog.write() as change:
        assert change.tombs.bury([address(number) for number in range(8)], now_ns() + MINUTE) == 8
        assert change.tombs.bury([address(number) for number in range(6, 20)], now_ns() + 2 * MINUTE) == 4
        assert change.tombs.ended() == 0
    assert entries(catalog) == 20
    clock.advance(61)  # those that have ended make room
    with catalog.write() as change:
        assert change.tombs.bury([address(number) for number in range(30, 50)], now_ns() + MINUTE) == 6


def test_a_tombstone_of_a_clock_that_was_wrong_counts_for_nothing(catalog: Catalog) -> None:
    with catalog.write() as change:
        change.tombs.bury([address(1)], now_ns() + 400 * 86400 * 10**9)
        assert change.publish([entry(1)]) == [True]


def test_where_there_are_none_a_put_asks_once_and_looks_for_nothing(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[object] = []
    monkeypatch.setattr(kvstore.tombs, "now_ns", lambda: looked.append(0) or 0)
    with catalog.write() as change:
        change.publish([entry(number) for number in range(100)])
    with catalog.read() as snapshot:
        snapshot.tombs.buried([address(1)])
    assert looked == []


def test_what_is_remembered_is_bounded_too(monkeypatch: pytest.MonkeyPatch, clock: MovableClock) -> None:
    monkeypatch.setattr(kvstore.tombs, "MOST_TOMBSTONES", 3)
    known = Remembered[int]()
    assert known.add([1, 2, 2], now_ns() + MINUTE) == 2
    assert known.add([3, 4, 1], now_ns() + 2 * MINUTE) == 2
    assert [number in known for number in range(5)] == [False, True, True, True, False]
    clock.advance(61)
    assert [number in known for number in range(5)] == [False, True, False, True, False]
    assert known.add([5], now_ns()) == 0


class _Shelf:
    """Documents in a dictionary, and how often each was asked for."""

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()

    def names(self) -> Iterable[str]:
        self.asked["names"] += 1
        return [*self.texts, "somebody-elses"]

    def read(self, name: str) -> bytes | None:
        self.asked["read"] += 1
        return self.texts.get(name)

    def write(self, name: str, text: bytes) -> None:
        self.texts[name] = text

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            del self.texts[name]


def test_others_learn_of_tombstones_by_one_look_now_and_then(clock: MovableClock) -> None:
    shelf = _Shelf()
    one, other = Graveyard(shelf, 30), Graveyard(shelf, 30)
    assert other.refused(["a", "b"]) == set()
    one.bury(["a", "b"], now_ns() + 10 * MINUTE)
    assert one.refused(["a", "c"]) == {"a"}
    assert other.refused(["a"]) == set()
    clock.advance(30)
    assert (other.refused(["a", "c"]), other.known(["b"])) == ({"a"}, {"b"})
    asked = Counter(shelf.asked)
    for _ in range(100):
        other.refused(["a"])
    assert shelf.asked == asked
    clock.advance(31)
    other.refused(["a"])
    assert shelf.asked - asked == {"names": 1}  # what was read once is not read again
    clock.advance(600)
    assert other.refused(["a"]) == set()
    assert len(other.collect()) == 1
    assert shelf.texts == {}


def test_a_remote_tier_lists_once_where_nothing_was_purged(tmp_path: Path, clock: MovableClock) -> None:
    url = f"file://{tmp_path}/kv?remote=true"
    with kvstore.open_store(url) as store:
        store.put_many(SPACE, writes(range(2)))
        before = store.requests()["LIST"]  # type: ignore[attr-defined]
        for number in range(2, 8):
            store.put_many(SPACE, writes([number]))
            store.contains_many(SPACE, keys([number]))
        assert store.requests()["LIST"] == before  # type: ignore[attr-defined]
        clock.advance(31)
        store.put_many(SPACE, writes([20, 21]))
        store.put_many(SPACE, writes([22]))
        assert store.requests()["LIST"] == before + 1  # type: ignore[attr-defined]


def test_tombstones_of_a_remote_tier_are_left_over_once_they_have_ended(tmp_path: Path, clock: MovableClock) -> None:
    with kvstore.open_store(f"file://{tmp_path}/kv?remote=true") as store:
        store.put_many(SPACE, writes(range(2)))
        store.purge_many(SPACE, keys([1]))
        assert store.leftovers() == []
        assert len(list((tmp_path / "kv/.purged").iterdir())) == 1
        clock.advance(620)
        assert [left.place.startswith(".purged/") for left in store.leftovers()] == [True]
        store.leftovers(remove=True)
        assert list((tmp_path / "kv/.purged").iterdir()) == []
        assert get(store, [0, 1]) == [HIT, MISS]


@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_tombstones_of_a_local_tier_that_have_ended_are_left_over_too(
    kind: str, tmp_path: Path, clock: MovableClock
) -> None:
    with kvstore.open_store(f"{kind}://{tmp_path}/kv") as store:
        store.purge_many(SPACE, keys(range(600)))
        store.purge_many(SPACE, keys([1000]), refuse_s=3600)
        assert store.leftovers() == []
        clock.advance(620)
        assert store.leftovers()[0].place == "600 tombstones that have ended"
        store.leftovers(remove=True)
        assert store.leftovers() == []
        assert store.put_many(SPACE, writes([1, 1000])) == [STORED, REFUSED]


# What stands above stores


def test_an_engine_that_still_has_a_purged_block_does_not_bring_it_back(tmp_path: Path) -> None:
    url, names = f"file://{tmp_path}/kv", keys(range(4))
    _store(url, names)
    with kvstore.open_store(url) as store:
        assert store.purge_many(SPACE, names[:3]) == [True] * 3
    stats = _store(url, names)
    assert (stats.stores, stats.refused, stats.exists, stats.failed_stores) == (0, 3, 1, 0)
    with kvstore.open_store(url) as store:
        assert get(store, range(4))[:3] == [MISS] * 3


def _store(url: str, names: Sequence[BlockKey]) -> TierStats:
    """What an engine does with blocks that it has computed; and what its tier did then."""
    with TieringManager(SPACE, [url], primary_slots=8) as manager:
        for view in manager.prepare_store(names):
            assert view is not None
            view[:] = 7
        manager.complete_store(names)
        assert manager.drain(60)
        (stats,) = manager.stats().tiers
    return stats


def test_a_copy_into_a_tier_that_refuses_says_which_blocks(tmp_path: Path) -> None:
    with (
        kvstore.open_store(f"lmdb://{tmp_path}/from") as source,
        kvstore.open_store(f"file://{tmp_path}/to") as target,
    ):
        source.put_many(SPACE, writes(range(6)))
        target.purge_many(SPACE, keys([2, 3]))
        report = copy(source, target)
        assert report.fates == {Fate.COPIED: 4, Fate.REFUSED: 2}
        assert not report.ok
        assert {name for _, name in report.of(Fate.REFUSED)} == set(keys([2, 3]))


# Who is on the way while a purge comes


def test_a_file_that_was_written_before_the_purge_is_not_published_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/kv"
    with kvstore.open_store(url) as one, kvstore.open_store(url) as other:
        one.put_many(SPACE, writes([9]))

        def purging(step: str) -> None:
            if step == "written":
                monkeypatch.setattr(steps, "checkpoint", lambda _: None)
                other.purge_many(SPACE, keys([1, 2]))

        monkeypatch.setattr(steps, "checkpoint", purging)
        assert one.put_many(SPACE, writes([1, 2, 3])) == [REFUSED, REFUSED, STORED]
        assert get(one, [1, 2, 3, 9]) == [MISS, MISS, HIT, HIT]
        assert one.usage().reserved == 0
    assert found(tmp_path / "kv", [1, 2]) == set()


def test_an_entry_that_was_made_before_the_purge_is_not_published_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"lmdb://{tmp_path}/kv"
    with kvstore.open_store(url) as one, kvstore.open_store(url) as other:
        store = Puts._store

        def purging(self: Puts, *args: Any) -> Any:
            monkeypatch.setattr(Puts, "_store", store)
            other.purge_many(SPACE, keys([1, 2]))
            return store(self, *args)

        monkeypatch.setattr(Puts, "_store", purging)
        assert one.put_many(SPACE, writes([1, 2, 3])) == [REFUSED, REFUSED, STORED]
        assert get(one, [1, 2, 3]) == [MISS, MISS, HIT]
        one.finish_purge()
    assert found(tmp_path / "kv", [1, 2]) == set()
