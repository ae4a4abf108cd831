"""Loads that hang: who waited is released, and memory is where a late writer can hurt nobody.

Field reports 15 (a buffer is reused while its transfer still runs) and 17 (a slow tier piles up jobs and pins the
primary tier solid). Every manager is checked at its end.
"""

from __future__ import annotations

import threading
import time
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hanging_helpers import impatient, staged_blocks
from tiering_helpers import (
    BLOCK,
    HIT,
    MISS,
    PATIENCE,
    PROMPT,
    SPACE,
    all_closed,
    ask,
    content,
    engine_store,
    fill,
    hurry,
    keys,
    managed,
    until,
)

from kvstore import GetOutcome
from kvstore.layout import as_bytes
from kvstore.testing.faults import FaultyStore, Hanging, slow
from kvstore.testing.patience import within
from kvstore.tiering import SecondaryTier
from kvstore.tiering.jobs import StagedLoad
from kvstore.tiering.secondary import NETWORK_LOAD_TIMEOUT

if TYPE_CHECKING:
    from kvstore.testing.faults import Call


class LateWriter:
    """A get that writes into its buffers much too late, when it is told to; `wrote` are the addresses it wrote to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.wrote: list[int] = []

    def __call__(self, call: Call) -> list[GetOutcome]:
        self.go_on.wait(2 * PATIENCE)
        for block in call.blocks:
            buffer = as_bytes(block.into)
            buffer[:] = 0xEE
            self.wrote.append(buffer.ctypes.data)
        return [GetOutcome.HIT] * len(call.blocks)


@pytest.mark.parametrize(
    ("seconds", "options"),
    [
        (0.0, {"load_timeout": 0.2}),
        pytest.param(30.0, {"load_timeout": NETWORK_LOAD_TIMEOUT}, marks=[pytest.mark.soak, pytest.mark.timeout(180)]),
    ],
)
def test_a_writer_that_is_late_touches_nothing_while_its_slots_hold_other_blocks(
    remote: FaultyStore, seconds: float, options: dict[str, float]
) -> None:
    """Field reports 15 and 18: the request is released in time, the slots are reused at once, and stay intact."""
    fill(str(remote.url), PROMPT[:4])
    remote.plan["get"] = late = LateWriter()
    with managed(SecondaryTier(remote, SPACE, **options)) as manager:
        begin = time.monotonic()
        with within(options["load_timeout"]):
            assert ask(manager, PROMPT[:4]) == [MISS] * 4
        others = PROMPT[10:14]
        assert engine_store(manager, others[:3]) == others[:3], "the slots are free again, at once"
        until(manager, lambda: engine_store(manager, others[3:]))
        assert not late.wrote
        views = manager.prepare_load(others)
        while len(late.wrote) < 4:
            if time.monotonic() - begin >= seconds:
                late.go_on.set()
            assert time.monotonic() - begin < seconds + PATIENCE
            manager._turn()
            assert all(np.array_equal(view, content(key)) for key, view in zip(others, views, strict=True))
            time.sleep(0.01)
        assert all(np.array_equal(view, content(key)) for key, view in zip(others, views, strict=True))
        manager.complete_load(others)
        pool = manager.primary.memory
        first, end = pool.ctypes.data, pool.ctypes.data + pool.nbytes
        assert not [address for address in late.wrote if first <= address < end]


def test_who_is_copying_into_a_slot_when_the_load_is_given_up_keeps_the_slot_until_it_has(
    remote: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field report 15, at its narrowest: the thread has decided to copy, and has not copied yet."""
    fill(str(remote.url), PROMPT[:1])
    at_the_copy, go_on = threading.Event(), threading.Event()

    def copy_late(load: StagedLoad) -> None:
        slots = list(load.slots)
        at_the_copy.set()
        go_on.wait(PATIENCE)
        for slot, buffer in zip(slots, load.buffers, strict=True):
            np.copyto(slot.view, buffer.memory)

    monkeypatch.setattr(StagedLoad, "copy", copy_late)
    with managed(impatient(remote), primary_slots=4) as manager:
        assert ask(manager, PROMPT[:1]) == [MISS]
        assert at_the_copy.is_set()
        others = PROMPT[10:13]
        assert engine_store(manager, others) == others, "three slots are free, and not the one being written"
        assert manager.stats().primary.free == 0
        go_on.set()
        until(manager, lambda: manager.stats().primary.free == 1)
        for key, view in zip(others, manager.prepare_load(others), strict=True):
            assert np.array_equal(view, content(key))
        manager.complete_load(others)
        assert manager.lookup(PROMPT[:1]) == [MISS], "what arrived too late is not reported"


def test_who_decides_to_copy_after_the_load_was_given_up_does_not_copy(
    remote: FaultyStore, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(str(remote.url), PROMPT[:1])
    copies: list[StagedLoad] = []
    monkeypatch.setattr(StagedLoad, "copy", lambda load: copies.append(load))
    remote.plan["get"] = hanging
    with managed(impatient(remote), primary_slots=1) as manager:
        assert ask(manager, PROMPT[:1]) == [MISS]
        assert engine_store(manager, PROMPT[10:11]) == PROMPT[10:11]
        assert staged_blocks(manager) == 1, "its staging is its own until it returns"
        hanging.release()
        until(manager, lambda: staged_blocks(manager) == 0)
        assert not copies


def test_loads_that_end_at_the_moment_they_are_given_up_are_right_or_missing(remote: FaultyStore) -> None:
    """Field report 15: a thousand blocks whose loads take about as long as their time-out, in slots that are reused."""
    names = keys(1000, "race")
    fill(str(remote.url), names)
    rng = np.random.default_rng(0)
    remote.plan["get"] = lambda call: slow(float(rng.uniform(0.0, 0.008)))(call)
    tier = SecondaryTier(remote, SPACE, threads=4, load_timeout=0.004, staging_bytes=16 * BLOCK, pause=0.0)
    came = missed = 0
    with managed(tier, primary_slots=8, slot_timeout=PATIENCE) as manager:
        begin = time.monotonic()
        for first in cycle(range(0, 1000, 4)):
            wanted = names[first : first + 4]
            answers = ask(manager, wanted)
            for key, view in zip(wanted, manager.prepare_load(wanted), strict=True):
                assert view is None or np.array_equal(view, content(key)), f"wrong bytes for {key}"
                came += view is not None
                manager.complete_load([key] if view is not None else [])
            missed += answers.count(MISS)
            engine_store(manager, keys(2, f"between {first}"))
            manager.finish_request(wanted)
            if time.monotonic() > begin + 2.0 and came and missed:
                break
            assert time.monotonic() < begin + PATIENCE, f"{came} came and {missed} did not"


def test_a_tier_whose_staging_is_with_hung_calls_answers_misses_and_recovers(
    remote: FaultyStore, hanging: Hanging
) -> None:
    """Field report 17: bounded memory; what does not fit is a miss in time, or a store that is shed."""
    fill(str(remote.url), PROMPT[:8])
    remote.plan["get"] = hanging
    tier = impatient(remote, threads=8, staging_bytes=4 * BLOCK)
    with managed(tier, primary_slots=16) as manager:
        with within(0.2):
            assert ask(manager, PROMPT[:8]) == [MISS] * 8
        assert staged_blocks(manager) == len(hanging.waiting) == 4
        manager.forget(PROMPT[:8])
        assert ask(manager, PROMPT[:8]) == [MISS] * 8
        assert manager.stats().tiers[0].failed_loads == 8
        assert engine_store(manager, PROMPT[20:30]) == PROMPT[20:30], "slots are not what is missing"
        until(manager, lambda: manager.stats().tiers[0].shed == 10)
        assert manager.stats().primary.pinned == 0, "a store that gets no staging gives its slot back"
        hurry(tier, seconds=PATIENCE)
        hanging.release()
        until(manager, lambda: staged_blocks(manager) == 0 and all_closed(manager))
        manager.forget(PROMPT[:8])
        assert ask(manager, PROMPT[:8]) == [HIT] * 8
        assert engine_store(manager, PROMPT[30:32]) == PROMPT[30:32]
        until(manager, lambda: manager.stats().tiers[0].stores == 2)
