"""What the manager did, beside what each of its tiers says of itself: `PrimaryStats` and `TierStats`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.tiering.counters import TierStats
    from kvstore.tiering.primary import PrimaryStats

__all__ = ["ManagerStats"]


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """What the manager and its tiers did since they were made, and what is under way."""

    primary: PrimaryStats
    tiers: tuple[TierStats, ...]
    asking: int
    """Blocks about which tiers are being asked."""
    waiting: int
    """Blocks that a tier has and that wait for a slot."""
    held: int
    """Slots kept for who was told HIT and has not pinned them yet."""
    hits: int
    """Lookups answered HIT (once per call and block)."""
    misses: int
    """Lookups answered MISS (once per call and block)."""
    promotions: int
    expired: int
    """Promotions that found no free slot in time, and became misses."""
    stores: int
    """Blocks that the engine stored."""
    skipped_stores: int
    """Blocks that found no free slot, and were not stored."""
