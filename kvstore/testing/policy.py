"""The contract of an eviction policy (`kvstore.tiering.policy`), as tests for whoever writes one."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from functools import partial
from itertools import count
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvstore.testing.supply import keys
from kvstore.types import BlockKey

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from kvstore.tiering.policy import EvictionPolicy, PolicyFactory

__all__ = ["ContractOfAPolicy", "PolicyTests", "bring", "evicted", "use"]

SLOTS = 6
KEYS = keys(range(3 * SLOTS))
MOST_KEYS_PER_SLOT = 3
"""What a policy may remember: the blocks themselves, and about two ghosts for each."""


def bring(policy: EvictionPolicy, *names: BlockKey) -> None:
    """Blocks become ready, and are let go by who brought them."""
    for name in names:
        policy.added(name)
        policy.unpinned(name)


def use(policy: EvictionPolicy, *names: BlockKey) -> None:
    """Requests with these blocks end, one after the other."""
    for name in names:
        policy.touched(name)


def evicted(policy: EvictionPolicy) -> list[BlockKey]:
    """Everything that may leave, in the order in which it does."""
    return list(iter(policy.evict, None))


class ContractOfAPolicy(RuleBasedStateMachine):
    """Whatever the order of calls: a victim was added, is still there, and is not pinned."""

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__()
        self.policy = policy
        self.pinned: dict[BlockKey, bool] = {}

    @property
    def evictable(self) -> set[BlockKey]:
        return {key for key, pinned in self.pinned.items() if not pinned}

    @precondition(lambda self: len(self.pinned) < SLOTS)
    @rule(key=st.sampled_from(KEYS))
    def add(self, key: BlockKey) -> None:
        if key not in self.pinned:
            self.policy.added(key)
            self.pinned[key] = True

    @rule(key=st.sampled_from(KEYS))
    def touch(self, key: BlockKey) -> None:
        if key in self.pinned:
            self.policy.touched(key)

    @rule(key=st.sampled_from(KEYS))
    def pin_or_unpin(self, key: BlockKey) -> None:
        if key in self.pinned:
            (self.policy.unpinned if self.pinned[key] else self.policy.pinned)(key)
            self.pinned[key] = not self.pinned[key]

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: BlockKey) -> None:
        if self.pinned.pop(key, None) is not None:
            self.policy.removed(key)

    @rule()
    def evict(self) -> None:
        victim = self.policy.evict()
        assert (victim in self.evictable) if self.evictable else (victim is None)
        if victim is not None:
            del self.pinned[victim]

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(remembered(self.policy)) <= MOST_KEYS_PER_SLOT * SLOTS

    def teardown(self) -> None:
        """What was added and did not leave yet comes out exactly once, as soon as nobody pins it."""
        for key, pinned in self.pinned.items():
            if pinned:
                self.policy.unpinned(key)
        assert sorted(evicted(self.policy)) == sorted(self.pinned)


class PolicyTests:
    """What the primary tier relies on. Subclass it and say how your policy is made::

    class TestMyPolicy(PolicyTests):
        @pytest.fixture
        def factory(self):
            return MyPolicy   # called with the number of slots
    """

    @pytest.fixture
    def factory(self) -> PolicyFactory:
        """Makes a policy for a number of slots."""
        raise NotImplementedError(f"{type(self).__name__} has to override the fixture `factory`: slots -> policy")

    def test_any_order_of_calls_yields_victims_that_are_there_and_not_pinned(self, factory: PolicyFactory) -> None:
        machine: Any = lambda: ContractOfAPolicy(factory(SLOTS))  # noqa: E731 - as good as the class that is wanted
        run_state_machine_as_test(
            machine,
            settings=settings(max_examples=100, stateful_step_count=60, deadline=None),
        )

    def test_pinned_blocks_come_out_only_when_they_are_unpinned(self, factory: PolicyFactory) -> None:
        policy = factory(SLOTS)
        bring(policy, *KEYS[:4])
        use(policy, *KEYS[:2], *KEYS[:2])
        policy.added(KEYS[4])
        policy.pinned(KEYS[0])
        policy.pinned(KEYS[3])
        use(policy, KEYS[0], KEYS[3], KEYS[4])
        assert sorted(evicted(policy)) == sorted(KEYS[1:3])
        policy.unpinned(KEYS[0])
        assert evicted(policy) == KEYS[:1]

    def test_twenty_thousand_passing_blocks_leave_no_more_behind_than_a_thousand(self, factory: PolicyFactory) -> None:
        policy, supply = factory(SLOTS), (BlockKey(number.to_bytes(16, "big")) for number in count())

        def pass_through(blocks: int) -> int:
            for _, key in zip(range(blocks), supply, strict=False):
                policy.evict()
                bring(policy, key)
                use(policy, *[key] * (1 + key.digest[-1] % 3))
            return len(remembered(policy))

        bring(policy, *KEYS[:SLOTS])
        assert pass_through(20_000) == pass_through(1000) <= MOST_KEYS_PER_SLOT * SLOTS

    def test_every_call_costs_the_same_however_many_blocks_are_pinned(self, factory: PolicyFactory) -> None:
        assert dearest_call(factory, pinned=4900) <= dearest_call(factory, pinned=10) < 60


def remembered(policy: EvictionPolicy) -> set[BlockKey]:
    """The keys that can be reached from a policy."""
    seen: dict[int, object] = {}
    found: set[BlockKey] = set()
    waiting: list[Any] = [policy]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, type | ModuleType | FunctionType):
            continue
        seen[id(item)] = item
        if isinstance(item, BlockKey):
            found.add(item)
        else:
            waiting.extend(gc.get_referents(item))
            if isinstance(item, OrderedDict):  # whose keys the collector does not know
                waiting.extend(cast("OrderedDict[object, object]", item))
    return found


def dearest_call(factory: PolicyFactory, *, pinned: int) -> int:
    """Lines of Python that the dearest of many calls runs, those of hashing and comparing keys included."""
    policy = factory(5000)
    supply = keys(range(5200))
    bring(policy, *supply[:5000])
    use(policy, *supply[:5000], *supply[:5000:2])
    for key in supply[:pinned]:
        policy.pinned(key)
    dearest = 0
    for newcomer in supply[5000:]:
        victim = None

        def evict() -> None:
            nonlocal victim
            victim = policy.evict()

        calls: list[Callable[[], object]] = [
            evict,
            partial(policy.added, newcomer),
            partial(policy.unpinned, newcomer),
            partial(policy.touched, newcomer),
            partial(policy.unpinned, supply[3]),
            partial(policy.touched, supply[3]),
            partial(policy.pinned, supply[3]),
        ]
        dearest = max(dearest, *map(lines_run, calls))
        if victim is None:
            policy.removed(newcomer)
    return max(dearest, lines_run(lambda: policy.removed(supply[5])))


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of Python a call runs."""
    lines = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # what others hang into a collection is not the call's
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return lines
