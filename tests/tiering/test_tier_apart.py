"""A tier on a store in a process of its own: jobs that fail as they begin, and which thread makes their messages."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest
from tiering_helpers import BLOCK, PATIENCE, SPACE, content, fill, keys

from kvstore.apart import StoreApart
from kvstore.tiering import PrimaryTier, SecondaryTier
from kvstore.tiering.jobs import FEW
from kvstore.tiering.pool_apart import PoolApart

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore import BlockKey
    from kvstore.tiering.jobs import TierJob
    from kvstore.tiering.primary import Slot

THREADS = 2


class Opened:
    """A tier on a `StoreApart` that stays the test's, and slots to load into."""

    def __init__(self, url: str, slots: int) -> None:
        self.store = StoreApart(url)
        self.primary = PrimaryTier(slots, BLOCK, shared=True)
        self.tier = SecondaryTier(self.store, SPACE, threads=THREADS, memory=self.primary.memory.data, load_timeout=30)

    def reserve(self, names: Sequence[BlockKey]) -> list[Slot]:
        slots = [self.primary.reserve(name, BLOCK) for name in names]
        return [slot for slot in slots if slot is not None]

    def load(self, names: Sequence[BlockKey]) -> None:
        for slot in self.reserve(names):
            self.tier.load(slot)
        self.tier.submit()

    def save(self, names: Sequence[BlockKey]) -> None:
        for slot in self.reserve(names):
            slot.view[:] = content(slot.key)
            assert self.tier.store(slot)
        self.tier.submit()

    def collect(self, count: int) -> tuple[int, int]:
        """Poll until that many loads came back: how many loaded and failed."""
        loaded = failed = 0
        deadline = time.monotonic() + PATIENCE
        while loaded + failed < count or self.tier.holds_memory:
            assert time.monotonic() < deadline, (loaded, failed)
            report = self.tier.poll()
            loaded, failed = loaded + len(report.loaded), failed + len(report.failed)
            time.sleep(0.001)
        return loaded, failed


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/tier"


@pytest.mark.parametrize("blocks", [1, FEW + 1])
def test_queued_loads_of_a_store_that_is_closed_fail_once_each(
    blocks: int, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.apart.store.CLOSE_S", 0.2)
    opened = Opened(url, 400 * blocks)
    os.kill(opened.store.process or 0, signal.SIGSTOP)
    names = keys(400 * blocks)
    for first in range(0, len(names), blocks):
        opened.load(names[first : first + blocks])
    opened.store.close()
    assert opened.collect(len(names)) == (0, len(names))
    assert not opened.tier.poll().failed
    opened.tier.close(PATIENCE)


@pytest.mark.parametrize("blocks", [FEW, FEW + 1])
def test_loads_from_a_store_that_was_closed_give_their_slots_back(blocks: int, url: str) -> None:
    opened = Opened(url, blocks)
    opened.store.close()
    opened.load(keys(blocks))
    assert opened.collect(blocks) == (0, blocks)
    opened.tier.close(PATIENCE)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """The thread on which each call's message was made, and about how many blocks it was."""
    noted: list[tuple[str, float]] = []
    begin = PoolApart._begin

    def noting(pool: PoolApart[TierJob], jobs: Sequence[TierJob]) -> None:
        noted.append((threading.current_thread().name, sum(job.about for job in jobs)))
        begin(pool, jobs)

    monkeypatch.setattr(PoolApart, "_begin", noting)
    return noted


@pytest.mark.parametrize(("blocks", "thread"), [(FEW, "MainThread"), (FEW + 1, "kvstore-file-sender")])
def test_messages_of_many_blocks_are_made_by_a_thread(
    blocks: int, thread: str, url: str, begun: list[tuple[str, float]]
) -> None:
    fill(url, keys(blocks))
    opened = Opened(url, blocks)
    opened.load(keys(blocks))
    assert opened.collect(blocks) == (blocks, 0)
    assert begun == [(thread, blocks)]
    opened.tier.close(PATIENCE)
    opened.store.close()


def test_stores_that_go_together_are_many_blocks(url: str, begun: list[tuple[str, float]]) -> None:
    opened = Opened(url, 20)
    names = keys(20)
    os.kill(opened.store.process or 0, signal.SIGSTOP)
    for first in range(0, 20, 5):
        opened.save(names[first : first + 5])
    os.kill(opened.store.process or 0, signal.SIGCONT)
    opened.collect(0)
    assert begun[1:] == [("kvstore-file-sender", 15)]
    opened.tier.close(PATIENCE)
    assert opened.store.contains_many(SPACE, names) == [True] * 20
    opened.store.close()
