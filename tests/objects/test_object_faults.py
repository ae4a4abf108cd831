"""The fault table of a single store: each fault on each verb with each client ends in time, and in the right outcome.

Field report 22: an unreachable remote store hangs the engine. Every verb here returns or raises `TierUnavailable`
within `timeout`, no wrong byte is a hit, and the first request after the fault is served. What a tier makes of
`TierUnavailable` is tested with the circuit breaker.
"""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvstore import open_store
from kvstore.errors import StoreOpenError, TierUnavailable
from kvstore.testing.patience import PATIENCE, patiently, wait_for, within
from kvstore.testing.proxy import (
    ANY,
    FaultProxy,
    answering,
    cutting,
    deaf,
    flipping,
    resetting,
    silent,
    slow_down,
    stalling,
    times,
    truncating,
    unanswered,
)
from kvstore.testing.supply import SPACE, get, key, keys, write, writes
from kvstore.types import GetOutcome, PutOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from kvstore import BlockStore
    from kvstore.testing.proxy import Fault
    from kvstore.testing.servers import S3Server

HIT, MISS, CORRUPT = GetOutcome.HIT, GetOutcome.MISS, GetOutcome.CORRUPT
STORED, EXISTS = PutOutcome.STORED, PutOutcome.EXISTS
TIMEOUT = 1.6
"""Seconds, for stores that meet a fault that does not pass: it is waited for. What is healthy is done `patiently`."""
GRACE = 1.5
"""Within it every request ends, once at least in several tries: a busy machine may be late, and not each time."""
SAME_FOLDER = next(number for number in range(100, 9999) if key(number).digest[0] == key(0).digest[0])

VERBS: dict[str, Callable[[BlockStore], object]] = {
    "PUT": lambda store: store.put_many(SPACE, [write(SAME_FOLDER)]),
    "GET": lambda store: get(store, [0]),
    "HEAD": lambda store: store.contains_many(SPACE, keys([0])),
    "LIST": lambda store: [info.key for info in store.scan_ages(SPACE)],  # what a look-up does: `test_lookup`
}
RIGHT: dict[str, object] = {
    "PUT": [STORED],
    "GET": [HIT],
    "HEAD": [True],
    "LIST": [key(0)],
}
LASTING: dict[str, Fault] = {
    "black hole": silent,
    "deaf": deaf,
    "reset at once": resetting(),
    "reset half-way": resetting(100),
    "stalled half-way": stalling(100),
    "truncated": truncating(100),
    "cut upload": cutting(100),
    "503 SlowDown": slow_down,
    "500 InternalError": answering(500, "InternalError"),
}
HARMLESS = {(verb, fault) for verb in ("HEAD", "PUT") for fault in ("reset half-way", "stalled half-way", "truncated")}
"""Where the fault has nothing to bite on: an answer without a body."""


@pytest.mark.parametrize("fault", LASTING)
@pytest.mark.parametrize("verb", VERBS)
def test_a_fault_ends_in_time_and_is_over_when_it_is_over(
    server: S3Server, place: str, client: str, verb: str, fault: str
) -> None:
    with open_store(place) as store:
        store.put_many(SPACE, [write(0)])
    with (
        FaultProxy(server.port) as proxy,
        hurried(place, client, proxy) as store,
    ):
        patiently(partial(store.put_many, SPACE, [write(0)]), TIMEOUT)  # so that the documents are known
        ask = partial(VERBS[verb], store)
        proxy.plan[verb] = LASTING[fault]
        if (verb, fault) in HARMLESS:
            assert patiently(ask, TIMEOUT) in (RIGHT[verb], [EXISTS])
        else:
            wait_for(lambda: seconds_until_given_up(ask, re.escape(place)) < TIMEOUT + GRACE)
        proxy.plan.clear()
        proxy.hang_up()  # connections that are kept and lead nowhere
        assert patiently(ask, TIMEOUT) in (RIGHT[verb], [EXISTS])
        assert patiently(partial(get, store, [0]), TIMEOUT) == [HIT]


def test_a_server_that_says_nothing_is_waited_for_as_long_as_the_store_was_told(
    server: S3Server, place: str, client: str
) -> None:
    """One attempt, which is given three quarters of the time."""
    with open_store(place) as store:
        store.put_many(SPACE, [write(0)])
    with (
        FaultProxy(server.port) as proxy,
        hurried(place, client, proxy, timeout=4.0) as patient,
        hurried(place, client, proxy, timeout=0.6) as hasty,
    ):
        for store, timeout in ((patient, 4.0), (hasty, 0.6)):
            assert patiently(partial(get, store, [0]), timeout) == [HIT]
        proxy.plan["GET"] = silent
        assert seconds_until_given_up(partial(get, patient, [0])) >= 3.0
        wait_for(lambda: 0.4 <= seconds_until_given_up(partial(get, hasty, [0])) < 1.2)


def seconds_until_given_up(ask: Callable[[], object], told: str | None = None) -> float:
    began = time.monotonic()
    with pytest.raises(TierUnavailable, match=told):
        ask()
    return time.monotonic() - began


@contextmanager
def hurried(place: str, client: str, proxy: FaultProxy, timeout: float = TIMEOUT) -> Generator[BlockStore]:
    """A store that is to meet a fault."""
    opening = partial(open_store, place, client=client, endpoint=proxy.endpoint, timeout=timeout, lookup_ttl=0)
    with patiently(opening, timeout) as store:
        yield store


PASSING: dict[str, Fault] = {
    "one reset": times(1, resetting()),
    "one 503": times(1, slow_down),
    "two 503": times(2, slow_down),
    "one truncated": times(1, truncating(100)),
}


@pytest.mark.parametrize("fault", PASSING)
@pytest.mark.parametrize("verb", VERBS)
def test_a_fault_that_passes_is_not_noticed(server: S3Server, place: str, client: str, verb: str, fault: str) -> None:
    with open_store(place) as store:
        store.put_many(SPACE, [write(0)])
    with (
        FaultProxy(server.port) as proxy,
        open_store(place, client=client, endpoint=proxy.endpoint, timeout=PATIENCE, lookup_ttl=0) as store,
    ):
        store.put_many(SPACE, [write(0)])
        proxy.plan[verb] = PASSING[fault]
        assert VERBS[verb](store) == RIGHT[verb]


def test_there_is_one_layer_of_retries(server: S3Server, place: str, client: str) -> None:
    with open_store(place) as store:
        store.put_many(SPACE, [write(0)])
    with (
        FaultProxy(server.port) as proxy,
        open_store(place, client=client, endpoint=proxy.endpoint, timeout=PATIENCE) as store,
    ):
        proxy.plan["GET"] = slow_down
        before = proxy.counts
        with pytest.raises(TierUnavailable):
            get(store, [0])
        assert proxy.counts - before == {"GET": 3}


def test_a_put_whose_answer_was_lost_is_there_once(server: S3Server, place: str, client: str) -> None:
    with (
        FaultProxy(server.port) as proxy,
        open_store(place, client=client, endpoint=proxy.endpoint, timeout=PATIENCE) as store,
    ):
        store.put_many(SPACE, [write(0)])
        proxy.plan["PUT"] = times(1, unanswered)
        assert store.put_many(SPACE, [write(SAME_FOLDER)]) == [EXISTS]
        assert get(store, [SAME_FOLDER]) == [HIT]


def test_a_bit_that_flips_on_the_way_is_read_again_and_costs_no_block(
    server: S3Server, place: str, client: str
) -> None:
    with open_store(place) as store:
        store.put_many(SPACE, [write(0)])
    with (
        FaultProxy(server.port) as proxy,
        open_store(place, client=client, endpoint=proxy.endpoint, timeout=PATIENCE) as store,
    ):
        proxy.plan["GET"] = times(1, flipping(5000))
        assert get(store, [0]) == [HIT]
        proxy.plan["GET"] = flipping(5000)
        assert get(store, [0]) == [CORRUPT]


def test_a_bit_that_flips_while_it_is_stored_is_found(server: S3Server, place: str, client: str) -> None:
    with (
        FaultProxy(server.port) as proxy,
        open_store(place, client=client, endpoint=proxy.endpoint, timeout=PATIENCE) as store,
    ):
        store.put_many(SPACE, [write(0)])
        proxy.plan["PUT"] = flipping(5000, upload=True)
        stored = store.put_many(SPACE, [write(SAME_FOLDER)])  # a server that checks what it is sent refuses
        assert stored in ([STORED], [PutOutcome.FAILED])
        assert get(store, [SAME_FOLDER]) == [CORRUPT if stored == [STORED] else MISS]


def test_a_server_behind_a_cut_cable_is_given_up_in_time_and_found_again(
    server: S3Server, place: str, client: str
) -> None:
    with (
        FaultProxy(server.port) as proxy,
        hurried(place, client, proxy) as store,
    ):
        patiently(partial(store.put_many, SPACE, [write(0)]), TIMEOUT)
        with proxy.unreachable():
            for verb in VERBS.values():
                ask = partial(verb, store)
                wait_for(lambda ask=ask: seconds_until_given_up(ask) < TIMEOUT + GRACE)
        found = partial(get, store, [0])
        assert patiently(found, TIMEOUT) == [HIT]
        with proxy.down(), pytest.raises(TierUnavailable):
            found()
        assert patiently(found, TIMEOUT) == [HIT]


def test_opening_a_black_hole_is_refused_in_time(server: S3Server, place: str, client: str) -> None:
    with FaultProxy(server.port) as proxy:
        proxy.plan[ANY] = silent
        with within(2 * TIMEOUT), pytest.raises(StoreOpenError, match=r"no answer in time|cannot be reached"):
            open_store(place, client=client, endpoint=proxy.endpoint, timeout=TIMEOUT)


def test_a_batch_of_which_one_request_fails_says_nothing_of_the_blocks(
    server: S3Server, place: str, client: str
) -> None:
    with (
        FaultProxy(server.port) as proxy,
        open_store(place, client=client, endpoint=proxy.endpoint, timeout=PATIENCE) as store,
    ):
        store.put_many(SPACE, writes(range(12)))
        proxy.plan["GET"] = times(4, slow_down, then=slow_down)
        with pytest.raises(TierUnavailable):
            get(store, range(12))
        proxy.plan.clear()
        assert get(store, range(12)) == [HIT] * 12
