"""What is said of blocks, below the stores: the values, the catalogue's books, and what a tier does with it.

What every store must do with marks is in `kvstore.testing.marks`.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import BlockKey, BlockLayout, BlockRead, Mark, MarkOutcome, Namespace, open_store
from kvstore.catalog import DATABASES, MARKED_AT_ONCE, Catalog, Entry, Snapshot, address_of
from kvstore.environment import Environment
from kvstore.errors import StoreFullError
from kvstore.marks import MOST_TEXT_BYTES
from kvstore.records import mark_prefix
from kvstore.testing.faults import FaultyStore, Hanging, failing
from kvstore.testing.supply import MIB, SPACE, held, key, keys, write, writes
from kvstore.tiering import SecondaryTier
from kvstore.tiering.hints import MAX_HINTS
from kvstore.tiering.primary import Slot
from kvstore.types import GetOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

MARKED, UNPINNED, MISSING = MarkOutcome.MARKED, MarkOutcome.UNPINNED, MarkOutcome.MISSING

ONE = Namespace("model", "revision", (BlockLayout.opaque(4096),), block_tokens=16)
PIN = Mark("a", pinned=True)


# Values


@pytest.mark.parametrize("text", ["a\nb", "\0", "a\x1b[2J", "\ud800", "\u2028", "x" * (MOST_TEXT_BYTES + 1), "ä" * 65])
def test_a_text_that_a_terminal_or_an_index_could_not_take_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="label"):
        Mark(text)
    with pytest.raises(ValueError, match="tenant"):
        Mark(tenant=text)


def test_a_text_may_be_anything_that_can_be_read() -> None:
    assert Mark("Preise 2026/ä 漢字", tenant="a" * MOST_TEXT_BYTES).label == "Preise 2026/ä 漢字"


# The catalogue's books


@contextmanager
def catalog_at(directory: Path, capacity: int | None = None) -> Iterator[Catalog]:
    environment = Environment.open(directory, DATABASES)
    try:
        catalog = Catalog(environment)
        catalog.prepare(capacity, alone=True)
        yield catalog
    finally:
        environment.close()


def entry(number: int, last_used: int | None = None) -> Entry:
    address = address_of(ONE, BlockKey(number.to_bytes(32, "big")))
    return Entry(address, 4096 * (1 + number % 3), 1000 + number, last_used or 1000 + number, generation=number)


def addresses(numbers: Sequence[int]) -> list[bytes]:
    return [entry(number).address for number in numbers]


def check_books(snapshot: Snapshot) -> None:
    """Totals are sums, `age` has what is not pinned, `marks` has each label and tenant, and nothing besides."""
    entries = list(snapshot.scan(ONE.fingerprint))
    totals = snapshot.totals()
    assert (totals.blocks, totals.used) == (len(entries), sum(one.size for one in entries))
    assert totals.pinned == sum(one.size for one in entries if one.pinned)
    ages = sorted((victim.last_used, victim.address, victim.size) for victim in snapshot.oldest())
    assert ages == sorted((one.last_used, one.address, one.size) for one in entries if not one.pinned)
    labels = {mark_prefix(label=mark.label) + one.address for one in entries for mark in one.marks if mark.label}
    tenants = {mark_prefix(tenant=mark.tenant) + one.address for one in entries for mark in one.marks if mark.tenant}
    index = [
        bytes(name)
        for name in snapshot.txn.cursor(snapshot._catalog.environment.databases["marks"]).iternext(values=False)
    ]
    assert index == sorted(labels | tenants)


NUMBERS = st.lists(st.integers(0, 7), max_size=4)
MARKS = st.builds(Mark, st.sampled_from(["", "a", "ab"]), st.booleans(), st.sampled_from(["", "a", "t"]))
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["publish", "discard", "evict", "use"]), NUMBERS),
        st.tuples(st.sampled_from(["mark", "unmark"]), NUMBERS, MARKS),
    ),
    max_size=20,
)


@given(changes=CHANGES, capacity=st.sampled_from([None, 65536]))
def test_the_books_close_whatever_is_done(
    tmp_path_factory: pytest.TempPathFactory, changes: list, capacity: int
) -> None:
    with catalog_at(tmp_path_factory.mktemp("books"), capacity) as catalog:
        for clock, (verb, numbers, *mark) in enumerate(changes):
            with catalog.write() as change:
                pinned = {one.address for one in change.scan(ONE.fingerprint) if one.pinned}
                match verb:
                    case "publish":
                        change.publish([entry(number) for number in numbers])
                    case "discard":
                        change.discard(addresses(numbers))
                    case "evict":
                        gone = change.evict(list(change.oldest())[: len(numbers)])
                        assert not pinned & {victim.address for victim in gone}
                    case "use":
                        change.use([(address, 5000 + clock, 1) for address in addresses(numbers)])
                    case "mark":
                        said = change.mark(addresses(numbers), mark[0])
                        assert said == [
                            MISSING if one is None else MARKED if one.pinned or not mark[0].pinned else UNPINNED
                            for one in change.find(addresses(numbers))
                        ]
                    case _:
                        change.unmark(addresses(numbers), mark[0])
                check_books(change)
                assert change.totals().pinned <= (capacity or 1 << 60) // 2
        with catalog.read() as snapshot:
            check_books(snapshot)


def test_a_block_that_is_pinned_after_it_was_chosen_is_not_evicted(tmp_path: Path) -> None:
    with catalog_at(tmp_path, 1 << 20) as catalog:
        with catalog.write() as change:
            change.publish([entry(1), entry(2)])
        with catalog.read() as snapshot:
            victims = list(snapshot.oldest())
        assert catalog.mark(addresses([1]), PIN) == [MARKED]
        with catalog.write() as change:
            assert [victim.address for victim in change.evict(victims)] == addresses([2])
            check_books(change)


def test_without_its_last_pin_a_block_is_as_young_as_its_last_use(tmp_path: Path) -> None:
    with catalog_at(tmp_path, 1 << 20) as catalog:
        with catalog.write() as change:
            change.publish([entry(number) for number in (1, 2, 3)])
            change.mark(addresses([1]), PIN)
            change.use([(entry(1).address, 1003, 1)])
            change.use([(entry(3).address, 1009, 1)])
        catalog.unmark(addresses([1]), PIN)
        with catalog.read() as snapshot:
            assert [victim.address for victim in snapshot.oldest()] == addresses([2, 1, 3])


def test_what_has_been_said_before_waits_for_no_writer(tmp_path: Path) -> None:
    """Every request of a hot prefix says the same; the write lock is for those who have something new."""
    with catalog_at(tmp_path, 6 * 4096) as catalog, ThreadPoolExecutor(1) as pool:
        with catalog.write() as change:
            change.publish([entry(3), entry(6), entry(9), entry(12)])
        first = catalog.mark(addresses([3, 6, 9, 12, 1]), PIN)
        assert first == [MARKED, MARKED, MARKED, UNPINNED, MISSING]
        with catalog.write():
            again = pool.submit(catalog.mark, addresses([3, 6, 9, 12, 1]), PIN)
            assert again.result(timeout=60) == first


@pytest.mark.parametrize("way", ["evict", "discard", "unmark", "clear"])
def test_what_goes_leaves_nothing_in_the_index(way: str, tmp_path: Path) -> None:
    with catalog_at(tmp_path, 1 << 20) as catalog:
        with catalog.write() as change:
            change.publish([entry(1), entry(2)])
            change.mark(addresses([1, 2]), Mark("a", tenant="t"))
        with catalog.write() as change:
            match way:
                case "evict":
                    change.evict(list(change.oldest())[:1])
                case "discard":
                    change.discard(addresses([1]))
                case "unmark":
                    change.unmark(addresses([1]), Mark())
                case _:
                    change.clear()
            check_books(change)


def test_a_block_that_is_named_twice_is_pinned_once(tmp_path: Path) -> None:
    with catalog_at(tmp_path, 2 * 4096) as catalog:
        with catalog.write() as change:
            change.publish([entry(3), entry(6)])
        assert catalog.mark(addresses([3, 3, 6]), PIN) == [MARKED, MARKED, UNPINNED]
        with catalog.read() as snapshot:
            check_books(snapshot)


def test_more_blocks_than_one_transaction_takes_are_marked_and_pinned_within_the_bound(tmp_path: Path) -> None:
    count = MARKED_AT_ONCE * 2 + 9
    numbers = [3 * number for number in range(count)]
    with catalog_at(tmp_path, 2 * 4096 * (count - 5)) as catalog:
        with catalog.write() as change:
            change.publish([entry(number) for number in numbers])
        assert catalog.mark(addresses(numbers), PIN) == [MARKED] * (count - 5) + [UNPINNED] * 5
        assert catalog.unmark(addresses(numbers), Mark("a")) == [True] * count
        with catalog.read() as snapshot:
            check_books(snapshot)


def test_the_bytes_of_a_marked_entry_are_those_of_the_formats_page(tmp_path: Path) -> None:
    with catalog_at(tmp_path) as catalog:
        with catalog.write() as change:
            change.publish([replace(entry(1), parent=b"p" * 32)])
            change.mark(addresses([1]), Mark("ä", tenant="acme"))
            change.mark(addresses([1]), Mark("b", pinned=True))
        with catalog.environment.read() as txn:
            (value,) = (bytes(value) for _, value in txn.cursor(catalog.environment.databases["meta"]))
            index = [(bytes(name), bytes(value)) for name, value in txn.cursor(catalog.environment.databases["marks"])]
            ages = list(txn.cursor(catalog.environment.databases["age"]))
            totals = bytes(txn.get(b"totals", db=catalog.environment.databases["info"]))
    marks = bytes([1, 1, 0]) + b"b" + bytes([0, 2, 4]) + "ä".encode() + b"acme"
    assert value[48:] == b"p" * 32 + marks
    address = entry(1).address
    assert index == [(b"Lb\0" + address, b""), ("Lä".encode() + b"\0" + address, b""), (b"Tacme\0" + address, b"")]
    assert ages == []
    assert totals[56:] == (8192).to_bytes(8, "little")


# Local tiers


LOCAL = pytest.mark.parametrize("scheme", ["file", "lmdb"])


@LOCAL
def test_a_capacity_that_leaves_no_room_beside_what_is_pinned_is_refused(scheme: str, tmp_path: Path) -> None:
    url = f"{scheme}://{tmp_path}/kv"
    with open_store(url, capacity=16 * MIB) as store:
        store.put_many(SPACE, writes(range(60)))
        assert set(store.mark_many(SPACE, keys(range(60)), PIN)) == {MARKED}
        pinned = store.usage().pinned
    with pytest.raises(StoreFullError, match=f"{pinned} bytes are pinned .* give at least {2 * pinned}"):
        open_store(url, capacity=6 * MIB)
    with open_store(url, capacity=2 * pinned) as store:
        assert held(store) == set(keys(range(60)))
        store.unmark_many(SPACE, keys(range(60)), PIN)
    with open_store(url, capacity=6 * MIB) as store:
        assert 20 < store.usage().blocks <= 60


def damage_one(url: str, root: Path, number: int) -> None:
    """Flip the block's bytes where they stand."""
    content = bytes(write(number).data)
    for path in root.rglob("*"):
        if path.is_file() and content in (data := path.read_bytes()):
            path.write_bytes(data.replace(content, bytes(len(content))))
            return
    raise AssertionError(f"block {number} is nowhere in {url}")


@LOCAL
def test_a_damaged_block_goes_pinned_or_not_and_its_marks_with_it(scheme: str, tmp_path: Path) -> None:
    url, root = f"{scheme}://{tmp_path}/kv", tmp_path / "kv"
    with open_store(url) as store:
        store.put_many(SPACE, writes([1, 2]))
        store.mark_many(SPACE, keys([1, 2]), PIN)
    damage_one(url, root, 1)
    with open_store(url) as store:
        into = bytearray(SPACE.block_bytes())
        assert store.get_many_into(SPACE, [BlockRead(key(1), into)]) == [GetOutcome.CORRUPT]
        assert [info.key for info in store.scan_marked(SPACE, Mark("a"))] == [key(2)]
        assert store.usage().pinned == store.usage().used


def test_a_file_tier_whose_catalogue_is_made_anew_keeps_its_marks(tmp_path: Path) -> None:
    """After a power loss the tree is scanned; what was said of blocks stands in the old catalogue alone."""
    url = f"file://{tmp_path}/kv"
    with open_store(url, capacity=16 * MIB) as store:
        store.put_many(SPACE, writes([1, 2, 3]))
        store.mark_many(SPACE, keys([1, 2]), Mark("a", pinned=True, tenant="t"))
        store.delete_many(SPACE, keys([2]))
        store._tier.presence.distrust()  # type: ignore[attr-defined]
    with open_store(url) as store:
        assert {info.key: info.marks for info in store.scan(SPACE)} == {
            key(1): (Mark("a", pinned=True, tenant="t"),),
            key(3): (),
        }
        assert store.usage().pinned == next(store.scan_marked(SPACE, PIN)).stored_bytes


# A tier


@pytest.fixture(params=["local", "can hang"])
def tier(request: pytest.FixtureRequest) -> Iterator[tuple[SecondaryTier, FaultyStore]]:
    """What calls of a store that can hang carry goes through staging memory."""
    inner = open_store("memory://marks", capacity=4 * SPACE.block_bytes())
    with FaultyStore(inner, can_hang=request.param == "can hang") as store:
        secondary = SecondaryTier(store, SPACE, threads=2)
        yield secondary, store
        secondary.cancel()
        assert secondary.close(5)


def until(tier: SecondaryTier, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        tier.submit()
        tier.poll()
        time.sleep(0.001)


def test_a_tier_marks_in_the_background_and_counts(tier: tuple[SecondaryTier, FaultyStore]) -> None:
    secondary, store = tier
    store.put_many(SPACE, writes(range(4)))
    secondary.mark(keys(range(5)), PIN)
    secondary.mark(keys([3]), Mark(tenant="t"))
    assert not secondary.idle
    until(secondary, lambda: secondary.idle)
    marks = {info.key: info.marks for info in store.scan(SPACE)}
    assert marks == {key(0): (PIN,), key(1): (PIN,), key(2): (Mark("a"),), key(3): (Mark(tenant="t"), Mark("a"))}
    stats = secondary.stats()
    assert (stats.marked, stats.pins_refused) == (5, 2)


def test_a_block_that_is_stored_says_what_its_slot_says(tier: tuple[SecondaryTier, FaultyStore]) -> None:
    secondary, store = tier
    store.put_many(SPACE, [write(0)])
    pool = np.zeros((3, SPACE.block_bytes()), np.uint8)
    for number, mark in enumerate([PIN, Mark("b"), None]):
        pool[number] = np.frombuffer(write(number).data, np.uint8)
        assert secondary.store(Slot(number, key(number), pool[number], mark=mark))
    until(secondary, lambda: secondary.idle)
    assert {info.key: info.marks for info in store.scan(SPACE)} == {key(0): (PIN,), key(1): (Mark("b"),), key(2): ()}


def test_a_later_use_is_younger_whatever_a_busy_tier_makes_of_them(tier: tuple[SecondaryTier, FaultyStore]) -> None:
    """Two requests that end while the tier is busy: the second one's prefix is the younger, its front the youngest."""
    secondary, store = tier
    store.put_many(SPACE, writes(range(4)))
    store.plan["touch"] = hanging = Hanging()
    secondary.touch(keys([9]))
    until(secondary, lambda: hanging.waiting == ["touch"])
    secondary.touch(keys([0, 1, 2, 3]))
    secondary.touch(keys([1, 0]))
    hanging.release()
    until(secondary, lambda: secondary.idle)
    assert store.calls[-1] == ("touch", keys([1, 0, 2, 3]))


def test_of_uses_that_a_busy_tier_cannot_take_the_oldest_are_dropped(tier: tuple[SecondaryTier, FaultyStore]) -> None:
    secondary, store = tier
    store.plan["touch"] = hanging = Hanging()
    secondary.touch(keys([9]))
    until(secondary, lambda: hanging.waiting == ["touch"])
    secondary.touch(keys([1]))
    secondary.touch([key(7)] * (MAX_HINTS - 1))
    secondary.touch(keys([2]))
    hanging.release()
    until(secondary, lambda: secondary.idle)
    assert store.calls[-1] == ("touch", keys([2, 7]))


def test_a_store_that_hangs_or_fails_costs_marks_and_nothing_else(tier: tuple[SecondaryTier, FaultyStore]) -> None:
    secondary, store = tier
    store.put_many(SPACE, writes([1]))
    store.plan["mark"] = failing()
    secondary.mark(keys([1]), PIN)
    until(secondary, lambda: secondary.stats().failed_calls == 1)
    store.plan["mark"] = hanging = Hanging()
    secondary.mark(keys([1]), PIN)
    until(secondary, lambda: hanging.waiting == ["mark"])
    for number in range(40):
        secondary.mark(keys(range(2000 * number, 2000 * number + 2000)), Mark("b"))
        secondary.submit()
    assert secondary.stats().marks_dropped == 1 + 8 * 2000  # what failed, and the first of those that waited
    hanging.release()
    until(secondary, lambda: secondary.idle)
    assert next(store.scan(SPACE)).marks == (PIN,)


def test_what_a_tier_that_closes_did_not_come_to_say_is_counted(tier: tuple[SecondaryTier, FaultyStore]) -> None:
    secondary, store = tier
    store.plan["touch"] = hanging = Hanging()
    secondary.touch(keys([1]))
    until(secondary, lambda: hanging.waiting == ["touch"])  # on the only thread that takes hints
    secondary.mark(keys([1, 2, 3]), PIN)
    secondary.submit()
    secondary.mark(keys([4, 5]), PIN)
    secondary.cancel()
    assert secondary.stats().marks_dropped == 5
    hanging.release()
