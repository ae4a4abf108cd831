"""The contract, part two: what a store knows of its blocks, how full it is, and which blocks have to go first."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import pytest

from kvstore.layout import BlockLayout
from kvstore.registry import open_store
from kvstore.testing.hooks import StoreHooks
from kvstore.testing.supply import KIB, MIB, SPACE, get, held, key, keys, write, writes
from kvstore.types import NO_PARENT, NO_POSITION, GetOutcome, PutOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.abc import BlockStore
    from kvstore.types import BlockInfo

HIT = GetOutcome.HIT

BIG = dataclasses.replace(SPACE, layouts=(BlockLayout.opaque(512 * KIB),))
"""Blocks that fill a small cap soon, and leave a store's own records small beside them."""

CAPACITY = 12 * MIB


def facts(store: BlockStore) -> dict[bytes, BlockInfo]:
    return {info.key.digest: info for info in store.scan(SPACE)}


def use_by_get(store: BlockStore, number: int) -> None:
    assert get(store, [number], BIG) == [HIT]


def use_by_put(store: BlockStore, number: int) -> None:
    assert store.put_many(BIG, [write(number, BIG)]) == [PutOutcome.EXISTS]


def use_by_touch(store: BlockStore, number: int) -> None:
    store.touch_many(BIG, [key(number)])


class FactTests(StoreHooks):
    """Scan, usage, capacity."""

    # Scan

    def test_a_scan_knows_place_predecessor_and_size(self, store: BlockStore) -> None:
        parent = key(1).digest
        store.put_many(SPACE, [write(1, position=0), write(2, position=1, parent=parent), write(3)])
        found = facts(store)
        assert {info.key for info in found.values()} == set(keys([1, 2, 3]))
        first, second, loner = (found[key(number).digest] for number in (1, 2, 3))
        assert (first.position, first.parent) == (0, NO_PARENT)
        assert (second.position, second.parent) == (1, parent)
        assert (loner.position, loner.parent) == (NO_POSITION, NO_PARENT)
        assert first.stored_bytes >= SPACE.block_bytes()

    def test_any_position_that_is_valid_is_kept(self, store: BlockStore) -> None:
        positions = [0, 1 << 31, 1 << 62, (1 << 63) - 1]
        batch = [write(number, position=position) for number, position in enumerate(positions)]
        assert store.put_many(SPACE, batch) == [PutOutcome.STORED] * len(positions)
        assert [facts(store)[key(number).digest].position for number in range(len(positions))] == positions
        assert get(store, range(len(positions))) == [HIT] * len(positions)
        assert all(time.time() - info.created < 60 for info in store.scan(SPACE))

    @pytest.mark.parametrize("digest_bytes", [16, 64])
    def test_a_predecessor_has_the_namespaces_digest_length(self, store: BlockStore, digest_bytes: int) -> None:
        space = dataclasses.replace(SPACE, digest_bytes=digest_bytes)
        parent = key(1, digest_bytes=digest_bytes).digest
        store.put_many(space, [write(2, space, position=70_000, parent=parent)])
        (info,) = store.scan(space)
        assert (info.key.digest, info.position, info.parent) == (
            key(2, digest_bytes=digest_bytes).digest,
            70_000,
            parent,
        )

    def test_a_scan_tells_when_a_block_was_made(self, store: BlockStore) -> None:
        before = time.time()
        store.put_many(SPACE, [write(1)])
        after = time.time()
        info = facts(store)[key(1).digest]
        assert before - 0.01 <= info.created <= after + 0.01
        assert info.created <= info.last_used <= after + 0.01

    def test_uses_are_counted_and_dated_at_the_latest_when_the_user_closes(self, bounded_url: str) -> None:
        with open_store(bounded_url) as onlooker:
            onlooker.put_many(SPACE, writes([1, 2]))
            time.sleep(0.02)
            with open_store(bounded_url) as user:
                assert get(user, [1, 1]) == [HIT, HIT]
                assert get(user, [1]) == [HIT]
            used, unused = (facts(onlooker)[key(number).digest] for number in (1, 2))
        assert (used.hits, unused.hits) == (3, 0)
        assert used.last_used >= used.created + 0.02
        assert unused.last_used < used.last_used

    def test_a_scan_lists_one_namespace_and_what_was_deleted_no_more(self, store: BlockStore) -> None:
        other = dataclasses.replace(SPACE, revision="another")
        store.put_many(SPACE, writes(range(5)))
        store.put_many(other, writes(range(3, 9), other))
        store.delete_many(SPACE, keys([0, 4]))
        assert held(store) == set(keys([1, 2, 3]))
        assert held(store, other) == set(keys(range(3, 9)))

    def test_a_scan_may_be_left_or_overtaken_by_changes(self, store: BlockStore) -> None:
        store.put_many(SPACE, writes(range(20)))
        scan = store.scan(SPACE)
        first = next(scan).key
        store.delete_many(SPACE, keys(range(20)))
        store.put_many(SPACE, writes(range(20, 25)))
        rest = [info.key for info in scan]
        assert first not in rest
        assert len(rest) == len(set(rest))
        next(store.scan(SPACE))  # and drop it half-way

    # Usage

    def test_an_empty_store_uses_nothing(self, store: BlockStore) -> None:
        usage = store.usage()
        assert (usage.blocks, usage.used, usage.reserved, usage.capacity) == (0, 0, 0, None)

    def test_usage_is_what_the_scans_say(self, store: BlockStore) -> None:
        layouts = (BlockLayout.opaque(1000), BlockLayout.opaque(737_280))
        other = dataclasses.replace(SPACE, layouts=layouts, digest_bytes=16)

        def check() -> None:
            infos = [info for space in store.namespaces() for info in store.scan(space)]
            usage = store.usage()
            assert usage.blocks == len(infos)
            assert usage.used == sum(info.stored_bytes for info in infos)
            assert usage.reserved == 0

        store.put_many(SPACE, writes(range(5)))
        check()
        store.put_many(other, [write(1, other, 0), write(1, other, 1), write(2, other, 1)])
        store.put_many(SPACE, [write(1), write(9), write(9)])
        check()
        store.delete_many(SPACE, keys([0, 0, 1, 77]))
        store.delete_many(other, [key(1, group=1, digest_bytes=16)])
        check()
        get(store, [2, 3, 4])
        store.touch_many(SPACE, keys([2, 3]))
        check()
        assert store.usage().blocks == 6

    def test_deleting_everything_leaves_nothing_used(self, store: BlockStore) -> None:
        store.put_many(SPACE, writes(range(10)))
        store.delete_many(SPACE, keys(range(10)))
        assert (store.usage().blocks, store.usage().used, store.usage().reserved) == (0, 0, 0)

    def test_usage_tells_the_cap(self, bounded_url: str) -> None:
        with open_store(bounded_url, capacity="64MiB") as store:
            assert store.usage().capacity == 64 * MIB

    # Capacity

    def test_the_store_stays_under_its_cap_and_keeps_what_came_last(self, bounded_url: str) -> None:
        """Field report 1: a tier that grows for ever."""
        with open_store(bounded_url, capacity=CAPACITY) as store:
            for number in range(60):
                assert store.put_many(BIG, [write(number, BIG)]) == [PutOutcome.STORED]
                usage = store.usage()
                assert usage.used + usage.reserved + usage.overhead <= CAPACITY
            kept = store.usage().blocks
            assert kept >= 8  # it is a store, after all: half of the cap, or more, holds blocks
            assert held(store, BIG) == set(keys(range(60 - kept, 60)))
            assert set(get(store, range(60 - kept, 60), BIG)) == {HIT}

    @pytest.mark.parametrize("use", [use_by_get, use_by_put, use_by_touch])
    def test_a_use_makes_a_block_young(self, bounded_url: str, use: Callable[[BlockStore, int], None]) -> None:
        with open_store(bounded_url, capacity=CAPACITY) as store:
            number = 0
            while store.contains_many(BIG, [key(0)]) == [True] or number == 0:
                store.put_many(BIG, [write(number, BIG)])
                number += 1
            old = sorted(number for number in range(number) if store.contains_many(BIG, [key(number)]) == [True])
            use(store, old[0])
            while store.contains_many(BIG, [key(old[2])]) == [True]:
                store.put_many(BIG, [write(number, BIG)])
                number += 1
            assert store.contains_many(BIG, keys(old[:3])) == [True, False, False]
            assert get(store, [old[0]], BIG) == [HIT]

    @pytest.mark.parametrize("use", ["get", "touch"])
    def test_of_a_batch_that_was_used_at_once_the_end_goes_first(self, bounded_url: str, use: str) -> None:
        """A prefix is of use up to its first gap."""
        with open_store(bounded_url, capacity=CAPACITY) as store:
            store.put_many(BIG, writes(range(8), BIG))
            if use == "get":
                assert get(store, range(8), BIG) == [HIT] * 8
            else:
                store.touch_many(BIG, keys(range(8)))
            seen: list[list[bool]] = []
            number = 8
            while not seen or any(seen[-1]):
                store.put_many(BIG, [write(number, BIG)])
                seen.append(store.contains_many(BIG, keys(range(8))))
                number += 1
            assert all(there == sorted(there, reverse=True) for there in seen)
            assert len({sum(there) for there in seen}) > 2

    def test_a_batch_of_which_only_a_part_fits_says_so_block_by_block(self, bounded_url: str) -> None:
        with open_store(bounded_url, capacity=CAPACITY) as store:
            outcomes = store.put_many(BIG, writes(range(40), BIG))
            present = {number for number in range(40) if store.contains_many(BIG, [key(number)]) == [True]}
            assert set(outcomes) <= {PutOutcome.STORED, PutOutcome.FULL}
            assert present <= {number for number, outcome in enumerate(outcomes) if outcome is PutOutcome.STORED}
            assert len(present) >= 8
            assert set(get(store, sorted(present), BIG)) == {HIT}

    def test_a_block_larger_than_the_cap_is_full_and_evicts_nothing(self, bounded_url: str) -> None:
        huge = dataclasses.replace(SPACE, layouts=(BlockLayout.opaque(CAPACITY + 4096),))
        with open_store(bounded_url, capacity=CAPACITY) as store:
            store.put_many(BIG, writes(range(4), BIG))
            assert store.put_many(huge, [write(1, huge)]) == [PutOutcome.FULL]
            assert held(store, BIG) == set(keys(range(4)))
            assert store.usage().reserved == 0

    def test_what_was_deleted_makes_room_again(self, bounded_url: str) -> None:
        """Field report 4: deletes that never count."""
        with open_store(bounded_url, capacity=CAPACITY) as store:
            for round_ in range(5):
                numbers = range(round_ * 8, round_ * 8 + 8)
                assert store.put_many(BIG, writes(numbers, BIG)) == [PutOutcome.STORED] * 8
                assert held(store, BIG) == set(keys(numbers))
                assert store.delete_many(BIG, keys(numbers)) == [True] * 8
