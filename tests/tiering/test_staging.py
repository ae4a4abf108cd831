"""Staging memory between a tier that can hang on a network and the slots: what goes through it comes out right."""

from __future__ import annotations

import threading

import pytest
from hanging_helpers import impatient, staged_blocks
from tiering_helpers import (
    BLOCK,
    PATIENCE,
    PROMPT,
    SPACE,
    engine_load,
    engine_store,
    fill,
    intact,
    keys,
    managed,
    until,
    writes,
)

from kvstore import BlockLayout, Namespace
from kvstore.testing.faults import FaultyStore, Hanging, failing, flapping
from kvstore.tiering import SecondaryTier


def test_everything_goes_through_staging_of_two_blocks_and_comes_back_right(remote: FaultyStore) -> None:
    with managed(impatient(remote, load_timeout=PATIENCE, staging_bytes=2 * BLOCK)) as manager:
        assert manager.store(writes(PROMPT)) == 60
        assert manager.drain(PATIENCE)
        assert manager.stats().tiers[0].stores == 60
    with managed(impatient(remote, load_timeout=PATIENCE, staging_bytes=2 * BLOCK)) as manager:
        assert engine_load(manager, PROMPT) == 60


def test_where_a_block_stands_in_its_prefix_goes_through_staging_with_it(remote: FaultyStore) -> None:
    with managed(impatient(remote), primary_slots=16) as manager:
        engine_store(manager, PROMPT[:3])
    assert sorted((info.position, info.key) for info in remote.inner.scan(SPACE)) == list(enumerate(PROMPT[:3]))


def test_groups_of_different_sizes_share_the_buffers_of_the_largest(remote: FaultyStore) -> None:
    space = Namespace("model", "1", (BlockLayout.opaque(BLOCK), BlockLayout.opaque(100)), block_tokens=16)
    names = [key for pair in zip(keys(20), keys(20, group=1), strict=True) for key in pair]
    for _ in range(2):
        tier = SecondaryTier(remote, space, staging_bytes=3 * BLOCK)
        with managed(tier, space=space) as manager:
            assert manager.store(writes(names, space), timeout=PATIENCE) == 40
            assert manager.drain(PATIENCE)  # what is on its way from staging is a miss until it has arrived
            assert engine_load(manager, names) == 40


def test_small_blocks_that_wait_to_be_stored_leave_their_share_of_staging_to_loads(
    remote: FaultyStore, hanging: Hanging
) -> None:
    """Field report 17: a block of 100 bytes takes a buffer as well as one of 8 KiB."""
    space = Namespace("model", "1", (BlockLayout.opaque(BLOCK), BlockLayout.opaque(100)), block_tokens=16)
    fill(str(remote.url), PROMPT[:10], space)
    remote.plan["put"] = hanging
    tier = SecondaryTier(remote, space, threads=3, staging_bytes=8 * BLOCK)
    with managed(tier, space=space, primary_slots=40) as manager:
        small = keys(20, "small", group=1)
        assert engine_store(manager, small) == small
        until(manager, lambda: len(hanging.waiting) == 2)
        until(manager, lambda: manager.stats().tiers[0].staging_bytes == 6 * BLOCK)
        assert engine_load(manager, PROMPT[:10]) == 10
        hanging.release()


@pytest.mark.parametrize("error", [None, RuntimeError("bug"), SystemExit()])
def test_what_a_tier_that_goes_up_and_down_took_is_right_and_what_it_refused_is_counted(
    remote: FaultyStore, error: BaseException | None
) -> None:
    down = failing(error)
    remote.plan = {verb: flapping([True, True, False], down) for verb in ("put", "get")}
    with managed(SecondaryTier(remote, SPACE, threads=2), primary_slots=4) as manager:
        assert manager.store(writes(PROMPT)) == 60
        assert manager.drain(PATIENCE)
        stats = manager.stats().tiers[0]
        assert stats.stores + stats.failed_stores == 60
        assert 0 < stats.failed_stores < 60
        assert sum(intact(remote.inner, PROMPT)) == stats.stores
        there = [key for key, found in zip(PROMPT, intact(remote.inner, PROMPT), strict=True) if found]
        came = sum(engine_load(manager, [key]) for key in there)
        assert came == len(there) - manager.stats().tiers[0].failed_loads
        assert staged_blocks(manager) == 0


def test_staging_that_cannot_hold_two_blocks_is_the_callers_error_and_nothing_stays_open(remote: FaultyStore) -> None:
    threads = threading.active_count()
    with pytest.raises(ValueError, match=f"at least {2 * BLOCK}"):
        SecondaryTier(remote, SPACE, staging_bytes=2 * BLOCK - 1)
    assert threading.active_count() == threads
    assert not remote.closed, "a store that was handed in stays its owner's"


def test_only_a_store_that_can_hang_has_staging(local: FaultyStore, remote: FaultyStore) -> None:
    for store, expected in ((local, None), (remote, 256 << 20)):
        tier = SecondaryTier(store, SPACE)
        assert (tier._staging and tier._staging.buffers * BLOCK) == expected
        assert tier.close(PATIENCE)
