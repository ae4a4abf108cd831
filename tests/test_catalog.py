"""The catalogue's books close, in every order of operations, over processes, and its bytes are the published format."""

from __future__ import annotations

import json
import struct
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from typing import TYPE_CHECKING

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore.catalog
from kvstore import BlockKey, BlockLayout, Namespace
from kvstore.catalog import (
    DATABASES,
    NO_CAPACITY,
    Catalog,
    Change,
    Entry,
    Snapshot,
    Victim,
    address_of,
    stored_capacity,
)
from kvstore.environment import Environment
from kvstore.errors import (
    CapacityMismatchError,
    InvalidBlockError,
    NewerFormatError,
    NotAStoreError,
    StoreClosedError,
)
from kvstore.marks import Mark
from kvstore.records import times_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Executor
    from pathlib import Path

SPACE = Namespace("model", "revision", (BlockLayout.opaque(4096), BlockLayout.opaque(4096)), block_tokens=16)
OTHER = replace(SPACE, revision="another")
LEASE = bytes(range(16))


@contextmanager
def catalog_at(directory: Path, capacity: int | None = None, *, alone: bool = True) -> Iterator[Catalog]:
    environment = Environment.open(directory, DATABASES)
    try:
        catalog = Catalog(environment)
        catalog.prepare(capacity, alone=alone)
        yield catalog
    finally:
        environment.close()


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with catalog_at(tmp_path, 1 << 20) as opened:
        yield opened


def entry(number: int, size: int = 4096, last_used: int | None = None, space: Namespace = SPACE) -> Entry:
    address = address_of(space, BlockKey(number.to_bytes(32, "big"), number % 2))
    return Entry(address, size, 1000 + number, 1000 + number if last_used is None else last_used)


def test_times_are_read_from_an_entrys_bytes_as_the_entry_has_them() -> None:
    some = replace(entry(7, last_used=123_456), generation=9, hits=3, position=4, parent=bytes(32))
    assert times_of(some.packed()) == (some.created, some.last_used)


def ages(snapshot: Snapshot) -> list[bytes]:
    return [victim.address for victim in snapshot.oldest()]


def check_books(snapshot: Snapshot) -> None:
    """Totals are the sums, and `age` mirrors `meta`."""
    entries = [found for space in (SPACE, OTHER) for found in snapshot.scan(space.fingerprint)]
    totals = snapshot.totals()
    assert (totals.blocks, totals.used) == (len(entries), sum(found.size for found in entries))
    assert totals.reserved == sum(intent.reserved for intent in snapshot.intents())
    ordered = sorted(entries, key=lambda found: (found.last_used, found.address))
    victims = sorted(snapshot.oldest(), key=lambda victim: (victim.last_used, victim.address))
    assert victims == [Victim(e.address, e.last_used, e.size, e.generation) for e in ordered]


def test_an_entry_is_found_as_it_was_published(catalog: Catalog) -> None:
    whole = replace(entry(1), generation=7, hits=3, position=70_000, parent=bytes(range(64)), flags=5)
    with catalog.write() as change:
        assert change.publish([whole, entry(2)]) == [True, True]
    with catalog.read() as snapshot:
        assert snapshot.find([whole.address, entry(3).address, entry(2).address]) == [whole, None, entry(2)]
        assert snapshot.contains([entry(3).address, whole.address]) == [False, True]
        check_books(snapshot)
    assert whole.key == BlockKey((1).to_bytes(32, "big"), 1)


def test_the_first_of_equal_addresses_wins_and_nothing_is_overwritten(catalog: Catalog) -> None:
    with catalog.write() as change:
        assert change.publish([entry(1), entry(1, size=8192)]) == [True, False]
    with catalog.write() as change:
        assert change.publish([entry(1, size=8192), entry(2)]) == [False, True]
    with catalog.read() as snapshot:
        assert snapshot.find([entry(1).address]) == [entry(1)]
        assert (snapshot.totals().blocks, snapshot.totals().used) == (2, 8192)


def test_the_front_of_age_is_the_least_recently_used(catalog: Catalog) -> None:
    with catalog.write() as change:
        change.publish([entry(1, last_used=300), entry(2, last_used=100), entry(3, last_used=200)])
    with catalog.read() as snapshot:
        assert ages(snapshot) == [entry(2).address, entry(3).address, entry(1).address]


def test_a_use_that_is_written_down_late_makes_no_block_older(catalog: Catalog) -> None:
    with catalog.write() as change:
        change.publish([entry(1, last_used=100), entry(2, last_used=200)])
        change.use([(entry(1).address, 300, 1)])
        change.use([(entry(1).address, 150, 1)])
        assert ages(change) == [entry(2).address, entry(1).address]
        check_books(change)
    with catalog.read() as snapshot:
        (found,) = snapshot.find([entry(1).address])
    assert found is not None
    assert (found.last_used, found.hits) == (300, 2)


def test_a_use_in_this_process_counts_before_it_is_settled_and_for_all_after(catalog: Catalog) -> None:
    with catalog.write() as change:
        change.publish([entry(1), entry(2), entry(3)])
    catalog.note([entry(1).address, entry(1).address])
    catalog.note([entry(2).address], hits=0)
    with catalog.read() as snapshot:
        assert ages(snapshot) == [entry(3).address, entry(1).address, entry(2).address]
    catalog.settle()
    with catalog.read() as snapshot:
        assert ages(snapshot) == [entry(3).address, entry(1).address, entry(2).address]
        one, two = (found for found in snapshot.find([entry(1).address, entry(2).address]) if found)
        assert (one.hits, two.hits) == (2, 0)
        assert one.last_used > 10**18
        check_books(snapshot)


def test_a_write_transaction_settles_a_few_notes_along_the_way(catalog: Catalog) -> None:
    with catalog.write() as change:
        change.publish([entry(number) for number in range(100)])
    catalog.note([entry(0).address, entry(99).address])
    with catalog.write() as change:
        change.publish([entry(200)])
    assert not catalog.noted(entry(0).address)
    with catalog.read() as snapshot:
        assert [found.hits for found in snapshot.find([entry(0).address, entry(99).address]) if found] == [1, 1]
        check_books(snapshot)


def test_notes_outlive_a_commit_that_fails(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    with catalog.write() as change:
        change.publish([entry(number) for number in range(40)])
    catalog.note([entry(0).address, entry(0).address, *(entry(number).address for number in range(1, 40))])
    used = catalog.noted(entry(0).address)
    with monkeypatch.context() as patch:
        patch.setattr(Change, "finish", no_page)
        with pytest.raises(lmdb.MapFullError):
            catalog.settle()
    assert catalog.noted(entry(0).address) == used
    catalog.note([entry(1).address])
    catalog.settle()
    with catalog.read() as snapshot:
        assert [found.hits for found in snapshot.find([entry(number).address for number in range(3)]) if found] == [
            *(2, 2, 1)
        ]
        check_books(snapshot)


def no_page(_: Change) -> None:
    raise lmdb.MapFullError("no page")


def test_notes_that_cannot_be_settled_are_bounded(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore.catalog, "MOST_NOTES", 10)
    addresses = [entry(number).address for number in range(30)]
    for address in addresses:
        catalog.note([address])
    assert [bool(catalog.noted(address)) for address in addresses] == [False] * 20 + [True] * 10


def test_a_use_changes_nothing_of_an_entry_but_when_and_how_often(catalog: Catalog) -> None:
    marks = (Mark("label", pinned=True, tenant="somebody"), Mark("other"))
    known = [
        replace(entry(1), hits=7, position=3, parent=b"p" * 32, flags=9),
        replace(entry(2), marks=marks, parent=b"q" * 32),
        replace(entry(3), hits=0xFFFFFFFE, marks=(Mark("label"),)),
    ]
    with catalog.write() as change:
        change.publish(known)
        change.use([(one.address, 5000, 2) for one in known] + [(entry(4).address, 5000, 1)])
    with catalog.read() as snapshot:
        assert snapshot.find([one.address for one in known]) == [
            replace(one, last_used=5000, hits=min(one.hits + 2, 0xFFFFFFFF)) for one in known
        ]
        assert sorted(ages(snapshot)) == sorted(one.address for one in known if not one.pinned)


def test_what_does_not_fit_its_record_is_the_callers_fault_and_no_damage(catalog: Catalog) -> None:
    with pytest.raises(InvalidBlockError, match="does not fit"), catalog.write() as change:
        change.publish([entry(1), replace(entry(2), last_used=-1)])
    assert not catalog.environment.damaged
    with catalog.read() as snapshot:
        assert ages(snapshot) == []
        check_books(snapshot)


def test_a_note_of_what_is_gone_is_dropped(catalog: Catalog) -> None:
    catalog.note([entry(1).address])
    catalog.settle()
    with catalog.read() as snapshot:
        check_books(snapshot)
        assert snapshot.totals().blocks == 0


def test_so_many_notes_call_for_settling(catalog: Catalog) -> None:
    assert not catalog.note([entry(1).address])
    assert catalog.note([entry(number).address for number in range(1000)])


def test_a_victim_that_was_used_since_it_was_chosen_stays(catalog: Catalog) -> None:
    with catalog.write() as change:
        change.publish([entry(1), entry(2), entry(3)])
    with catalog.read() as snapshot:
        victims = list(snapshot.oldest())
    with catalog.write() as change:
        change.use([(entry(1).address, 5000, 1)])
        change.discard([entry(2).address])
    with catalog.write() as change:
        assert [victim.address for victim in change.evict(victims)] == [entry(3).address]
    with catalog.read() as snapshot:
        check_books(snapshot)
        assert ages(snapshot) == [entry(1).address]


def test_a_discard_can_be_of_one_written_copy_only(catalog: Catalog) -> None:
    with catalog.write() as change:
        first = change.generations(2)
        assert change.generations(1) == first + 2
        change.publish([replace(entry(1), generation=first + 1)])
    with catalog.write() as change:
        assert change.discard([entry(1).address], first) == []
        assert len(change.discard([entry(1).address, entry(1).address], first + 1)) == 1
        check_books(change)


def test_intents_count_until_they_are_released(catalog: Catalog) -> None:
    with catalog.write() as change:
        one = change.reserve(LEASE, 1000, b"one")
        two = change.reserve(bytes(16), 500, b"two")
    with catalog.read() as snapshot:
        assert snapshot.intents() == [two, one]
        assert snapshot.intents(LEASE) == [one]
        assert snapshot.totals().reserved == 1500
    with catalog.write() as change:
        one = change.amend(one, 300, b"less")
        assert change.intents(LEASE) == [one]
        change.release(two)
        change.release(two)
        assert change.totals().reserved == 300
        check_books(change)


def test_room_is_the_cap_less_everything(catalog: Catalog) -> None:
    with catalog.write() as change:
        change.publish([entry(1, size=1000)])
        change.reserve(LEASE, 200, b"")
        change.set_overhead(30)
        assert change.totals().room == (1 << 20) - 1230
    with catalog.read() as snapshot:
        assert snapshot.totals().room == (1 << 20) - 1230


def test_a_change_that_raises_leaves_the_books_as_they_were(catalog: Catalog) -> None:
    with catalog.write() as change:
        change.publish([entry(1)])

    def half_a_change() -> None:
        with catalog.write() as change:
            change.publish([entry(2)])
            change.discard([entry(1).address])
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        half_a_change()
    with catalog.read() as snapshot:
        assert ages(snapshot) == [entry(1).address]
        check_books(snapshot)


def test_a_scan_is_of_one_namespace_and_goes_on_behind_an_address(catalog: Catalog) -> None:
    mine = sorted((entry(number) for number in range(5)), key=lambda found: found.address)
    with catalog.write() as change:
        change.publish([*mine, *(entry(number, space=OTHER) for number in range(3))])
    with catalog.read() as snapshot:
        assert list(snapshot.scan(SPACE.fingerprint)) == mine
        assert list(snapshot.scan(SPACE.fingerprint, mine[2].address)) == mine[3:]
        assert list(snapshot.scan(SPACE.fingerprint, mine[4].address)) == []
        assert len(list(snapshot.scan(OTHER.fingerprint))) == 3
        assert list(snapshot.scan(bytes(16))) == []


def test_namespaces_are_kept_and_an_unreadable_one_is_passed_over(catalog: Catalog) -> None:
    with catalog.write() as change:
        change.add_namespace(SPACE)
        change.add_namespace(SPACE)
        change.add_namespace(OTHER)
        change.txn.put(bytes(16), b"{", db=catalog.environment.databases["namespaces"])
    with catalog.read() as snapshot:
        assert set(snapshot.namespaces()) == {SPACE, OTHER}


def test_clearing_forgets_blocks_and_intents_and_no_counter(catalog: Catalog) -> None:
    with catalog.write() as change:
        change.add_namespace(SPACE)
        change.publish([entry(1)])
        intent = change.reserve(LEASE, 10, b"")
        generation = change.generations(1)
    with catalog.write() as change:
        change.clear()
        assert change.generations(1) > generation
        assert change.reserve(LEASE, 10, b"").number > intent.number
        change.publish([entry(2)])
    with catalog.read() as snapshot:
        check_books(snapshot)
        assert snapshot.totals().capacity == 1 << 20
        assert snapshot.namespaces() == [SPACE]


NUMBERS = st.integers(0, 7)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.lists(NUMBERS, max_size=4)),
        st.tuples(st.just("discard"), st.lists(NUMBERS, max_size=3)),
        st.tuples(st.just("note"), st.lists(NUMBERS, max_size=3)),
        st.tuples(st.just("evict"), st.lists(NUMBERS, min_size=1, max_size=1)),
        st.tuples(st.just("reserve"), st.lists(NUMBERS, min_size=1, max_size=1)),
        st.tuples(st.just("release"), st.lists(NUMBERS, min_size=1, max_size=1)),
        st.tuples(st.just("settle"), st.just([])),
    ),
    max_size=15,
)


@given(steps=STEPS)
def test_the_books_close_after_any_operations(
    steps: list[tuple[str, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    there: list[bytes] = []  # the model
    with catalog_at(tmp_path_factory.mktemp("catalog")) as catalog:
        for clock, (name, numbers) in enumerate(steps):
            if name == "note":
                catalog.note([entry(number).address for number in numbers])
            elif name == "settle":
                catalog.settle()
            else:
                apply(catalog, name, numbers, clock, there)
            with catalog.read() as snapshot:
                check_books(snapshot)
                assert {victim.address for victim in snapshot.oldest()} == set(there)


def apply(catalog: Catalog, name: str, numbers: list[int], clock: int, there: list[bytes]) -> None:
    with catalog.read() as snapshot:
        victims = list(snapshot.oldest())[: numbers[0]] if name == "evict" else []
    with catalog.write() as change:
        if name == "publish":
            entries = [entry(number, last_used=clock + 1) for number in numbers]
            fresh = [address for address in dict.fromkeys(e.address for e in entries) if address not in there]
            assert sum(change.publish(entries)) == len(fresh)
            there += fresh
        elif name == "discard":
            for gone in change.discard([entry(number).address for number in numbers]):
                there.remove(gone.address)
        elif name == "evict":
            for victim in change.evict(victims):
                there.remove(victim.address)
        elif name == "reserve":
            change.reserve(LEASE, numbers[0], b"")
        else:
            for intent in change.intents()[: numbers[0]]:
                change.release(intent)


def publish_and_evict(directory: Path, seed: int) -> int:
    with catalog_at(directory, alone=False) as catalog:
        evicted = 0
        for step in range(60):
            with catalog.read() as snapshot:
                victims = list(snapshot.oldest())[:3]
            catalog.note([victim.address for victim in victims[2:]])
            with catalog.write() as change:
                change.publish([entry((seed * 7 + step * 3 + number) % 300) for number in range(3)])
                intent = change.reserve(LEASE, step, b"")
                evicted += len(change.evict(victims[: step % 3]))
                if step % 2:
                    change.release(intent)
        catalog.settle()
    return evicted


def test_the_books_close_over_processes(tmp_path: Path) -> None:
    with catalog_at(tmp_path) as catalog, ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        evicted = list(pool.map(publish_and_evict, [tmp_path] * 4, range(4)))
        assert sum(evicted) > 50
        with catalog.read() as snapshot:
            check_books(snapshot)
            assert len(snapshot.intents()) == 4 * 30
            assert len({intent.number for intent in snapshot.intents()}) == 120


def test_the_first_user_decides_on_the_cap_and_others_accept_it_or_are_refused(tmp_path: Path) -> None:
    assert stored_capacity(tmp_path) is None
    with catalog_at(tmp_path, 1 << 20) as catalog:
        assert catalog.prepare(None, alone=False) == 1 << 20
        assert catalog.prepare(1 << 20, alone=False) == 1 << 20
        with pytest.raises(CapacityMismatchError, match=r"1048576.*2097152.*close the tier"):
            catalog.prepare(2 << 20, alone=False)
    assert stored_capacity(tmp_path) == 1 << 20
    with catalog_at(tmp_path) as catalog:
        assert catalog.prepare(None, alone=True) == 1 << 20
        assert catalog.prepare(2 << 20, alone=True) == 2 << 20


def test_a_tier_without_a_cap_says_so(tmp_path: Path) -> None:
    with catalog_at(tmp_path) as catalog:
        with pytest.raises(CapacityMismatchError, match="none"):
            catalog.prepare(1 << 20, alone=False)
        with catalog.read() as snapshot:
            assert snapshot.totals().room is None
    assert stored_capacity(tmp_path) == NO_CAPACITY


def test_a_newer_format_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with catalog_at(tmp_path) as catalog, catalog.environment.write() as txn:
        txn.put(b"format", struct.pack("<I", 2), db=catalog.environment.databases["info"])
    before = (tmp_path / "data.mdb").read_bytes()
    with pytest.raises(NewerFormatError, match=r"format 2.*upgrade"):
        stored_capacity(tmp_path)
    with pytest.raises(NewerFormatError), catalog_at(tmp_path):
        pass
    assert (tmp_path / "data.mdb").read_bytes()[8192:] == before[8192:]


def make_foreign(directory: Path) -> None:
    with lmdb.open(str(directory), max_dbs=2) as environment, environment.begin(write=True) as txn:
        txn.put(b"mine", b"not yours")


def test_an_environment_of_something_else_is_no_catalogue(tmp_path: Path, stranger: Executor) -> None:
    stranger.submit(make_foreign, tmp_path).result()
    with pytest.raises(NotAStoreError, match="did not write"):
        stored_capacity(tmp_path)


def raw_tables(directory: Path) -> dict[str, dict[bytes, bytes]]:
    with lmdb.open(str(directory), max_dbs=8, readonly=True) as environment:
        tables: dict[str, dict[bytes, bytes]] = {}
        for name in DATABASES:
            table = environment.open_db(name.encode(), create=False)
            with environment.begin(db=table) as txn:
                tables[name] = dict(txn.cursor())
    return tables


def test_the_bytes_are_those_of_format_1(tmp_path: Path, stranger: Executor) -> None:
    """Written out by hand: whoever changes a byte has to change the version."""
    parent = bytes(range(32))
    with catalog_at(tmp_path, 77_000) as catalog, catalog.write() as change:
        change.add_namespace(SPACE)
        change.generations(4)
        change.publish([replace(entry(5), size=69632, generation=2, hits=3, position=9, parent=parent, flags=1)])
        change.reserve(LEASE, 300, b"payload")
        change.set_overhead(11)
    tables = stranger.submit(raw_tables, tmp_path).result()
    address = SPACE.fingerprint + b"\0\1" + (5).to_bytes(32, "big")
    meta = "0100 2000 03000000 0010010000000000 0200000000000000 ed03000000000000 ed03000000000000 0900000000000000"
    assert tables["meta"] == {address: bytes.fromhex(meta) + parent}
    age = bytes.fromhex("00000000000003ed")
    assert tables["age"] == {age + address: bytes.fromhex("0010010000000000 0200000000000000")}
    assert tables["intents"] == {LEASE + bytes(8): bytes.fromhex("2c01000000000000") + b"payload"}
    totals = struct.pack("<8Q", 77_000, 1, 69632, 300, 11, 5, 1, 0)
    assert tables["info"] == {b"format": b"\1\0\0\0", b"totals": totals}
    (manifest,) = tables["namespaces"].values()
    assert Namespace.from_manifest(json.loads(manifest)) == SPACE
    assert list(tables["namespaces"]) == [SPACE.fingerprint]


def test_a_closed_environment_says_so(tmp_path: Path) -> None:
    with catalog_at(tmp_path) as catalog:
        pass
    with pytest.raises(StoreClosedError), catalog.read():
        pass
