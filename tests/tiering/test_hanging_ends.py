"""Closing over calls that hang: bounded, and the memory goes or stays as it must.

Field report 18: shutdown waits for ever, or frees memory under running I/O.
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING

import pytest
from hanging_helpers import impatient
from tiering_helpers import HIT, MISS, PATIENCE, PROMPT, SPACE, ask, content, engine_store, fill, intact, managed, until

from kvstore.errors import ShutdownTimeout
from kvstore.layout import as_bytes
from kvstore.testing.faults import FaultyStore, Hanging, slow
from kvstore.testing.patience import wait_for, within
from kvstore.tiering import TieringManager
from kvstore.tiering.jobs import CopyOut

if TYPE_CHECKING:
    from kvstore import GetOutcome
    from kvstore.testing.faults import Call


@pytest.mark.parametrize("verbs", [("get",), ("put",), ("get", "put", "contains", "touch")])
def test_closing_a_tier_with_calls_that_hang_on_a_network_is_bounded_and_lets_the_memory_go(
    remote: FaultyStore, hanging: Hanging, verbs: tuple[str, ...]
) -> None:
    """Field report 18: nothing to raise about, since no call can touch the primary tier."""
    fill(str(remote.url), PROMPT[:4])
    manager = TieringManager(SPACE, [impatient(remote, load_timeout=PATIENCE)], primary_slots=8)
    manager.lookup(PROMPT[:2])
    assert ask(manager, PROMPT[:2]) == [HIT] * 2
    remote.plan.update(dict.fromkeys(verbs, hanging))
    engine_store(manager, PROMPT[10:14])
    manager.lookup(PROMPT[2:4])
    manager.touch(PROMPT[:2])
    until(manager, lambda: hanging.waiting)
    with within(1.0):
        manager.close(timeout=1.0)
    assert manager.stats().primary.pinned == 0
    pool = weakref.ref(manager.primary.memory)
    del manager
    gc.collect()
    assert hanging.waiting, "the calls are still there"
    assert pool() is None, "and have nothing of the primary tier"


def test_closing_lets_stores_finish_that_are_on_their_way_through_staging(remote: FaultyStore) -> None:
    remote.plan["put"] = slow(0.02)
    with managed(impatient(remote, load_timeout=PATIENCE), primary_slots=32) as manager:
        assert engine_store(manager, PROMPT[:12]) == PROMPT[:12]
    assert intact(remote.inner, PROMPT[:12]) == [True] * 12


def test_a_store_that_is_being_copied_when_its_tier_is_closed_keeps_its_slot_until_then_and_is_shed(
    remote: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report 18: a copy ends by itself; until it has, its slot is in use, and that is said."""
    begun, go_on, copy = threading.Event(), threading.Event(), CopyOut.work

    def copy_late(job: CopyOut) -> None:
        begun.set()
        go_on.wait(PATIENCE)
        copy(job)

    monkeypatch.setattr(CopyOut, "work", copy_late)
    manager = TieringManager(SPACE, [impatient(remote)], primary_slots=4)
    assert engine_store(manager, PROMPT[:2]) == PROMPT[:2]
    until(manager, begun.is_set)
    with pytest.raises(ShutdownTimeout):
        manager.close(timeout=0.2)
    go_on.set()
    until(manager, lambda: manager.stats().primary.pinned == 0)
    stats = manager.stats().tiers[0]
    assert (stats.shed, stats.stores, stats.backlog_bytes, stats.staging_bytes) == (2, 0, 0, 0)


def test_closing_with_a_local_load_that_holds_memory_raises_in_time_and_the_memory_stays(
    local: FaultyStore, hanging: Hanging
) -> None:
    """Field report 18: a read stuck in the kernel cannot be killed, so its slot and the pool stay as they are."""
    fill(str(local.url), PROMPT)
    late: list[int] = []

    def read_late(call: Call) -> list[GetOutcome]:
        outcomes: list[GetOutcome] = call.answer()
        late.append(int(as_bytes(call.blocks[0].into)[0]))
        return outcomes

    hanging.then = read_late
    local.plan["get"] = hanging
    manager = TieringManager(SPACE, [local], primary_slots=4)
    manager.lookup(PROMPT[:1])
    until(manager, lambda: hanging.waiting)
    assert not manager.drain(0.1)
    with within(0.3), pytest.raises(ShutdownTimeout, match="memory://local"):
        manager.close(timeout=0.3)
    manager.close()
    pool = weakref.ref(manager.primary.memory)
    del manager
    gc.collect()
    assert pool() is not None, "the transfer may still write into it"
    hanging.release()
    wait_for(lambda: gc.collect() >= 0 and pool() is None)  # it goes with the transfer that held it
    assert late == [int(content(PROMPT[0])[0])], "and the late write hit memory that was still there"


def test_a_local_load_that_hangs_keeps_its_slot_is_never_reported_and_its_request_is_released(
    local: FaultyStore, hanging: Hanging
) -> None:
    """Field reports 15 and 18."""
    fill(str(local.url), PROMPT)
    local.plan["get"] = hanging
    with managed(impatient(local)) as manager:
        with within(0.2):
            assert ask(manager, PROMPT[:4]) == [MISS] * 4
        assert manager.stats().primary.free == 0, "the dead load still owns its slots"
        assert engine_store(manager, PROMPT[:4]) == []
        assert manager.stats().tiers[0].staging_bytes == 0
        local.plan.clear()
        hanging.release()
        until(manager, lambda: manager.stats().primary.free == 4)
        assert manager.lookup(PROMPT[:4]) == [MISS] * 4, "what arrived too late is not reported"
        assert engine_store(manager, PROMPT[:3]) == PROMPT[:3]
