"""A tier brought within its capacity, by whoever has it alone: blocks go, and the catalogue loses its free pages.

A catalogue keeps the size of its greatest day. Beside a capacity that was lowered since, all blocks might have to go
for it, and none would find room. So it counts for what of it is alive while blocks are chosen, and is compacted then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.compaction import compact, is_worthwhile
from kvstore_zarr.put import make_room

if TYPE_CHECKING:
    from kvstore_zarr.tier import LocalTier

__all__ = ["trim"]


def trim(tier: LocalTier, *, may_compact: bool) -> bool:
    """Evict until the tier is within its capacity, and compact the catalogue where that is worth it; whether the
    environment is closed, and is to be opened again. In `Presence.opening`.
    """
    if may_compact and _is_compacted(tier):
        return True
    make_room(tier)
    with tier.catalog.write() as change:
        tier.account(change)
    return False


def _is_compacted(tier: LocalTier) -> bool:
    """Compact it, unless the copy would take the tier above its capacity and above what it occupies now."""
    with tier.catalog.read() as snapshot:
        before = tier.occupied(snapshot)
    tier.counts_live = True
    try:
        make_room(tier)
    finally:
        tier.counts_live = False
    most = None if tier.capacity is None else max(tier.capacity, before)

    def has_room(nbytes: int) -> bool:
        with tier.catalog.read() as snapshot:
            return most is None or tier.occupied(snapshot) + nbytes <= most

    return is_worthwhile(tier.environment, tier.capacity) and compact(
        tier.environment, has_room, lambda error: tier.remark(f"its catalogue could not be made smaller: {error}")
    )
