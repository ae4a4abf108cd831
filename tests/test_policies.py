"""Eviction policies: one contract over all of them, what LRU and ARC promise beyond it, and a real trace."""

from __future__ import annotations

import json
import random
import runpy
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from test_primary_tier import AnyOrderOfCalls
from tiering_helpers import BLOCK, PATIENCE, ask, engine_load, engine_store, keys, managed, writes

from kvstore import BlockKey, LookupResult
from kvstore.errors import ConfigurationError
from kvstore.testing import PolicyTests
from kvstore.testing.policy import KEYS, SLOTS, bring, evicted, use
from kvstore.tiering import PrimaryTier
from kvstore.tiering.policy import ARC, LRU, POLICIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.tiering.policy import EvictionPolicy, PolicyFactory

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "eviction_trace.py"

# The contract, for every policy


class TestEveryPolicy(PolicyTests):
    """Those that have a name: alone, and in a primary tier and a manager."""

    @pytest.fixture(params=sorted(POLICIES))
    def name(self, request: pytest.FixtureRequest) -> str:
        name: str = request.param
        return name

    @pytest.fixture
    def factory(self, name: str) -> PolicyFactory:
        return POLICIES[name]

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
    follow_the_paper(events)


@pytest.mark.parametrize("seed", range(4))
def test_arc_does_what_the_paper_says_for_long(seed: int) -> None:
    """Long enough for ghosts of both halves to come back: a few keys that most ask for, and others in passing."""
    chance = random.Random(seed)
    keys = [chance.choice(KEYS[: chance.choice((4, 8, len(KEYS)))]) for _ in range(1500)]
    targets = follow_the_paper([(key, "remove" if chance.random() < 0.02 else "request") for key in keys])
    steps = [after - before for before, after in pairwise(targets)]
    assert min(steps) < 0 < max(steps)


def follow_the_paper(events: Iterable[tuple[BlockKey, str]]) -> list[float]:
    """Do the same with both and compare what they keep after each event; the targets on the way."""
    policy, paper = ARC(SLOTS), Figure4(SLOTS)
    present: set[BlockKey] = set()
    targets: list[float] = []
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
        targets.append(policy._target)
    return targets


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


class TestAPolicyOfOnesOwn(PolicyTests):
    """The contract says whom one may evict, not whom one should."""

    @pytest.fixture
    def factory(self) -> PolicyFactory:
        return YoungestFirst


def test_the_contract_finds_a_policy_that_forgets_pins() -> None:
    with pytest.raises(AssertionError):
        PolicyTests().test_pinned_blocks_come_out_only_when_they_are_unpinned(NeverSorry)
    assert any(a_series_of_calls_finds(NeverSorry) for _ in range(20))  # by chance: one series may miss it


def a_series_of_calls_finds(factory: PolicyFactory) -> bool:
    try:
        PolicyTests().test_any_order_of_calls_yields_victims_that_are_there_and_not_pinned(factory)
    except AssertionError:
        return True
    return False


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
