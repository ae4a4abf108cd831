"""The contract, part four: whatever is done in whatever order, a store without a cap answers as a dictionary would."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvstore.layout import BlockLayout, as_bytes
from kvstore.marks import Mark, MarkOutcome
from kvstore.registry import open_store
from kvstore.testing.hooks import StoreHooks
from kvstore.testing.supply import SPACE, buffer, content, key
from kvstore.types import BlockRead, BlockWrite, GetOutcome, PutOutcome

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.types import BlockKey

LAYOUTS = (BlockLayout.opaque(1000), BlockLayout.opaque(8192))
KEYS = st.sampled_from([key(number, group=group) for number in range(6) for group in range(2)])
CONTENTS = st.integers(0, 3)
MARKS = st.builds(Mark, st.sampled_from(["", "a", "b"]), st.booleans(), st.sampled_from(["", "t"]))

revisions = itertools.count()


class AgainstADictionary(RuleBasedStateMachine):
    """Each run has a namespace to itself, so that all of them can share one location."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.store = open_store(url)
        self.space = dataclasses.replace(SPACE, revision=f"run {next(revisions)}", layouts=LAYOUTS)
        self.model: dict[BlockKey, int] = {}
        self.marks: dict[BlockKey, dict[tuple[str, str], bool]] = {}

    def data(self, name: BlockKey, number: int) -> NDArray[np.uint8]:
        return content(number, self.space.block_bytes(name.group))

    @rule(blocks=st.lists(st.tuples(KEYS, CONTENTS), max_size=4))
    def put(self, blocks: list[tuple[BlockKey, int]]) -> None:
        expected: list[PutOutcome] = []
        for name, number in blocks:
            expected.append(PutOutcome.EXISTS if name in self.model else PutOutcome.STORED)
            self.model.setdefault(name, number)
        given = [BlockWrite(name, buffer(self.data(name, number))) for name, number in blocks]
        assert self.store.put_many(self.space, given) == expected

    @rule(names=st.lists(KEYS, max_size=4))
    def get(self, names: list[BlockKey]) -> None:
        self.check(names)

    def check(self, names: list[BlockKey]) -> None:
        """Read them and compare."""
        reads = [BlockRead(name, bytearray(self.space.block_bytes(name.group))) for name in names]
        outcomes = self.store.get_many_into(self.space, reads)
        assert outcomes == [GetOutcome.HIT if name in self.model else GetOutcome.MISS for name in names]
        for read in reads:
            if read.key in self.model:
                right = self.data(read.key, self.model[read.key])
                same = np.array_equal(as_bytes(read.into), right)  # pytest would explain it with all of the bytes
                assert same, f"wrong bytes of {read.key}"

    @rule(names=st.lists(KEYS, max_size=3))
    def delete(self, names: list[BlockKey]) -> None:
        expected = [self.model.pop(name, None) is not None for name in names]
        for name in names:
            self.marks.pop(name, None)
        assert self.store.delete_many(self.space, names) == expected

    @rule(names=st.lists(KEYS, max_size=4))
    def ask(self, names: list[BlockKey]) -> None:
        assert self.store.contains_many(self.space, names) == [name in self.model for name in names]
        self.store.touch_many(self.space, names)

    @precondition(lambda self: self.store.capabilities.marks)
    @rule(names=st.lists(KEYS, max_size=3), mark=MARKS)
    def mark(self, names: list[BlockKey], mark: Mark) -> None:
        expected = [MarkOutcome.MARKED if name in self.model else MarkOutcome.MISSING for name in names]
        for name in names:
            if name in self.model and mark != Mark():
                said = self.marks.setdefault(name, {})
                said[mark.label, mark.tenant] = mark.pinned or said.get((mark.label, mark.tenant), False)
        assert self.store.mark_many(self.space, names, mark) == expected

    @precondition(lambda self: self.store.capabilities.marks)
    @rule(name=KEYS, mark=MARKS)
    def unmark(self, name: BlockKey, mark: Mark) -> None:
        said = self.marks.get(name, {})
        meant = [
            pair
            for pair, is_pinned in said.items()
            if mark.label in ("", pair[0]) and mark.tenant in ("", pair[1]) and (is_pinned or not mark.pinned)
        ]
        for pair in meant:
            if mark.pinned and pair != ("", ""):
                said[pair] = False
            else:
                del said[pair]
        assert self.store.unmark_many(self.space, [name], mark) == [bool(meant)]

    @precondition(lambda self: self.store.capabilities.persistent)
    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = open_store(self.url)

    @invariant()
    def the_scan_is_the_dictionary(self) -> None:
        found = {info.key: info for info in self.store.scan(self.space)}
        assert sorted(found) == sorted(self.model)
        for name, info in found.items():
            assert {(mark.label, mark.tenant): mark.pinned for mark in info.marks} == self.marks.get(name, {})
        marked = sorted(info.key for info in self.store.scan_marked(self.space, Mark("a")))
        assert marked == sorted(name for name, said in self.marks.items() if any(label == "a" for label, _ in said))

    def teardown(self) -> None:
        self.check(list(self.model))
        self.store.delete_many(self.space, list(self.model))
        assert (self.store.usage().blocks, self.store.usage().pinned) == (0, 0)
        self.store.close()


def run_against_a_dictionary(url: str, *, runs: int = 15, steps: int = 20) -> None:
    """So many runs of so many steps on the store at `url`, shared with whatever else is there."""
    machine: Any = lambda: AgainstADictionary(url)  # noqa: E731 - hypothesis wants a class, and takes a factory
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=runs,
            stateful_step_count=steps,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


class ModelTests(StoreHooks):
    """Hypothesis looks for the shortest series of calls about which store and dictionary disagree."""

    def test_a_store_answers_as_a_dictionary_would(self, url: str) -> None:
        run_against_a_dictionary(url)
