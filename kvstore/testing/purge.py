"""The contract, part eight: what was purged is found by nobody, and for a while not stored again."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from kvstore.marks import Mark
from kvstore.registry import open_store
from kvstore.testing.clock import MovableClock, movable_clock
from kvstore.testing.elsewhere import in_another_process, put, read
from kvstore.testing.facts import BIG, CAPACITY
from kvstore.testing.hooks import StoreHooks
from kvstore.testing.supply import SPACE, get, held, key, keys, write, writes
from kvstore.types import GetOutcome, PutOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.abc import BlockStore

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS
STORED, EXISTS, REFUSED = PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.REFUSED


class PurgeTests(StoreHooks):
    """`purge_many`, and the tombstones that it leaves."""

    @pytest.fixture
    def clock(self) -> Iterator[MovableClock]:
        """What the stores of this test go by."""
        with movable_clock() as clock:
            yield clock

    @pytest.fixture
    def burying_url(self, url: str) -> str:
        """The URL, where the store keeps tombstones."""
        with open_store(url) as opened:
            if not opened.capabilities.tombstones:
                pytest.skip("keeps no tombstones, as its capabilities say")
        return url

    @pytest.fixture
    def burying(self, burying_url: str, store: BlockStore) -> BlockStore:
        """An open, empty store that keeps tombstones."""
        del burying_url
        return store

    def test_a_purged_block_is_gone_and_the_others_are_not(self, store: BlockStore) -> None:
        store.put_many(SPACE, writes(range(4)))
        assert store.purge_many(SPACE, keys([1, 9, 2, 1])) == [True, False, True, False]
        assert store.contains_many(SPACE, keys(range(4))) == [True, False, False, True]
        assert get(store, range(4)) == [HIT, MISS, MISS, HIT]
        assert held(store) == set(keys([0, 3]))
        assert store.usage().blocks == 2
        assert all(residue.what for residue in store.finish_purge())
        assert get(store, range(4)) == [HIT, MISS, MISS, HIT]

    def test_of_a_sound_store_every_block_is_seen(self, store: BlockStore) -> None:
        store.put_many(SPACE, writes(range(4)))
        assert store.unseen() == []
        store.take_in(blocks=True)
        assert store.purge_unseen(names=[SPACE.name]) == []
        assert get(store, range(4)) == [HIT] * 4

    def test_a_store_without_tombstones_says_so_and_takes_the_block_again(self, store: BlockStore) -> None:
        store.put_many(SPACE, [write(1)])
        store.purge_many(SPACE, keys([1]))
        assert store.put_many(SPACE, [write(1)]) == [REFUSED if store.capabilities.tombstones else STORED]

    def test_what_was_purged_is_refused_whether_it_was_there_or_not(self, burying: BlockStore) -> None:
        burying.put_many(SPACE, writes([1, 2]))
        burying.purge_many(SPACE, keys([1, 7]))
        wanted = [REFUSED, EXISTS, STORED, REFUSED, REFUSED]
        assert burying.put_many(SPACE, writes([1, 2, 3, 7, 1])) == wanted
        assert get(burying, [1, 2, 3, 7]) == [MISS, HIT, HIT, MISS]
        assert held(burying) == set(keys([2, 3]))
        assert burying.usage().blocks == 2

    def test_a_tombstone_is_for_one_block_of_one_namespace(self, burying: BlockStore) -> None:
        other = dataclasses.replace(SPACE, revision="another")
        burying.put_many(SPACE, [write(1)])
        burying.put_many(other, [write(1, other)])
        burying.purge_many(SPACE, keys([1, 2]))
        assert get(burying, [1], other) == [HIT]
        assert burying.put_many(other, writes([1, 2], other)) == [EXISTS, STORED]
        two = dataclasses.replace(SPACE, layouts=SPACE.layouts * 2)
        burying.purge_many(two, [key(1, group=1)])
        assert burying.put_many(two, [write(1, two, 0), write(1, two, 1)]) == [STORED, REFUSED]

    def test_tombstones_end_and_others_can_be_laid_for_longer(self, burying_url: str, clock: MovableClock) -> None:
        with open_store(burying_url) as store:
            store.put_many(SPACE, writes([1, 2, 3]))
            store.purge_many(SPACE, keys([1, 2]), refuse_s=600)
            store.purge_many(SPACE, keys([2]), refuse_s=3600)
            store.purge_many(SPACE, keys([2]), refuse_s=60)
            clock.advance(590)
            assert store.put_many(SPACE, writes([1, 2])) == [REFUSED, REFUSED]
            clock.advance(20)
            assert store.put_many(SPACE, writes([1, 2])) == [STORED, REFUSED]
            clock.advance(3000)
            assert store.put_many(SPACE, writes([1, 2])) == [EXISTS, STORED]
            assert get(store, [1, 2, 3]) == [HIT] * 3

    def test_who_refuses_for_no_time_lays_none(self, burying: BlockStore) -> None:
        burying.put_many(SPACE, [write(1)])
        assert burying.purge_many(SPACE, keys([1]), refuse_s=0) == [True]
        assert burying.put_many(SPACE, [write(1)]) == [STORED]
        for seconds in (-1.0, 1e9):
            with pytest.raises(ValueError, match="seconds"):
                burying.purge_many(SPACE, keys([1]), refuse_s=seconds)
        assert get(burying, [1]) == [HIT]

    def test_pinned_blocks_go_as_well(self, burying: BlockStore) -> None:
        if not burying.capabilities.marks:
            pytest.skip("keeps no marks, as its capabilities say")
        burying.put_many(SPACE, writes([1, 2]))
        burying.mark_many(SPACE, keys([1, 2]), Mark("handbook", pinned=True, tenant="acme"))
        assert burying.purge_many(SPACE, keys([1])) == [True]
        assert {info.key for info in burying.scan_marked(SPACE, Mark(tenant="acme"))} == {key(2)}
        assert burying.usage().pinned == next(burying.scan(SPACE)).stored_bytes

    def test_another_opener_learns_of_it_in_time(self, burying_url: str, clock: MovableClock) -> None:
        with open_store(burying_url) as one, open_store(burying_url) as other:
            one.put_many(SPACE, writes(range(4)))
            other.put_many(SPACE, [write(9)])
            assert other.contains_many(SPACE, keys(range(4))) == [True] * 4
            one.purge_many(SPACE, keys([1, 2, 8]))
            clock.advance(one.capabilities.tombstones_seen_s)
            assert other.contains_many(SPACE, keys(range(4))) == [True, False, False, True]
            assert get(other, range(4)) == [HIT, MISS, MISS, HIT]
            assert other.put_many(SPACE, writes([1, 2, 3, 8])) == [REFUSED, REFUSED, EXISTS, REFUSED]
            assert get(one, [1, 2, 8]) == [MISS] * 3

    def test_another_process_refuses_it_too(self, burying_url: str, shared_url: str) -> None:
        with open_store(burying_url) as store:
            store.put_many(SPACE, writes([1, 2]))
            store.purge_many(SPACE, keys([1]))
            assert in_another_process(put, shared_url, [1, 2, 3]) == [REFUSED, EXISTS, STORED]
            assert in_another_process(read, shared_url, [1, 2, 3]) == [MISS, HIT, HIT]

    def test_tombstones_outlive_a_restart(self, burying_url: str, persistent_url: str) -> None:
        with open_store(burying_url) as store:
            store.put_many(SPACE, writes([1, 2]))
            store.purge_many(SPACE, keys([1]))
            store.finish_purge()
        with open_store(persistent_url) as store:
            assert store.put_many(SPACE, writes([1, 2])) == [REFUSED, EXISTS]
            assert get(store, [1, 2]) == [MISS, HIT]

    def test_who_only_reads_purges_nothing(self, url: str) -> None:
        with open_store(url) as owner:
            owner.put_many(SPACE, [write(1)])
            with open_store(url, readonly=True) as reader:
                assert reader.purge_many(SPACE, keys([1, 2])) == [False, False]
                reader.finish_purge()
            assert get(owner, [1]) == [HIT]
            assert owner.put_many(SPACE, [write(2)]) == [STORED]

    @pytest.mark.usefixtures("bounded_url")
    def test_a_full_tier_can_be_purged_and_filled_again(self, burying_url: str) -> None:
        with open_store(burying_url, capacity=CAPACITY) as store:
            for number in range(60):
                store.put_many(BIG, [write(number, BIG)])
            there = [info.key for info in store.scan(BIG)]
            assert store.purge_many(BIG, there) == [True] * len(there)
            store.finish_purge()
            assert store.usage().blocks == 0
            for number in range(100, 160):
                assert store.put_many(BIG, [write(number, BIG)]) == [STORED]
            assert store.put_many(BIG, [write(59, BIG)]) == [REFUSED]
            assert len(held(store, BIG)) >= len(there) - 2
