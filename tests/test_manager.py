"""The manager: what an engine is told, what it gets, and that it never waits. Every manager is checked at its end."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tiering_helpers import (
    BLOCK,
    PATIENCE,
    SPACE,
    ask,
    check,
    content,
    engine_load,
    engine_store,
    faulty,
    fill,
    intact,
    keys,
    managed,
    until,
    writes,
)

from kvstore import BlockKey, BlockLayout, BlockWrite, GetOutcome, LookupResult, Namespace, open_store
from kvstore.errors import InvalidBlockError, ShutdownTimeout, TierUnavailable, UnknownSchemeError
from kvstore.testing.faults import failing, lying, slow
from kvstore.tiering import PrimaryTier, SecondaryTier, TieringManager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore import BlockStore
    from kvstore.testing.faults import Call, FaultyStore, Hanging

HIT, PENDING, RETRY, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.RETRY, LookupResult.MISS
PROMPT = keys(60)


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    """A backend that behaves until it is told not to."""
    backend = faulty()
    yield backend
    backend.close()


@pytest.fixture(params=["memory", "file", "lmdb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A location that outlives the managers over it, on every backend."""
    location = {"memory": "memory://prompts", "file": f"file://{tmp_path}/kv", "lmdb": f"lmdb://{tmp_path}/kv.lmdb"}
    with open_store("memory://prompts"):
        yield location[request.param]


def impatient(backend: BlockStore) -> SecondaryTier:
    """A tier that gives up after 0.15 s."""
    return SecondaryTier(backend, SPACE, threads=2, lookup_timeout=0.15, load_timeout=0.15)


# Right bytes


def test_sixty_blocks_go_through_four_slots_and_come_back_after_a_restart(url: str) -> None:
    with managed(url) as manager:
        assert manager.store(writes(PROMPT)) == 60
    with managed(url) as manager:
        assert engine_load(manager, PROMPT) == 60
        assert manager.stats().tiers[0].loads == 60
    with managed(url) as manager:
        buffers = [np.zeros(BLOCK, np.uint8) for _ in PROMPT]
        assert manager.load_prefix(PROMPT, buffers) == 60
        assert all(np.array_equal(buffer, content(key)) for buffer, key in zip(buffers, PROMPT, strict=True))


def test_an_engine_that_never_waits_stores_what_it_got_slots_for_but_what_was_shed(url: str) -> None:
    with managed(url, primary_slots=16) as manager:
        written: list[BlockKey] = []

        def pass_over() -> bool:
            written.extend(engine_store(manager, [key for key in PROMPT if key not in written]))
            return len(written) == 60

        until(manager, pass_over)
        assert manager.drain(PATIENCE)
        stats = manager.stats().tiers[0]
    assert stats.stores + stats.shed == 60
    assert stats.stores >= 8
    with open_store(url) as found:
        assert sum(intact(found, PROMPT)) == stats.stores


def test_two_tiers_both_get_every_block_and_each_serves_alone(tmp_path: Path) -> None:
    urls = f"file://{tmp_path}/kv", f"lmdb://{tmp_path}/kv.lmdb"
    with managed(*urls) as manager:
        assert manager.store(writes(PROMPT)) == 60
        assert manager.drain(PATIENCE)
        assert [tier.stores for tier in manager.stats().tiers] == [60, 60]
    for one in urls:
        with managed(one) as manager:
            assert engine_load(manager, PROMPT) == 60


def test_tiers_are_asked_in_order_and_the_first_that_has_a_block_serves_it() -> None:
    first, second = faulty("first"), faulty("second")
    with first, second:
        fill("memory://first", PROMPT[:2])
        fill("memory://second", PROMPT[1:4])
        with managed(first, second) as manager:
            assert ask(manager, PROMPT[:5]) == [HIT] * 4 + [MISS]
            assert [tier.loads for tier in manager.stats().tiers] == [2, 2]
        assert ("contains", PROMPT[2:5]) in second.calls


def test_a_source_overwritten_after_the_store_changes_nothing(store: FaultyStore, hanging: Hanging) -> None:
    store.plan["put"] = hanging
    source = content(PROMPT[0])
    with managed(store) as manager:
        assert manager.store([BlockWrite(PROMPT[0], source.data)]) == 1
        source[:] = 0
        until(manager, lambda: hanging.waiting)
        hanging.release()
    assert intact(store.inner, PROMPT[:1]) == [True]


def test_no_slot_is_reused_while_a_slow_tier_still_reads_it(store: FaultyStore, hanging: Hanging) -> None:
    fill(str(store.url), PROMPT[20:30])
    store.plan["put"] = hanging
    with managed(store, slot_timeout=0.1) as manager:
        cascading = engine_store(manager, PROMPT[:4])
        manager.step()
        until(manager, lambda: hanging.waiting)
        for key in PROMPT[10:20]:  # an engine that needs slots, and scribbles over all that it gets
            for view in manager.prepare_store([key]):
                if view is not None:
                    view[:] = 0
                    manager.complete_store([key], success=False)
        engine_load(manager, PROMPT[20:30])  # and promotions that need slots, too
        hanging.release()
        assert manager.drain(PATIENCE)
    shed = manager.stats().tiers[0].shed
    assert sum(intact(store.inner, cascading)) == len(cascading) - shed > 0


def test_a_block_stored_again_while_its_store_is_still_running_goes_out_once(
    store: FaultyStore, hanging: Hanging
) -> None:
    store.plan["put"] = hanging
    with managed(store) as manager:
        assert engine_store(manager, PROMPT[:1]) == PROMPT[:1]
        until(manager, lambda: hanging.waiting)
        assert manager.prepare_store(PROMPT[:1]) == [None]
        assert manager.lookup(PROMPT[:1]) == [HIT]
        assert manager.store(writes(PROMPT[:1])) == 1
        hanging.release()
    assert [verb for verb, _ in store.calls].count("put") == 1


def test_a_block_that_is_being_written_is_pending_for_others_and_given_back_if_that_fails() -> None:
    with managed("memory://nothing") as manager:
        assert manager.prepare_store(PROMPT[:1])[0] is not None
        assert manager.lookup(PROMPT[:1]) == [PENDING]
        assert manager.prepare_load(PROMPT[:1]) == [None]
        manager.complete_store(PROMPT[:1], success=False)
        assert ask(manager, PROMPT[:1]) == [MISS]
        assert manager.stats().tiers[0].stores == 0


def test_where_a_block_stands_in_its_prefix_goes_with_it(url: str) -> None:
    with managed(url, primary_slots=16) as manager:
        engine_store(manager, PROMPT[:3])
        manager.store(writes(PROMPT[:6])[3:])
        views = manager.prepare_store(PROMPT[6:8], position=6, parent=PROMPT[5].digest)
        for key, view in zip(PROMPT[6:8], views, strict=True):
            assert view is not None
            view[:] = content(key)
        manager.complete_store(PROMPT[6:8])
    with open_store(url) as found:
        facts = {info.position: (info.key, info.parent) for info in found.scan(SPACE)}
    parents = [b"", *(key.digest for key in PROMPT)]
    assert facts == {n: (PROMPT[n], parents[n]) for n in range(8)}


def test_groups_share_slots_of_the_largest_block_and_get_views_of_their_own_size(url: str) -> None:
    space = Namespace("model", "1", (BlockLayout.opaque(BLOCK), BlockLayout.opaque(100)), block_tokens=16)
    names = [key for pair in zip(keys(20), keys(20, group=1), strict=True) for key in pair]
    with managed(url, space=space) as manager:
        assert manager.primary.slot_bytes == BLOCK
        views = manager.prepare_store(names[:2])
        assert [view.nbytes for view in views if view is not None] == [BLOCK, 100]
        manager.complete_store(names[:2], success=False)
        assert manager.store(writes(names[:-1], space), timeout=PATIENCE) == 39
    with managed(url, space=space) as manager:
        buffers = [np.zeros(space.block_bytes(key.group), np.uint8).data for key in names]
        assert manager.load_prefix(names, buffers) // 2 == 19, "the last block lacks a group"
        assert all(np.array_equal(buffers[n], content(names[n], len(buffers[n]))) for n in range(39))


# Room


def test_a_hit_stays_until_who_asked_can_pin_it_and_no_longer_than_promised() -> None:
    with managed("memory://nothing", hold=0.2) as manager:
        manager.store(writes(PROMPT[:4]))
        assert manager.drain(PATIENCE)
        assert manager.lookup(PROMPT[:4]) == [HIT] * 4
        assert manager.prepare_store(PROMPT[10:11]) == [None], "all four are promised"
        views = manager.prepare_load(PROMPT[:2])
        assert all(np.array_equal(view, content(key)) for key, view in zip(PROMPT, views, strict=False))
        time.sleep(0.25)
        manager.step()
        assert engine_store(manager, PROMPT[10:14]) == PROMPT[10:12], "two are pinned, two were not fetched in time"
        manager.complete_load(PROMPT[:2])


def test_a_block_that_two_requests_read_stays_until_both_have_read_it() -> None:
    with managed() as manager:
        (key,) = engine_store(manager, PROMPT[:1])
        for _ in range(2):
            assert manager.prepare_load([key])[0] is not None
        manager.complete_load([key])
        assert manager.stats().primary.pinned == 1
        manager.complete_load([key])
        assert manager.stats().primary.pinned == 0


def test_blocks_behind_a_gap_are_not_kept_from_making_room_for_the_gap() -> None:
    with open_store("memory://prompts"):
        fill("memory://prompts", PROMPT)
        with managed("memory://prompts", slot_timeout=PATIENCE) as manager:
            assert ask(manager, PROMPT[56:]) == [HIT] * 4
            manager.finish_request(PROMPT)
            assert engine_load(manager, PROMPT) == 60


def test_every_lookup_renews_the_promise() -> None:
    with managed("memory://nothing", hold=0.2) as manager:
        manager.store(writes(PROMPT[:4]))
        assert manager.drain(PATIENCE)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            assert manager.lookup(PROMPT[:4]) == [HIT] * 4
            manager.step()
            assert manager.prepare_store(PROMPT[10:11]) == [None]
            time.sleep(0.01)
        manager.finish_request(PROMPT[:4])
        assert engine_store(manager, PROMPT[10:11]) == PROMPT[10:11], "a finished request gives its promises back"


def test_promotions_happen_in_the_order_of_asking() -> None:
    with open_store("memory://prompts") as store:
        fill("memory://prompts", PROMPT)
        with managed("memory://prompts", slot_timeout=PATIENCE) as manager:
            manager.lookup(PROMPT[5:20])
            manager.lookup(PROMPT[:5])
            until(manager, lambda: manager.stats().primary.ready == 4)
            assert manager.lookup(PROMPT[5:20]) == [HIT] * 4 + [PENDING] * 11
            assert manager.lookup(PROMPT[:5]) == [PENDING] * 5
            manager.finish_request(PROMPT)
        assert store.usage().blocks == 60


def test_who_waits_for_more_blocks_than_there_are_slots_is_told_miss_in_time() -> None:
    with open_store("memory://prompts"):
        fill("memory://prompts", PROMPT)
        with managed("memory://prompts", slot_timeout=0.2) as manager:
            assert ask(manager, PROMPT, timeout=3.0) == [HIT] * 4 + [MISS] * 56
            assert manager.stats().expired == 56
            manager.finish_request(PROMPT)
            assert engine_load(manager, PROMPT) == 60, "what was missed for want of a slot is not lost"


def test_two_requests_that_fit_only_one_after_the_other_both_get_their_blocks() -> None:
    with open_store("memory://prompts"):
        fill("memory://prompts", PROMPT)
        with managed("memory://prompts", slot_timeout=PATIENCE) as manager:
            requests = {"first": PROMPT[:3], "second": PROMPT[10:13]}
            served: list[str] = []

            def serve() -> bool:
                for name, wanted in list(requests.items()):
                    if manager.lookup(wanted) == [HIT] * 3:
                        assert all(view is not None for view in manager.prepare_load(wanted))
                        manager.complete_load(wanted)
                        manager.finish_request(requests.pop(name))
                        served.append(name)
                return not requests

            until(manager, serve)
            assert served == ["first", "second"]


def test_stores_leave_a_quarter_of_the_slots_to_loads_even_if_every_tier_hangs(
    store: FaultyStore, hanging: Hanging
) -> None:
    fill(str(store.url), PROMPT[:30])
    store.plan["put"] = hanging
    tiers = [SecondaryTier(store, SPACE, threads=2), SecondaryTier(store, SPACE, threads=2)]
    with managed(*tiers, primary_slots=8) as manager:
        assert len(engine_store(manager, PROMPT[30:])) == 6
        manager.step()
        assert engine_store(manager, PROMPT[40:]) == []
        assert engine_load(manager, PROMPT[:30]) == 30
        hanging.release()


def test_a_tier_that_hangs_takes_nothing_from_one_that_works(store: FaultyStore, hanging: Hanging) -> None:
    store.plan["put"] = hanging
    with open_store("memory://healthy") as healthy, managed(store, "memory://healthy", primary_slots=8) as manager:
        written: list[BlockKey] = []

        def all_written() -> bool:
            written.extend(engine_store(manager, [key for key in PROMPT if key not in written]))
            return len(written) == 60

        until(manager, all_written)
        until(manager, lambda: manager.stats().tiers[1].backlog_bytes == 0)
        stuck, works = manager.stats().tiers
        assert stuck.shed >= 50
        assert works.stores == 60 - works.shed
        assert sum(intact(healthy, PROMPT)) == works.stores >= 30
        hanging.release()


def test_the_primary_tier_alone_is_a_cache_too() -> None:
    with managed() as manager:
        assert manager.store(writes(PROMPT)) == 60
        assert manager.lookup(PROMPT) == [MISS] * 56 + [HIT] * 4


# Backends that hang, fail and lie


def test_a_lookup_that_hangs_becomes_a_miss_in_time(store: FaultyStore, hanging: Hanging) -> None:
    fill(str(store.url), PROMPT)
    store.plan["contains"] = hanging
    with managed(impatient(store)) as manager:
        begin = time.monotonic()
        assert ask(manager, PROMPT[:10]) == [MISS] * 10
        assert ask(manager, PROMPT[10:20]) == [MISS] * 10
        assert time.monotonic() - begin < 2.0
        hanging.release()


def test_closing_behind_a_store_that_hangs_raises_in_time_and_drops_what_waits(
    store: FaultyStore, hanging: Hanging
) -> None:
    store.plan["put"] = hanging
    manager = TieringManager(SPACE, [SecondaryTier(store, SPACE, threads=1)], primary_slots=8)
    assert engine_store(manager, PROMPT[:1])
    manager.step()
    until(manager, lambda: hanging.waiting)
    assert engine_store(manager, PROMPT[1:3])
    with pytest.raises(ShutdownTimeout):
        manager.close(timeout=0.3)
    assert manager.stats().tiers[0].shed == 2
    hanging.release()
    until(manager, lambda: manager.stats().primary.pinned == 0)
    assert manager.lookup([*PROMPT[:2], PROMPT[9]]) == [HIT, HIT, MISS]
    assert manager.stats().tiers[0].stores == 1


def test_closing_behind_a_lookup_that_hangs_holds_no_memory_and_does_not_raise(
    store: FaultyStore, hanging: Hanging
) -> None:
    store.plan["contains"] = hanging
    manager = TieringManager(SPACE, [store], primary_slots=4)
    manager.lookup(PROMPT)
    until(manager, lambda: hanging.waiting)
    begin = time.monotonic()
    manager.close(timeout=0.3)
    assert time.monotonic() - begin < 2.0


def test_closing_lets_queued_stores_finish(store: FaultyStore) -> None:
    store.plan["put"] = slow(0.05)
    with managed(store, primary_slots=64) as manager:
        assert len(engine_store(manager, PROMPT[:20])) == 20
    assert intact(store.inner, PROMPT[:20]) == [True] * 20


@pytest.mark.parametrize("error", [TierUnavailable("down"), OSError(5, "I/O error"), RuntimeError("bug"), SystemExit()])
def test_a_backend_that_fails_is_misses_and_counts_and_never_an_exception(
    store: FaultyStore, error: BaseException
) -> None:
    fill(str(store.url), PROMPT)
    with managed(store, primary_slots=8) as manager:
        store.plan = dict.fromkeys(("get", "put", "touch"), failing(error))
        assert ask(manager, PROMPT[:3]) == [MISS] * 3, "promised by a lookup, not delivered by the load"
        assert engine_store(manager, PROMPT[:3]) == PROMPT[:3], "so the engine computes them"
        assert manager.lookup(PROMPT[:3]) == [HIT] * 3
        manager.finish_request(PROMPT[:3])
        assert manager.drain(PATIENCE)
        store.plan["contains"] = failing(error)
        assert ask(manager, PROMPT[10:13]) == [MISS] * 3
        assert manager.load_prefix(PROMPT[10:], [np.empty(BLOCK, np.uint8).data] * 50) == 0
        stats = manager.stats().tiers[0]
        assert (stats.failed_loads, stats.failed_stores) == (3, 3)
        assert stats.failed_calls >= 5
        store.plan.clear()
        assert manager.load_prefix(PROMPT[10:], [np.empty(BLOCK, np.uint8).data] * 50) == 50, "hits once it is back"


def test_a_load_that_fails_after_a_positive_lookup_is_a_miss_at_once_and_not_tried_again(
    store: FaultyStore,
) -> None:
    fill(str(store.url), PROMPT)
    store.plan["get"] = lying(GetOutcome.CORRUPT)
    with managed(store) as manager:
        assert ask(manager, PROMPT[:2]) == [MISS] * 2
        end = time.monotonic() + 0.3
        while time.monotonic() < end:  # an engine that asks again and again is not led on
            assert manager.lookup(PROMPT[:2]) == [MISS] * 2
            manager.step()
            time.sleep(0.005)
        assert [verb for verb, _ in store.calls] == ["contains", "get"]
        assert manager.stats().tiers[0].corrupt == 2


def test_a_promotion_publishes_exactly_the_blocks_that_arrived_intact(store: FaultyStore) -> None:
    fill(str(store.url), PROMPT[:3])
    store.plan["contains"] = lying(True)

    def one_is_damaged(call: Call) -> list[GetOutcome]:
        outcomes: list[GetOutcome] = call.answer()
        call.blocks[1].into[:4] = b"rot!"
        outcomes[1] = GetOutcome.CORRUPT
        return outcomes

    store.plan["get"] = one_is_damaged
    with managed(store) as manager:
        assert ask(manager, PROMPT[:4]) == [HIT, MISS, HIT, MISS]


def test_a_file_cut_short_after_its_block_was_found_is_a_miss_and_a_new_store_replaces_it(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv"
    with managed(url) as manager:
        manager.store(writes(PROMPT[:1]))
    block = max((path for path in tmp_path.rglob("*") if path.is_file() and "/g0/" in str(path)), key=_size)
    with managed(url) as manager:
        assert manager.lookup(PROMPT[:1]) == [RETRY]
        manager.step()
        with block.open("r+b") as file:
            file.truncate(1000)
        assert ask(manager, PROMPT[:1]) == [MISS]
        assert manager.store(writes(PROMPT[:1])) == 1
    with managed(url) as manager:
        assert engine_load(manager, PROMPT[:1]) == 1


def _size(path: Path) -> int:
    return path.stat().st_size


def test_no_call_of_the_engine_waits_for_a_backend(store: FaultyStore, hanging: Hanging) -> None:
    fill(str(store.url), PROMPT[:30])
    store.plan = dict.fromkeys(("contains", "get", "put", "touch"), hanging)
    with managed(impatient(store), primary_slots=8) as manager:
        worst = 0.0
        calls: list[Callable[[], object]] = [
            lambda: manager.lookup(PROMPT),
            lambda: engine_store(manager, PROMPT[30:]),
            lambda: manager.prepare_load(PROMPT[50:]),
            lambda: manager.touch(PROMPT),
            lambda: manager.finish_request(PROMPT),
            manager.step,
            manager.stats,
        ]
        for _ in range(20):
            for call in calls:
                begin = time.perf_counter()
                call()
                worst = max(worst, time.perf_counter() - begin)
        assert worst < 0.1
        hanging.release()


# Hearsay


def test_a_miss_is_remembered_for_a_moment_and_not_for_longer(store: FaultyStore) -> None:
    with managed(store, miss_age=0.2) as manager:
        assert ask(manager, PROMPT[:1]) == [MISS]
        fill(str(store.url), PROMPT[:1])
        assert manager.lookup(PROMPT[:1]) == [MISS]
        time.sleep(0.25)
        manager.step()
        assert ask(manager, PROMPT[:1]) == [HIT]
        assert manager.stats().promotions == 1


def test_a_scheduler_whose_steps_last_longer_than_a_promise_gets_its_blocks_and_its_misses() -> None:
    with open_store("memory://prompts"):
        fill("memory://prompts", PROMPT[:8])
        with managed("memory://prompts", miss_age=0.01, hold=0.01, slot_timeout=PATIENCE) as manager:
            wanted, answers = PROMPT[:10], []
            for _ in range(12):
                answers = manager.lookup(wanted)
                while answers and answers[0] is HIT:
                    assert manager.prepare_load(wanted[:1])[0] is not None
                    manager.complete_load(wanted[:1])
                    manager.finish_request([wanted.pop(0)])
                    answers.pop(0)
                manager.step()
                time.sleep(0.05)
            assert answers == [MISS, MISS], "eight came through four slots, two are nowhere"
            fill("memory://prompts", PROMPT[8:10])
            assert manager.lookup(wanted) == [RETRY] * 2, "told once, then asked anew"
            manager.finish_request(wanted)


def test_a_miss_is_forgotten_when_the_block_is_stored() -> None:
    with managed("memory://nothing", miss_age=PATIENCE) as manager:
        assert ask(manager, PROMPT[:1]) == [MISS]
        assert engine_store(manager, PROMPT[:1]) == PROMPT[:1]
        assert manager.drain(PATIENCE)
        manager.store(writes(PROMPT[1:9]))
        assert manager.drain(PATIENCE)
        assert manager.primary.get(PROMPT[0]) is None, "it left the primary tier"
        assert ask(manager, PROMPT[:1]) == [HIT]


def test_a_finished_request_is_young_in_every_tier_and_nothing_is_promoted_for_it(store: FaultyStore) -> None:
    fill(str(store.url), PROMPT)
    with managed(store, slot_timeout=PATIENCE) as manager:
        manager.lookup(PROMPT)
        until(manager, lambda: manager.stats().waiting > 50)
        manager.finish_request(PROMPT)
        assert manager.drain(PATIENCE)
        assert manager.stats().promotions < 10
        assert ("touch", PROMPT) in store.calls


def test_a_touch_keeps_a_block_from_being_the_next_to_go() -> None:
    with managed() as manager:
        manager.store(writes(PROMPT[:4]))
        manager.touch(PROMPT[:1])
        manager.store(writes(PROMPT[4:7]))
        assert manager.lookup(PROMPT[:2]) == [HIT, MISS]


def test_answers_to_questions_that_nobody_has_any_more_start_nothing(store: FaultyStore) -> None:
    fill(str(store.url), PROMPT)
    with managed(store) as manager:
        manager.lookup(PROMPT)
        manager.finish_request(PROMPT)
        manager.step()
        assert manager.drain(PATIENCE)
        assert manager.stats().promotions == 0


def test_a_key_that_cannot_be_one_of_the_namespace_is_the_callers_error() -> None:
    with managed("memory://nothing") as manager:
        for bad in (BlockKey(b"short"), BlockKey(b"x" * 32, group=1)):
            for call in (manager.lookup, manager.prepare_store):
                with pytest.raises(InvalidBlockError):
                    call([bad])
        with pytest.raises(InvalidBlockError):
            manager.store([BlockWrite(PROMPT[0], b"too few bytes")])
        assert manager.stats().primary.free == 4


def test_completing_what_was_not_prepared_is_the_callers_error() -> None:
    with managed() as manager:
        manager.store(writes(PROMPT[:1]))
        manager.lookup(PROMPT[:1])
        for complete in (manager.complete_load, manager.complete_store):
            with pytest.raises(ValueError, match="was not None"):
                complete(PROMPT[:1])


# For people who have no scheduler


def test_load_prefix_ends_at_the_first_block_that_is_lacking(url: str) -> None:
    with managed(url) as manager:
        manager.store(writes(PROMPT[:20]) + writes(PROMPT)[30:])
    with managed(url) as manager:
        buffers = [np.full(BLOCK, 7, np.uint8) for _ in PROMPT]
        assert manager.load_prefix(PROMPT, buffers) == 20
        assert all(np.array_equal(buffer, content(key)) for buffer, key in zip(buffers[:20], PROMPT, strict=False))
        assert all((buffer == 7).all() for buffer in buffers[20:])
        assert manager.load_prefix([], []) == 0


def test_load_prefix_hands_blocks_to_a_function_in_order_and_survives_its_exception() -> None:
    with open_store("memory://prompts"):
        fill("memory://prompts", PROMPT)
        with managed("memory://prompts") as manager:
            seen: list[int] = []

            def look(index: int, view: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
                assert np.array_equal(view, content(PROMPT[index]))
                seen.append(index)
                if len(seen) == 70:
                    raise KeyError("the caller's own")

            assert manager.load_prefix(PROMPT, look) == 60
            assert seen == list(range(60))
            with pytest.raises(KeyError, match="own"):
                manager.load_prefix(PROMPT, look)


def test_load_prefix_and_prefetch_end_in_time_when_the_tier_hangs(store: FaultyStore, hanging: Hanging) -> None:
    fill(str(store.url), PROMPT)
    store.plan["get"] = hanging
    with managed(store) as manager:
        begin = time.monotonic()
        assert manager.prefetch(PROMPT, timeout=0.2) == 0
        assert manager.load_prefix(PROMPT, [np.empty(BLOCK, np.uint8).data] * 60, timeout=0.2) == 0
        assert time.monotonic() - begin < 2.0
        hanging.release()


def test_store_waits_for_a_slow_tier_and_not_for_ever(store: FaultyStore, hanging: Hanging) -> None:
    store.plan["put"] = slow(0.01)
    with managed(store) as manager:
        assert manager.store(writes(PROMPT)) == 60
        assert manager.stats().tiers[0].shed == 0, "who can wait loses nothing"
        assert manager.drain(PATIENCE)
        store.plan["put"] = hanging
        begin = time.monotonic()
        assert manager.store(writes(keys(60, "b")), timeout=0.2) == 60, "they are in the primary tier, or were"
        assert time.monotonic() - begin < 2.0
        assert manager.stats().tiers[0].shed == 58
        hanging.release()


def test_prefetch_brings_the_front_of_a_prefix_as_far_as_there_are_slots() -> None:
    with open_store("memory://prompts"):
        fill("memory://prompts", [*PROMPT[:3], *PROMPT[4:]])
        with managed("memory://prompts", primary_slots=16) as manager:
            assert manager.prefetch(PROMPT) == 3
            assert manager.lookup(PROMPT[:3]) == [HIT] * 3
        with managed("memory://prompts") as manager:
            assert manager.prefetch(PROMPT[4:]) == 4


def test_draining_tells_whether_it_was_enough(store: FaultyStore, hanging: Hanging) -> None:
    store.plan["put"] = hanging
    with managed(store) as manager:
        engine_store(manager, PROMPT[:1])
        assert not manager.drain(0.05)
        hanging.release()
        assert manager.drain(PATIENCE)
    assert intact(store.inner, PROMPT[:1]) == [True]


# Opening


def test_a_tier_that_cannot_be_opened_is_an_error_and_the_others_are_closed(store: FaultyStore) -> None:
    with pytest.raises(UnknownSchemeError):
        TieringManager(SPACE, ["memory://first", SecondaryTier(store, SPACE), "nowhere://x"], primary_slots=4)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("kvstore-memory")]


def test_a_primary_tier_that_does_not_fit_is_refused() -> None:
    for wrong in (
        {},
        {"primary_slots": 4, "primary": PrimaryTier(4, BLOCK)},
        {"primary": PrimaryTier(4, BLOCK - 1)},
    ):
        with pytest.raises(ValueError, match="primary"):
            TieringManager(SPACE, **wrong)  # type: ignore[arg-type]
    with managed(primary=PrimaryTier(4, 2 * BLOCK), primary_slots=None) as manager:
        assert manager.store(writes(PROMPT[:4])) == 4
        check(manager)
