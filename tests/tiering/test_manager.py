"""The manager: what goes in comes out, and what an engine is told. Every manager is checked at its end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tiering_helpers import (
    BLOCK,
    HIT,
    MISS,
    PATIENCE,
    PENDING,
    PROMPT,
    SPACE,
    ask,
    check,
    content,
    engine_load,
    engine_store,
    faulty,
    fill,
    intact,
    keys,
    managed,
    until,
    writes,
)

from kvstore import BlockKey, BlockLayout, BlockWrite, Namespace, open_store
from kvstore.errors import UnknownSchemeError
from kvstore.tiering import PrimaryTier, SecondaryTier, TieringManager

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.testing.faults import FaultyStore, Hanging


def test_sixty_blocks_go_through_four_slots_and_come_back_after_a_restart(url: str) -> None:
    with managed(url) as manager:
        assert manager.store(writes(PROMPT)) == 60
    with managed(url) as manager:
        assert engine_load(manager, PROMPT) == 60
        assert manager.stats().tiers[0].loads == 60
    with managed(url) as manager:
        buffers = [np.zeros(BLOCK, np.uint8) for _ in PROMPT]
        assert manager.load_prefix(PROMPT, buffers) == 60
        assert all(np.array_equal(buffer, content(key)) for buffer, key in zip(buffers, PROMPT, strict=True))


def test_an_engine_that_never_waits_stores_what_it_got_slots_for_but_what_was_shed(url: str) -> None:
    with managed(url, primary_slots=16) as manager:
        written: list[BlockKey] = []

        def pass_over() -> bool:
            written.extend(engine_store(manager, [key for key in PROMPT if key not in written]))
            return len(written) == 60

        until(manager, pass_over)
        assert manager.drain(PATIENCE)
        stats = manager.stats().tiers[0]
    assert stats.stores + stats.shed == 60
    assert stats.stores >= 8
    with open_store(url) as found:
        assert sum(intact(found, PROMPT)) == stats.stores


def test_two_tiers_both_get_every_block_and_each_serves_alone(tmp_path: Path) -> None:
    urls = f"file://{tmp_path}/kv", f"lmdb://{tmp_path}/kv.lmdb"
    with managed(*urls) as manager:
        assert manager.store(writes(PROMPT)) == 60
        assert manager.drain(PATIENCE)
        assert [tier.stores for tier in manager.stats().tiers] == [60, 60]
    for one in urls:
        with managed(one) as manager:
            assert engine_load(manager, PROMPT) == 60


def test_tiers_are_asked_in_order_and_the_first_that_has_a_block_serves_it() -> None:
    first, second = faulty("first"), faulty("second")
    with first, second:
        fill("memory://first", PROMPT[:2])
        fill("memory://second", PROMPT[1:4])
        with managed(first, second) as manager:
            assert ask(manager, PROMPT[:5]) == [HIT] * 4 + [MISS]
            assert [tier.loads for tier in manager.stats().tiers] == [2, 2]
        assert ("contains", PROMPT[2:5]) in second.calls


def test_a_source_overwritten_after_the_store_changes_nothing(store: FaultyStore, hanging: Hanging) -> None:
    store.plan["put"] = hanging
    source = content(PROMPT[0])
    with managed(store) as manager:
        assert manager.store([BlockWrite(PROMPT[0], source.data)]) == 1
        source[:] = 0
        until(manager, lambda: hanging.waiting)
        hanging.release()
    assert intact(store.inner, PROMPT[:1]) == [True]


def test_no_slot_is_reused_while_a_slow_tier_still_reads_it(store: FaultyStore, hanging: Hanging) -> None:
    fill(str(store.url), PROMPT[20:30])
    store.plan["put"] = hanging
    with managed(store, slot_timeout=0.1) as manager:
        cascading = engine_store(manager, PROMPT[:4])
        manager.step()
        until(manager, lambda: hanging.waiting)
        for key in PROMPT[10:20]:  # an engine that needs slots, and scribbles over all that it gets
            for view in manager.prepare_store([key]):
                if view is not None:
                    view[:] = 0
                    manager.complete_store([key], success=False)
        engine_load(manager, PROMPT[20:30])  # and promotions that need slots, too
        hanging.release()
        assert manager.drain(PATIENCE)
    shed = manager.stats().tiers[0].shed
    assert sum(intact(store.inner, cascading)) == len(cascading) - shed > 0


def test_a_block_stored_again_while_its_store_is_still_running_goes_out_once(
    store: FaultyStore, hanging: Hanging
) -> None:
    store.plan["put"] = hanging
    with managed(store) as manager:
        assert engine_store(manager, PROMPT[:1]) == PROMPT[:1]
        until(manager, lambda: hanging.waiting)
        assert manager.prepare_store(PROMPT[:1]) == [None]
        assert manager.lookup(PROMPT[:1]) == [HIT]
        assert manager.store(writes(PROMPT[:1])) == 1
        hanging.release()
    assert [verb for verb, _ in store.calls].count("put") == 1


def test_a_block_that_is_being_written_is_pending_for_others_and_given_back_if_that_fails() -> None:
    with managed("memory://nothing") as manager:
        assert manager.prepare_store(PROMPT[:1])[0] is not None
        assert manager.lookup(PROMPT[:1]) == [PENDING]
        assert manager.prepare_load(PROMPT[:1]) == [None]
        manager.complete_store(PROMPT[:1], success=False)
        assert ask(manager, PROMPT[:1]) == [MISS]
        assert manager.stats().tiers[0].stores == 0


def test_where_a_block_stands_in_its_prefix_goes_with_it(url: str) -> None:
    with managed(url, primary_slots=16) as manager:
        engine_store(manager, PROMPT[:3])
        manager.store(writes(PROMPT[:6])[3:])
        views = manager.prepare_store(PROMPT[6:8], position=6, parent=PROMPT[5].digest)
        for key, view in zip(PROMPT[6:8], views, strict=True):
            assert view is not None
            view[:] = content(key)
        manager.complete_store(PROMPT[6:8])
    with open_store(url) as found:
        facts = {info.position: (info.key, info.parent) for info in found.scan(SPACE)}
    parents = [b"", *(key.digest for key in PROMPT)]
    assert facts == {n: (PROMPT[n], parents[n]) for n in range(8)}


def test_groups_share_slots_of_the_largest_block_and_get_views_of_their_own_size(url: str) -> None:
    space = Namespace("model", "1", (BlockLayout.opaque(BLOCK), BlockLayout.opaque(100)), block_tokens=16)
    names = [key for pair in zip(keys(20), keys(20, group=1), strict=True) for key in pair]
    with managed(url, space=space) as manager:
        assert manager.primary.slot_bytes == BLOCK
        views = manager.prepare_store(names[:2])
        assert [view.nbytes for view in views if view is not None] == [BLOCK, 100]
        manager.complete_store(names[:2], success=False)
        assert manager.store(writes(names[:-1], space), timeout=PATIENCE) == 39
    with managed(url, space=space) as manager:
        buffers = [np.zeros(space.block_bytes(key.group), np.uint8).data for key in names]
        assert manager.load_prefix(names, buffers) // 2 == 19, "the last block lacks a group"
        assert all(np.array_equal(buffers[n], content(names[n], len(buffers[n]))) for n in range(39))


def test_a_tier_that_cannot_be_opened_is_an_error_and_the_others_are_closed(store: FaultyStore) -> None:
    with pytest.raises(UnknownSchemeError):
        TieringManager(SPACE, ["memory://first", SecondaryTier(store, SPACE), "nowhere://x"], primary_slots=4)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("kvstore-memory")]


def test_a_primary_tier_that_does_not_fit_is_refused() -> None:
    for wrong in (
        {},
        {"primary_slots": 4, "primary": PrimaryTier(4, BLOCK)},
        {"primary": PrimaryTier(4, BLOCK - 1)},
    ):
        with pytest.raises(ValueError, match="primary"):
            TieringManager(SPACE, **wrong)  # type: ignore[arg-type]
    with managed(primary=PrimaryTier(4, 2 * BLOCK), primary_slots=None) as manager:
        assert manager.store(writes(PROMPT[:4])) == 4
        check(manager)
