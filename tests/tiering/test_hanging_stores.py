"""Stores to what can hang: copied out first, so that they pin no slot; shed where they cannot be.

Field reports 15 (a buffer is reused while its transfer still runs) and 17 (a slow tier piles up jobs and pins the
primary tier solid). Every manager is checked at its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hanging_helpers import impatient
from tiering_helpers import BLOCK, PATIENCE, PROMPT, engine_load, engine_store, fill, intact, keys, managed, until

from kvstore.testing.patience import within

if TYPE_CHECKING:
    from kvstore.testing.faults import FaultyStore, Hanging


def test_a_tier_that_hangs_in_its_stores_pins_no_slot_sheds_and_still_serves_loads(
    remote: FaultyStore, hanging: Hanging
) -> None:
    """Field report 17."""
    fill(str(remote.url), PROMPT[:20])
    remote.plan["put"] = hanging
    tier = impatient(remote, threads=3, load_timeout=PATIENCE, staging_bytes=8 * BLOCK)
    with managed(tier, primary_slots=16) as manager:
        offered = keys(300, "new")
        for first in range(0, 300, 5):
            assert engine_store(manager, offered[first : first + 5]) == offered[first : first + 5]
            until(manager, lambda: manager.stats().primary.pinned == 0)
            stats = manager.stats().tiers[0]
            assert stats.backlog_bytes <= 6 * BLOCK
            assert stats.staging_bytes <= 6 * BLOCK, "the rest is kept for loads"
        assert manager.stats().tiers[0].shed == 300 - 6
        assert engine_load(manager, PROMPT[:20]) == 20
        assert len(hanging.waiting) == 2
        assert not manager.drain(0.1)
        hanging.release()
    assert intact(remote.inner, offered) == [True] * 6 + [False] * 294


def test_a_source_overwritten_once_its_slot_is_free_changes_nothing_that_is_still_being_stored(
    remote: FaultyStore, hanging: Hanging
) -> None:
    """Field report 15."""
    remote.plan["put"] = hanging
    with managed(impatient(remote, load_timeout=PATIENCE), primary_slots=4) as manager:
        assert engine_store(manager, PROMPT[:3]) == PROMPT[:3]
        until(manager, lambda: hanging.waiting and manager.stats().primary.pinned == 0)
        scribbled = manager.prepare_store(PROMPT[10:13])
        for view in scribbled:
            assert view is not None
            view[:] = 0
        hanging.release()
        until(manager, lambda: manager.stats().tiers[0].stores == 3)
        manager.complete_store(PROMPT[10:13], success=False)
    assert intact(remote.inner, PROMPT[:3]) == [True] * 3


def test_stores_behind_loads_that_hang_on_every_thread_give_their_slots_back_in_time(
    remote: FaultyStore, hanging: Hanging
) -> None:
    """Field report 17: even what could not be copied out, for want of a thread."""
    fill(str(remote.url), PROMPT[:2])
    remote.plan["get"] = hanging
    with managed(impatient(remote, load_timeout=0.5), primary_slots=8) as manager:
        for key in PROMPT[:2]:
            manager.lookup([key])
            until(manager, lambda: key in [one for _, names in remote.calls for one in names])  # noqa: B023
            manager._turn()
        until(manager, lambda: len(hanging.waiting) == 2)
        assert engine_store(manager, PROMPT[10:14]) == PROMPT[10:14]
        with within(0.5):
            until(manager, lambda: manager.stats().primary.pinned == 0)
        assert manager.stats().tiers[0].shed == 4
        hanging.release()
