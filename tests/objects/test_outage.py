"""An object store that is out of reach, as an engine sees it: misses in time, then nothing at all, then hits again.

Field report 22: an unreachable remote store hangs the engine. The same faults as in the table of the store
(`test_faults.py`), here under a manager, whose circuit breaker turns them into misses.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

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
    keys,
    managed,
    until,
)

from kvstore import open_store
from kvstore.testing.patience import patiently, within
from kvstore.testing.proxy import ANY, FaultProxy, deaf, resetting, silent, slow_down, stalling
from kvstore.tiering import SecondaryTier
from kvstore.tiering.breaker import FAILURES, BreakerState

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    from kvstore.testing.proxy import Fault
    from kvstore.testing.servers import S3Server
    from kvstore.tiering import TieringManager
    from kvstore.types import BlockKey

TIMEOUT = 3.0
"""Seconds, for one request, whatever the fault. What is healthy is waited for."""
NUMBERS = itertools.count()
OPTIONS: dict[str, float] = {"timeout": TIMEOUT, "lookup_ttl": 0}


def planned(fault: Fault) -> Callable[[FaultProxy], AbstractContextManager[None]]:
    """Every request meets it."""

    @contextmanager
    def outage(proxy: FaultProxy) -> Generator[None]:
        proxy.plan[ANY] = fault
        yield
        proxy.plan.clear()

    return outage


OUTAGES: dict[str, Callable[[FaultProxy], AbstractContextManager[None]]] = {
    "black hole": planned(silent),
    "deaf": planned(deaf),
    "reset": planned(resetting()),
    "reset half-way": planned(resetting(1)),
    "stalled": planned(stalling(1)),
    "503 SlowDown": planned(slow_down),
    "cut cable": FaultProxy.unreachable,
    "down": FaultProxy.down,
}


def found(manager: TieringManager, keys: list[BlockKey]) -> bool:
    """Whether all are hits; a busy machine may be late once."""
    manager.forget(keys)
    return ask(manager, keys) == [HIT] * len(keys)


def stores_what_comes(manager: TieringManager) -> bool:
    """Whether new blocks get into the tier; a busy machine may be late once."""
    before = manager.stats().tiers[0].stores
    written = engine_store(manager, keys(2, f"new {next(NUMBERS)}"))
    assert manager.drain(PATIENCE)
    return manager.stats().tiers[0].stores - before == len(written) == 2


@pytest.mark.parametrize("outage", OUTAGES)
def test_an_outage_is_misses_in_time_then_silence_then_hits(
    server: S3Server, place: str, client: str, outage: str
) -> None:
    fill(place, PROMPT[:8])
    with (
        FaultProxy(server.port) as proxy,
        patiently(partial(open_store, place, client=client, endpoint=proxy.endpoint, **OPTIONS), TIMEOUT) as store,
    ):
        tier = SecondaryTier(store, SPACE, lookup_timeout=1.0, pause=0.5)
        with managed(tier, primary_slots=32) as manager:
            until(manager, lambda: found(manager, PROMPT[:2]))
            with OUTAGES[outage](proxy):
                for key in PROMPT[2 : 2 + FAILURES]:
                    with within(TIMEOUT):
                        assert ask(manager, [key]) == [MISS]
                assert manager.stats().tiers[0].breaker is not BreakerState.CLOSED
                with within(2 * TIMEOUT):  # what was under way ends, and what was given up with it
                    until(manager, lambda: not (tier._questions._asking or tier._transit.live))
                proxy.requests.clear()
                with within(1.0):  # nobody waits for a store that is left alone, or it were once for each of 20
                    for number in range(20):
                        assert ask(manager, keys(2, f"later {number}")) == [MISS] * 2
                        engine_store(manager, PROMPT[20:22])
                assert proxy.counts.keys() <= {"GET"}, "probes, and nothing else"
            until(manager, lambda: all_closed(manager))
            until(manager, lambda: found(manager, PROMPT[2:8]))
            until(manager, lambda: stores_what_comes(manager))
