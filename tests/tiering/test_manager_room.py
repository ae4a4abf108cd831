"""Slots of the primary tier: who gets them, who keeps them for how long, and that nobody waits for ever."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tiering_helpers import (
    HIT,
    MISS,
    PATIENCE,
    PENDING,
    PROMPT,
    SPACE,
    ask,
    content,
    engine_load,
    engine_store,
    fill,
    intact,
    managed,
    until,
    writes,
)

from kvstore import BlockKey, open_store
from kvstore.tiering import SecondaryTier

if TYPE_CHECKING:
    from kvstore.testing.faults import FaultyStore, Hanging


class MovedTime:
    """In place of the `time` module: what has passed, and what a test adds to it."""

    now = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.now

    perf_counter, sleep = staticmethod(time.perf_counter), staticmethod(time.sleep)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedTime:
    """What the manager goes by."""
    clock = MovedTime()
    monkeypatch.setattr("kvstore.tiering.manager.time", clock)
    return clock


def test_a_hit_stays_until_who_asked_can_pin_it_and_no_longer_than_promised(clock: MovedTime) -> None:
    with managed("memory://nothing", hold=PATIENCE) as manager:
        manager.store(writes(PROMPT[:4]))
        assert manager.drain(PATIENCE)
        assert manager.lookup(PROMPT[:4]) == [HIT] * 4
        assert manager.prepare_store(PROMPT[10:11]) == [None], "all four are promised"
        views = manager.prepare_load(PROMPT[:2])
        assert all(np.array_equal(view, content(key)) for key, view in zip(PROMPT, views, strict=False))
        clock.now += PATIENCE
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


def test_every_lookup_renews_the_promise(clock: MovedTime) -> None:
    with managed("memory://nothing", hold=PATIENCE) as manager:
        manager.store(writes(PROMPT[:4]))
        assert manager.drain(PATIENCE)
        for _ in range(3):
            assert manager.lookup(PROMPT[:4]) == [HIT] * 4
            clock.now += 0.75 * PATIENCE
            manager.step()
            assert manager.prepare_store(PROMPT[10:11]) == [None]
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
            assert ask(manager, PROMPT) == [HIT] * 4 + [MISS] * 56
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
