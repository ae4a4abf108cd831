"""Backends that hang, fail and lie under the manager: misses and counts, and an engine that never waits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tiering_helpers import (
    BLOCK,
    HIT,
    MISS,
    PATIENCE,
    PROMPT,
    RETRY,
    SPACE,
    all_closed,
    ask,
    engine_load,
    engine_store,
    fill,
    intact,
    managed,
    until,
    writes,
)

from kvstore import GetOutcome
from kvstore.errors import ShutdownTimeout, TierUnavailable
from kvstore.testing.faults import failing, lying, slow
from kvstore.testing.patience import GRACE, within, without_processor_s
from kvstore.tiering import SecondaryTier, TieringManager

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore.testing.faults import Call, FaultyStore, Hanging


def test_a_lookup_that_hangs_becomes_a_miss_in_time(store: FaultyStore, hanging: Hanging) -> None:
    fill(str(store.url), PROMPT)
    store.plan["contains"] = hanging
    with managed(SecondaryTier(store, SPACE, threads=2, lookup_timeout=0.15)) as manager:
        with within(0.3):
            assert ask(manager, PROMPT[:10]) == [MISS] * 10
            assert ask(manager, PROMPT[10:20]) == [MISS] * 10
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
    with within(0.3):
        manager.close(timeout=0.3)


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
        until(manager, lambda: all_closed(manager))
        assert manager.load_prefix(PROMPT[10:], [np.empty(BLOCK, np.uint8).data] * 50) == 50, "hits once it is back"


def test_a_load_that_fails_after_a_positive_lookup_is_a_miss_at_once_and_not_tried_again(
    store: FaultyStore,
) -> None:
    fill(str(store.url), PROMPT)
    store.plan["get"] = lying(GetOutcome.CORRUPT)
    with managed(store, miss_age=PATIENCE) as manager:
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
    tier = SecondaryTier(store, SPACE, threads=2, lookup_timeout=GRACE, load_timeout=GRACE)
    with managed(tier, primary_slots=8) as manager:
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
                begin = time.perf_counter() - without_processor_s()
                call()
                worst = max(worst, time.perf_counter() - without_processor_s() - begin)
        assert worst < 0.1
        hanging.release()
