"""The manager with its tiers in processes of their own: all that holds for it, and what becomes of killed ones."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest
import test_manager
from tiering_helpers import (
    BLOCK,
    HIT,
    MISS,
    PATIENCE,
    PROMPT,
    SPACE,
    all_closed,
    ask,
    engine_load,
    engine_store,
    fill,
    hurry,
    intact,
    managed,
    until,
    writes,
)

from kvstore import open_store
from kvstore.apart import StoreApart
from kvstore.errors import ConfigurationError
from kvstore.testing.patience import wait_for, within
from kvstore.tiering import PrimaryTier, SecondaryTier, TieringManager, jobs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.testing.servers import S3Server
    from kvstore.tiering.report import TierReport


@pytest.fixture(params=["file", pytest.param("lmdb", marks=pytest.mark.soak)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}://{tmp_path}/tier"


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every manager of these tests has its tiers apart."""
    defaults = TieringManager.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "io_process", True)


# All tests of the manager that ask for a URL, here once more.
globals().update(
    {
        name: test
        for name, test in vars(test_manager).items()
        if name.startswith("test_") and "url" in inspect.signature(test).parameters
    }
)


@contextlib.contextmanager
def managed_apart(url: str, slots: int, **options: float) -> Iterator[TieringManager]:
    """A manager of one tier apart, which has `options` and rests but shortly where it failed."""
    primary = PrimaryTier(slots, BLOCK, shared=True)
    tier = SecondaryTier(url, SPACE, io_process=True, memory=primary.memory.data, pause=0.05, **options)
    with managed(tier, primary=primary, primary_slots=None) as manager:
        yield manager


def store_of(manager: TieringManager) -> StoreApart:
    store = manager._tiers[0]._store
    assert isinstance(store, StoreApart)
    return store


def process_of(manager: TieringManager) -> int:
    process = store_of(manager).process
    assert process is not None
    return process


def test_the_store_is_in_another_process_and_no_thread_of_this_one_moves_bytes(url: str) -> None:
    with managed(url) as manager:
        assert process_of(manager) != os.getpid()
        ours = {thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore-")}
        assert {name.rpartition("-")[2] for name in ours} == {"link", "sender"}


def test_a_primary_tier_of_private_memory_is_refused_with_what_to_do(url: str) -> None:
    with pytest.raises(ConfigurationError, match="shared=True"):
        TieringManager(SPACE, [url], primary=PrimaryTier(4, BLOCK))
    with managed(url, primary=PrimaryTier(4, BLOCK, shared=True), primary_slots=None) as manager:
        assert manager.store(writes(PROMPT[:4])) == 4


def test_a_sealed_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", os.urandom(32).hex())
    url = f"file://{tmp_path}/tier?encryption=env:KEY&keyring={tmp_path}/ring"
    with managed(url, primary_slots=64) as manager:
        manager.store(writes(PROMPT))
    with managed(url) as manager:
        assert engine_load(manager, PROMPT) == 60
    with open_store(url) as store:
        assert all(intact(store, PROMPT))


def test_kills_while_blocks_come_and_go_cost_blocks_and_nothing_else(url: str) -> None:
    fill(url, PROMPT[:30])
    with managed_apart(url, 8) as manager:
        over, killed = threading.Event(), list[int]()

        def kill() -> None:
            while not over.wait(random.uniform(0.0, 0.1)):
                process = store_of(manager).process
                if process is not None and process not in killed:
                    time.sleep(random.uniform(0.0, 0.1))
                    os.kill(process, signal.SIGKILL)
                    killed.append(process)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            for number in range(200):
                engine_load(manager, PROMPT[:30])  # checks bytes
                engine_store(manager, PROMPT[30 + number % 25 :][:5])
                if len(killed) >= 4:
                    break
        finally:
            over.set()
            killer.join()
        until(manager, lambda: all_closed(manager))
        assert len(killed) >= 2
        assert manager.stats().tiers[0].failed_calls > 0
        manager.forget(PROMPT)
        until(manager, lambda: engine_load(manager, PROMPT[:30]) == 30)
    with open_store(url) as store:
        assert all(intact(store, PROMPT[:30]))
        intact(store, PROMPT[30:])


def test_a_process_that_hangs_costs_a_time_out_and_its_slots_are_free_once_it_is_killed(url: str) -> None:
    fill(url, PROMPT[:8])
    with managed_apart(url, 4) as manager:
        until(manager, lambda: manager.lookup(PROMPT[:8])[:4] == [HIT] * 4 and not manager._promotions.asking)
        process, tier = process_of(manager), manager._tiers[0]
        os.kill(process, signal.SIGSTOP)
        hurry(tier)
        assert engine_load(manager, PROMPT[:8]) == 4, "the loads of the others hang"
        assert tier.holds_memory
        with within(0.2):
            assert ask(manager, PROMPT[8:12]) == [MISS] * 4
        hurry(tier, seconds=PATIENCE)
        os.kill(process, signal.SIGKILL)
        until(manager, lambda: all_closed(manager) and not tier.holds_memory)
        manager.forget(PROMPT)
        assert engine_load(manager, PROMPT[:8]) == 8


def test_a_load_into_a_slot_holds_it_until_the_process_that_hangs_is_gone(url: str) -> None:
    fill(url, PROMPT[:4])
    with managed_apart(url, 4, load_timeout=0.2) as manager:
        tier, primary, process = manager._tiers[0], manager.primary, process_of(manager)
        slots = [primary.reserve(key, BLOCK) for key in PROMPT[:4]]
        os.kill(process, signal.SIGSTOP)
        for slot in slots:
            assert slot is not None
            tier.load(slot)
        tier.submit()
        reports: list[TierReport] = []

        def came(kind: str) -> bool:
            reports.append(tier.poll())
            return any(getattr(report, kind) for report in reports)

        wait_for(lambda: came("overdue"))
        assert not came("released")
        assert tier.holds_memory
        os.kill(process, signal.SIGKILL)
        wait_for(lambda: came("released") and not tier.holds_memory)
        assert {slot for report in reports for slot in report.released} == set(slots)
        for slot in slots:
            assert slot is not None
            primary.discard(slot)
            primary.unpin(slot)


def test_closing_beside_a_process_that_hangs_is_bounded_and_leaves_no_slot_lent(url: str) -> None:
    fill(url, PROMPT[:4])
    manager = TieringManager(SPACE, [url], primary_slots=4)
    process = process_of(manager)
    until(manager, lambda: MISS not in manager.lookup(PROMPT[:4]) and manager._promotions.asking == 0)
    os.kill(process, signal.SIGSTOP)
    engine_store(manager, PROMPT[10:12])
    manager.step()
    with within(7.0):
        manager.close(timeout=1.0)  # and raises no ShutdownTimeout
    assert not any(tier.holds_memory for tier in manager._tiers)


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server.url(tmp_path.name)


def test_no_block_of_a_bucket_is_copied_by_this_process(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: object) -> None:
        raise AssertionError("that was for the process of the tier")

    monkeypatch.setattr(jobs.Verb, "made", made)
    monkeypatch.setattr(jobs.Copy, "made", made)
    with managed(bucket, primary_slots=64) as manager:
        assert manager.store(writes(PROMPT)) == 60
    with managed(bucket) as manager:
        assert engine_load(manager, PROMPT) == 60
        assert manager.stats().tiers[0].loads == 60
