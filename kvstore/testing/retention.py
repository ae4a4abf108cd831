"""The contract, part seven: a block past its `ttl` is a miss and makes room, and a namespace can go as a whole."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from kvstore.marks import Mark
from kvstore.registry import backend_class, open_store
from kvstore.retention import REMOVED_A_SECOND, TTL
from kvstore.testing.clock import MovableClock, movable_clock
from kvstore.testing.facts import BIG, CAPACITY
from kvstore.testing.hooks import StoreHooks
from kvstore.testing.supply import SPACE, get, held, key, keys, write, writes
from kvstore.types import GetOutcome, PutOutcome
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.abc import BlockStore

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS
STORED, EXISTS = PutOutcome.STORED, PutOutcome.EXISTS
HOUR = 3600.0

USES: dict[str, Callable[[BlockStore], object]] = {
    "get": lambda store: get(store, [1]),
    "put": lambda store: store.put_many(SPACE, [write(1)]),
    "touch": lambda store: store.touch_many(SPACE, [key(1)]),
}


USES_OF_BIG: dict[str, Callable[[BlockStore], object]] = {
    "get": lambda store: get(store, [1, 2, 3], BIG),
    "put": lambda store: store.put_many(BIG, writes([1, 2, 3], BIG)),
    "touch": lambda store: store.touch_many(BIG, keys([1, 2, 3])),
}


class RetentionTests(StoreHooks):
    """Time to live, and the end of namespaces."""

    @pytest.fixture
    def clock(self) -> Iterator[MovableClock]:
        """What the stores of this test go by."""
        with movable_clock() as clock:
            yield clock

    @pytest.fixture
    def ageing_url(self, url: str, clock: MovableClock) -> str:
        """The URL, where the backend knows `ttl`."""
        del clock
        if TTL not in backend_class(TierURL.parse(url)).options:
            pytest.skip("it has no option `ttl`")
        return url

    @pytest.mark.parametrize("since", ["used", "stored"])
    def test_a_block_past_its_ttl_is_a_miss_and_can_be_stored_anew(
        self, ageing_url: str, clock: MovableClock, since: str
    ) -> None:
        with open_store(ageing_url, ttl="2h", ttl_from=since) as store:
            assert store.put_many(SPACE, writes([1, 2])) == [STORED, STORED]
            clock.advance(1.9 * HOUR)
            assert store.contains_many(SPACE, keys([1])) == [True]
            assert get(store, [2]) == [HIT]
            assert store.put_many(SPACE, [write(3)]) == [STORED]
            assert store.delete_many(SPACE, keys([3])) == [True]
            clock.advance(2.2 * HOUR)
            assert store.contains_many(SPACE, keys([1, 2, 3])) == [False] * 3
            assert get(store, [1, 2, 3]) == [MISS] * 3
            store.touch_many(SPACE, keys([1]))
            assert get(store, [1]) == [MISS]
            assert store.put_many(SPACE, writes([1, 2])) == [STORED, STORED]
            assert get(store, [1, 2]) == [HIT, HIT]
            clock.advance(1.9 * HOUR)
            assert get(store, [1, 2]) == [HIT, HIT]

    @pytest.mark.parametrize("use", USES)
    def test_every_use_begins_the_time_anew_where_uses_count(
        self, ageing_url: str, clock: MovableClock, use: str
    ) -> None:
        with open_store(ageing_url, ttl="2h") as store:
            if not store.capabilities.uses:
                pytest.skip("keeps no times of use, as its capabilities say")
            store.put_many(SPACE, writes([1, 2]))
            for _ in range(3):
                clock.advance(1.5 * HOUR)
                USES[use](store)
            assert get(store, [1, 2]) == [HIT, MISS]

    @pytest.mark.parametrize("use", USES)
    def test_no_use_does_where_only_storing_counts(self, ageing_url: str, clock: MovableClock, use: str) -> None:
        with open_store(ageing_url, ttl="2h", ttl_from="stored") as store:
            store.put_many(SPACE, [write(1)])
            clock.advance(1.5 * HOUR)
            USES[use](store)
            clock.advance(0.6 * HOUR)
            assert get(store, [1]) == [MISS]

    @pytest.mark.parametrize("since", ["used", "stored"])
    def test_puts_take_the_room_of_expired_blocks_back_in_bounded_steps(
        self, ageing_url: str, clock: MovableClock, since: str
    ) -> None:
        small = dataclasses.replace(SPACE, layouts=(SPACE.layouts[0].opaque(512),))
        with open_store(ageing_url, ttl="2h", ttl_from=since) as store:
            if not store.capabilities.uses:
                pytest.skip("no put looks for old blocks there: a sweep does, or `kvstore gc`")
            store.put_many(small, writes(range(200), small))
            clock.advance(3 * HOUR)
            before = store.usage()
            store.put_many(small, writes(range(1000, 1010), small))
            left = store.usage()
            assert 200 - REMOVED_A_SECOND - 20 <= left.blocks - 10 < before.blocks
            for number in range(200):
                store.put_many(small, [write(2000 + number, small)])
            assert store.usage().blocks == 210
            assert not held(store, small) & set(keys(range(200)))

    def test_a_pinned_block_does_not_expire(self, ageing_url: str, clock: MovableClock) -> None:
        with open_store(ageing_url, ttl="2h") as store:
            if not store.capabilities.marks:
                pytest.skip("keeps no marks, as its capabilities say")
            store.put_many(SPACE, writes([1, 2]))
            store.mark_many(SPACE, keys([1]), Mark("handbook", pinned=True))
            store.mark_many(SPACE, keys([2]), Mark("handbook"))
            clock.advance(100 * HOUR)
            assert store.contains_many(SPACE, keys([1, 2])) == [True, False]
            store.put_many(SPACE, writes(range(10, 14)))
            assert get(store, [1, 2]) == [HIT, MISS]
            assert held(store) == set(keys([1, *range(10, 14)]))
            clock.advance(100 * HOUR)
            store.unmark_many(SPACE, keys([1]), Mark("handbook"))
            assert get(store, [1]) == [MISS]

    def test_a_ttl_is_its_openers_own(self, ageing_url: str, clock: MovableClock) -> None:
        with open_store(ageing_url) as patient, open_store(ageing_url, ttl="2h") as strict:
            patient.put_many(SPACE, writes([1, 2]))
            clock.advance(3 * HOUR)
            assert strict.contains_many(SPACE, keys([1])) == [False]
            assert get(patient, [1]) == [HIT]

    @pytest.mark.parametrize("use", USES)
    def test_who_only_uses_blocks_tells_of_it_before_another_evicts_them(
        self, bounded_url: str, clock: MovableClock, use: str
    ) -> None:
        """A process that stores nothing and stays open has no other occasion."""
        with open_store(bounded_url, capacity=CAPACITY) as writer, open_store(bounded_url) as user:
            if not user.capabilities.uses:
                pytest.skip("keeps no times of use, as its capabilities say")
            assert writer.put_many(BIG, writes(range(6), BIG)) == [STORED] * 6
            for _ in range(2):
                clock.advance(90)
                USES_OF_BIG[use](user)
            number = 6
            while writer.contains_many(BIG, keys([4])) == [True]:
                assert writer.put_many(BIG, [write(number, BIG)]) == [STORED]
                number += 1
            assert writer.contains_many(BIG, keys(range(5))) == [False, True, True, True, False]

    def test_only_what_was_not_used_since_is_removed(self, store: BlockStore) -> None:
        store.put_many(SPACE, writes(range(3)))
        infos = sorted(store.scan_ages(SPACE), key=lambda info: info.key.digest)
        assert {info.key for info in infos} == set(keys(range(3)))
        assert all(info.stored_bytes >= SPACE.block_bytes() for info in infos)
        used = infos[0].key
        uses = store.capabilities.uses
        if uses:
            store.put_many(SPACE, [one for one in writes(range(3)) if one.key == used])
        removed = store.remove_unused(SPACE, infos)
        assert removed == [not uses, True, True]
        assert held(store) == ({used} if uses else set())

    def test_a_namespace_goes_as_a_whole_and_no_other(self, store: BlockStore) -> None:
        other = dataclasses.replace(SPACE, revision="another")
        store.put_many(SPACE, writes(range(5)))
        store.put_many(other, writes(range(3), other))
        if store.capabilities.marks:
            store.mark_many(SPACE, keys([1]), Mark("a", pinned=True))
        assert store.drop_namespace(SPACE) == 5
        assert store.namespaces() == [other]
        assert get(store, [1]) == [MISS]
        assert get(store, range(3), other) == [HIT] * 3
        assert store.usage().blocks == 3
        assert store.usage().pinned == 0
        assert store.drop_namespace(SPACE) == 0
        assert store.put_many(SPACE, [write(1)]) == [STORED]
        assert get(store, [1]) == [HIT]
        assert {space.name for space in store.namespaces()} == {SPACE.name, other.name}

    def test_a_namespace_with_blocks_is_not_dropped_for_being_empty(self, store: BlockStore) -> None:
        store.put_many(SPACE, [write(1)])
        assert store.drop_namespace(SPACE, only_if_empty=True) == 0
        assert store.namespaces() == [SPACE]
        assert get(store, [1]) == [HIT]
        store.delete_many(SPACE, [key(1)])
        assert store.drop_namespace(SPACE, only_if_empty=True) == 0
        assert store.put_many(SPACE, [write(2)]) == [STORED]
        assert store.namespaces() == [SPACE]

    def test_a_dropped_namespace_is_gone_after_a_restart(self, persistent_url: str) -> None:
        with open_store(persistent_url) as store:
            store.put_many(SPACE, writes(range(3)))
            store.drop_namespace(SPACE)
        with open_store(persistent_url) as store:
            assert store.namespaces() == []
            store.put_many(SPACE, [write(1)])
        with open_store(persistent_url) as store:
            assert get(store, [1, 2]) == [HIT, MISS]
            assert store.namespaces() == [SPACE]

    def test_who_only_reads_removes_nothing(self, url: str) -> None:
        with open_store(url) as owner:
            owner.put_many(SPACE, writes([1]))
            with open_store(url, readonly=True) as reader:
                infos = list(reader.scan_ages(SPACE))
                assert reader.remove_unused(SPACE, infos) == [False]
                assert reader.drop_namespace(SPACE) == 0
                reader.leftovers(remove=True)
            assert get(owner, [1]) == [HIT]
