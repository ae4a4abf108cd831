"""The contract, part three: opening, closing, forking, restarting, and the company of other threads and processes."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import re
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.abc import BlockStore
from kvstore.errors import StoreClosedError, StoreNotFoundError
from kvstore.marks import Mark
from kvstore.registry import open_store
from kvstore.testing.elsewhere import delete, hammer, in_a_new_process, in_another_process, look, put, read
from kvstore.testing.facts import BIG, CAPACITY
from kvstore.testing.hooks import StoreHooks, knows_capacity
from kvstore.testing.supply import MIB, SPACE, get, held, key, keys, write, writes
from kvstore.types import BlockInfo, BlockRead, GetOutcome, PutOutcome
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Callable

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS

OTHER = dataclasses.replace(SPACE, revision="another")

VERBS: dict[str, Callable[[BlockStore], object]] = {
    "namespaces": lambda store: store.namespaces(),
    "contains_many": lambda store: store.contains_many(SPACE, [key(1)]),
    "put_many": lambda store: store.put_many(SPACE, [write(1)]),
    "put_if_room": lambda store: store.put_if_room(SPACE, [write(1)]),
    "get_many_into": lambda store: store.get_many_into(SPACE, [BlockRead(key(1), bytearray(SPACE.block_bytes()))]),
    "delete_many": lambda store: store.delete_many(SPACE, [key(1)]),
    "scan": lambda store: list(store.scan(SPACE)),
    "usage": lambda store: store.usage(),
    "excess": lambda store: store.excess(1 << 40),
    "touch_many": lambda store: store.touch_many(SPACE, [key(1)]),
    "mark_many": lambda store: store.mark_many(SPACE, [key(1)], Mark("a")),
    "unmark_many": lambda store: store.unmark_many(SPACE, [key(1)], Mark("a")),
    "purge_many": lambda store: store.purge_many(SPACE, [key(1)]),
    "finish_purge": lambda store: store.finish_purge(),
    "scan_marked": lambda store: list(store.scan_marked(SPACE, Mark("a"))),
    "scan_ages": lambda store: list(store.scan_ages(SPACE)),
    "check_many": lambda store: store.check_many(SPACE, [BlockRead(key(1), bytearray(SPACE.block_bytes()))]),
    "of_later_version": lambda store: store.of_later_version(SPACE, [key(1)]),
    "remove_unused": lambda store: store.remove_unused(SPACE, [BlockInfo(key(1), 1, 0.0, 0.0)]),
    "drop_namespace": lambda store: store.drop_namespace(OTHER),
    "sealed_with": lambda store: store.sealed_with(SPACE, [key(1)]),
    "reseal_many": lambda store: store.reseal_many(SPACE, [write(1)]),
    "leftovers": lambda store: store.leftovers(),
    "repair": lambda store: store.repair(),
    "unseen": lambda store: store.unseen(),
    "take_in": lambda store: store.take_in(blocks=False),
    "purge_unseen": lambda store: store.purge_unseen(names=[]),
}
"""A use of each, of little effect: another namespace is dropped than the one that tests go on with."""

OPTIONAL = (
    *("touch_many", "mark_many", "unmark_many", "finish_purge", "of_later_version", "sealed_with", "reseal_many"),
    *("leftovers", "repair", "unseen", "take_in", "purge_unseen"),
)
"""Those that do nothing where a store does not define them."""

NO_VERBS = {"close", "ensure_open", "scrubbed"}
"""The rest of a store's methods: what a tier's scrub has done may be asked at any time."""


def verbs_of(store: BlockStore) -> list[str]:
    """Those that have to know that it is closed: of the others the defaults answer, where it has no `ensure_open`."""
    inherited = [
        name
        for name in OPTIONAL
        if getattr(type(store), name) is getattr(BlockStore, name) and type(store).ensure_open is BlockStore.ensure_open
    ]
    return [name for name in VERBS if name not in inherited]


def refuses(store: BlockStore) -> list[str]:
    """The verbs that raise StoreClosedError."""
    refused: list[str] = []
    for name, verb in VERBS.items():
        try:
            verb(store)
        except StoreClosedError:
            refused.append(name)
    return refused


class LifetimeTests(StoreHooks):
    """Opening and closing, alone and in company."""

    def test_no_verb_is_forgotten_here(self) -> None:
        methods = {name for name, _ in inspect.getmembers(BlockStore, inspect.isfunction) if not name.startswith("_")}
        assert set(VERBS) == methods - NO_VERBS

    # Close

    def test_a_closed_store_refuses_every_verb_and_closes_twice(self, url: str) -> None:
        store = open_store(url)
        store.put_many(SPACE, [write(1)])
        store.close()
        store.close()
        assert refuses(store) == verbs_of(store)

    @pytest.mark.parametrize("verb", ["contains_many", "put_many", "get_many_into", "delete_many"])
    def test_a_closed_store_refuses_an_empty_batch_too(self, url: str, verb: str) -> None:
        store = open_store(url)
        store.close()
        with pytest.raises(StoreClosedError):
            getattr(store, verb)(SPACE, [])

    def test_leaving_the_context_closes(self, url: str) -> None:
        with open_store(url) as store:
            assert refuses(store) == []
        assert refuses(store) == verbs_of(store)

    def test_a_closed_store_leaves_no_descriptor_open(self, url: str) -> None:
        before = open_descriptors()
        for _ in range(2):
            with open_store(url) as store:
                store.put_many(SPACE, [write(1)])
                get(store, [1, 2])
        left = Counter(open_descriptors()) - Counter(before)  # of a test before this one some may just have closed
        assert not left

    def test_two_stores_in_one_process_share_their_blocks_and_close_apart(self, url: str) -> None:
        with open_store(url) as one:
            with open_store(url) as two:
                one.put_many(SPACE, [write(1)])
                two.put_many(SPACE, [write(2)])
                assert get(one, [1, 2]) == get(two, [1, 2]) == [HIT, HIT]
                assert two.delete_many(SPACE, [key(1)]) == [True]
                assert get(one, [1, 2]) == [MISS, HIT]
            assert get(one, [2]) == [HIT]
            assert one.put_many(SPACE, [write(3)]) == [PutOutcome.STORED]
            assert one.usage().blocks == 2

    # Fork

    def test_a_forked_child_is_refused_and_the_parent_goes_on(self, url: str) -> None:
        with open_store(url) as store:
            store.put_many(SPACE, [write(1)])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later: fork beside threads
                child = os.fork()
            if child == 0:
                refused = refuses(store)
                store.close()
                os._exit(0 if refused == verbs_of(store) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert get(store, [1]) == [HIT]
            assert store.put_many(SPACE, [write(2)]) == [PutOutcome.STORED]
            assert held(store) == {key(1), key(2)}

    def test_a_forked_child_may_open_a_store_of_its_own(self, persistent_url: str) -> None:
        with open_store(persistent_url) as store:
            store.put_many(SPACE, [write(1)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            with open_store(persistent_url) as own:
                os._exit(0 if get(own, [1]) == [HIT] and own.put_many(SPACE, [write(2)]) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with open_store(persistent_url) as store:
            assert get(store, [1, 2]) == [HIT, HIT]

    # Reopening

    def test_blocks_namespaces_and_usage_are_there_after_reopening(self, persistent_url: str) -> None:
        """Field report 2: a restarted cache that counts from zero."""
        with open_store(persistent_url) as store:
            store.put_many(SPACE, [write(1, position=3), write(2, parent=key(1).digest)])
            usage, known = store.usage(), {info.key: info for info in store.scan(SPACE)}
        with open_store(persistent_url) as store:
            assert store.namespaces() == [SPACE]
            assert get(store, [1, 2, 3]) == [HIT, HIT, MISS]
            assert (store.usage().blocks, store.usage().used) == (usage.blocks, usage.used)
            for info in store.scan(SPACE):
                before = known[info.key]
                assert (info.created, info.position, info.parent) == (before.created, before.position, before.parent)

    def test_a_process_started_afresh_reads_what_this_one_stored(self, persistent_url: str) -> None:
        """Field report 12: a hash seed per process, so that nothing is ever shared."""
        with open_store(persistent_url) as store:
            store.put_many(SPACE, writes(range(8)))
        assert in_a_new_process(read, persistent_url, list(range(9))) == [HIT] * 8 + [MISS]

    @pytest.mark.usefixtures("bounded_url")
    def test_the_order_of_use_outlives_a_restart(self, persistent_url: str) -> None:
        with open_store(persistent_url, capacity=CAPACITY) as store:
            store.put_many(BIG, [write(0, BIG)])
            for number in range(1, 6):
                store.put_many(BIG, [write(number, BIG)])
            get(store, [0], BIG)
        with open_store(persistent_url, capacity=CAPACITY) as store:
            number = 6
            while store.contains_many(BIG, keys([1])) == [True]:
                store.put_many(BIG, [write(number, BIG)])
                number += 1
            assert store.contains_many(BIG, keys([0, 1])) == [True, False]

    # Read-only

    def test_nothing_is_opened_or_created_where_nothing_is(self, url: str) -> None:
        try:
            open_store(url, readonly=True).close()
        except StoreNotFoundError:
            with pytest.raises(StoreNotFoundError, match=re.escape(TierURL.parse(url).location)):
                open_store(url, readonly=True)  # nor did the first attempt leave anything
        else:
            with open_store(url) as store:
                assert not store.capabilities.persistent, "a store that is not there was opened read-only"

    def test_blocks_are_read_and_nothing_is_changed(self, url: str) -> None:
        with open_store(url) as owner:
            owner.put_many(SPACE, [write(1, position=5)])
            with open_store(url, readonly=True) as store:
                assert get(store, [1, 2]) == [HIT, MISS]
                assert store.put_many(SPACE, writes([1, 2])) == [PutOutcome.FAILED] * 2
                assert store.delete_many(SPACE, keys([1])) == [False]
                store.touch_many(SPACE, keys([1]))
                assert [(info.key, info.position) for info in store.scan(SPACE)] == [(key(1), 5)]
                assert store.usage().blocks == 1
                assert store.namespaces() == [SPACE]
            assert get(owner, [1, 2]) == [HIT, MISS]

    # Threads

    def test_threads_on_the_same_keys_never_see_a_wrong_byte(self, url: str) -> None:
        with open_store(url), ThreadPoolExecutor(8) as pool:  # held open: memory:// goes with its last store
            jobs = [pool.submit(hammer, url, seed, 60, {}) for seed in range(8)]
            check_hammering([job.result() for job in jobs])
            check_books(url)

    def test_threads_on_one_store_under_a_cap(self, bounded_url: str) -> None:
        options = {"capacity": 4 * MIB}
        outcomes: Counter[object] = Counter()
        with open_store(bounded_url, **options) as store, ThreadPoolExecutor(8) as pool:

            def work(seed: int) -> None:
                for step in range(40):
                    number = (seed * 7 + step * 3) % 90
                    outcomes.update(store.put_many(SPACE, writes([number, number + 1])))
                    outcomes.update(get(store, [number, number + 1]))
                    usage = store.usage()
                    assert usage.used + usage.reserved + usage.overhead <= 4 * MIB

            list(pool.map(work, range(8)))
            assert {PutOutcome.STORED, PutOutcome.EXISTS, HIT} <= set(outcomes)
            assert set(outcomes) <= {PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.FULL, HIT, MISS}
            assert outcomes[PutOutcome.FULL] < outcomes[PutOutcome.STORED] // 2
            check_books(bounded_url)

    # Processes

    def test_a_delete_in_one_process_is_seen_by_another_at_once(self, shared_url: str) -> None:
        with open_store(shared_url) as store:
            store.put_many(SPACE, writes(range(4)))
            assert get(store, range(4)) == [HIT] * 4
            assert in_another_process(delete, shared_url, [1, 2]) == [True, True]
            assert get(store, range(4)) == [HIT, MISS, MISS, HIT]
            assert store.contains_many(SPACE, keys(range(4))) == [True, False, False, True]
            assert store.usage().blocks == 2

    def test_a_put_in_one_process_is_seen_by_another_at_once(self, shared_url: str) -> None:
        with open_store(shared_url) as store:
            assert get(store, [1]) == [MISS]
            in_another_process(put, shared_url, [1, 2])
            assert get(store, [1]) == [HIT]
            assert store.put_many(SPACE, writes([1, 2, 3])) == [PutOutcome.EXISTS, PutOutcome.EXISTS, PutOutcome.STORED]
            assert store.namespaces() == [SPACE]
            spaces, digests, usage = in_another_process(look, shared_url)
            assert (spaces, digests) == ([SPACE], {key(number).digest for number in (1, 2, 3)})
            assert (usage.blocks, usage.used) == (store.usage().blocks, store.usage().used)

    def test_processes_on_the_same_keys_under_one_cap_never_see_a_wrong_byte(self, shared_url: str) -> None:
        """Field reports 3 and 9: ranks corrupting one name, and a cap that applied once per worker."""
        options = {"capacity": 4 * MIB} if knows_capacity(shared_url) else {}
        with open_store(shared_url, **options), ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
            jobs = [pool.submit(hammer, shared_url, seed, 60, options) for seed in range(8)]
            check_hammering([job.result() for job in jobs])
            check_books(shared_url)


def check_hammering(counts: list[dict[str, int]]) -> None:
    """Everything happened, and nothing that may not happen."""
    total = {name for count in counts for name in count}
    assert {"PutOutcome.STORED", "PutOutcome.EXISTS", "GetOutcome.HIT"} <= total
    assert not total & {"wrong bytes", "GetOutcome.CORRUPT", "PutOutcome.FAILED"}


def check_books(url: str) -> None:
    """Usage is what a scan says, and every block of it is there."""
    with open_store(url) as store:
        infos = list(store.scan(SPACE))
        usage = store.usage()
        assert (usage.blocks, usage.used, usage.reserved) == (len(infos), sum(i.stored_bytes for i in infos), 0)
        into = bytearray(SPACE.block_bytes())
        assert all(store.get_many_into(SPACE, [BlockRead(info.key, into)]) == [HIT] for info in infos)


def open_descriptors() -> list[str]:
    """What this process has open, to see that a closed store left nothing."""
    found: list[str] = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            found.append(str(entry.readlink()))
    return sorted(found)
