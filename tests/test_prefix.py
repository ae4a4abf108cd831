"""Prefixes of models with several KV-cache groups: what is promised is what can be loaded, in all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiering_helpers import content, faulty, fill, managed, until

from kvstore import BlockKey, BlockLayout, GetOutcome, LookupResult, Namespace, open_store
from kvstore.keys import chain_digests
from kvstore.testing.faults import failing
from kvstore.testing.patience import PATIENCE, within
from kvstore.tiering import WHOLE, Prefix, load_groups, lookup_prefix, prepare_prefix, window_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore.testing.faults import Call, FaultyStore, Hanging
    from kvstore.tiering import TieringManager

TOKENS = 4
SPACE = Namespace(
    "hybrid",
    "r1",
    (
        BlockLayout.canonical(layers=2, tokens=TOKENS, heads=2, head_dim=8, dtype="float16"),
        BlockLayout.canonical(layers=3, tokens=TOKENS, heads=2, head_dim=8, dtype="float8_e4m3fn"),
        BlockLayout("float32", ("layer", "head", "dim", "state"), (2, 2, 4, 4)),
    ),
    TOKENS,
)
FULL, WINDOW, STATE = range(3)
NEEDS = {FULL: WHOLE, WINDOW: window_blocks(9, TOKENS), STATE: 1}
BLOCKS = 12
DIGESTS = tuple(chain_digests(range(BLOCKS * TOKENS), TOKENS))


def prompt(blocks: int = BLOCKS) -> Prefix:
    """A request's prompt, of which nothing is known yet."""
    return Prefix(DIGESTS[:blocks], NEEDS)


PROMPT = prompt()
"""For what it needs; nothing is looked up with this one."""


def named(group: int, positions: Iterable[int]) -> list[BlockKey]:
    return [BlockKey(DIGESTS[position], group) for position in positions]


EVERYTHING = [key for group in NEEDS for key in named(group, range(BLOCKS))]


@pytest.fixture(params=["memory", "file", "lmdb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    location = {"memory": "memory://groups", "file": f"file://{tmp_path}/kv", "lmdb": f"lmdb://{tmp_path}/kv.lmdb"}
    with open_store("memory://groups"):
        yield location[request.param]


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    with faulty() as backend:
        yield backend


def load(manager: TieringManager, prefix: Prefix | None = None, timeout: float = PATIENCE) -> tuple[int, set[BlockKey]]:
    """How much was loaded, and which blocks were delivered: each once, with the bytes that belong to it."""
    prefix = prefix or prompt()
    delivered: set[BlockKey] = set()

    def deliver(key: BlockKey, view: NDArray[np.uint8]) -> None:
        assert key not in delivered
        assert np.array_equal(view, content(key, view.nbytes))
        delivered.add(key)

    blocks = load_groups(manager, prefix, deliver, timeout=timeout)
    assert delivered.issuperset(prefix.needed(blocks))
    return blocks, delivered


def look(manager: TieringManager, prefix: Prefix | None = None) -> int:
    """The answer of `lookup_prefix`, asked once per step until it is final."""

    def final() -> tuple[int, LookupResult] | None:
        blocks, answer = lookup_prefix(manager, prefix)
        return (blocks, answer) if answer in (LookupResult.HIT, LookupResult.MISS) else None

    prefix = prefix or prompt()
    blocks, answer = until(manager, final)
    assert (answer is LookupResult.MISS) == (blocks == 0)
    return blocks


# What a prefix needs


@pytest.mark.parametrize(("window", "blocks"), [(1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_a_window_counts_the_token_that_is_computed_next(window: int, blocks: int) -> None:
    assert window_blocks(window, TOKENS) == blocks


def test_a_prefix_needs_all_of_full_attention_the_end_of_a_window_and_one_state() -> None:
    assert PROMPT.needed(4) == [
        BlockKey(DIGESTS[0], FULL),
        BlockKey(DIGESTS[1], FULL),
        *named(FULL, [2]),
        *named(WINDOW, [2]),
        *named(FULL, [3]),
        *named(WINDOW, [3]),
        *named(STATE, [3]),
    ]
    assert set(PROMPT.needed(1)) == {BlockKey(DIGESTS[0], group) for group in NEEDS}
    assert PROMPT.needed(0) == []


needs = st.dictionaries(st.integers(0, 3), st.sampled_from([0, 1, 2, 3, WHOLE]), min_size=1)


@given(needs, st.integers(0, 8), st.sets(st.tuples(st.integers(0, 7), st.integers(0, 3))))
def test_the_usable_prefix_is_the_longest_that_lacks_nothing_it_needs(
    wanted: dict[int, int], length: int, holes: set[tuple[int, int]]
) -> None:
    """Field report 14: a partial set of groups never counts as a hit."""
    prefix = Prefix(DIGESTS[:length], wanted)
    prefix.lacking = {
        BlockKey(DIGESTS[position], group) for position, group in holes if position < length and group in wanted
    }
    fine = [n for n in range(length + 1) if prefix.lacking.isdisjoint(prefix.needed(n))]
    assert prefix.usable() == max(fine)
    for slots in range(12):
        assert prefix.usable(slots) == max(n for n in fine if len(prefix.needed(n)) <= slots)


@pytest.mark.parametrize("wanted", [{}, {0: -1}])
def test_needs_that_make_no_sense_are_refused(wanted: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="at least one group"):
        Prefix(DIGESTS, wanted)


# On real tiers

CASES = [
    ("nothing lacks", [], 12),
    ("full attention lacks one", named(FULL, [7]), 7),
    ("a window lacks what is behind it", named(WINDOW, range(10)), 12),
    ("a window lacks its last block", named(WINDOW, [11]), 11),
    ("a window lacks one inside", named(WINDOW, [10]), 10),
    ("only one state was kept", named(STATE, [*range(5), *range(6, 12)]), 6),
    ("a state where the window is not", named(STATE, [10, 11]) + named(WINDOW, [8, 9]), 8),
    ("no state at all", named(STATE, range(12)), 0),
    ("full attention lacks the first", named(FULL, [0]), 0),
]


@pytest.mark.parametrize(("lacking", "usable"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_load_delivers_what_the_lookup_promised(url: str, lacking: list[BlockKey], usable: int) -> None:
    """Field report 14: lookup promises more than the load delivers, in sliding-window and hybrid models."""
    fill(url, [key for key in EVERYTHING if key not in lacking], SPACE)
    with managed(url, space=SPACE, primary_slots=40) as manager:
        assert look(manager) == usable
        blocks, views = prepare_prefix(manager, prompt())
        assert blocks == usable
        assert views.keys() == set(PROMPT.needed(usable))
        assert all(np.array_equal(view, content(key, view.nbytes)) for key, view in views.items())
        manager.complete_load(list(views))
        manager.finish_request(EVERYTHING)
    with managed(url, space=SPACE, primary_slots=4) as manager:  # fewer slots than blocks
        assert load(manager)[0] == usable


def test_groups_that_are_not_needed_are_not_looked_at(url: str) -> None:
    fill(url, named(FULL, range(BLOCKS)), SPACE)
    with managed(url, space=SPACE) as manager:
        assert load(manager, Prefix(DIGESTS)) == (12, set(named(FULL, range(BLOCKS))))


def test_no_more_of_a_window_is_loaded_than_the_prefix_needs() -> None:
    with open_store("memory://window"):
        fill("memory://window", EVERYTHING, SPACE)
        with managed("memory://window", space=SPACE, primary_slots=40) as manager:
            assert look(manager) == 12
            assert manager.stats().promotions == 12 + 2 + 1


@pytest.mark.parametrize(("slots", "usable"), [(1, 0), (3, 1), (4, 1), (5, 2), (8, 5), (14, 11), (15, 12)])
def test_no_more_is_promised_than_the_primary_tier_holds_at_once(slots: int, usable: int) -> None:
    with open_store("memory://small"):
        fill("memory://small", EVERYTHING, SPACE)
        with managed("memory://small", space=SPACE, primary_slots=slots) as manager:
            request = prompt()
            assert look(manager, request) == usable
            blocks, views = prepare_prefix(manager, request)
            assert blocks == usable
            manager.complete_load(list(views))


def test_a_primary_tier_that_others_fill_shortens_the_prefix_and_stalls_nobody() -> None:
    with open_store("memory://busy"):
        fill("memory://busy", EVERYTHING, SPACE)
        with managed("memory://busy", space=SPACE, primary_slots=8, slot_timeout=0.1, miss_age=0.1) as manager:
            others = [BlockKey(bytes([number] * 32), FULL) for number in range(3)]
            assert sum(view is not None for view in manager.prepare_store(others)) == 3
            with within(0.1):
                assert look(manager) == 2, "five slots are left: two blocks, their window and their state"
            manager.complete_store(others, success=False)
            manager.forget(EVERYTHING)
            assert look(manager) == 5


# What was promised and does not come


def test_a_block_that_fails_its_checks_in_one_group_shortens_the_prefix_for_all(store: FaultyStore) -> None:
    """Field report 14, at load time."""
    fill("memory://faulty", EVERYTHING, SPACE)
    damaged = named(WINDOW, [11])[0]

    def get(call: Call) -> list[GetOutcome]:
        return [
            GetOutcome.CORRUPT if key == damaged else outcome
            for key, outcome in zip(call.keys, call.answer(), strict=True)
        ]

    store.plan["get"] = get
    with managed(store, space=SPACE, primary_slots=40) as manager:
        assert load(manager)[0] == 11
        manager.forget(EVERYTHING)
        assert look(manager) == 11
        assert prepare_prefix(manager, prompt())[0] == 11
        manager.complete_load(PROMPT.needed(11))


def test_a_block_lost_between_lookup_and_load_shortens_the_prefix_and_pins_nothing_in_vain() -> None:
    """Field report 14, at load time."""
    with open_store("memory://lost"):
        fill("memory://lost", EVERYTHING, SPACE)
        with managed("memory://lost", space=SPACE, primary_slots=40) as manager:
            assert look(manager, prompt(9)) == 9
            assert look(manager) == 12
            manager.forget(named(FULL, [9]))
            slot = manager.primary.get(named(FULL, [9])[0])
            assert slot is not None
            manager.primary.pin(slot)
            manager.primary.discard(slot)
            manager.primary.unpin(slot)
            blocks, views = prepare_prefix(manager, prompt())
            assert (blocks, views.keys()) == (9, set(PROMPT.needed(9)))
            manager.complete_load(list(views))


def test_a_tier_that_fails_for_one_group_ends_in_a_shorter_prefix_soon(store: FaultyStore) -> None:
    fill("memory://faulty", EVERYTHING, SPACE)

    store.plan["get"] = lambda call: failing()(call) if STATE in {key.group for key in call.keys} else call.answer()
    with managed(store, space=SPACE, primary_slots=40) as manager, within(2.0):
        assert load(manager)[0] == 0


def test_a_tier_that_hangs_is_waited_for_once_and_not_block_by_block(store: FaultyStore, hanging: Hanging) -> None:
    fill("memory://faulty", EVERYTHING, SPACE)
    store.plan["get"] = hanging
    with managed(store, space=SPACE, primary_slots=40) as manager:
        with within(0.3):  # 12 times as long, were it for each block
            assert load(manager, Prefix(DIGESTS, {WINDOW: 1}), timeout=2.0) == (0, set())
        hanging.release()
        store.plan.clear()
