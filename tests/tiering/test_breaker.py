"""The circuit breaker of a tier: an outage costs one time-out or three errors, and ends by itself.

Field report 22: an unreachable remote store hangs the engine.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tiering_helpers import (
    HIT,
    MISS,
    PATIENCE,
    PROMPT,
    SPACE,
    all_closed,
    ask,
    engine_store,
    fill,
    hurry,
    intact,
    keys,
    managed,
    until,
)

from kvstore import BlockLayout, Mark, Namespace
from kvstore.errors import TierUnavailable
from kvstore.testing.faults import Hanging, failing
from kvstore.testing.patience import GRACE, within
from kvstore.tiering import SecondaryTier, TieringManager
from kvstore.tiering.breaker import FAILURES, LONGEST, Breaker, BreakerState, Probe

if TYPE_CHECKING:
    from kvstore.testing.faults import Call, FaultyStore

DOWN = TierUnavailable("down")


class Time:
    """In place of the `time` module."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr("kvstore.tiering.breaker.time", clock)
    return clock


def opened(pause: float = 1.0) -> Breaker:
    breaker = Breaker("memory://x", pause)
    breaker.timed_out("lookup", 1.0)
    return breaker


def pause_before_the_probe(breaker: Breaker, clock: Time) -> float:
    """Wait for it, in small steps."""
    begin = clock.now
    while not breaker.probe_is_due():
        clock.now += 0.01
    return clock.now - begin


# By itself


def test_it_opens_at_three_errors_of_either_kind_and_a_success_takes_back_those_of_its_own() -> None:
    breaker = Breaker("memory://x")
    for error in (DOWN, DOWN, None, DOWN, DOWN):
        breaker.heard("load", error)
        assert not breaker.refuses
    breaker.heard("lookup", None)
    assert not breaker.refuses, "which says nothing of loads, nor opens by itself"
    breaker.heard("lookup", DOWN)
    assert breaker.refuses
    assert (breaker.state, breaker.trips) == (BreakerState.OPEN, 1)


def test_lookups_that_work_do_not_hide_loads_that_fail() -> None:
    breaker = Breaker("memory://x")
    for _ in range(FAILURES):
        assert not breaker.refuses
        breaker.heard("lookup", None)
        breaker.heard("load", DOWN)
    assert breaker.refuses


def test_one_call_that_takes_too_long_is_enough() -> None:
    assert opened().refuses


def test_after_a_pause_there_is_one_probe_and_no_other_before_it_has_ended(clock: Time) -> None:
    breaker = opened()
    assert not breaker.probe_is_due()
    assert 0.5 <= pause_before_the_probe(breaker, clock) <= 1.02
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.refuses
    clock.now += 1000
    assert not breaker.probe_is_due()
    breaker.probed(None)
    assert (breaker.state, breaker.trips) == (BreakerState.CLOSED, 1)


def test_pauses_grow_up_to_a_bound_and_are_never_all_alike(clock: Time) -> None:
    breaker = opened()
    pauses: list[float] = []
    for _ in range(12):
        pauses.append(pause_before_the_probe(breaker, clock))
        breaker.probed(DOWN)
    assert all(2**power / 2 <= pause <= 2**power + 0.02 for power, pause in enumerate(pauses[:6]))
    assert all(LONGEST / 2 <= pause <= LONGEST + 0.02 for pause in pauses[5:])
    assert len({round(pause, 1) for pause in pauses[5:]}) > 1
    assert breaker.trips == 1, "it did not close in between"


def test_what_comes_back_for_a_moment_only_is_tried_ever_later(clock: Time) -> None:
    breaker = opened()
    for power in range(5):
        assert pause_before_the_probe(breaker, clock) >= 2**power / 2
        breaker.probed(None)
        clock.now += LONGEST - 1
        breaker.timed_out("load", 1.0)
    pause_before_the_probe(breaker, clock)
    breaker.probed(None)
    clock.now += LONGEST + 1
    breaker.timed_out("load", 1.0)
    assert pause_before_the_probe(breaker, clock) <= 1.02, "forgiven"


def test_late_news_of_calls_that_began_before_it_opened_changes_nothing(clock: Time) -> None:
    breaker = opened()
    for _ in range(FAILURES):
        breaker.heard("load", DOWN)
        breaker.timed_out("load", 1.0)
    breaker.heard("load", None)
    assert (breaker.state, breaker.trips) == (BreakerState.OPEN, 1)
    assert pause_before_the_probe(breaker, clock) <= 1.02


def test_the_count_starts_anew_when_it_closes(clock: Time) -> None:
    breaker = Breaker("memory://x")
    for _ in range(FAILURES):
        breaker.heard("load", DOWN)
    pause_before_the_probe(breaker, clock)
    breaker.probed(None)
    breaker.heard("load", DOWN)
    assert not breaker.refuses


# In a tier, under a manager


def quick(store: FaultyStore, **options: Any) -> SecondaryTier:
    """It is soon tried again. Time-outs are for those that let something hang."""
    return SecondaryTier(store, SPACE, **{"threads": 2, "load_timeout": PATIENCE, "pause": 0.2, **options})


def one_block_at_a_time(store: FaultyStore) -> None:
    """Each load and each store is a call of its own."""
    store.capabilities = replace(store.capabilities, batch_bytes=1)


def trip(manager: TieringManager, store: FaultyStore, *verbs: str) -> None:
    """Take the store down, and ask until the tier has noticed."""
    store.plan = dict.fromkeys(verbs or ("contains", "get", "put", "touch"), failing(DOWN))
    for number in range(FAILURES):
        assert ask(manager, keys(2, f"lost {number}")) == [MISS] * 2
    assert manager.stats().tiers[0].breaker is BreakerState.OPEN
    store.calls.clear()


def test_an_outage_costs_three_errors_and_then_no_calls(remote: FaultyStore) -> None:
    with managed(quick(remote, pause=PATIENCE), primary_slots=16) as manager:
        trip(manager, remote)
        for number in range(20):
            assert ask(manager, keys(2, f"other {number}")) == [MISS] * 2
        assert engine_store(manager, PROMPT[:8]) == PROMPT[:8]
        assert manager.stats().primary.pinned == 0
        manager.finish_request(PROMPT[:8])
        assert manager.drain(GRACE), "nothing waits for it"
        assert remote.calls == []
        stats = manager.stats().tiers[0]
        assert (stats.shed, stats.trips, stats.failed_calls) == (8, 1, FAILURES)


def test_what_is_said_of_blocks_while_it_is_open_is_counted_as_lost(remote: FaultyStore) -> None:
    tier = quick(remote, pause=PATIENCE)
    with managed(tier) as manager:
        trip(manager, remote)
        tier.mark(keys(3), Mark("a", pinned=True))
        tier.touch(keys(5))
        assert manager.drain(GRACE), "nothing waits for it"
        assert manager.stats().tiers[0].marks_dropped == 3
        assert remote.calls == []


def test_misses_are_answered_at_once_while_it_is_open(remote: FaultyStore, hanging: Hanging) -> None:
    """Field report 22: what hangs is met once, not once per request."""
    remote.plan["contains"] = hanging
    with managed(quick(remote, lookup_timeout=0.3, pause=PATIENCE)) as manager:
        assert ask(manager, PROMPT[:2]) == [MISS] * 2
        for number in range(20):
            assert ask(manager, keys(2, f"other {number}")) == [MISS] * 2
        assert manager.stats().tiers[0].overdue_calls == len(remote.calls) == 1
        hanging.release()


def test_it_comes_back_by_itself_whoever_asks(remote: FaultyStore) -> None:
    """Field report 22: back to hits when the server returns."""
    fill(str(remote.url), PROMPT[:3])
    with managed(quick(remote)) as manager:
        trip(manager, remote)
        remote.plan.clear()
        until(manager, lambda: all_closed(manager))  # steps, and no request
        assert ask(manager, PROMPT[:3]) == [HIT] * 3
        assert engine_store(manager, PROMPT[10:11]) == PROMPT[10:11]
    assert intact(remote.inner, PROMPT[10:11]) == [True]


def test_while_it_stays_down_only_probes_reach_it_one_at_a_time_and_ever_fewer(
    remote: FaultyStore, hanging: Hanging
) -> None:
    with managed(quick(remote, pause=0.02)) as manager:
        trip(manager, remote)
        begin = time.monotonic()
        number = 0
        while time.monotonic() - begin < 0.8 or len(remote.calls) < 3:
            assert time.monotonic() - begin < PATIENCE
            number += 1
            manager.lookup(keys(2, f"other {number}"))
            manager._turn()
            time.sleep(0.001)
        probes, took = len(remote.calls), time.monotonic() - begin
        assert {verb for verb, _ in remote.calls} == {"get"}
        assert sum(0.02 * 2**number / 2 for number in range(probes)) <= took, (
            "each after twice the pause, or half of it"
        )
        remote.plan["get"] = hanging
        until(manager, lambda: hanging.waiting)
        for _ in range(200):
            manager._turn()
            time.sleep(0.001)
        assert len(hanging.waiting) == 1, "nobody is tried again before there is an answer"
        remote.plan.clear()
        hanging.release()
        until(manager, lambda: all_closed(manager))


def test_a_probe_asks_for_a_block_that_nobody_has_and_costs_a_lookup_of_nothing(remote: FaultyStore) -> None:
    probe = Probe(remote, SPACE)
    probe.work()
    (verb, (key,)) = remote.calls[0]
    assert verb == "get"
    SPACE.check_key(key)
    assert key != Probe(remote, SPACE)._key


def test_a_probe_fits_a_namespace_of_other_digests_and_groups(remote: FaultyStore) -> None:
    space = Namespace("m", "r", (BlockLayout.opaque(4096), BlockLayout.opaque(128)), block_tokens=16, digest_bytes=16)
    Probe(remote, space).work()


def test_loads_that_wait_when_it_opens_are_released_at_once(remote: FaultyStore, hanging: Hanging) -> None:
    names = keys(12, "waiting")
    fill(str(remote.url), names)
    remote.plan["get"] = hanging
    one_block_at_a_time(remote)
    tier = quick(remote, load_timeout=PATIENCE, staging_bytes=8 * 8192, pause=PATIENCE)
    with managed(tier, primary_slots=16, slot_timeout=PATIENCE) as manager:
        manager.lookup(names)
        until(manager, lambda: len(hanging.waiting) == 2 and not manager.stats().waiting)
        remote.plan["contains"] = Hanging()
        hurry(tier, seconds=0.3)
        tier._transit._load_timeout = PATIENCE
        with within(0.3):  # and not after their own time-out
            assert ask(manager, PROMPT[:1]) == [MISS]
            until(manager, lambda: manager.lookup(names).count(MISS) == 10)
        assert manager.stats().tiers[0].failed_loads == 10
        remote.plan["contains"].release()
        hanging.release()


def test_a_store_that_only_refuses_to_write_is_still_read(remote: FaultyStore) -> None:
    fill(str(remote.url), PROMPT[:3])
    remote.plan["put"] = failing(DOWN)
    with managed(quick(remote), primary_slots=16) as manager:
        for number in range(2 * FAILURES):
            engine_store(manager, keys(1, f"unwritten {number}"))
            assert manager.drain(PATIENCE)
        stats = manager.stats().tiers[0]
        assert (stats.failed_stores, stats.trips) == (2 * FAILURES, 0)
        assert ask(manager, PROMPT[:3]) == [HIT] * 3


def test_a_store_that_breaks_the_promises_of_its_lookups_is_left_alone(remote: FaultyStore) -> None:
    fill(str(remote.url), PROMPT[:8])
    remote.plan["get"] = failing(DOWN)
    with managed(quick(remote, pause=PATIENCE)) as manager:
        for key in PROMPT[: FAILURES + 1]:
            assert ask(manager, [key]) == [MISS]
        assert [verb for verb, _ in remote.calls] == ["contains", "get"] * FAILURES


def test_it_stays_open_while_a_lookup_hangs_since_nobody_could_ask(remote: FaultyStore, hanging: Hanging) -> None:
    fill(str(remote.url), PROMPT[:1])
    remote.plan["contains"] = hanging
    tier = quick(remote, lookup_timeout=0.3, pause=0.01)
    with managed(tier) as manager:
        assert ask(manager, PROMPT[:1]) == [MISS]
        hurry(tier, seconds=PATIENCE)
        for _ in range(100):
            manager._turn()
            time.sleep(0.001)
        assert len(remote.calls) == 1
        remote.plan.clear()
        hanging.release()
        until(manager, lambda: all_closed(manager))
        manager.forget(PROMPT[:1])
        assert ask(manager, PROMPT[:1]) == [HIT]


def test_loads_that_wait_behind_others_do_not_open_it(remote: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many are late, and none hangs: a busy server is not a dead one. Time passes in loads alone, not for others."""
    clock, begin, noticed = Time(), Time.now, threading.Event()
    for module in ("pool", "questions", "transit"):
        monkeypatch.setattr(f"kvstore.tiering.{module}.time", clock)
    names = keys(16, "busy")
    fill(str(remote.url), names)

    def slow(call: Call) -> Any:
        clock.now += 0.1
        assert clock.now < begin + 0.6 or noticed.wait(PATIENCE)
        return call.answer()

    remote.plan["get"] = slow
    one_block_at_a_time(remote)
    with managed(quick(remote, threads=1, load_timeout=0.5), primary_slots=16) as manager:
        manager.lookup(names)
        until(manager, lambda: manager.stats().tiers[0].overdue_calls > 3)
        noticed.set()
        assert manager.drain(PATIENCE)
        assert manager.stats().tiers[0].trips == 0


def test_one_load_that_never_returns_does_not_keep_the_tier_from_coming_back(
    remote: FaultyStore, hanging: Hanging
) -> None:
    fill(str(remote.url), PROMPT[:4])

    def first_hangs(call: Call) -> Any:
        remote.plan.pop("get")
        return hanging(call)

    remote.plan["get"] = first_hangs
    tier = quick(remote, load_timeout=0.3)
    with managed(tier) as manager:
        assert ask(manager, PROMPT[:1]) == [MISS]
        hurry(tier, seconds=PATIENCE)
        until(manager, lambda: all_closed(manager))
        assert hanging.waiting == ["get"]
        assert ask(manager, PROMPT[1:4]) == [HIT] * 3
        assert manager.stats().tiers[0].trips == 1, "and it is not held against it again"
        hanging.release()


def test_closing_while_it_is_open_or_a_probe_hangs_is_bounded(remote: FaultyStore, hanging: Hanging) -> None:
    manager = TieringManager(SPACE, [quick(remote, pause=0.02)], primary_slots=4)
    trip(manager, remote)
    remote.plan["get"] = hanging
    until(manager, lambda: hanging.waiting)
    with within(0.5):
        manager.close(timeout=0.5)


def test_another_tier_is_not_concerned(remote: FaultyStore, local: FaultyStore) -> None:
    fill(str(local.url), PROMPT[:2])
    with managed(quick(remote, pause=PATIENCE), quick(local), primary_slots=16) as manager:
        remote.plan = dict.fromkeys(("contains", "get"), failing(DOWN))
        for number in range(FAILURES):
            ask(manager, keys(1, f"lost {number}"))
        assert [tier.breaker.value for tier in manager.stats().tiers] == ["open", "closed"]
        assert ask(manager, PROMPT[:2]) == [HIT] * 2
        assert manager.stats().tiers[1].hits == 2


def test_the_log_says_it_once_when_it_opens_and_once_when_it_closes(
    remote: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    with managed(quick(remote, pause=0.02)) as manager:
        trip(manager, remote)
        until(manager, lambda: len(remote.calls) >= 3)
        remote.plan.clear()
        until(manager, partial(all_closed, manager))
    said = [
        record.getMessage()
        for record in caplog.records
        if record.name == "kvstore.tiering.breaker" and record.levelno >= logging.WARNING
    ]
    assert len(said) == 2
    assert "memory://remote: 3 lookups in a row failed" in said[0]
    assert "down" in said[0]
    assert "memory://remote: answers again" in said[1]
