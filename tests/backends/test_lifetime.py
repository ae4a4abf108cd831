"""The contract, part three: opening, closing, forking, restarting, and the company of other threads and processes."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING

import other_process
import pytest
from tiers import MIB, SPACE, get, held, key, keys, open_descriptors, write, writes

from kvstore import BlockRead, GetOutcome, PutOutcome
from kvstore.errors import StoreClosedError, StoreNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor
    from pathlib import Path

    from tiers import Tier

    from kvstore import BlockStore

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS

VERBS: dict[str, Callable[[BlockStore], object]] = {
    "namespaces": lambda store: store.namespaces(),
    "contains_many": lambda store: store.contains_many(SPACE, [key(1)]),
    "put_many": lambda store: store.put_many(SPACE, [write(1)]),
    "get_many_into": lambda store: store.get_many_into(SPACE, [BlockRead(key(1), bytearray(SPACE.block_bytes()))]),
    "delete_many": lambda store: store.delete_many(SPACE, [key(1)]),
    "scan": lambda store: list(store.scan(SPACE)),
    "usage": lambda store: store.usage(),
    "touch_many": lambda store: store.touch_many(SPACE, [key(1)]),
}


def refuses(store: BlockStore) -> list[str]:
    """The verbs that raise StoreClosedError."""
    refused: list[str] = []
    for name, verb in VERBS.items():
        try:
            verb(store)
        except StoreClosedError:
            refused.append(name)
    return refused


class TestClose:
    def test_a_closed_store_refuses_every_verb_and_closes_twice(self, tier: Tier) -> None:
        store = tier.open()
        store.put_many(SPACE, [write(1)])
        store.close()
        store.close()
        assert refuses(store) == list(VERBS)

    def test_leaving_the_context_closes(self, tier: Tier) -> None:
        with tier.open() as store:
            assert refuses(store) == []
        assert refuses(store) == list(VERBS)

    def test_a_closed_store_leaves_no_descriptor_open(self, tier: Tier) -> None:
        before = open_descriptors()
        for _ in range(2):
            with tier.open() as store:
                store.put_many(SPACE, [write(1)])
                get(store, [1, 2])
        assert open_descriptors() == before

    def test_two_stores_in_one_process_share_their_blocks_and_close_apart(self, tier: Tier) -> None:
        with tier.open() as one:
            with tier.open() as two:
                one.put_many(SPACE, [write(1)])
                two.put_many(SPACE, [write(2)])
                assert get(one, [1, 2]) == get(two, [1, 2]) == [HIT, HIT]
                assert two.delete_many(SPACE, [key(1)]) == [True]
                assert get(one, [1, 2]) == [MISS, HIT]
            assert get(one, [2]) == [HIT]
            assert one.put_many(SPACE, [write(3)]) == [PutOutcome.STORED]
            assert one.usage().blocks == 2


class TestFork:
    def test_a_forked_child_is_refused_and_the_parent_goes_on(self, tier: Tier) -> None:
        with tier.open() as store:
            store.put_many(SPACE, [write(1)])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later: fork beside threads
                child = os.fork()
            if child == 0:
                refused = refuses(store)
                store.close()
                os._exit(0 if refused == list(VERBS) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert get(store, [1]) == [HIT]
            assert store.put_many(SPACE, [write(2)]) == [PutOutcome.STORED]
            assert held(store) == {key(1), key(2)}

    def test_a_forked_child_may_open_a_store_of_its_own(self, persistent_tier: Tier) -> None:
        with persistent_tier.open() as store:
            store.put_many(SPACE, [write(1)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            with persistent_tier.open() as own:
                os._exit(0 if get(own, [1]) == [HIT] and own.put_many(SPACE, [write(2)]) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with persistent_tier.open() as store:
            assert get(store, [1, 2]) == [HIT, HIT]


class TestReopening:
    def test_blocks_namespaces_and_usage_are_there_after_reopening(self, persistent_tier: Tier) -> None:
        """Field report 2: a restarted cache that counts from zero."""
        with persistent_tier.open() as store:
            store.put_many(SPACE, [write(1, position=3), write(2, parent=key(1).digest)])
            usage, known = store.usage(), {info.key: info for info in store.scan(SPACE)}
        with persistent_tier.open() as store:
            assert store.namespaces() == [SPACE]
            assert get(store, [1, 2, 3]) == [HIT, HIT, MISS]
            assert (store.usage().blocks, store.usage().used) == (usage.blocks, usage.used)
            for info in store.scan(SPACE):
                before = known[info.key]
                assert (info.created, info.position, info.parent) == (before.created, before.position, before.parent)

    def test_a_process_started_afresh_reads_what_this_one_stored(
        self, persistent_tier: Tier, fresh_process: Executor
    ) -> None:
        """Field report 12: a hash seed per process, so that nothing is ever shared."""
        with persistent_tier.open() as store:
            store.put_many(SPACE, writes(range(8)))
        assert fresh_process.submit(other_process.read, persistent_tier, list(range(9))).result() == [HIT] * 8 + [MISS]

    def test_the_order_of_use_outlives_a_restart(self, persistent_tier: Tier) -> None:
        from test_facts import BIG, CAPACITY

        with persistent_tier.open(capacity=CAPACITY) as store:
            store.put_many(BIG, [write(0, BIG)])
            for number in range(1, 6):
                store.put_many(BIG, [write(number, BIG)])
            get(store, [0], BIG)
        with persistent_tier.open(capacity=CAPACITY) as store:
            number = 6
            while store.contains_many(BIG, keys([1])) == [True]:
                store.put_many(BIG, [write(number, BIG)])
                number += 1
            assert store.contains_many(BIG, keys([0, 1])) == [True, False]


class TestReadOnly:
    def test_nothing_is_created_where_nothing_is(self, persistent_tier: Tier) -> None:
        assert persistent_tier.path is not None
        with pytest.raises(StoreNotFoundError, match=str(persistent_tier.path)):
            persistent_tier.open(readonly=True)
        assert not persistent_tier.path.exists()

    def test_blocks_are_read_and_nothing_is_changed(self, tier: Tier) -> None:
        with tier.open() as owner:
            owner.put_many(SPACE, [write(1, position=5)])
            with tier.open(readonly=True) as store:
                assert get(store, [1, 2]) == [HIT, MISS]
                assert store.put_many(SPACE, writes([1, 2])) == [PutOutcome.FAILED] * 2
                assert store.delete_many(SPACE, keys([1])) == [False]
                store.touch_many(SPACE, keys([1]))
                assert [(info.key, info.position) for info in store.scan(SPACE)] == [(key(1), 5)]
                assert store.usage().blocks == 1
                assert store.namespaces() == [SPACE]
            assert get(owner, [1, 2]) == [HIT, MISS]

    def test_a_reader_alone_leaves_every_file_as_it_is(self, persistent_tier: Tier) -> None:
        assert persistent_tier.path is not None
        with persistent_tier.open() as store:
            store.put_many(SPACE, writes(range(3)))
        before = files_of(persistent_tier.path)
        with persistent_tier.open(readonly=True) as store:
            assert get(store, [0, 1, 2, 3]) == [HIT, HIT, HIT, MISS]
            store.put_many(SPACE, writes([7]))
            store.delete_many(SPACE, keys([0]))
        after = files_of(persistent_tier.path)
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        assert {name for name in changed if not name.endswith("lock.mdb")} == set()  # LMDB's table of readers


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


class TestThreads:
    def test_threads_on_the_same_keys_never_see_a_wrong_byte(self, tier: Tier) -> None:
        with tier.open(), ThreadPoolExecutor(8) as pool:  # held open: memory:// goes with its last store
            counts = list(pool.map(lambda seed: other_process.hammer(tier, seed, 60, {}), range(8)))
            check_hammering(counts)
            check_books(tier)

    def test_threads_on_one_store_under_a_cap(self, tier: Tier) -> None:
        options = {"capacity": 4 * MIB}
        with tier.open(**options) as store, ThreadPoolExecutor(8) as pool:

            def work(seed: int) -> None:
                for step in range(40):
                    number = (seed * 7 + step * 3) % 90
                    assert store.put_many(SPACE, writes([number, number + 1]))
                    assert set(get(store, [number, number + 1])) <= {HIT, MISS}
                    usage = store.usage()
                    assert usage.used + usage.reserved + usage.overhead <= 4 * MIB

            list(pool.map(work, range(8)))
            check_books(tier)


class TestProcesses:
    def test_a_delete_in_one_process_is_seen_by_another_at_once(
        self, persistent_tier: Tier, stranger: Executor
    ) -> None:
        with persistent_tier.open() as store:
            store.put_many(SPACE, writes(range(4)))
            assert get(store, range(4)) == [HIT] * 4
            assert stranger.submit(other_process.delete, persistent_tier, [1, 2]).result() == [True, True]
            assert get(store, range(4)) == [HIT, MISS, MISS, HIT]
            assert store.contains_many(SPACE, keys(range(4))) == [True, False, False, True]
            assert store.usage().blocks == 2

    def test_a_put_in_one_process_is_seen_by_another_at_once(self, persistent_tier: Tier, stranger: Executor) -> None:
        with persistent_tier.open() as store:
            assert get(store, [1]) == [MISS]
            stranger.submit(other_process.put, persistent_tier, [1, 2]).result()
            assert get(store, [1]) == [HIT]
            assert store.put_many(SPACE, writes([1, 2, 3])) == [PutOutcome.EXISTS, PutOutcome.EXISTS, PutOutcome.STORED]
            assert store.namespaces() == [SPACE]
            spaces, digests, usage = stranger.submit(other_process.look, persistent_tier).result()
            assert (spaces, digests) == ([SPACE], {key(number).digest for number in (1, 2, 3)})
            assert (usage.blocks, usage.used) == (store.usage().blocks, store.usage().used)

    def test_processes_on_the_same_keys_under_one_cap_never_see_a_wrong_byte(self, persistent_tier: Tier) -> None:
        """Field reports 3 and 9: ranks corrupting one name, and a cap that applied once per worker."""
        options = {"capacity": 4 * MIB}
        with persistent_tier.open(**options), ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
            jobs = [pool.submit(other_process.hammer, persistent_tier, seed, 60, options) for seed in range(8)]
            check_hammering([job.result() for job in jobs])
            check_books(persistent_tier)


def check_hammering(counts: list[dict[str, int]]) -> None:
    """Everything happened, and nothing that may not happen."""
    total = {name for count in counts for name in count}
    assert {"PutOutcome.STORED", "PutOutcome.EXISTS", "GetOutcome.HIT"} <= total
    assert not total & {"wrong bytes", "GetOutcome.CORRUPT", "PutOutcome.FAILED"}


def check_books(tier: Tier) -> None:
    """Usage is what a scan says, and every block of it is there."""
    with tier.open() as store:
        infos = list(store.scan(SPACE))
        usage = store.usage()
        assert (usage.blocks, usage.used, usage.reserved) == (len(infos), sum(i.stored_bytes for i in infos), 0)
        into = bytearray(SPACE.block_bytes())
        assert all(store.get_many_into(SPACE, [BlockRead(info.key, into)]) == [HIT] for info in infos)
