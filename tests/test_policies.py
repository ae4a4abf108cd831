"""Eviction policies: one contract over all of them, what LRU and ARC promise beyond it, and a real trace."""

from __future__ import annotations

import gc
import json
import runpy
import sys
from collections import OrderedDict
from itertools import count
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from test_primary_tier import AnyOrderOfCalls
from tiering_helpers import BLOCK, PATIENCE, ask, engine_load, engine_store, keys, managed, writes

from kvstore import BlockKey, LookupResult
from kvstore.errors import ConfigurationError
from kvstore.tiering import PrimaryTier
from kvstore.tiering.policy import ARC, LRU, POLICIES, make_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from kvstore.tiering.policy import EvictionPolicy

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "eviction_trace.py"
SLOTS = 6
KEYS = keys(3 * SLOTS)
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


# The contract, for every policy


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


@pytest.mark.parametrize("name", sorted(POLICIES))
class TestEveryPolicy:
    """What the primary tier relies on. A policy of your own passes when it stands in `POLICIES` for these tests."""

    def test_any_order_of_calls_yields_victims_that_are_there_and_not_pinned(self, name: str) -> None:
        run_state_machine_as_test(
            lambda: ContractOfAPolicy(make_policy(name, SLOTS)),
            settings=settings(max_examples=100, stateful_step_count=60, deadline=None),
        )

    def test_pinned_blocks_come_out_only_when_they_are_unpinned(self, name: str) -> None:
        policy = make_policy(name, SLOTS)
        bring(policy, *KEYS[:4])
        use(policy, *KEYS[:2], *KEYS[:2])
        policy.added(KEYS[4])
        policy.pinned(KEYS[0])
        policy.pinned(KEYS[3])
        use(policy, KEYS[0], KEYS[3], KEYS[4])
        assert sorted(evicted(policy)) == sorted(KEYS[1:3])
        policy.unpinned(KEYS[0])
        assert evicted(policy) == KEYS[:1]

    def test_twenty_thousand_passing_blocks_leave_no_more_behind_than_a_thousand(self, name: str) -> None:
        policy, supply = make_policy(name, SLOTS), (BlockKey(number.to_bytes(16, "big")) for number in count())

        def pass_through(blocks: int) -> int:
            for _, key in zip(range(blocks), supply, strict=False):
                policy.evict()
                bring(policy, key)
                use(policy, *[key] * (1 + key.digest[-1] % 3))
            return len(remembered(policy))

        bring(policy, *KEYS[:SLOTS])
        assert pass_through(20_000) == pass_through(1000) <= MOST_KEYS_PER_SLOT * SLOTS

    def test_every_call_costs_the_same_however_many_blocks_are_pinned(self, name: str) -> None:
        assert dearest_call(name, pinned=4900) <= dearest_call(name, pinned=10) < 60

    def test_the_primary_tier_keeps_its_promises_under_it(self, name: str) -> None:
        class UnderThisPolicy(AnyOrderOfCalls):
            def __init__(self) -> None:
                super().__init__()
                self.tier = PrimaryTier(3, 8, policy=name)

        run_state_machine_as_test(
            UnderThisPolicy, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
        )

    def test_sixty_blocks_go_through_four_slots_and_come_back(self, name: str) -> None:
        prompt = keys(60)
        with managed("memory://behind", policy=name) as manager:
            assert manager.store(writes(prompt)) == 60
            assert engine_load(manager, prompt) == 60


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
            waiting.extend(item if isinstance(item, OrderedDict) else ())
    return found


def dearest_call(name: str, *, pinned: int) -> int:
    """Lines of Python that the dearest of many calls runs, those of hashing and comparing keys included."""
    policy = make_policy(name, 5000)
    supply = keys(5200)
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
            lambda key=newcomer: policy.added(key),
            lambda key=newcomer: policy.unpinned(key),
            lambda key=newcomer: policy.touched(key),
            lambda: policy.unpinned(supply[3]),
            lambda: policy.touched(supply[3]),
            lambda: policy.pinned(supply[3]),
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


# LRU


@given(used=st.lists(st.sampled_from(KEYS)))
def test_under_lru_the_untouched_leave_in_the_order_of_age_and_then_the_touched_in_the_order_of_use(
    used: list[BlockKey],
) -> None:
    policy = LRU(len(KEYS))
    bring(policy, *KEYS)
    use(policy, *used)
    last_uses = list(dict.fromkeys(reversed(used)))[::-1]
    assert evicted(policy) == [key for key in KEYS if key not in used] + last_uses


# ARC


class Figure4:
    """The paper's algorithm, line by line, but for the two departures that `ARC` names. MRU at the end."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1: list[BlockKey] = []
        self.t2: list[BlockKey] = []
        self.b1: list[BlockKey] = []
        self.b2: list[BlockKey] = []

    def remove(self, x: BlockKey) -> None:
        (self.t1 if x in self.t1 else self.t2).remove(x)

    def request(self, x: BlockKey) -> None:
        if x in self.t1 + self.t2:
            self.remove(x)
            self.t2.append(x)
            return
        if len(self.t1) + len(self.t2) == self.c:
            self.replace()
        if x in self.b1:
            self.p = min(self.c, self.p + max(1, len(self.b2) / len(self.b1)))
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:
            self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
            self.b2.remove(x)
            self.t2.append(x)
        else:
            self.t1.append(x)

    def replace(self) -> None:
        if self.t1 and (len(self.t1) > self.p or not self.t2):
            self.b1 = [*self.b1, self.t1.pop(0)][-self.c :]
        else:
            self.b2 = [*self.b2, self.t2.pop(0)][-self.c :]


@given(events=st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(["request"] * 9 + ["remove"])), max_size=120))
@settings(max_examples=200)
def test_arc_does_what_the_paper_says_but_for_its_departures(events: list[tuple[BlockKey, str]]) -> None:
    policy, paper = ARC(SLOTS), Figure4(SLOTS)
    present: set[BlockKey] = set()
    for key, event in events:
        if event == "request":
            request(policy, present, key)
            paper.request(key)
        elif key in present:
            policy.removed(key)
            present.remove(key)
            paper.remove(key)
        assert list(policy._once.order) == paper.t1
        assert list(policy._again.order) == paper.t2
        assert list(policy._once.ghosts) == paper.b1
        assert list(policy._again.ghosts) == paper.b2
        assert (policy._once.ready, policy._again.ready) == (len(paper.t1), len(paper.t2))
        assert policy._target == paper.p


def request(policy: EvictionPolicy, present: set[BlockKey], key: BlockKey) -> None:
    """What the primary tier does for a request with one block."""
    if key not in present:
        if len(present) == SLOTS:
            present.remove(policy.evict() or key)
        bring(policy, key)
        present.add(key)
    use(policy, key)


@pytest.mark.parametrize(("policy", "left"), [("arc", 8), ("lru", 0)])
def test_a_prefix_used_twice_survives_a_scan_of_blocks_used_once_under_arc_and_not_under_lru(
    policy: str, left: int
) -> None:
    prefix, scan = keys(8, "prefix"), keys(400, "scan")
    with managed("memory://behind", policy=policy, primary_slots=32) as manager:
        for start in (0, 2):  # stored by one request, loaded by the next
            assert len(engine_store(manager, prefix[:2] if start else prefix)) == (0 if start else 8)
            assert engine_load(manager, prefix) == 8
        for start in range(0, len(scan), 8):
            blocks = scan[start : start + 8]
            assert engine_store(manager, blocks) == blocks
            manager.finish_request(blocks)
            assert manager.drain(PATIENCE)
        here = [manager.primary.get(key) is not None for key in prefix]
    assert sum(here) == left


def test_a_block_that_was_stored_cascaded_and_held_for_one_request_counts_as_used_once() -> None:
    policy = ARC(4)
    first, second = keys(2)
    with managed("memory://one", "memory://two", policy=lambda _: policy) as manager:
        engine_store(manager, [first, second])
        for _ in range(3):
            assert ask(manager, [first, second]) == [LookupResult.HIT] * 2
        manager.finish_request([first, second])
        assert manager.drain(PATIENCE)
        assert set(policy._once.order) == {first, second}
        manager.finish_request([first])
        assert set(policy._again.order) == {first}


# Choosing one


def test_a_policy_is_chosen_by_name_through_the_manager_and_lru_is_the_default() -> None:
    for options, expected in (({}, LRU), ({"policy": "lru"}, LRU), ({"policy": "arc"}, ARC)):
        with managed(**options) as manager:
            assert type(manager.primary._policy) is expected


def test_an_unknown_policy_is_an_error_that_lists_what_is_known_and_how_to_bring_your_own() -> None:
    with pytest.raises(ConfigurationError, match=r"'lfu'.*Known: arc, lru; .*callable"):
        PrimaryTier(4, BLOCK, policy="lfu")
    with pytest.raises(ConfigurationError, match="'lfu'"), managed(policy="lfu"):
        pass


def test_a_manager_over_a_primary_tier_takes_no_second_policy() -> None:
    with (
        pytest.raises(ValueError, match="has its policy already"),
        managed(primary=PrimaryTier(4, BLOCK), primary_slots=None, policy="arc"),
    ):
        pass


def test_the_front_of_a_prefix_stays_longest() -> None:
    tier = PrimaryTier(4, 8)
    prefix, others = keys(4), keys(3, "others")
    for key in prefix:
        slot = tier.reserve(key, 8)
        assert slot is not None
        tier.publish(slot)
        tier.unpin(slot)
    tier.touch(prefix)
    for other in others:
        assert tier.reserve(other, 8) is not None
    assert [tier.get(key) is not None for key in prefix] == [True, False, False, False]


class YoungestFirst(LRU):
    """A third party's policy."""

    def evict(self) -> BlockKey | None:
        return self._order.popitem()[0] if self._order else None


class NeverSorry(LRU):
    """Offers what it was told is pinned."""

    def pinned(self, key: BlockKey) -> None:
        pass


def test_a_policy_of_ones_own_is_passed_as_what_makes_it() -> None:
    prompt = keys(5)
    with managed(policy=YoungestFirst) as manager:
        assert manager.store(writes(prompt)) == 5
        assert [manager.primary.get(key) is not None for key in prompt] == [True, True, True, False, True]


def test_a_policy_that_would_evict_a_pinned_block_is_stopped() -> None:
    tier = PrimaryTier(2, 8, policy=NeverSorry)
    slots = [tier.reserve(key, 8) for key in KEYS[:2]]
    for slot in filter(None, slots):
        tier.publish(slot)
        tier.unpin(slot)
    assert slots[0] is not None
    tier.pin(slots[0])
    with pytest.raises(RuntimeError, match="NeverSorry chose to evict"):
        tier.reserve(KEYS[2], 8)
    assert tier.get(KEYS[0]) is slots[0]


# A real trace

MEASURED = {
    "lru": {0.01: 0.052, 0.03: 0.125, 0.1: 0.278, 0.3: 0.358},
    "arc": {0.01: 0.077, 0.03: 0.145, 0.1: 0.287, 0.3: 0.349},
}
"""Prefix hits over blocks requested, by another implementation of both, by cache size as a share of all blocks."""


def replay(*arguments: str) -> int:
    main: Callable[[Sequence[str]], int] = runpy.run_path(str(BENCHMARK))["main"]
    return main(arguments)


@pytest.mark.parametrize("policy", sorted(MEASURED))
def test_hits_on_a_real_trace_are_those_that_others_measured(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    trace = runpy.run_path(str(BENCHMARK))["DEFAULT_TRACE"]
    if not trace.exists():
        pytest.skip(f"no trace at {trace}: {runpy.run_path(str(BENCHMARK))['DOWNLOAD']}")
    assert replay("--json", "--policy", policy) == 0
    rates = {result["share"]: result["hit_rate"] for result in json.loads(capsys.readouterr().out)}
    assert rates == pytest.approx(MEASURED[policy], abs=0.002)


def test_the_benchmark_reads_a_trace_and_counts_leading_blocks_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    requests = [[0, 1], [0, 1, 2], [9, 1, 2], [0, 9]]
    trace.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": ids}) + "\n" for ids in requests))
    assert replay(str(trace)) == 0
    assert "4 requests for 10 blocks, 4 of them different; with room for all: 0.400" in capsys.readouterr().out


def test_a_trace_that_is_absent_is_said_with_where_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(str(tmp_path / "absent.jsonl")) == 2
    assert "FAST25-release/traces/conversation_trace.jsonl" in capsys.readouterr().err
