"""What the catalogue keeps of blocks, uses, intents and namespaces, one transaction at a time."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import lmdb
import pytest
from catalog_helpers import LEASE, OTHER, SPACE, ages, catalog_at, check_books, entry

import kvstore.catalog
from kvstore import BlockKey
from kvstore.catalog import Catalog, Change
from kvstore.errors import InvalidBlockError
from kvstore.marks import Mark
from kvstore.records import times_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with catalog_at(tmp_path, 1 << 20) as opened:
        yield opened


def test_times_are_read_from_an_entrys_bytes_as_the_entry_has_them() -> None:
    some = replace(entry(7, last_used=123_456), generation=9, hits=3, position=4, parent=bytes(32))
    assert times_of(some.packed()) == (some.created, some.last_used)


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


def test_where_many_notes_may_wait_passing_by_writes_down_one_transactions_worth(catalog: Catalog) -> None:
    addresses = [entry(number).address for number in range(1000)]
    with catalog.write() as change:
        change.publish([entry(number) for number in range(1000)])
    catalog.settle_due = 800
    assert catalog.note(addresses)
    catalog.settle_in_passing()
    assert sum(catalog.noted(address) > 0 for address in addresses) == 1000 - 256
    assert not catalog.note(addresses[256:])
    catalog.settle_in_passing()
    assert sum(catalog.noted(address) > 0 for address in addresses) == 1000 - 2 * 256
    catalog.settle_due = 256
    assert catalog.note(addresses)
    catalog.settle_in_passing()
    assert sum(catalog.noted(address) > 0 for address in addresses) < 256
    catalog.settle()
    with catalog.read() as snapshot:
        assert sum(one.hits for one in snapshot.find(addresses) if one) == 1000 + 744 + 1000


def test_while_others_write_one_in_many_tries_to_settle_in_passing(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvstore.catalog, "SETTLE_AGAIN_S", 0.5)
    addresses = [entry(number).address for number in range(300)]
    with catalog.write() as change:
        change.publish([entry(number) for number in range(300)])
    assert catalog.note(addresses)
    tries: list[float] = []
    write = Catalog.write

    def counted(self: Catalog, patience_s: float, **named: int) -> AbstractContextManager[Change]:
        tries.append(patience_s)
        return write(self, patience_s, **named)

    monkeypatch.setattr(Catalog, "write", counted)
    with held(catalog), ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(catalog.settle_in_passing) for _ in range(20)]:
            done.result()
        catalog.settle_in_passing()
        assert len(tries) == 1
    assert catalog.noted(addresses[0])
    time.sleep(0.5)
    catalog.settle_in_passing()
    assert not catalog.noted(addresses[0])


@contextmanager
def held(catalog: Catalog) -> Iterator[None]:
    """The write lock is another thread's meanwhile."""
    taken, ended = threading.Event(), threading.Event()

    def hold() -> None:
        with catalog.environment.write():
            taken.set()
            ended.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait(10)
    try:
        yield
    finally:
        ended.set()
        holder.join()


class Perishing:
    """A transaction whose views are good until something is written, as LMDB has it; then they are zeros here."""

    def __init__(self, txn: lmdb.Transaction[memoryview]) -> None:
        self._txn = txn
        self._lent: list[bytearray] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._txn, name)

    def cursor(self, db: lmdb._Database) -> Perishing:
        self._cursor = self._txn.cursor(db)
        return self

    def getmulti(self, keys: list[bytes]) -> list[tuple[memoryview, memoryview]]:
        found = [(bytearray(key), bytearray(value)) for key, value in self._cursor.getmulti(keys)]
        self._lent += itertools.chain.from_iterable(found)
        return [(memoryview(key), memoryview(value)) for key, value in found]

    def putmulti(self, items: list[tuple[bytes, bytes]]) -> None:
        self._perish()
        self._cursor.putmulti(items)

    def delete(self, key: bytes, db: lmdb._Database) -> bool:
        self._perish()
        return self._txn.delete(key, db=db)

    def _perish(self) -> None:
        for one in self._lent:
            one[:] = bytes(len(one))


def test_uses_are_written_without_a_look_at_what_a_write_has_made_invalid(catalog: Catalog) -> None:
    with catalog.write() as change:
        change.publish([entry(number) for number in range(20)])
    with catalog.write() as change:
        change.txn = Perishing(change.txn)  # type: ignore[assignment]
        change.use([(entry(number).address, 5000 + number, 1) for number in range(20)])
    with catalog.read() as snapshot:
        check_books(snapshot)
        found = snapshot.find([entry(number).address for number in range(20)])
    assert [one.hits for one in found if one] == [1] * 20


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
