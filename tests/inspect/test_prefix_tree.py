"""Prefixes as a tree: every block is in it once, wherever it belongs, whatever is missing around it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inspect_helpers import KEYS, PROMPT, SPACE, TOKENS, looking, store_prompt

import kvstore.inspect
from kvstore import BlockInfo, BlockKey, BlockLayout, Mark, Namespace, open_store
from kvstore.errors import NotStoredError
from kvstore.inspect import PrefixTree
from kvstore.inspect.scanned import Scanned
from kvstore.types import NO_PARENT, NO_POSITION

if TYPE_CHECKING:
    from kvstore.inspect import Run

GROUPS = Namespace("model", "revision", (SPACE.layouts[0], BlockLayout.opaque(64)), block_tokens=TOKENS)


def digest(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def info(
    number: int, parent: int | None, position: int, *, label: str = "", group: int = 0, hits: int = 0
) -> BlockInfo:
    before = NO_PARENT if parent is None else digest(parent)
    marks = (Mark(label),) if label else ()
    return BlockInfo(BlockKey(digest(number), group), 100, 1e9 + number, 2e9 + number, hits, position, before, marks)


def tree_of(*infos: BlockInfo, space: Namespace = GROUPS) -> PrefixTree:
    return PrefixTree.of(Scanned(space, infos, "memory://x"))


def shape(run: Run) -> object:
    return (run.blocks, [shape(child) for child in run.children]) if run.children else run.blocks


def test_blocks_without_a_branch_are_one_run(tier: str) -> None:
    with looking(tier, SPACE) as look:
        (root,) = look.namespace().tree().roots
        sizes = [one.stored_bytes for one in look.store.scan(SPACE)]
    assert (root.first, root.last) == (KEYS[0].digest.hex(), KEYS[-1].digest.hex())
    assert (root.start, root.blocks, root.tokens, root.complete) == (0, 10, 40, True)
    assert root.stored_bytes == sum(sizes)
    assert root.children == ()


def test_prompts_that_part_are_branches(local: str) -> None:
    with open_store(local) as store:
        store_prompt(store)
        store_prompt(store, tokens=[*PROMPT[:20], *[7] * 12])
        store_prompt(store, tokens=[*PROMPT[:24], *[8] * 4])
        store_prompt(store, tokens=[9] * 8)
    with kvstore.inspect.open(local) as look:
        tree = look.namespace().tree()
    first, second = tree.roots
    assert shape(second) == 2
    assert (first.blocks, first.start) == (5, 0)
    shapes = {str(shape(child)) for child in first.children}
    assert shapes in ({"3", "(1, [4, 1])"}, {"3", "(1, [1, 4])"})
    assert [run.start for _, run in first.walk()].count(6) == 2
    assert tree.blocks == 10 + 3 + 1 + 2


def test_a_label_ends_a_run() -> None:
    tree = tree_of(
        info(0, None, 0, label="a"), info(1, 0, 1, label="a"), info(2, 1, 2, label="b"), info(3, 2, 3), info(4, 3, 4)
    )
    (root,) = tree.roots
    assert [(run.labels, run.blocks) for _, run in root.walk()] == [(("a",), 2), (("b",), 1), ((), 2)]
    assert [depth for depth, _ in root.walk()] == [0, 1, 2]


def test_sums_and_ages_are_those_of_the_blocks() -> None:
    (root,) = tree_of(info(3, None, 0, hits=5), info(1, 3, 1, hits=2)).roots
    assert (root.stored_bytes, root.hits) == (200, 7)
    assert (root.created, root.last_used) == (1e9 + 1, 2e9 + 3)


def test_what_lost_its_beginning_is_a_root_that_is_incomplete() -> None:
    tree = tree_of(info(5, 4, 5), info(6, 5, 6), info(9, None, 3), info(10, 9, 4))
    assert [(run.start, run.blocks, run.complete) for run in tree.roots] == [(3, 2, False), (5, 2, False)]
    assert "beginning not stored" in tree.text()
    assert not tree.loose


def test_blocks_of_which_nothing_is_known_are_counted_apart() -> None:
    tree = tree_of(info(1, None, NO_POSITION), info(2, None, NO_POSITION), info(3, None, 0))
    assert ({one.key.digest for one in tree.loose}, len(tree.roots)) == ({digest(1), digest(2)}, 1)
    assert tree.blocks == 3
    assert "2 blocks without position and parent" in tree.text()


def test_a_block_of_unknown_place_that_others_follow_begins_a_tree() -> None:
    tree = tree_of(info(1, None, NO_POSITION), info(2, 1, NO_POSITION))
    (root,) = tree.roots
    assert (root.blocks, root.start, root.complete, len(tree.loose)) == (2, NO_POSITION, False, 0)


def test_each_group_has_trees_of_its_own() -> None:
    tree = tree_of(
        info(1, None, 0), info(2, 1, 1), info(1, None, 0, group=1), info(2, 1, 1, group=1), info(3, 2, 2, group=1)
    )
    assert [(run.group, run.blocks) for run in tree.roots] == [(0, 2), (1, 3)]
    assert tree.text().count("group ") == 2


def test_parents_in_a_circle_hang_nobody() -> None:
    tree = tree_of(info(1, 2, 1), info(2, 1, 2), info(3, 3, 1), info(4, None, 0))
    assert {one.key.digest for one in tree.loose} == {digest(1), digest(2), digest(3)}
    assert tree.blocks == 4
    scanned = Scanned(GROUPS, [info(1, 2, 1), info(2, 1, 2)], "memory://x")
    assert len(scanned.chain(scanned.block(digest(1).hex(), 0))) == 2


def test_a_prefix_may_branch_at_each_of_its_blocks() -> None:
    depth = 3000
    spine = [info(number, number - 1 if number else None, number) for number in range(depth)]
    leaves = [info(depth + number, number, number + 1) for number in range(depth)]
    tree = tree_of(*spine, *leaves)
    assert tree.blocks == 2 * depth
    assert max(level for level, _ in tree.runs()) == depth - 1
    assert f"and {2 * depth - 1 - 40:,} more runs" in repr(tree)
    assert len(tree._repr_html_()) < 100_000


PLACES = st.lists(st.tuples(st.integers(-1, 30), st.sampled_from(["", "a", "b"]), st.booleans()), max_size=30)


@given(PLACES)
def test_every_block_is_in_the_tree_once_and_after_its_parent(places: list[tuple[int, str, bool]]) -> None:
    infos = [
        info(number, None if parent < 0 else parent, NO_POSITION if lost else number, label=label)
        for number, (parent, label, lost) in enumerate(places)
    ]
    tree = tree_of(*infos)
    inside = [one.key for _, run in tree.runs() for one in run.infos]
    assert sorted([*inside, *(one.key for one in tree.loose)]) == sorted(one.key for one in infos)
    for _, run in tree.runs():
        assert {one.labels for one in run.infos} == {run.labels}
        for before, after in zip(run.infos, run.infos[1:], strict=False):
            assert after.parent == before.key.digest
        for child in run.children:
            assert child.infos[0].parent == run.infos[-1].key.digest
            assert child.complete == run.complete


def test_a_prefix_is_named_by_a_label_or_a_digest(local: str) -> None:
    with open_store(local) as store:
        store_prompt(store)
        store_prompt(store, tokens=[*PROMPT[:20], *[7] * 12])
        store.mark_many(SPACE, KEYS[:3], Mark("handbook"))
        store.mark_many(SPACE, [KEYS[-1], store_prompt(store, tokens=[3] * 8)[-1]], Mark("twice"))
    with kvstore.inspect.open(local) as look:
        space = look.namespace()
        assert space.prefix("handbook").keys == KEYS[:3]
        assert space.prefix(label="handbook").complete
        assert space.prefix(KEYS[6].digest.hex()[:10].upper()).keys == KEYS[:7]
        with pytest.raises(NotStoredError, match="2 prefixes of group 0 are labelled 'twice'") as error:
            space.prefix("twice")
        assert KEYS[-1].digest.hex() in str(error.value)
        with pytest.raises(NotStoredError, match=r"no block of group 0 is labelled 'x'\. Labels: handbook, twice"):
            space.prefix(label="x")
        with pytest.raises(NotStoredError, match="no block of group 0 begins with 'zz'"):
            space.prefix("zz")


def test_a_block_is_named_by_how_its_digest_begins() -> None:
    with open_store("memory://named") as store:
        store_prompt(store, GROUPS, PROMPT[:8])
        other = KEYS[0]
        with kvstore.inspect.open(store) as look:
            space = look.namespace()
            assert space.block(other.digest.hex()[:5]).key == other
            assert space.block(other.digest.hex()).key == other
            wrong = other.digest.hex()[:4] + f"{(int(other.digest.hex()[4], 16) + 1) % 16:x}"
            with pytest.raises(NotStoredError, match="no block of group 0 begins"):
                space.block(wrong)
            with pytest.raises(NotStoredError, match="2 blocks of group 0 begin with ''"):
                space.block("")
            with pytest.raises(NotStoredError, match="group 0 has one"):
                space.block(other.digest.hex(), group=1)
            with pytest.raises(NotStoredError, match="groups 0 to 1, not 2"):
                space.block(other.digest.hex(), group=2)


def test_a_prefix_without_its_beginning_says_so(tier: str) -> None:
    with open_store(tier) as store:
        store_prompt(store, start=4)
        with kvstore.inspect.open(store) as look:
            prefix = look.namespace().prefix(KEYS[-1].digest.hex())
            assert (len(prefix), prefix.complete, prefix.tokens) == (6, False, 24)
            assert "from block 4 on" in repr(prefix)
            pytest.importorskip("xarray")
            assert list(prefix.xarray().token.values) == list(range(16, 40))
