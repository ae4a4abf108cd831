"""Blocks between an engine and its tiers: a pool of host memory in front, URLs behind it.

`TieringManager` is what an engine talks to; it runs in the scheduler's thread and never waits.
"""

from kvstore.tiering.manager import ManagerStats, TieringManager
from kvstore.tiering.primary import PrimaryStats, PrimaryTier
from kvstore.tiering.secondary import SecondaryTier, TierStats

__all__ = ["ManagerStats", "PrimaryStats", "PrimaryTier", "SecondaryTier", "TierStats", "TieringManager"]
