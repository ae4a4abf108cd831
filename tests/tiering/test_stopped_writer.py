"""A process that is stopped (SIGSTOP) while it has the tier's write lock costs stores, and never an engine's step."""

from __future__ import annotations

import logging
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, cast

import pytest
from tiering_helpers import PATIENCE, PROMPT, SPACE, ask, engine_store, fill, keys, managed, writes

from kvstore import LookupResult, PutOutcome, open_store
from kvstore.errors import StoreAccessError, TierUnavailable
from kvstore.testing.patience import wait_for, within, without_processor_s
from kvstore.turns import STOPPED_PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Generator
    from multiprocessing.synchronize import Event
    from pathlib import Path

    from kvstore import BlockStore

SPAWN = get_context("spawn")

pytestmark = pytest.mark.timeout(60)


def write_and_stop(url: str, inside: Event) -> None:
    """Be stopped within a write transaction, and go on as if nothing had happened."""
    with open_store(url) as store:
        with cast("Any", store)._tier.catalog.write():
            inside.set()
            os.kill(os.getpid(), signal.SIGSTOP)
        store.put_many(SPACE, writes(keys(2, "afterwards")))


@contextmanager
def stopped_writer(url: str) -> Generator[int]:
    inside = SPAWN.Event()
    process = SPAWN.Process(target=write_and_stop, args=(url, inside))
    process.start()
    assert process.pid is not None
    try:
        assert inside.wait(30)
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        yield process.pid
        os.kill(process.pid, signal.SIGCONT)
        process.join(30)
    finally:
        if process.is_alive():
            process.kill()
            process.join()


@pytest.fixture(params=["file", "lmdb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}://{tmp_path}/tier"


def test_no_step_waits_blocks_are_read_stores_are_counted_and_it_is_said_once(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="kvstore")
    fill(url, PROMPT[:30])
    with managed(url, primary_slots=64) as manager:
        slowest: list[float] = []
        with stopped_writer(url) as process:
            began, batch = time.monotonic(), 0
            while time.monotonic() - began < STOPPED_PATIENCE_S + 2:
                before = time.perf_counter() - without_processor_s()
                engine_store(manager, keys(4, f"new {batch}"))
                manager.step()
                slowest.append(time.perf_counter() - without_processor_s() - before)
                batch += 1
                time.sleep(0.01)
            assert ask(manager, PROMPT[:30]) == [LookupResult.HIT] * 30
            (stats,) = manager.stats().tiers
            assert stats.stores == 0
            assert stats.failed_stores >= 4
            assert stats.failed_loads == 0
            assert manager.drain(PATIENCE)
        slowest.sort()
        assert slowest[len(slowest) * 99 // 100] < 0.05
        told = [record.getMessage() for record in caplog.records if "held up all writers" in record.getMessage()]
        assert len([text for text in told if "Until then" in text]) == 1
        assert f"process {process}, which is stopped, has held up all writers" in told[0]
        assert f"kill -CONT {process}" in told[0]
        engine_store(manager, keys(4, "recovered"))
        assert manager.drain(PATIENCE)
        assert manager.stats().tiers[0].stores == 4
        assert any("writes again" in record.getMessage() for record in caplog.records)
    with open_store(url) as store:
        assert all(store.contains_many(SPACE, keys(2, "afterwards")))


def test_every_verb_that_writes_ends_in_time_and_says_who_is_in_the_way(url: str) -> None:
    fill(url, PROMPT[:4])
    with open_store(url) as store, stopped_writer(url) as process:
        with (
            within(STOPPED_PATIENCE_S),
            pytest.raises(TierUnavailable, match=f"process {process}, which is stopped"),
        ):
            store.delete_many(SPACE, PROMPT[:1])
        wait_for(
            lambda: seconds_of_eight_touches_and_a_put(store) < STOPPED_PATIENCE_S / 2
        )  # it is known to be stopped
        assert store.contains_many(SPACE, PROMPT[:4]) == [True] * 4


def seconds_of_eight_touches_and_a_put(store: BlockStore) -> float:
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        touching = [pool.submit(store.touch_many, SPACE, PROMPT[:4]) for _ in range(8)]
        try:
            outcomes = store.put_many(SPACE, writes(keys(1, "new")))
        except TierUnavailable:
            outcomes = [PutOutcome.FAILED]
        for touch in touching:
            touch.result()
    assert outcomes == [PutOutcome.FAILED]
    return time.monotonic() - began


def test_who_comes_while_the_writer_is_stopped_is_told_why_it_cannot_open_the_tier(url: str) -> None:
    fill(url, PROMPT[:4])
    with stopped_writer(url) as process:
        with pytest.raises(StoreAccessError, match=f"process {process}, which is stopped"):
            open_store(url)
        with open_store(url, readonly=True) as store:
            assert store.contains_many(SPACE, PROMPT[:4]) == [True] * 4
