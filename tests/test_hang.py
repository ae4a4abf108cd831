"""Calls that hang: who waited is released, memory is where nobody can be hurt, and everything ends in time.

Field reports 15 (a buffer is reused while its transfer still runs), 17 (a slow tier piles up jobs and pins the primary
tier solid) and 18 (shutdown waits for ever, or frees memory under running I/O). Every manager is checked at its end.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tiering_helpers import (
    BLOCK,
    PATIENCE,
    SPACE,
    ask,
    content,
    engine_load,
    engine_store,
    fill,
    intact,
    keys,
    managed,
    until,
    writes,
)

from kvstore import BlockLayout, BlockStore, GetOutcome, LookupResult, Namespace, open_store
from kvstore.errors import ShutdownTimeout
from kvstore.layout import as_bytes
from kvstore.testing.faults import FaultyStore, Hanging, failing, flapping, slow
from kvstore.tiering import SecondaryTier, TieringManager
from kvstore.tiering.jobs import CopyOut, StagedLoad

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.testing.faults import Call

HIT, MISS = LookupResult.HIT, LookupResult.MISS
PROMPT = keys(60)


@pytest.fixture
def remote() -> Iterator[FaultyStore]:
    """A store that can hang on a network, and behaves until it is told not to."""
    with FaultyStore(open_store("memory://remote"), can_hang=True) as store:
        yield store


@pytest.fixture
def local() -> Iterator[FaultyStore]:
    """A store that cannot hang on a network: a call of its that does is stuck in the kernel."""
    with FaultyStore(open_store("memory://local")) as store:
        yield store


def impatient(store: BlockStore, **options: Any) -> SecondaryTier:
    """A tier that gives up after 0.2 s."""
    return SecondaryTier(store, SPACE, **{"threads": 2, "lookup_timeout": 0.2, "load_timeout": 0.2, **options})


def staged_blocks(manager: TieringManager) -> int:
    """Blocks of staging memory that calls to the first tier have."""
    return manager.stats().tiers[0].staging_bytes // BLOCK


class LateWriter:
    """A get that writes into its buffers when it is much too late; `wrote` are the addresses that it wrote to."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.wrote: list[int] = []

    def __call__(self, call: Call) -> list[GetOutcome]:
        time.sleep(self.seconds)
        for block in call.blocks:
            buffer = as_bytes(block.into)
            buffer[:] = 0xEE
            self.wrote.append(buffer.ctypes.data)
        return [GetOutcome.HIT] * len(call.blocks)


# Loads from what can hang


@pytest.mark.parametrize(
    ("seconds", "options"),
    [
        (1.5, {"load_timeout": 0.2}),
        pytest.param(30.0, {}, marks=[pytest.mark.soak, pytest.mark.timeout(180)]),
    ],
)
def test_a_writer_that_is_late_touches_nothing_while_its_slots_hold_other_blocks(
    remote: FaultyStore, seconds: float, options: dict[str, float]
) -> None:
    """Field reports 15 and 18: the request is released within 5 s, the slots are reused at once, and stay intact."""
    fill(str(remote.url), PROMPT[:4])
    remote.plan["get"] = late = LateWriter(seconds)
    with managed(SecondaryTier(remote, SPACE, **options)) as manager:
        begin = time.monotonic()
        assert ask(manager, PROMPT[:4]) == [MISS] * 4
        assert time.monotonic() - begin < 5.0
        others = PROMPT[10:14]
        assert engine_store(manager, others[:3]) == others[:3], "the slots are free again, at once"
        until(manager, lambda: engine_store(manager, others[3:]), timeout=0.5)
        assert not late.wrote
        views = manager.prepare_load(others)
        while len(late.wrote) < 4:
            assert time.monotonic() - begin < seconds + PATIENCE
            manager._turn()
            assert all(np.array_equal(view, content(key)) for key, view in zip(others, views, strict=True))
            time.sleep(0.01)
        assert all(np.array_equal(view, content(key)) for key, view in zip(others, views, strict=True))
        manager.complete_load(others)
        pool = manager.primary._pool
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
    tier = SecondaryTier(remote, SPACE, threads=4, load_timeout=0.004, staging_bytes=16 * BLOCK)
    came = missed = 0
    with managed(tier, primary_slots=8, slot_timeout=PATIENCE) as manager:
        end = time.monotonic() + 2.0
        for first in range(0, 1000, 4):
            wanted = names[first : first + 4]
            answers = ask(manager, wanted)
            for key, view in zip(wanted, manager.prepare_load(wanted), strict=True):
                assert view is None or np.array_equal(view, content(key)), f"wrong bytes for {key}"
                came += view is not None
                manager.complete_load([key] if view is not None else [])
            missed += answers.count(MISS)
            engine_store(manager, keys(2, f"between {first}"))
            manager.finish_request(wanted)
            if time.monotonic() > end:
                break
        assert came
        assert missed


def test_a_tier_whose_staging_is_with_hung_calls_answers_misses_and_recovers(
    remote: FaultyStore, hanging: Hanging
) -> None:
    """Field report 17: bounded memory; what does not fit is a miss in time, or a store that is shed."""
    fill(str(remote.url), PROMPT[:8])
    remote.plan["get"] = hanging
    tier = impatient(remote, threads=8, staging_bytes=4 * BLOCK)
    with managed(tier, primary_slots=16) as manager:
        begin = time.monotonic()
        assert ask(manager, PROMPT[:8]) == [MISS] * 8
        assert time.monotonic() - begin < 5.0
        assert staged_blocks(manager) == len(hanging.waiting) == 4
        manager.forget(PROMPT[:8])
        assert ask(manager, PROMPT[:8]) == [MISS] * 8
        assert manager.stats().tiers[0].failed_loads == 8
        assert engine_store(manager, PROMPT[20:30]) == PROMPT[20:30], "slots are not what is missing"
        until(manager, lambda: manager.stats().tiers[0].shed == 10)
        assert manager.stats().primary.pinned == 0, "a store that gets no staging gives its slot back"
        hanging.release()
        until(manager, lambda: staged_blocks(manager) == 0)
        manager.forget(PROMPT[:8])
        assert ask(manager, PROMPT[:8]) == [HIT] * 8
        assert engine_store(manager, PROMPT[30:32]) == PROMPT[30:32]
        until(manager, lambda: manager.stats().tiers[0].stores == 2)


# Stores to what can hang


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
    with managed(impatient(remote), primary_slots=4) as manager:
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
        until(manager, lambda: manager.stats().primary.pinned == 0, timeout=5.0)
        assert manager.stats().tiers[0].shed == 4
        hanging.release()


# The end


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
    begin = time.monotonic()
    manager.close(timeout=1.0)
    assert time.monotonic() - begin < 3.0
    assert manager.stats().primary.pinned == 0
    pool = weakref.ref(manager.primary._pool)
    del manager
    gc.collect()
    assert hanging.waiting, "the calls are still there"
    assert pool() is None, "and have nothing of the primary tier"


def test_closing_lets_stores_finish_that_are_on_their_way_through_staging(remote: FaultyStore) -> None:
    remote.plan["put"] = slow(0.02)
    with managed(impatient(remote), primary_slots=32) as manager:
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
    begin = time.monotonic()
    with pytest.raises(ShutdownTimeout, match="memory://local"):
        manager.close(timeout=0.3)
    assert time.monotonic() - begin < 2.0
    manager.close()
    pool = weakref.ref(manager.primary._pool)
    del manager
    gc.collect()
    assert pool() is not None, "the transfer may still write into it"
    hanging.release()
    deadline = time.monotonic() + PATIENCE
    while pool() is not None:
        assert time.monotonic() < deadline, "it goes with the transfer that held it"
        time.sleep(0.01)
        gc.collect()
    assert late == [int(content(PROMPT[0])[0])], "and the late write hit memory that was still there"


def test_a_local_load_that_hangs_keeps_its_slot_is_never_reported_and_its_request_is_released(
    local: FaultyStore, hanging: Hanging
) -> None:
    """Field reports 15 and 18."""
    fill(str(local.url), PROMPT)
    local.plan["get"] = hanging
    with managed(impatient(local)) as manager:
        begin = time.monotonic()
        assert ask(manager, PROMPT[:4]) == [MISS] * 4
        assert time.monotonic() - begin < 5.0
        assert manager.stats().primary.free == 0, "the dead load still owns its slots"
        assert engine_store(manager, PROMPT[:4]) == []
        assert manager.stats().tiers[0].staging_bytes == 0
        local.plan.clear()
        hanging.release()
        until(manager, lambda: manager.stats().primary.free == 4)
        assert manager.lookup(PROMPT[:4]) == [MISS] * 4, "what arrived too late is not reported"
        assert engine_store(manager, PROMPT[:3]) == PROMPT[:3]


# Staging as such


def test_everything_goes_through_staging_of_two_blocks_and_comes_back_right(remote: FaultyStore) -> None:
    with managed(impatient(remote, load_timeout=PATIENCE, staging_bytes=2 * BLOCK)) as manager:
        assert manager.store(writes(PROMPT)) == 60
        assert manager.drain(PATIENCE)
        assert manager.stats().tiers[0].stores == 60
    with managed(impatient(remote, load_timeout=PATIENCE, staging_bytes=2 * BLOCK)) as manager:
        assert engine_load(manager, PROMPT) == 60


def test_where_a_block_stands_in_its_prefix_goes_through_staging_with_it(remote: FaultyStore) -> None:
    with managed(impatient(remote), primary_slots=16) as manager:
        engine_store(manager, PROMPT[:3])
    assert sorted((info.position, info.key) for info in remote.inner.scan(SPACE)) == list(enumerate(PROMPT[:3]))


def test_groups_of_different_sizes_share_the_buffers_of_the_largest(remote: FaultyStore) -> None:
    space = Namespace("model", "1", (BlockLayout.opaque(BLOCK), BlockLayout.opaque(100)), block_tokens=16)
    names = [key for pair in zip(keys(20), keys(20, group=1), strict=True) for key in pair]
    for _ in range(2):
        tier = SecondaryTier(remote, space, staging_bytes=3 * BLOCK)
        with managed(tier, space=space) as manager:
            assert manager.store(writes(names, space), timeout=PATIENCE) == 40
            assert engine_load(manager, names) == 40


def test_small_blocks_that_wait_to_be_stored_leave_their_share_of_staging_to_loads(
    remote: FaultyStore, hanging: Hanging
) -> None:
    """Field report 17: a block of 100 bytes takes a buffer as well as one of 8 KiB."""
    space = Namespace("model", "1", (BlockLayout.opaque(BLOCK), BlockLayout.opaque(100)), block_tokens=16)
    fill(str(remote.url), PROMPT[:10], space)
    remote.plan["put"] = hanging
    tier = SecondaryTier(remote, space, threads=3, staging_bytes=8 * BLOCK)
    with managed(tier, space=space, primary_slots=40) as manager:
        small = keys(20, "small", group=1)
        assert engine_store(manager, small) == small
        until(manager, lambda: len(hanging.waiting) == 2)
        until(manager, lambda: manager.stats().tiers[0].staging_bytes == 6 * BLOCK)
        assert engine_load(manager, PROMPT[:10]) == 10
        hanging.release()


@pytest.mark.parametrize("error", [None, RuntimeError("bug"), SystemExit()])
def test_what_a_tier_that_goes_up_and_down_took_is_right_and_what_it_refused_is_counted(
    remote: FaultyStore, error: BaseException | None
) -> None:
    down = failing(error)
    remote.plan = {verb: flapping([True, True, False], down) for verb in ("put", "get")}
    with managed(SecondaryTier(remote, SPACE, threads=2), primary_slots=4) as manager:
        assert manager.store(writes(PROMPT)) == 60
        assert manager.drain(PATIENCE)
        stats = manager.stats().tiers[0]
        assert stats.stores + stats.failed_stores == 60
        assert 0 < stats.failed_stores < 60
        assert sum(intact(remote.inner, PROMPT)) == stats.stores
        there = [key for key, found in zip(PROMPT, intact(remote.inner, PROMPT), strict=True) if found]
        came = sum(engine_load(manager, [key]) for key in there)
        assert came == len(there) - manager.stats().tiers[0].failed_loads
        assert staged_blocks(manager) == 0


def test_staging_that_cannot_hold_two_blocks_is_the_callers_error_and_nothing_stays_open(remote: FaultyStore) -> None:
    threads = threading.active_count()
    with pytest.raises(ValueError, match=f"at least {2 * BLOCK}"):
        SecondaryTier(remote, SPACE, staging_bytes=2 * BLOCK - 1)
    assert threading.active_count() == threads
    assert not remote.closed, "a store that was handed in stays its owner's"


def test_only_a_store_that_can_hang_has_staging(local: FaultyStore, remote: FaultyStore) -> None:
    for store, expected in ((local, None), (remote, 256 << 20)):
        tier = SecondaryTier(store, SPACE)
        assert (tier._staging and tier._staging.buffers * BLOCK) == expected
        assert tier.close(PATIENCE)
