"""Stores by several ranks: a block is there when every part of it is, and nobody's slot is written by somebody else."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiering_helpers import PATIENCE, ask, content, keys, managed, until

from kvstore import BlockKey, BlockLayout, LookupResult, Namespace, open_store
from kvstore.shards import Shards
from kvstore.tiering import ShardedStores

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore.tiering import TieringManager

HIT, PENDING, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS
LAYOUTS = (
    BlockLayout.canonical(layers=2, tokens=4, heads=4, head_dim=16, dtype="uint8"),
    BlockLayout.latent(layers=2, tokens=4, latent=24, dtype="uint8"),
)
SPACE = Namespace("sharded", "r1", LAYOUTS, 4)
FOUR_RANKS = [Shards(layout, tensor=4) for layout in LAYOUTS]
PROMPT = keys(6)


@pytest.fixture(params=["memory", "file", "lmdb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    location = {"memory": "memory://ranks", "file": f"file://{tmp_path}/kv", "lmdb": f"lmdb://{tmp_path}/kv.lmdb"}
    with open_store("memory://ranks"):
        yield location[request.param]


def write_part(key: BlockKey, view: NDArray[np.uint8], rank: int) -> None:
    """What a rank's copy from its GPU does."""
    shards = FOUR_RANKS[key.group]
    shards.to_numpy(view, rank)[...] = shards.to_numpy(content(key, view.nbytes), rank)


def view_of(stores: ShardedStores, key: BlockKey) -> NDArray[np.uint8]:
    view = stores.prepare_store([key])[0]
    assert view is not None
    return view


def free_slots(manager: TieringManager) -> int:
    return manager.stats().primary.free


def test_a_block_is_stored_when_the_last_of_four_ranks_has_written_its_heads(url: str) -> None:
    """Field report 13: zero or wrong hits with tensor-parallel ranks."""
    with managed(url, space=SPACE) as manager, open_store(url) as tier:
        stores = ShardedStores(manager, FOUR_RANKS)
        view = view_of(stores, PROMPT[0])
        for rank in (2, 0, 3):
            write_part(PROMPT[0], view, rank)
            stores.complete_store([PROMPT[0]], rank)
            assert manager.lookup(PROMPT[:1]) == [PENDING]
            assert manager.prepare_load(PROMPT[:1]) == [None]
            assert manager.drain(PATIENCE)
            assert tier.contains_many(SPACE, PROMPT[:1]) == [False]
        write_part(PROMPT[0], view, 1)
        stores.complete_store([PROMPT[0]], 1)
        assert manager.lookup(PROMPT[:1]) == [HIT]
        assert stores.waiting == 0
    with managed(url, space=SPACE) as manager:
        expected = content(PROMPT[0], LAYOUTS[0].nbytes)
        halves: list[NDArray[np.uint8]] = []

        def read(_: int, view: NDArray[np.uint8]) -> None:
            halves.extend(Shards(LAYOUTS[0], tensor=2).to_numpy(view, rank).copy() for rank in range(2))

        assert manager.load_prefix(PROMPT[:1], read) == 1
        assert np.array_equal(np.concatenate(halves, axis=3), LAYOUTS[0].to_numpy(expected))


def test_a_latent_that_every_rank_holds_is_written_by_one() -> None:
    key = keys(1, group=1)[0]
    with managed(space=SPACE) as manager:
        stores = ShardedStores(manager, FOUR_RANKS)
        write_part(key, view_of(stores, key), 0)
        stores.complete_store([key], 0)
        assert manager.lookup([key]) == [HIT]
        with pytest.raises(ValueError, match="no part to write"):
            stores.complete_store([key], 1)


def test_a_rank_that_fails_releases_who_waits_at_once_and_the_slot_when_no_rank_writes_any_more() -> None:
    """Field report 13."""
    with managed("memory://failing", space=SPACE) as manager:
        stores = ShardedStores(manager, FOUR_RANKS)
        view_of(stores, PROMPT[0])
        stores.complete_store(PROMPT[:1], 0)
        stores.complete_store(PROMPT[:1], 1, success=False)
        assert ask(manager, PROMPT[:1]) == [MISS]
        assert free_slots(manager) == 3
        assert stores.prepare_store(PROMPT[:1]) == [None], "ranks 2 and 3 are still writing the first attempt"
        stores.complete_store(PROMPT[:1], 2)
        assert free_slots(manager) == 3
        stores.complete_store(PROMPT[:1], 3, success=False)
        assert free_slots(manager) == 4
        assert (stores.waiting, stores.given_up) == (0, 1)
        view = view_of(stores, PROMPT[0])
        for rank in range(4):
            write_part(PROMPT[0], view, rank)
            stores.complete_store(PROMPT[:1], rank)
        assert manager.lookup(PROMPT[:1]) == [HIT]


def test_a_rank_that_never_reports_stalls_nobody_and_writes_into_nobody_elses_block() -> None:
    """Field reports 13 and 15: not stored, and the slot is nobody else's while the rank may still write."""
    with managed("memory://late", space=SPACE) as manager:
        stores = ShardedStores(manager, FOUR_RANKS, timeout=0.05)
        view = view_of(stores, PROMPT[0])
        for rank in range(3):
            stores.complete_store(PROMPT[:1], rank)

        def released() -> bool:
            stores.step()
            return manager.lookup(PROMPT[:1]) == [MISS]

        until(manager, released)
        for key in PROMPT[1:]:  # more than the slots that are left
            until(manager, lambda: manager.room_for_stores)
            other = view_of(stores, key)
            for rank in range(4):
                write_part(key, other, rank)
                stores.complete_store([key], rank)
        view[:] = 0xEE  # 30 seconds late, as it were
        for slot in (manager.primary.get(key) for key in PROMPT[1:]):
            assert slot is None or np.array_equal(slot.view, content(slot.key, slot.view.nbytes))
        assert stores.waiting == 1
        stores.rank_lost(3)
        assert stores.waiting == 0
        assert manager.drain(PATIENCE)
        with open_store("memory://late") as tier:
            assert tier.contains_many(SPACE, PROMPT) == [False] + [True] * 5


def test_a_report_that_comes_after_all_gives_the_slot_back_and_stores_nothing() -> None:
    with managed(space=SPACE) as manager:
        stores = ShardedStores(manager, FOUR_RANKS, timeout=0.0)
        view_of(stores, PROMPT[0])
        stores.step()
        stores.step()
        for rank in range(4):
            assert free_slots(manager) == 3
            stores.complete_store(PROMPT[:1], rank)
        assert free_slots(manager) == 4
        assert manager.lookup(PROMPT[:1]) == [MISS]
        assert stores.given_up == 1


def test_a_lost_rank_ends_every_store_that_waits_for_it_and_no_other() -> None:
    latent = keys(1, group=1)[0]
    with managed(space=SPACE) as manager:
        stores = ShardedStores(manager, FOUR_RANKS)
        assert all(view is not None for view in stores.prepare_store(PROMPT[:2]))
        write_part(latent, view_of(stores, latent), 0)
        for rank in (0, 1, 3):
            stores.complete_store(PROMPT[:2], rank)
        stores.rank_lost(2)
        assert stores.waiting == 1
        assert manager.lookup(PROMPT[:2]) == [MISS, MISS]
        stores.complete_store([latent], 0)
        assert manager.lookup([latent]) == [HIT]


def test_a_report_that_nobody_expects_is_refused() -> None:
    with managed(space=SPACE) as manager:
        stores = ShardedStores(manager, FOUR_RANKS)
        view_of(stores, PROMPT[0])
        stores.complete_store(PROMPT[:1], 0)
        for key, rank in ((PROMPT[0], 0), (PROMPT[0], 4), (PROMPT[1], 0)):
            with pytest.raises(ValueError, match=f"rank {rank} has no part to write"):
                stores.complete_store([key], rank)
        stores.rank_lost(1)
        stores.rank_lost(2)
        stores.rank_lost(3)


def test_shards_of_other_layouts_are_refused() -> None:
    with managed(space=SPACE) as manager, pytest.raises(ValueError, match="one per KV-cache group"):
        ShardedStores(manager, FOUR_RANKS[:1])


@given(st.permutations([(number, rank) for number in range(3) for rank in range(4)]), st.sets(st.integers(0, 11)))
def test_whatever_the_order_of_reports_exactly_the_whole_blocks_are_stored(
    reports: list[tuple[int, int]], failing: set[int]
) -> None:
    """Field report 13."""
    broken = {number for at, (number, _) in enumerate(reports) if at in failing}
    with managed(space=SPACE) as manager:
        stores = ShardedStores(manager, FOUR_RANKS)
        views = stores.prepare_store(PROMPT[:3])
        for at, (number, rank) in enumerate(reports):
            if at not in failing:
                write_part(PROMPT[number], views[number], rank)
            stores.complete_store([PROMPT[number]], rank, success=at not in failing)
        assert manager.lookup(PROMPT[:3]) == [MISS if number in broken else HIT for number in range(3)]
        assert free_slots(manager) == 1 + len(broken)
        assert (stores.waiting, stores.given_up) == (0, len(broken))


def test_whose_a_block_is_and_where_it_stands_reaches_the_tier_as_from_one_writer(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv"
    with managed(url, space=SPACE) as manager, open_store(url) as tier:
        stores = ShardedStores(manager, FOUR_RANKS)
        asked = signature(ShardedStores.prepare_store).parameters
        assert asked.keys() == signature(type(manager).prepare_store).parameters.keys()
        (view,) = stores.prepare_store(PROMPT[:1], position=7, parent=PROMPT[1].digest, tenant="acme")
        assert view is not None
        for rank in range(4):
            write_part(PROMPT[0], view, rank)
            stores.complete_store(PROMPT[:1], rank)
        assert manager.drain(PATIENCE)
        (info,) = tier.scan(SPACE)
        assert (info.position, info.parent, [mark.tenant for mark in info.marks]) == (7, PROMPT[1].digest, ["acme"])
