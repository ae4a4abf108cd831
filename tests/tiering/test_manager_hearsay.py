"""What the manager remembers of what tiers said, how long, and what it tells them of use; the callers' errors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from tiering_helpers import HIT, MISS, PATIENCE, PROMPT, RETRY, ask, engine_store, fill, managed, until, writes

from kvstore import BlockKey, BlockWrite, open_store
from kvstore.errors import InvalidBlockError

if TYPE_CHECKING:
    from kvstore.testing.faults import FaultyStore


def test_a_miss_is_remembered_for_a_moment_and_not_for_longer(store: FaultyStore) -> None:
    with managed(store, miss_age=0.2) as manager:
        assert ask(manager, PROMPT[:1]) == [MISS]
        fill(str(store.url), PROMPT[:1])
        assert manager.lookup(PROMPT[:1]) == [MISS]
        time.sleep(0.25)
        manager.step()
        assert ask(manager, PROMPT[:1]) == [HIT]
        assert manager.stats().promotions == 1


def test_a_scheduler_whose_steps_last_longer_than_a_promise_gets_its_blocks_and_its_misses() -> None:
    with open_store("memory://prompts"):
        fill("memory://prompts", PROMPT[:8])
        with managed("memory://prompts", miss_age=0.01, hold=0.01, slot_timeout=PATIENCE) as manager:
            wanted, answers = PROMPT[:10], []
            for _ in range(12):
                answers = manager.lookup(wanted)
                while answers and answers[0] is HIT:
                    assert manager.prepare_load(wanted[:1])[0] is not None
                    manager.complete_load(wanted[:1])
                    manager.finish_request([wanted.pop(0)])
                    answers.pop(0)
                manager.step()
                time.sleep(0.05)
            assert answers == [MISS, MISS], "eight came through four slots, two are nowhere"
            fill("memory://prompts", PROMPT[8:10])
            assert manager.lookup(wanted) == [RETRY] * 2, "told once, then asked anew"
            manager.finish_request(wanted)


def test_a_miss_is_forgotten_when_the_block_is_stored() -> None:
    with managed("memory://nothing", miss_age=PATIENCE) as manager:
        assert ask(manager, PROMPT[:1]) == [MISS]
        assert engine_store(manager, PROMPT[:1]) == PROMPT[:1]
        assert manager.drain(PATIENCE)
        manager.store(writes(PROMPT[1:9]))
        assert manager.drain(PATIENCE)
        assert manager.primary.get(PROMPT[0]) is None, "it left the primary tier"
        assert ask(manager, PROMPT[:1]) == [HIT]


def test_a_finished_request_is_young_in_every_tier_and_nothing_is_promoted_for_it(store: FaultyStore) -> None:
    fill(str(store.url), PROMPT)
    with managed(store, slot_timeout=PATIENCE) as manager:
        manager.lookup(PROMPT)
        until(manager, lambda: manager.stats().waiting > 50)
        manager.finish_request(PROMPT)
        assert manager.drain(PATIENCE)
        assert manager.stats().promotions < 10
        assert ("touch", PROMPT) in store.calls


def test_a_touch_keeps_a_block_from_being_the_next_to_go() -> None:
    with managed() as manager:
        manager.store(writes(PROMPT[:4]))
        manager.touch(PROMPT[:1])
        manager.store(writes(PROMPT[4:7]))
        assert manager.lookup(PROMPT[:2]) == [HIT, MISS]


def test_answers_to_questions_that_nobody_has_any_more_start_nothing(store: FaultyStore) -> None:
    fill(str(store.url), PROMPT)
    with managed(store) as manager:
        manager.lookup(PROMPT)
        manager.finish_request(PROMPT)
        manager.step()
        assert manager.drain(PATIENCE)
        assert manager.stats().promotions == 0


def test_a_key_that_cannot_be_one_of_the_namespace_is_the_callers_error() -> None:
    with managed("memory://nothing") as manager:
        for bad in (BlockKey(b"short"), BlockKey(b"x" * 32, group=1)):
            for call in (manager.lookup, manager.prepare_store):
                with pytest.raises(InvalidBlockError):
                    call([bad])
        with pytest.raises(InvalidBlockError):
            manager.store([BlockWrite(PROMPT[0], b"too few bytes")])
        assert manager.stats().primary.free == 4


def test_completing_what_was_not_prepared_is_the_callers_error() -> None:
    with managed() as manager:
        manager.store(writes(PROMPT[:1]))
        manager.lookup(PROMPT[:1])
        for complete in (manager.complete_load, manager.complete_store):
            with pytest.raises(ValueError, match="was not None"):
                complete(PROMPT[:1])
