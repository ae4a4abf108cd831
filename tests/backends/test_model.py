"""The contract, part four: whatever is done in whatever order, a store without a cap answers as a dictionary would."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from tiers import SPACE, content, key

from kvstore import BlockLayout, BlockRead, BlockWrite, GetOutcome, PutOutcome

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tiers import Tier

    from kvstore import BlockKey

LAYOUTS = (BlockLayout.opaque(1000), BlockLayout.opaque(8192))
KEYS = st.builds(lambda number, group: key(number, group=group), st.integers(0, 5), st.integers(0, 1))
CONTENTS = st.integers(0, 3)

revisions = itertools.count()


class AgainstADictionary(RuleBasedStateMachine):
    """Each run has a namespace to itself, so that all of them can share one location."""

    def __init__(self, tier: Tier) -> None:
        super().__init__()
        self.tier = tier
        self.store = tier.open()
        self.space = dataclasses.replace(SPACE, revision=f"run {next(revisions)}", layouts=LAYOUTS)
        self.model: dict[BlockKey, int] = {}

    def data(self, name: BlockKey, number: int) -> NDArray[np.uint8]:
        return content(number, self.space.block_bytes(name.group))

    @rule(blocks=st.lists(st.tuples(KEYS, CONTENTS), max_size=4))
    def put(self, blocks: list[tuple[BlockKey, int]]) -> None:
        expected: list[PutOutcome] = []
        for name, number in blocks:
            expected.append(PutOutcome.EXISTS if name in self.model else PutOutcome.STORED)
            self.model.setdefault(name, number)
        given = [BlockWrite(name, self.data(name, number)) for name, number in blocks]
        assert self.store.put_many(self.space, given) == expected

    @rule(names=st.lists(KEYS, max_size=4))
    def get(self, names: list[BlockKey]) -> None:
        reads = [BlockRead(name, bytearray(self.space.block_bytes(name.group))) for name in names]
        outcomes = self.store.get_many_into(self.space, reads)
        assert outcomes == [GetOutcome.HIT if name in self.model else GetOutcome.MISS for name in names]
        for read in reads:
            if read.key in self.model:
                assert read.into == self.data(read.key, self.model[read.key]).tobytes()

    @rule(names=st.lists(KEYS, max_size=3))
    def delete(self, names: list[BlockKey]) -> None:
        expected = [self.model.pop(name, None) is not None for name in names]
        assert self.store.delete_many(self.space, names) == expected

    @rule(names=st.lists(KEYS, max_size=4))
    def ask(self, names: list[BlockKey]) -> None:
        assert self.store.contains_many(self.space, names) == [name in self.model for name in names]
        self.store.touch_many(self.space, names)

    @precondition(lambda self: self.store.capabilities.persistent)
    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.tier.open()

    @invariant()
    def the_scan_is_the_dictionary(self) -> None:
        found = [info.key for info in self.store.scan(self.space)]
        assert sorted(found) == sorted(self.model)

    def teardown(self) -> None:
        self.store.delete_many(self.space, list(self.model))
        assert self.store.usage().blocks == 0
        self.store.close()


def test_a_store_answers_as_a_dictionary_would(tier: Tier) -> None:
    run_state_machine_as_test(
        lambda: AgainstADictionary(tier), settings=settings(max_examples=15, stateful_step_count=20, deadline=None)
    )


@pytest.mark.soak
def test_a_store_answers_as_a_dictionary_would_for_long(tier: Tier) -> None:
    run_state_machine_as_test(
        lambda: AgainstADictionary(tier), settings=settings(max_examples=500, stateful_step_count=60, deadline=None)
    )
