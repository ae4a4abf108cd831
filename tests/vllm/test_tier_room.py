"""Stores hold the rows of primary memory that a request needs: it waits for them, for a while, and is not computed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from driver import Driver, Request, keys, kvstore_tier
from vllm.v1.kv_offload.base import LookupResult

from kvstore import open_store
from kvstore.testing.faults import FaultyStore, Hanging
from kvstore.testing.patience import PATIENCE, within
from kvstore.vllm import tier

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT, OTHERS = keys(6), keys(4, "others")
HIT, MISS = LookupResult.HIT, LookupResult.MISS
ROWS = 8  # the prompt, or the others, and not both


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    """A local store, which writes from primary memory itself."""
    store = FaultyStore(open_store("memory://room"), can_hang=False)
    monkeypatch.setattr("kvstore.tiering.secondary.open_store", lambda _url: store)
    return store


@pytest.fixture
def engine(store: FaultyStore, hanging: Hanging) -> Iterator[Driver]:
    """The prompt is in the tier alone, and four of eight rows are held by stores that do not end."""
    with Driver([kvstore_tier("memory://room")], rows=ROWS) as engine:
        engine.store(PROMPT)
        engine.evict_all()
        store.plan["put"] = hanging
        writer = engine.arrive(OTHERS)
        engine.complete_store(writer, engine.prepare_store(writer) or [])
        engine.until(lambda: hanging.waiting)
        yield engine
        hanging.release()
        engine.settle()


def test_a_request_waits_for_stores_that_hold_the_rows_for_its_blocks(
    engine: Driver, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "STORE_PATIENCE", PATIENCE)
    request = asked(engine)
    for _ in range(100):
        assert engine.lookup(request) == [LookupResult.RETRY] * len(PROMPT)
        engine.step()
    hanging.release()
    assert engine.until(lambda: engine.final(request)) == [HIT] * len(PROMPT)


def test_it_does_not_wait_for_ever(engine: Driver) -> None:
    request = asked(engine)
    begin = time.monotonic()
    with within(tier.STORE_PATIENCE):
        answers = engine.until(lambda: engine.final(request))
    assert MISS in answers, "there are not enough rows"
    assert time.monotonic() - begin >= tier.STORE_PATIENCE / 2


def test_a_request_with_room_enough_does_not_wait(engine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "STORE_PATIENCE", PATIENCE)
    begin = time.monotonic()
    assert engine.load(PROMPT[:4]) == 4
    assert time.monotonic() - begin < PATIENCE / 2


def asked(engine: Driver) -> Request:
    """A request for the prompt, of which the tier has said that all of it is there."""
    request = engine.arrive(PROMPT)
    verdicts = engine.tiers[0]._lookups
    engine.lookup(request)
    engine.step()
    engine.until(lambda: engine.lookup(request) is not None and not verdicts.waiting)
    return request
