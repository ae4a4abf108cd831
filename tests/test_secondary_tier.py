"""A secondary tier: whatever a backend does, misses and dropped stores are all that comes of it, and all is counted."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from secondary_bench import Bench
from tiering_helpers import BLOCK, PATIENCE, content, faulty, fill, hurry, keys

from kvstore import GetOutcome, PutOutcome
from kvstore.errors import TierUnavailable
from kvstore.testing.faults import failing
from kvstore.testing.patience import within
from kvstore.tiering.report import TierReport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.testing.faults import Call, FaultyStore, Hanging

KEYS = keys(64)


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    """A backend that behaves until it is told not to, and lets go of every caller at the end of the test."""
    backend = faulty()
    yield backend
    backend.close()


@pytest.fixture
def bench(store: FaultyStore, hanging: Hanging) -> Iterator[Bench]:
    """A tier over a store that misbehaves on order; `hurry` is for the time of a fault."""
    made = Bench(store, threads=2)
    yield made
    hanging.release()
    made.tier.cancel()
    assert made.tier.close(PATIENCE)


def test_what_was_stored_is_found_and_loaded_by_another_tier(store: FaultyStore, bench: Bench) -> None:
    assert bench.store(KEYS[:5]) == [True] * 5
    assert [slot.key for slot in bench.settle().released] == KEYS[:5]
    other = Bench(store)
    other.tier.ask(KEYS[:7])
    slots = other.load(KEYS[:5])
    report = other.settle()
    assert report.answers == [*((key, True) for key in KEYS[:5]), *((key, False) for key in KEYS[5:7])]
    assert set(report.loaded) == set(slots)
    assert all(np.array_equal(slot.view, content(slot.key)) for slot in slots)
    assert bench.tier.stats().stores == 5
    assert bench.tier.stats().bytes_stored == 5 * BLOCK
    stats = other.tier.stats()
    assert (stats.hits, stats.misses, stats.loads, stats.bytes_loaded) == (5, 2, 5, 5 * BLOCK)
    assert stats.load_seconds > 0
    assert other.tier.close(PATIENCE)
    assert not store.closed, "a store that was handed in stays its owner's"


def test_keys_asked_in_one_step_go_in_one_call(store: FaultyStore, bench: Bench) -> None:
    bench.tier.ask(KEYS[:3])
    bench.tier.ask(KEYS[2:9])
    bench.settle()
    assert store.calls == [("contains", KEYS[:9])]


@pytest.mark.parametrize(("batch_blocks", "calls"), [(2, 16), (8, 4), (1000, 2)])
def test_transfers_are_split_to_suit_the_store_and_to_use_every_thread(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch, batch_blocks: int, calls: int
) -> None:
    monkeypatch.setattr("kvstore.tiering.batches.MIN_BATCH_BYTES", BLOCK)
    store.capabilities = replace(store.capabilities, batch_bytes=batch_blocks * BLOCK)
    fill(str(store.url), KEYS)
    made = Bench(store, threads=2)
    made.load(KEYS[:32])
    assert len(made.settle().loaded) == 32
    gets = [names for verb, names in store.calls if verb == "get"]
    assert len(gets) == calls
    assert sorted(name for names in gets for name in names) == sorted(KEYS[:32])
    assert made.tier.close(PATIENCE)


def test_a_lookup_without_an_answer_is_a_miss_in_time_and_the_late_answer_is_ignored(
    store: FaultyStore, bench: Bench, hanging: Hanging
) -> None:
    fill(str(store.url), KEYS[:3])
    store.plan["contains"] = hanging
    hurry(bench.tier, seconds=0.15)
    begin = time.monotonic()
    bench.tier.ask(KEYS[:3])
    with within(0.15):
        report = bench.settle()
    assert report.answers == [(key, False) for key in KEYS[:3]]
    assert time.monotonic() - begin >= 0.15
    hurry(bench.tier, seconds=PATIENCE)
    bench.tier.ask(KEYS[3:5])
    with within(0):  # nobody waits again for a tier that is being waited for
        bench.settle()
    assert report.answers[3:] == [(key, False) for key in KEYS[3:5]]
    assert len(store.calls) == 1, "and no calls pile up behind the one that hangs"
    assert bench.tier.stats().overdue_calls == 1
    store.plan.clear()
    hanging.release()
    bench.run(lambda: not hanging.waiting and bench.closed)
    assert len(report.answers) == 5
    bench.tier.ask(KEYS[:3])
    bench.settle()
    assert report.answers[5:] == [(key, True) for key in KEYS[:3]], "hits again once the tier is back"


def test_a_load_that_hangs_is_given_up_in_time_and_its_slot_is_held_until_it_ends(
    store: FaultyStore, bench: Bench, hanging: Hanging
) -> None:
    fill(str(store.url), KEYS[:3])
    store.plan["get"] = hanging
    hurry(bench.tier)
    slots = bench.load(KEYS[:1])
    report = bench.run(lambda: bench.report.overdue and not bench.closed)
    assert report.overdue == slots
    assert bench.tier.holds_memory
    bench.tier.ask(KEYS[1:2])
    bench.run(lambda: report.answers)
    assert report.answers == [(KEYS[1], False)], "who comes next does not wait for a tier that is stuck"
    hurry(bench.tier, seconds=PATIENCE)
    store.plan.clear()
    hanging.release()
    bench.run(lambda: report.released and bench.closed)
    assert (report.loaded, report.failed, report.released) == ([], [], slots), "its end frees the slot, nothing more"
    assert not bench.tier.holds_memory
    bench.tier.ask(KEYS[1:2])
    bench.settle()
    assert report.answers[1:] == [(KEYS[1], True)]


def test_a_load_queued_behind_one_that_hangs_is_given_up_and_its_slot_free_at_once(
    store: FaultyStore, bench: Bench, hanging: Hanging
) -> None:
    fill(str(store.url), KEYS[:3])
    store.plan["get"] = hanging
    for name in KEYS[:2]:
        bench.load([name])
        bench.tier.submit()
    bench.run(lambda: len(hanging.waiting) == 2)
    queued = bench.load(KEYS[2:3])
    hurry(bench.tier)
    report = bench.run(lambda: len(bench.report.overdue) == 2 and bench.report.failed)
    assert report.failed == queued
    assert [names for verb, names in store.calls if verb == "get"] == [[KEYS[0]], [KEYS[1]]]


@pytest.mark.parametrize("error", [TierUnavailable("down"), OSError(5, "I/O error"), MemoryError(), SystemExit()])
def test_no_error_of_a_backend_gets_out_of_its_tier(
    store: FaultyStore,
    bench: Bench,
    error: BaseException,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.tiering.breaker.FAILURES", 99)  # every call meets the error
    fill(str(store.url), KEYS[:4])
    store.plan = dict.fromkeys(("contains", "get", "put", "touch"), failing(error))
    for _ in range(2):
        bench.tier.ask(KEYS[:4])
        slots = bench.load(KEYS[:2])
        bench.store(KEYS[4:6])
        bench.tier.touch(KEYS[:4])
        report = bench.settle()
        for slot in (*report.failed, *report.released):
            bench.primary.discard(slot)
            bench.primary.unpin(slot)
        assert report.answers == [(key, False) for key in KEYS[:4]]
        assert set(report.failed) == set(slots)
        bench.report = TierReport()
    stats = bench.tier.stats()
    assert (stats.misses, stats.failed_loads, stats.failed_stores) == (8, 4, 4)
    assert stats.failed_calls >= 8
    assert stats.backlog_bytes == 0
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 4, f"each kind of failure is said once: {said}"
    assert all(str(store.url) in line for line in said)
    store.plan.clear()
    bench.tier.ask(KEYS[:4])
    assert bench.settle().answers == [(key, True) for key in KEYS[:4]]


@pytest.mark.parametrize("lie", [[], [True], [True] * 9])
def test_a_backend_that_answers_about_other_than_what_it_was_asked_is_not_believed(
    store: FaultyStore, bench: Bench, lie: list[bool]
) -> None:
    store.plan["contains"] = lambda _: lie
    store.plan["get"] = lambda _: [GetOutcome.HIT] * len(lie)
    store.plan["put"] = lambda _: [PutOutcome.STORED] * len(lie)
    bench.tier.ask(KEYS[:4])
    slots = bench.load(KEYS[:4])
    bench.store(KEYS[4:8])
    report = bench.settle()
    assert report.answers == [(key, False) for key in KEYS[:4]]
    assert report.failed == slots
    assert bench.tier.stats().failed_stores == 4


def test_only_the_blocks_that_did_not_arrive_intact_fail(store: FaultyStore, bench: Bench) -> None:
    fill(str(store.url), KEYS[:4])

    def one_is_damaged(call: Call) -> list[GetOutcome]:
        outcomes: list[GetOutcome] = call.answer()
        outcomes[1] = GetOutcome.CORRUPT
        return outcomes

    store.plan["get"] = one_is_damaged
    slots = bench.load([*KEYS[:4], KEYS[9]])
    report = bench.settle()
    assert [slot.key for slot in report.loaded] == [KEYS[0], KEYS[2], KEYS[3]]
    assert report.failed == [slots[1], slots[4]]
    stats = bench.tier.stats()
    assert (stats.loads, stats.corrupt, stats.failed_loads) == (3, 1, 2)


def test_a_tier_that_falls_behind_drops_stores_and_still_serves_loads(
    store: FaultyStore, caplog: pytest.LogCaptureFixture, hanging: Hanging
) -> None:
    fill(str(store.url), KEYS[:4])
    store.plan["put"] = hanging
    made = Bench(store, threads=2, backlog_bytes=5 * BLOCK)
    taken = made.store(KEYS[10:30])
    assert taken == [True] * 5 + [False] * 15
    assert made.tier.stats().shed == 15
    assert len(caplog.records) == 1
    slots = made.load(KEYS[:4])
    report = made.run(lambda: len(made.report.loaded) == 4)
    assert report.loaded == slots
    hanging.release()
    made.settle()
    assert made.tier.stats().backlog_bytes == 0
    assert made.store(KEYS[30:32]) == [True, True], "accepted again once the tier has caught up"
    made.settle()
    assert made.tier.close(PATIENCE)


def test_one_store_is_accepted_even_if_it_is_larger_than_the_backlog(store: FaultyStore) -> None:
    made = Bench(store, backlog_bytes=1)
    assert made.store(KEYS[:2]) == [True, False]
    made.settle()
    assert made.tier.close(PATIENCE)


def test_loads_overtake_stores_that_were_queued_before_them(store: FaultyStore, hanging: Hanging) -> None:
    fill(str(store.url), KEYS[:4])
    store.plan["put"] = hanging
    made = Bench(store, threads=1)
    for name in KEYS[10:13]:
        made.store([name])
        made.run(lambda: hanging.waiting)
    made.load(KEYS[:1])
    made.tier.submit()
    hanging.release()
    made.settle()
    assert store.calls == [("put", KEYS[10:11]), ("get", KEYS[:1]), ("put", KEYS[11:13])]
    assert made.tier.close(PATIENCE)


@pytest.mark.parametrize(("can_hang", "calls"), [(False, [1, 4, 4, 1]), (True, [1] * 10)])
def test_stores_that_wait_for_a_thread_go_in_one_call_where_calls_are_dear(
    store: FaultyStore, hanging: Hanging, monkeypatch: pytest.MonkeyPatch, can_hang: bool, calls: list[int]
) -> None:
    monkeypatch.setattr("kvstore.tiering.jobs.STORE_BATCH_BYTES", 4 * BLOCK)
    store.capabilities = replace(store.capabilities, can_hang=can_hang)
    store.plan["put"] = hanging
    made = Bench(store, threads=1)
    for name in KEYS[:10]:
        made.store([name])
        made.tier.submit()
        if name == KEYS[0]:
            made.run(lambda: hanging.waiting)
    hanging.release()
    report = made.settle()
    assert sorted(slot.key for slot in report.released) == sorted(KEYS[:10])
    assert [len(names) for verb, names in store.calls if verb == "put"] == calls
    stats = made.tier.stats()
    assert (stats.stores, stats.shed, stats.backlog_bytes) == (10, 0, 0)
    assert made.tier.close(PATIENCE)


def test_stores_in_one_call_have_their_own_outcomes_and_one_that_was_dropped_is_left_out(
    store: FaultyStore, hanging: Hanging
) -> None:
    fill(str(store.url), KEYS[2:3])
    store.plan["put"] = hanging
    made = Bench(store, threads=1)
    for name in KEYS[:5]:
        made.store([name])
        made.tier.submit()
        if name == KEYS[0]:
            made.run(lambda: hanging.waiting)
    dropped = [job for job in made.tier._transit.live if job.keys == KEYS[3:4]]
    assert made.tier._pool.cancel(dropped[0])
    del made.tier._transit.live[dropped[0]]
    hanging.release()
    made.settle()
    assert store.calls == [("put", KEYS[:1]), ("put", [KEYS[1], KEYS[2], KEYS[4]])]
    assert (made.tier.stats().stores, made.tier.stats().exists) == (3, 1)
    assert made.tier.close(PATIENCE)


def test_a_call_that_fails_fails_every_store_in_it(store: FaultyStore, hanging: Hanging) -> None:
    store.plan["put"] = hanging
    made = Bench(store, threads=1)
    for name in KEYS[:4]:
        made.store([name])
        made.tier.submit()
        if name == KEYS[0]:
            made.run(lambda: hanging.waiting)
    store.plan["put"] = failing(OSError(5, "I/O error"))
    hanging.release()
    report = made.settle()
    assert sorted(slot.key for slot in report.released) == sorted(KEYS[:4])
    assert (made.tier.stats().stores, made.tier.stats().failed_stores, made.tier.stats().backlog_bytes) == (1, 3, 0)
    assert made.tier.close(PATIENCE)


def test_touches_reach_the_store_and_do_not_pile_up(store: FaultyStore, bench: Bench, hanging: Hanging) -> None:
    bench.tier.touch(KEYS[:3])
    bench.settle()
    assert store.calls == [("touch", KEYS[:3])]
    store.plan["touch"] = hanging
    for name in KEYS[:20]:
        bench.tier.touch([name])
        bench.tier.submit()
        bench.tier.poll()
    bench.run(lambda: hanging.waiting)
    assert len(store.calls) == 2
    hanging.release()
    bench.settle()
    assert sum(len(names) for verb, names in store.calls[1:]) == 20


def test_what_a_store_made_of_a_block_is_counted_apart(store: FaultyStore, bench: Bench) -> None:
    store.plan["put"] = lambda _: [PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.FULL, PutOutcome.FAILED]
    bench.store(KEYS[:4])
    bench.settle()
    stats = bench.tier.stats()
    assert (stats.stores, stats.exists, stats.full, stats.failed_stores) == (1, 1, 1, 1)
    assert stats.bytes_stored == BLOCK


def test_closing_is_bounded_drops_what_waits_and_leaves_a_store_with_a_stuck_call_open(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch, hanging: Hanging
) -> None:
    monkeypatch.setattr("kvstore.tiering.secondary.open_store", lambda _: store)
    made = Bench("memory://faulty", threads=1)  # type: ignore[arg-type]  # opened by the tier, so closed by it
    store.plan["put"] = hanging
    made.store(KEYS[:1])
    made.run(lambda: hanging.waiting)
    made.store(KEYS[1:3])
    made.tier.submit()
    with within(0.2):
        dropped = made.tier.cancel()
        assert not made.tier.close(0.2)
    assert [slot.key for slot in dropped.released] == KEYS[1:3]
    assert made.tier.stats().shed == 2
    assert made.tier.holds_memory
    assert not store.closed
    hanging.release()
    made.run(lambda: made.report.released)
    assert [slot.key for slot in made.report.released] == KEYS[:1]
    assert made.store(KEYS[5:6]) == [False], "nothing is accepted after the end"
    assert made.tier.close(PATIENCE)
    assert store.closed


def test_a_poll_with_little_time_leaves_what_else_ended_to_the_next(bench: Bench) -> None:
    for key in KEYS[:20]:
        bench.store([key])
        bench.tier.submit()  # each a job of its own
    deadline = time.monotonic() + PATIENCE
    while len(bench.tier._pool._done) < 20:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    reports = [bench.tier.poll(budget=0.0) for _ in range(20)]
    assert [len(report.released) for report in reports] == [1] * 20
    assert bench.tier.idle
