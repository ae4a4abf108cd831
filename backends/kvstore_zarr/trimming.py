"""A tier brought within its capacity, by whoever has it alone: blocks go, and the catalogue loses its free pages.

A catalogue keeps the size of its greatest day. Beside a capacity that was lowered since, all blocks might have to go
for it, and none would find room. So it counts for what of it is alive while blocks are chosen, and is compacted then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.compaction import COMPACTED, compact, is_worthwhile
from kvstore_zarr.put import make_room
from kvstore_zarr.tier import INNER

if TYPE_CHECKING:
    from kvstore_zarr.tier import LocalTier

__all__ = ["trim"]


def trim(tier: LocalTier) -> bool:
    """Evict until the tier is within its capacity, and compact the catalogue where that is worth it; whether it was,
    and its environment is closed. In `Presence.opening`.
    """
    with tier.catalog.read() as snapshot:
        before = tier.occupied(snapshot)
    tier.counts_live = True
    try:
        make_room(tier)
    finally:
        tier.counts_live = False
    most = None if tier.capacity is None else max(tier.capacity, before)
    if is_worthwhile(tier.environment, tier.capacity) and _compacted(tier, most):
        return True
    make_room(tier)
    with tier.catalog.write() as change:
        tier.account(change)
    return False


def _compacted(tier: LocalTier, most: int | None) -> bool:
    """Compact it, unless the copy would take the tier above `most` bytes."""

    def has_room(nbytes: int) -> bool:
        with tier.catalog.read() as snapshot:
            return most is None or tier.occupied(snapshot) + nbytes <= most

    # Not synced: after a power loss the catalogue is made anew from the blocks, whatever was on disk of it.
    return compact(tier.environment, tier.root / INNER / COMPACTED, has_room, sync=False)
