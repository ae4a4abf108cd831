"""The manager against a model: any engine, over three tiers that fail in every way at every stage.

Threads run, but only between rules: a call to a store goes through at once or is parked until a rule lets it go, with
whatever fault that rule chose; every rule waits until all threads are idle or parked. Time is the machine's own and
passes only when it says so. So an example that failed fails again.

What must hold, whatever happens: not one wrong byte in any view or in any store; no HIT for a block that did not
arrive; every block that was stored went to each tier once or was counted as shed; who asks and goes on asking is served
or released in bounded time, even if no parked call ever returns; and at the end nobody holds a pin, and what the tiers
have is found again.
"""

from __future__ import annotations

import itertools
import time as real_time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from parking_tiers import (
    BLOCK,
    FAULTS,
    HANGS,
    HOLD,
    MISS_AGE,
    PROMPT,
    SLOT_TIMEOUT,
    SPACE,
    TIERS,
    TIMED,
    Clock,
    Tier,
    address,
    bytes_of,
)
from tiering_helpers import PATIENCE, all_closed, check

from kvstore import BlockWrite, LookupResult
from kvstore.errors import ShutdownTimeout
from kvstore.testing.faults import honest
from kvstore.tiering import TieringManager

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore import BlockKey

HIT, MISS = LookupResult.HIT, LookupResult.MISS


class Machine(RuleBasedStateMachine):
    """An engine with requests that read, and with blocks that it writes."""

    some = st.lists(st.integers(0, len(PROMPT) - 1), min_size=1, max_size=8, unique=True)
    tier_numbers = st.integers(0, TIERS - 1)

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(self.settle)
        self.patched = pytest.MonkeyPatch()
        for module in TIMED:
            self.patched.setattr(f"kvstore.tiering.{module}.time", self.clock)
        self.tiers = [Tier(number) for number in range(TIERS)]
        self.manager = TieringManager(
            SPACE,
            [tier.tier for tier in self.tiers],
            primary_slots=6,
            hold=HOLD,
            slot_timeout=SLOT_TIMEOUT,
            miss_age=MISS_AGE,
        )
        self.requests: list[list[BlockKey]] = []
        self.reading: list[tuple[BlockKey, NDArray[np.uint8]]] = []
        self.writing: dict[BlockKey, NDArray[np.uint8]] = {}
        self.stored = 0
        self.closed = False

    def settle(self) -> None:
        deadline = real_time.monotonic() + PATIENCE
        while not all(tier.settled() for tier in self.tiers):
            assert real_time.monotonic() < deadline, "threads neither idle nor parked"
            real_time.sleep(2e-5)

    @initialize(data=st.data())
    def find_things_as_they_are(self, data: st.DataObject) -> None:
        """Tiers with blocks of earlier days, each with ways of its own."""
        for number, tier in enumerate(self.tiers):
            self.another_process(number, data.draw(st.permutations(range(len(PROMPT))))[: 6 * number], stores=True)
            for verb in FAULTS:
                tier.modes[verb] = data.draw(st.sampled_from([honest, honest, None, *FAULTS[verb]]))

    # Requests

    @rule(numbers=some, count=st.integers(0, 4))
    def begin_a_request(self, numbers: list[int], count: int) -> None:
        if len(self.requests) == 3:
            self.stop_asking(finished=False, which=0)
        self.requests.append([PROMPT[number] for number in numbers])
        self.manager.lookup(self.requests[-1])
        self.steps(0.0, count)

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.05, 0.15, 0.25, 0.6, 3.0]), count=st.integers(1, 4))
    def steps(self, seconds: float, count: int) -> None:
        for _ in range(count):
            self.step(seconds / count)

    def step(self, seconds: float) -> None:
        """As engines do: what arrived is collected, and every request that waits looks again."""
        self.clock.now += seconds
        self.manager.step()
        self.settle()
        for request in list(self.requests):
            self.look(request)

    def look(self, request: list[BlockKey]) -> None:
        """Read what has arrived in front; a block that is missing is recomputed, and ends the request."""
        answers = self.manager.lookup(request)
        if answers[0] is MISS:
            self.end(request)
        elif answers[0] is HIT:
            front = [
                key for key, _ in itertools.takewhile(lambda pair: pair[1] is HIT, zip(request, answers, strict=True))
            ]
            for key, view in zip(front, self.manager.prepare_load(front), strict=True):
                assert view is not None, "a HIT is there for who pins it at once"
                assert np.array_equal(view, bytes_of(key)), f"a HIT for {key}, which did not arrive"
            self.manager.complete_load(front)
            del request[: len(front)]
            if not request:
                self.end(request)

    def end(self, request: list[BlockKey]) -> None:
        self.requests.remove(request)
        self.manager.finish_request(request)

    @precondition(lambda self: self.requests)
    @rule(finished=st.booleans(), which=st.integers(0, 2))
    def stop_asking(self, finished: bool, which: int) -> None:
        """Cancelled, or forgotten without a word."""
        request = self.requests.pop(which % len(self.requests))
        if finished:
            self.manager.finish_request(request)

    @rule(numbers=some)
    def pin(self, numbers: list[int]) -> None:
        names = [PROMPT[number] for number in numbers]
        for key, view in zip(names, self.manager.prepare_load(names), strict=True):
            if view is not None:
                self.reading.append((key, view))

    @rule()
    def unpin(self) -> None:
        self.manager.complete_load([key for key, _ in self.reading])
        self.reading = []

    @rule()
    def serve_everybody_in_time_whatever_hangs(self) -> None:
        """No parked call returns meanwhile; engines end what they write, as they do."""
        self.end_writing(success=False, count=len(PROMPT))
        for _ in range(150):
            if not self.requests:
                return
            self.step(0.05)
        raise AssertionError(f"still waiting after 7.5 s: {self.requests}, {self.manager.stats()}")

    # Blocks that the engine writes

    @rule(numbers=some)
    def begin_to_write(self, numbers: list[int]) -> None:
        names = [PROMPT[number] for number in numbers]
        for key, view in zip(names, self.manager.prepare_store(names), strict=True):
            if view is not None:
                view[:] = 0xAA  # what nobody may ever see
                self.writing[key] = view

    @rule(success=st.booleans(), count=st.integers(1, 5))
    def end_writing(self, success: bool, count: int) -> None:
        names = list(self.writing)[:count]
        for key in names:
            view = self.writing.pop(key)
            if success:
                view[:] = bytes_of(key)
        self.manager.complete_store(names, success=success)
        self.stored += len(names) if success else 0
        assert self.manager.lookup(names) == [HIT] * len(names) if success else True

    @rule(numbers=some, count=st.integers(0, 2))
    def write(self, numbers: list[int], count: int) -> None:
        self.end_writing(success=True, count=len(PROMPT))
        self.begin_to_write(numbers)
        self.end_writing(success=True, count=len(PROMPT))
        self.steps(0.0, count)

    # What becomes of the tiers

    @rule(number=tier_numbers, verb=st.sampled_from(["contains", "get", "put", "touch"]), data=st.data())
    def change_its_ways(self, number: int, verb: str, data: st.DataObject) -> None:
        self.tiers[number].modes[verb] = data.draw(st.sampled_from(FAULTS[verb]))

    @rule(number=tier_numbers, verb=st.sampled_from(["contains", "get", "get", "get", "put", "put", "touch"]))
    def park_what_begins(self, number: int, verb: str) -> None:
        self.tiers[number].modes[verb] = None

    @precondition(lambda self: any(tier.parked for tier in self.tiers))
    @rule(data=st.data(), count=st.integers(0, 2))
    def let_a_call_go(self, data: st.DataObject, count: int) -> None:
        tier = data.draw(st.sampled_from([tier for tier in self.tiers if tier.parked]))
        parked = sorted(tier.parked, key=lambda parked: (parked.call.verb, parked.call.keys))
        chosen = data.draw(st.sampled_from(parked))
        tier.let_go(chosen, data.draw(st.sampled_from(FAULTS[chosen.call.verb])))
        self.settle()
        self.steps(0.0, count)

    @rule(number=tier_numbers, numbers=some, stores=st.booleans())
    def another_process(self, number: int, numbers: list[int], stores: bool) -> None:
        """Stores blocks in a tier, or deletes them there."""
        tier = self.tiers[number]
        names = [PROMPT[number] for number in numbers]
        if stores:
            tier.store.inner.put_many(SPACE, [BlockWrite(key, bytes_of(key).data) for key in names])
            tier.has.update(names)
        else:
            tier.store.inner.delete_many(SPACE, names)
            tier.has.difference_update(names)

    @precondition(lambda self: not self.closed)
    @rule(odds=st.integers(0, 9))
    def close(self, odds: int) -> None:
        """In the middle of it all, now and then; an engine that goes on asking is told misses."""
        if odds < 7:
            return
        self.settle()
        self.closed = True
        try:
            self.manager.close(timeout=0.01)
            raised = False
        except ShutdownTimeout:
            raised = True
        self.settle()
        local = [parked.call for tier in self.tiers[:HANGS] for parked in tier.parked]
        holders = [call for call in local if call.verb in ("get", "put") and call.keys[0] in PROMPT]  # the rest: probes
        assert raised == bool(holders), "only a local call can hold a slot"

    # What holds

    @invariant()
    def pinned_views_and_outgoing_bytes_are_right(self) -> None:
        for key, view in self.reading:
            assert np.array_equal(view, bytes_of(key)), f"{key} changed while it was pinned"
        for view in self.writing.values():
            assert (view == 0xAA).all(), "somebody wrote into a slot that is being written"
        assert not [wrong for tier in self.tiers for wrong in tier.wrong]

    @invariant()
    def who_may_write_to_memory_has_it_alone(self) -> None:
        """Also who was given up long ago, and only hangs."""
        writers = [address(view) for view in self.writing.values()]
        readers = [address(view) for _, view in self.reading]
        for parked in itertools.chain.from_iterable(tier.parked for tier in self.tiers):
            if parked.call.verb == "get":
                writers += [address(block.into) for block in parked.call.blocks]
            elif parked.call.verb == "put":
                readers += [address(block.data) for block in parked.call.blocks]
        assert len(set(writers)) == len(writers)
        assert not set(writers) & set(readers)

    @invariant()
    def tiers_have_what_they_took(self) -> None:
        for tier in self.tiers:
            assert {info.key for info in tier.store.inner.scan(SPACE)} == tier.has

    @invariant()
    def memory_is_bounded(self) -> None:
        for tier in self.manager.stats().tiers:
            assert tier.backlog_bytes <= 6 * BLOCK
            assert tier.staging_bytes <= 4 * 4096

    # The end

    def teardown(self) -> None:
        try:
            self.unpin()
            self.end_writing(success=True, count=len(PROMPT))
            self.everything_returns()
            self.every_store_is_accounted_for()
            if not self.closed:
                self.what_tiers_have_is_found_again()
            check(self.manager)
        finally:
            self.patched.undo()
            for tier in self.tiers:
                for parked in list(tier.parked):
                    tier.let_go(parked, honest)
            self.manager.close()
            for tier in self.tiers:
                tier.store.close()

    def everything_returns(self) -> None:
        for tier in self.tiers:
            tier.modes = dict.fromkeys(FAULTS, honest)
        for _ in range(100):
            for tier in self.tiers:
                for parked in list(tier.parked):
                    tier.let_go(parked, honest)
            self.settle()
            self.step(0.05)
            ended = all(tier.tier.idle and not tier.tier._transit.live for tier in self.tiers)
            if ended and not self.requests and (self.closed or all_closed(self.manager)):
                return
        raise AssertionError(f"not idle although everything returns: {self.manager.stats()}")

    def every_store_is_accounted_for(self) -> None:
        for tier, stats in zip(self.tiers, self.manager.stats().tiers, strict=True):
            outcomes = stats.stores + stats.exists + stats.full + stats.failed_stores
            assert outcomes + stats.shed == self.stored, stats
            assert (stats.backlog_bytes, stats.staging_bytes) == (0, 0)
            assert sum(len(names) for verb, names in tier.store.calls if verb == "put") == outcomes

    def what_tiers_have_is_found_again(self) -> None:
        for key in sorted(set().union(*(tier.has for tier in self.tiers))):
            self.step(1.0)
            self.requests = [[key]]
            for _ in range(20):
                self.step(0.01)
                if not self.requests:
                    break
            assert self.manager.lookup([key]) == [HIT], f"{key} is in a tier and not found"
            self.manager.finish_request([key])


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_any_engine_over_any_tiers_for_long() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=2000, stateful_step_count=100, deadline=None))
