"""Blocks between an engine and its tiers: a pool of host memory in front, URLs behind it.

`TieringManager` is what an engine talks to; it runs in the scheduler's thread and never waits. For models with several
KV-cache groups, `Prefix` and its functions say what all of them together can use; for engines with several ranks,
`ShardedStores` says when a block is whole.
"""

from kvstore.tiering.manager import ManagerStats, TieringManager
from kvstore.tiering.prefix import WHOLE, Prefix, load_groups, lookup_prefix, prepare_prefix, window_blocks
from kvstore.tiering.primary import PrimaryStats, PrimaryTier
from kvstore.tiering.ranks import ShardedStores
from kvstore.tiering.secondary import SecondaryTier, TierStats

__all__ = [
    "WHOLE",
    "ManagerStats",
    "Prefix",
    "PrimaryStats",
    "PrimaryTier",
    "SecondaryTier",
    "ShardedStores",
    "TierStats",
    "TieringManager",
    "load_groups",
    "lookup_prefix",
    "prepare_prefix",
    "window_blocks",
]
