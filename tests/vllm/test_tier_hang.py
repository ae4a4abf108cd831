"""A backend that hangs for ever behind vLLM's manager: who is released, who waits, and whose memory it is."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from driver import Driver, Request, keys, kvstore_tier
from tiering_helpers import hurry
from vllm.v1.kv_offload.base import LookupResult

from kvstore import open_store
from kvstore.errors import ShutdownTimeout
from kvstore.testing.faults import FaultyStore, Hanging, failing
from kvstore.testing.patience import GRACE, PATIENCE, within

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = keys(6)
HIT, MISS = LookupResult.HIT, LookupResult.MISS
TIER = kvstore_tier("memory://hang", load_timeout=PATIENCE, lookup_timeout=PATIENCE)
TIMEOUT = 0.3
"""Seconds after which calls are given up in the time of a fault (`hurry`): nothing healthy is to meet it."""
CALL_LIMIT = 200e-6


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FaultyStore:
    """What the next tier opens, whatever its URL; parametrised indirectly with whether it can hang on a network."""
    store = FaultyStore(open_store("memory://hang"), can_hang=getattr(request, "param", True))
    monkeypatch.setattr("kvstore.tiering.secondary.open_store", lambda _url: store)
    return store


BOTH = pytest.mark.parametrize("store", [True, False], indirect=True, ids=["network", "local"])
LOCAL = pytest.mark.parametrize("store", [False], indirect=True, ids=["local"])


def cold(engine: Driver) -> None:
    """The prompt is in the tier and nowhere else."""
    engine.store(PROMPT)
    engine.evict_all()


def stuck(engine: Driver, store: FaultyStore, hanging: Hanging, verb: str = "get") -> Request:
    """A request for the prompt, whose load (or whatever else of its calls) hangs."""
    cold(engine)
    store.plan[verb] = hanging
    request = engine.arrive(PROMPT)
    engine.until(lambda: engine.final(request) or hanging.waiting)
    hurried(engine)
    return request


def hurried(engine: Driver) -> None:
    """What hangs is given up soon."""
    hurry(*(tier._tier for tier in engine.tiers), seconds=TIMEOUT)


def quick(engine: Driver) -> None:
    """No call has waited for the backend, whose every call takes longer than a time-out. (How quick they are at the
    p99 is measured where nothing else runs: `benchmarks/vllm_tier.py --hang`.)
    """
    slow = engine.slow_calls()
    assert len(slow) > 200
    assert slow[len(slow) // 2] <= CALL_LIMIT
    assert slow[-4] < TIMEOUT / 2, f"the slowest of {len(slow)} calls: {slow[-5:]}"
    assert slow[-1] < GRACE, "others may have the processor for a while; a hang has no end"


def busy(engine: Driver, until: Callable[[], bool]) -> None:
    """Other requests come and go, in primary memory, until something has happened."""
    deadline = time.monotonic() + PATIENCE
    names = keys(1, "other")
    while not until():
        assert time.monotonic() < deadline
        request = engine.arrive(names)
        written = engine.prepare_store(request)
        engine.step()
        engine.complete_store(request, written or [])
        assert engine.lookup(request) == [HIT]
        assert engine.read(request, names) == []
        engine.finish(request)


def test_a_request_behind_a_load_that_hangs_is_released_and_others_go_on(store: FaultyStore, hanging: Hanging) -> None:
    with Driver([TIER], rows=16) as engine:
        request = stuck(engine, store, hanging)
        with within(TIMEOUT):
            busy(engine, lambda: engine.final(request) == [MISS])
        written = engine.prepare_store(request)
        assert written == PROMPT, "its rows are free: it is computed"
        engine.complete_store(request, written)
        engine.step()
        quick(engine)
        before = engine.rows.copy()
        hanging.release()
        time.sleep(0.05)
        assert np.array_equal(engine.rows, before), "what came too late touches nothing"


def test_a_late_load_does_not_touch_rows_that_belong_to_others(store: FaultyStore, hanging: Hanging) -> None:
    with Driver([TIER], rows=6) as engine:
        request = stuck(engine, store, hanging)
        engine.until(lambda: engine.final(request))
        engine.finish(request)
        engine.store(keys(6, "b"))
        hanging.release()
        engine.until(lambda: not hanging.waiting)
        time.sleep(0.05)
        assert engine.load(keys(6, "b")) == 6


@BOTH
def test_lookups_that_hang_are_misses(store: FaultyStore, hanging: Hanging) -> None:
    with Driver([TIER], rows=16) as engine:
        cold(engine)
        store.plan["contains"] = hanging
        hurried(engine)
        with within(TIMEOUT):
            assert engine.load(PROMPT) == 0
        hurry(engine.tiers[0]._tier, seconds=PATIENCE)
        with within(0):
            assert engine.load(keys(6, "c")) == 0, "nobody waits for it a second time"
        quick(engine)
        hanging.release()


def test_stores_that_hang_do_not_fill_primary_memory(store: FaultyStore, hanging: Hanging) -> None:
    with Driver([{**TIER, "staging": 16 * 8192}], rows=8) as engine:
        store.plan["put"] = hanging
        for number in range(40):
            assert engine.store(keys(4, f"prompt {number}")) == 4
        stats = engine.tiers[0]._tier.stats()
        assert stats.shed > 0
        quick(engine)
        hanging.release()


@LOCAL
def test_local_stores_that_hang_are_shed_beyond_the_backlog(store: FaultyStore, hanging: Hanging) -> None:
    with Driver([{**TIER, "backlog": 4 * 8192, "threads": 1}], rows=16) as engine:
        store.plan["put"] = hanging
        for number in range(6):
            request = engine.arrive(keys(4, f"prompt {number}"))
            written = engine.prepare_store(request)
            assert written is not None, "rows are left"
            engine.complete_store(request, written)
            engine.step()
        assert engine.tiers[0]._tier.stats().shed >= 16
        hanging.release()
        engine.settle()


@LOCAL
def test_a_read_stuck_in_the_kernel_keeps_its_rows_and_other_requests_go_on(
    store: FaultyStore, hanging: Hanging
) -> None:
    with Driver([TIER], rows=16) as engine:
        request = stuck(engine, store, hanging)
        begin = time.monotonic()
        busy(engine, lambda: time.monotonic() - begin > 2 * TIMEOUT)
        assert engine.final(request) is None, "its rows may be written to at any time: they are nobody else's"
        quick(engine)
        hanging.release()
        assert engine.until(lambda: engine.final(request)) == [MISS], "too late to be believed"


@LOCAL
def test_blocks_of_a_local_load_that_is_overdue_are_misses_before_it_ends(store: FaultyStore, hanging: Hanging) -> None:
    """The tier is asked itself: vLLM's manager asks nobody about a block that is on its way into primary memory."""
    with Driver([TIER], rows=16) as engine:
        request = stuck(engine, store, hanging)
        engine.until(lambda: engine.tiers[0].lookup(PROMPT[0], request.context) is MISS)
        assert hanging.waiting
        hanging.release()


def test_a_reset_waits_for_a_network_no_longer_than_a_load_may(store: FaultyStore, hanging: Hanging) -> None:
    with Driver([TIER], rows=16) as engine:
        stuck(engine, store, hanging)
        store.plan["put"] = hanging
        engine.store(keys(2, "b"))
        with within(TIMEOUT):
            engine.reset_cache()
        hanging.release()


@LOCAL
def test_a_reset_waits_for_a_read_stuck_in_the_kernel_and_says_so(
    store: FaultyStore, hanging: Hanging, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvstore.vllm.tier.PATIENCE", 0.1)
    with Driver([TIER], rows=16) as engine:
        stuck(engine, store, hanging)
        threading.Timer(0.5, hanging.release).start()
        begin = time.monotonic()
        with within(0.5):
            engine.reset_cache()
        assert time.monotonic() - begin > 0.3
        assert "waiting for transfers that hold primary memory" in caplog.text


@pytest.mark.parametrize("verb", ["get", "put", "contains"])
def test_shutdown_ends_within_its_bound_while_a_network_hangs(
    verb: str, store: FaultyStore, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.vllm.tier.SHUTDOWN_TIMEOUT", 0.4)
    with Driver([TIER], rows=16) as engine:
        stuck(engine, store, hanging, verb)
        if verb == "put":
            engine.store(keys(2, "b"))
        with within(0.4):
            engine.shutdown()
        assert not engine.leftovers, "primary memory was given back"
        hanging.release()


@LOCAL
def test_shutdown_raises_while_a_local_read_holds_rows_and_their_memory_stays(
    store: FaultyStore, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.vllm.tier.SHUTDOWN_TIMEOUT", 0.4)
    with Driver([TIER], rows=16) as engine:
        stuck(engine, store, hanging)
        with within(0.4), pytest.raises(ShutdownTimeout, match="must stay mapped"):
            engine.shutdown()
        assert engine.leftovers, "vLLM has kept its mapping"
        hanging.release()
        time.sleep(0.1)  # the read lands in memory that is still there
        engine.shutdown()
        assert not engine.leftovers


@BOTH
def test_a_backend_that_fails_at_everything_is_a_tier_without_blocks(store: FaultyStore) -> None:
    with Driver([TIER], rows=8) as engine:
        cold(engine)
        store.plan.update(dict.fromkeys(("get", "put", "contains", "touch"), failing(RuntimeError("a bug"))))
        assert engine.load(PROMPT) == 0
        assert engine.store(PROMPT) == 6
        assert engine.load(PROMPT) == 6, "from primary memory"


def test_a_second_tier_serves_while_the_first_hangs(
    store: FaultyStore, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = iter([store, open_store("memory://well")])
    monkeypatch.setattr("kvstore.tiering.secondary.open_store", lambda _url: next(stores))
    with Driver([TIER, TIER], rows=16) as engine:
        cold(engine)
        store.plan.update(contains=hanging, get=hanging, put=hanging)
        hurry(engine.tiers[0]._tier, seconds=TIMEOUT)
        assert engine.load(PROMPT) == 6
        hanging.release()
