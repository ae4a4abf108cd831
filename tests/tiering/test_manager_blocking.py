"""The calls for people who have no scheduler: they wait, and not for ever."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tiering_helpers import BLOCK, HIT, PATIENCE, PROMPT, content, engine_store, fill, intact, keys, managed, writes

from kvstore import open_store
from kvstore.background import Bell
from kvstore.testing.faults import slow
from kvstore.testing.patience import within

if TYPE_CHECKING:
    from kvstore.testing.faults import FaultyStore, Hanging
    from kvstore.tiering import TieringManager


def test_load_prefix_ends_at_the_first_block_that_is_lacking(url: str) -> None:
    with managed(url) as manager:
        manager.store(writes(PROMPT[:20]) + writes(PROMPT)[30:])
    with managed(url) as manager:
        buffers = [np.full(BLOCK, 7, np.uint8) for _ in PROMPT]
        assert manager.load_prefix(PROMPT, buffers) == 20
        assert all(np.array_equal(buffer, content(key)) for buffer, key in zip(buffers[:20], PROMPT, strict=False))
        assert all((buffer == 7).all() for buffer in buffers[20:])
        assert manager.load_prefix([], []) == 0


def test_load_prefix_hands_blocks_to_a_function_in_order_and_survives_its_exception() -> None:
    with open_store("memory://prompts"):
        fill("memory://prompts", PROMPT)
        with managed("memory://prompts") as manager:
            seen: list[int] = []

            def look(index: int, view: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
                assert np.array_equal(view, content(PROMPT[index]))
                seen.append(index)
                if len(seen) == 70:
                    raise KeyError("the caller's own")

            assert manager.load_prefix(PROMPT, look) == 60
            assert seen == list(range(60))
            with pytest.raises(KeyError, match="own"):
                manager.load_prefix(PROMPT, look)


def test_load_prefix_and_prefetch_end_in_time_when_the_tier_hangs(store: FaultyStore, hanging: Hanging) -> None:
    fill(str(store.url), PROMPT)
    store.plan["get"] = hanging
    with managed(store) as manager:
        with within(0.4):
            assert manager.prefetch(PROMPT, timeout=0.2) == 0
            assert manager.load_prefix(PROMPT, [np.empty(BLOCK, np.uint8).data] * 60, timeout=0.2) == 0
        hanging.release()


def test_store_waits_for_a_slow_tier_and_not_for_ever(store: FaultyStore, hanging: Hanging) -> None:
    store.plan["put"] = slow(0.01)
    with managed(store) as manager:
        assert manager.store(writes(PROMPT)) == 60
        assert manager.stats().tiers[0].shed == 0, "who can wait loses nothing"
        assert manager.drain(PATIENCE)
        store.plan["put"] = hanging
        with within(0.2):
            assert manager.store(writes(keys(60, "b")), timeout=0.2) == 60, "they are in the primary tier, or were"
        assert manager.stats().tiers[0].shed == 58
        hanging.release()


def test_prefetch_brings_the_front_of_a_prefix_as_far_as_there_are_slots() -> None:
    with open_store("memory://prompts"):
        fill("memory://prompts", [*PROMPT[:3], *PROMPT[4:]])
        with managed("memory://prompts", primary_slots=16) as manager:
            assert manager.prefetch(PROMPT) == 3
            assert manager.lookup(PROMPT[:3]) == [HIT] * 3
        with managed("memory://prompts") as manager:
            assert manager.prefetch(PROMPT[4:]) == 4


def test_draining_tells_whether_it_was_enough(store: FaultyStore, hanging: Hanging) -> None:
    store.plan["put"] = hanging
    with managed(store) as manager:
        engine_store(manager, PROMPT[:1])
        assert not manager.drain(0.05)
        hanging.release()
        assert manager.drain(PATIENCE)
    assert intact(store.inner, PROMPT[:1]) == [True]


def test_a_call_that_waits_is_woken_by_what_ends_and_does_not_look_meanwhile(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.tiering.manager.REST", PATIENCE)
    fill(str(store.url), PROMPT)
    store.plan["contains"] = store.plan["get"] = slow(0.1)
    with managed(store) as manager:
        begin, turns = time.monotonic(), counted(manager)
        assert manager.prefetch(PROMPT[:1]) == 1
        assert turns[0] <= 8, "it asks, hears, loads, and has"
        assert manager.store(writes(keys(3, "b"))) == 3
        assert manager.drain(PATIENCE)
        assert time.monotonic() - begin < PATIENCE / 2, "it is told, and waits for no time-out"


def counted(manager: TieringManager) -> list[int]:
    """How often this manager takes its turn from now on."""
    turns, turn = [0], manager._turn

    def counting(budget: float = float("inf")) -> None:
        turns[0] += 1
        turn(budget)

    manager._turn = counting  # type: ignore[method-assign]
    return turns


def test_a_bell_that_was_rung_before_anybody_waited_is_heard_once() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    begin = time.monotonic()
    bell.wait(PATIENCE)
    assert time.monotonic() - begin < PATIENCE / 2
    bell.wait(0.01)
    threading.Timer(0.01, bell.ring).start()
    begin = time.monotonic()
    bell.wait(PATIENCE)
    assert time.monotonic() - begin < PATIENCE / 2
