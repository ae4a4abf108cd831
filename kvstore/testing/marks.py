"""The contract, part six: what is said of blocks stays with them, and a pinned block is not evicted."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from kvstore.marks import MOST_MARKS, PINNABLE, Mark, MarkOutcome
from kvstore.registry import open_store
from kvstore.testing.elsewhere import in_another_process, mark_elsewhere, marks_elsewhere
from kvstore.testing.facts import BIG, CAPACITY, HIT
from kvstore.testing.hooks import StoreHooks
from kvstore.testing.supply import SPACE, get, held, key, keys, write, writes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace

MARKED, UNPINNED, MISSING, FAILED = (
    MarkOutcome.MARKED,
    MarkOutcome.UNPINNED,
    MarkOutcome.MISSING,
    MarkOutcome.FAILED,
)


def marks(store: BlockStore, number: int, space: Namespace = SPACE) -> tuple[Mark, ...]:
    """Of one block, as a scan tells them."""
    return next(info.marks for info in store.scan(space) if info.key == key(number))


def pinned(store: BlockStore, space: Namespace = SPACE) -> set[bytes]:
    """The digests of the pinned blocks."""
    return {info.key.digest for info in store.scan(space) if info.pinned}


def digests(numbers: Iterable[int]) -> set[bytes]:
    """Of these blocks' keys."""
    return {name.digest for name in keys(numbers)}


def found(store: BlockStore, mark: Mark, space: Namespace = SPACE) -> set[bytes]:
    """The digests of the blocks that `mark` finds, each once."""
    listed = [info.key.digest for info in store.scan_marked(space, mark)]
    assert len(listed) == len(set(listed))
    return set(listed)


class MarkTests(StoreHooks):
    """Labels, pins, tenants."""

    @pytest.fixture
    def marking_url(self, url: str) -> str:
        """The URL, where the store keeps marks."""
        with open_store(url) as opened:
            if not opened.capabilities.marks:
                pytest.skip("keeps no marks, as its capabilities say")
        return url

    @pytest.fixture
    def marking(self, marking_url: str, store: BlockStore) -> BlockStore:
        """An open, empty store that keeps marks."""
        del marking_url
        return store

    def test_a_store_that_keeps_no_marks_says_so_of_each_block(self, store: BlockStore) -> None:
        store.put_many(SPACE, [write(1)])
        said = store.mark_many(SPACE, keys([1, 2]), Mark("a"))
        kept = store.capabilities.marks
        assert said == ([MARKED, MISSING] if kept else [MISSING, MISSING])
        assert found(store, Mark("a")) == (digests([1]) if kept else set())

    def test_what_is_said_of_a_block_stands_beside_what_was_said_before(self, marking: BlockStore) -> None:
        marking.put_many(SPACE, writes(range(3)))
        assert marking.mark_many(SPACE, keys([0, 9, 1]), Mark("handbook", tenant="acme")) == [MARKED, MISSING, MARKED]
        assert marking.mark_many(SPACE, keys([1]), Mark("prices", pinned=True)) == [MARKED]
        assert marking.mark_many(SPACE, keys([1]), Mark(tenant="zeta")) == [MARKED]
        info = {one.key: one for one in marking.scan(SPACE)}[key(1)]
        assert (info.labels, info.tenants, info.pinned) == (("handbook", "prices"), ("acme", "zeta"), True)
        assert marks(marking, 0) == (Mark("handbook", tenant="acme"),)
        assert marks(marking, 2) == ()
        assert pinned(marking) == digests([1])

    def test_who_says_a_thing_twice_or_without_its_pin_changes_nothing(self, marking: BlockStore) -> None:
        marking.put_many(SPACE, [write(1)])
        for _ in range(2):
            assert marking.mark_many(SPACE, keys([1, 1]), Mark("a", pinned=True, tenant="t")) == [MARKED, MARKED]
        assert marking.mark_many(SPACE, keys([1]), Mark("a", tenant="t")) == [MARKED]
        assert marking.mark_many(SPACE, keys([1]), Mark()) == [MARKED]
        assert marks(marking, 1) == (Mark("a", pinned=True, tenant="t"),)
        assert marking.usage().pinned == next(marking.scan(SPACE)).stored_bytes

    def test_a_pin_belongs_to_its_label(self, marking: BlockStore) -> None:
        marking.put_many(SPACE, writes([1, 2]))
        marking.mark_many(SPACE, keys([1, 2]), Mark("a", pinned=True))
        marking.mark_many(SPACE, keys([1]), Mark("b", pinned=True))
        assert marking.unmark_many(SPACE, keys([1, 2, 3]), Mark("a", pinned=True)) == [True, True, False]
        assert pinned(marking) == digests([1])
        assert found(marking, Mark("a")) == digests([1, 2])
        assert marking.unmark_many(SPACE, keys([1, 2]), Mark("b")) == [True, False]
        assert pinned(marking) == set()
        assert found(marking, Mark("b")) == set()
        assert marking.usage().pinned == 0

    def test_marks_are_taken_back_by_label_by_tenant_or_all(self, marking: BlockStore) -> None:
        said = [Mark("a", tenant="t"), Mark("a", tenant="u"), Mark("b", pinned=True, tenant="t"), Mark("c")]
        marking.put_many(SPACE, [write(1)])
        for mark in said:
            marking.mark_many(SPACE, keys([1]), mark)
        assert marks(marking, 1) == tuple(sorted(said))
        assert marking.unmark_many(SPACE, keys([1, 1]), Mark("a", tenant="u")) == [True, False]
        assert marks(marking, 1) == (said[0], said[2], said[3])
        assert marking.unmark_many(SPACE, keys([1]), Mark(tenant="t")) == [True]
        assert marks(marking, 1) == (said[3],)
        assert marking.unmark_many(SPACE, keys([1]), Mark()) == [True]
        assert marks(marking, 1) == ()

    def test_blocks_are_found_by_what_was_said_of_them(self, marking: BlockStore) -> None:
        other = dataclasses.replace(SPACE, revision="another")
        marking.put_many(SPACE, writes(range(6)))
        marking.put_many(other, writes([0], other))
        marking.mark_many(SPACE, keys([0, 1, 2]), Mark("a", tenant="t"))
        marking.mark_many(SPACE, keys([2, 3]), Mark("ab", pinned=True))
        marking.mark_many(SPACE, keys([3, 4]), Mark(tenant="a"))
        marking.mark_many(SPACE, keys([2]), Mark("a", pinned=True))
        marking.mark_many(other, keys([0]), Mark("a"))
        assert found(marking, Mark("a")) == digests([0, 1, 2])
        assert found(marking, Mark("ab")) == digests([2, 3])
        assert found(marking, Mark("a", pinned=True)) == digests([2])
        assert found(marking, Mark("a", tenant="t")) == digests([0, 1, 2])
        assert found(marking, Mark(tenant="a")) == digests([3, 4])
        assert found(marking, Mark(pinned=True)) == digests([2, 3])
        assert found(marking, Mark()) == digests([0, 1, 2, 3, 4])
        assert found(marking, Mark("b")) == set()
        assert found(marking, Mark("a"), other) == digests([0])

    def test_marks_go_with_their_block(self, marking: BlockStore) -> None:
        marking.put_many(SPACE, writes([1, 2]))
        marking.mark_many(SPACE, keys([1, 2]), Mark("a", pinned=True))
        assert marking.delete_many(SPACE, keys([1])) == [True]
        assert found(marking, Mark("a")) == digests([2])
        assert marking.usage().pinned == marking.usage().used
        marking.put_many(SPACE, [write(1)])
        assert marks(marking, 1) == ()
        assert marking.delete_many(SPACE, keys([2])) == [True]
        assert marking.usage().pinned == 0

    def test_one_block_has_a_bounded_number_of_marks(self, marking: BlockStore) -> None:
        marking.put_many(SPACE, [write(1)])
        for number in range(MOST_MARKS):
            assert marking.mark_many(SPACE, keys([1]), Mark(f"label {number:03}")) == [MARKED]
        before = marks(marking, 1)
        assert marking.mark_many(SPACE, keys([1]), Mark("one more")) == [FAILED]
        assert marking.mark_many(SPACE, keys([1]), Mark("label 000")) == [MARKED]
        assert marks(marking, 1) == before

    def test_who_only_reads_sees_marks_and_makes_none(self, marking: BlockStore, marking_url: str) -> None:
        marking.put_many(SPACE, writes([1]))
        marking.mark_many(SPACE, keys([1]), Mark("a", pinned=True))
        with open_store(marking_url, readonly=True) as reader:
            assert marks(reader, 1) == (Mark("a", pinned=True),)
            assert found(reader, Mark("a")) == digests([1])
            assert reader.mark_many(SPACE, keys([1]), Mark("b")) == [FAILED]
            assert reader.unmark_many(SPACE, keys([1]), Mark("a")) == [False]
        assert marks(marking, 1) == (Mark("a", pinned=True),)

    # Eviction

    @pytest.mark.usefixtures("bounded_url")
    def test_a_pinned_block_is_not_evicted_until_its_last_pin_goes(self, marking_url: str) -> None:
        with open_store(marking_url, capacity=CAPACITY) as store:
            store.put_many(BIG, writes(range(4), BIG))
            assert store.mark_many(BIG, keys([0, 1]), Mark("a", pinned=True)) == [MARKED, MARKED]
            store.mark_many(BIG, keys([0]), Mark("b", pinned=True))
            store.mark_many(BIG, keys([2]), Mark("a"))
            fill(store, range(10, 70))
            assert held(store, BIG) & set(keys(range(4))) == set(keys([0, 1]))
            assert get(store, [0, 1], BIG) == [HIT, HIT]
            store.unmark_many(BIG, keys([0, 1]), Mark("a", pinned=True))
            fill(store, range(70, 130))
            assert held(store, BIG) & set(keys(range(4))) == set(keys([0]))
            store.unmark_many(BIG, keys([0]), Mark("b"))
            fill(store, range(130, 190))
            assert held(store, BIG) & set(keys(range(4))) == set()
            assert store.usage().pinned == 0

    @pytest.mark.usefixtures("bounded_url")
    def test_a_part_of_the_capacity_can_be_pinned_and_the_front_of_a_batch_is(self, marking_url: str) -> None:
        with open_store(marking_url, capacity=CAPACITY) as store:
            fill(store, range(14))
            said = store.mark_many(BIG, keys(range(14)), Mark("a", pinned=True))
            count = said.count(MARKED)
            assert said == [MARKED] * count + [UNPINNED] * (14 - count)
            assert 8 <= count <= CAPACITY // PINNABLE // BIG.block_bytes()
            assert store.usage().pinned <= CAPACITY // PINNABLE
            assert (pinned(store, BIG), found(store, Mark("a"), BIG)) == (digests(range(count)), digests(range(14)))
            assert store.mark_many(BIG, keys([0, 13]), Mark("b", pinned=True)) == [MARKED, UNPINNED]
            fill(store, range(20, 80))  # and what is new still finds room
            assert held(store, BIG) >= set(keys(range(count))) | {key(79)}
            store.unmark_many(BIG, keys([0]), Mark(pinned=True))
            assert store.mark_many(BIG, keys([79]), Mark("a", pinned=True)) == [MARKED]

    # Restarts and other processes

    @pytest.mark.usefixtures("bounded_url")
    def test_marks_and_pins_outlive_a_restart(self, marking_url: str, persistent_url: str) -> None:
        with open_store(marking_url, capacity=CAPACITY) as store:
            store.put_many(BIG, writes(range(3), BIG))
            store.mark_many(BIG, keys([0]), Mark("a", pinned=True, tenant="t"))
            store.mark_many(BIG, keys([1]), Mark("b"))
            usage = store.usage()
        with open_store(persistent_url, capacity=CAPACITY) as store:
            assert store.usage().pinned == usage.pinned > 0
            assert marks(store, 0, BIG) == (Mark("a", pinned=True, tenant="t"),)
            assert found(store, Mark("b"), BIG) == digests([1])
            fill(store, range(10, 70))
            assert held(store, BIG) & set(keys(range(3))) == {key(0)}

    def test_another_process_sees_marks_and_makes_some(self, marking_url: str, shared_url: str) -> None:
        with open_store(marking_url) as store:
            store.put_many(SPACE, writes([1, 2]))
            store.mark_many(SPACE, keys([1]), Mark("a", pinned=True))
            assert in_another_process(mark_elsewhere, shared_url, [1, 2], Mark("b", pinned=True)) == [MARKED, MARKED]
            assert marks(store, 1) == (Mark("a", pinned=True), Mark("b", pinned=True))
            store.unmark_many(SPACE, keys([1]), Mark("b"))
            seen = in_another_process(marks_elsewhere, shared_url)
            assert seen == {key(1).digest: (Mark("a", pinned=True),), key(2).digest: (Mark("b", pinned=True),)}


def fill(store: BlockStore, numbers: Iterable[int]) -> None:
    """Put blocks one by one, each of which has to find room."""
    for number in numbers:
        outcome = store.put_many(BIG, [write(number, BIG)])[0]
        assert outcome.present, f"block {number} is {outcome}"
