"""Blocks between an engine and its tiers: a pool of host memory in front, URLs behind it.

`TieringManager` is what an engine talks to; it runs in the scheduler's thread and never waits. For models with several
KV-cache groups, `Prefix` and its functions say what all of them together can use; for engines with several ranks,
`ShardedStores` says when a block is whole.

Where to look:

    manager.py      what an engine calls; blocking.py: the same for people who have no scheduler
    opening.py      the tiers of a manager, from what it was given
    prefix.py       several KV-cache groups; ranks.py: several ranks
    primary.py      slots of host memory and who pins them; policy/: which block is evicted
    promises.py     HITs that are kept until somebody pins them
    promotion.py    blocks that are asked about, wait for a slot, or are missing
    secondary.py    one URL; questions.py: its lookups; transit.py: its loads and stores, their time-outs; hints.py: its
                    touches and marks
    jobs.py         the calls to a backend, and what memory each of them is lent; staging.py: that of calls that hang
    pool.py         the threads they run on; pool_apart.py: the same in a process of the store's own
    counters.py     what is counted and said of all that; statistics.py: what of the manager's own work
"""

from kvstore.tiering.counters import TierStats
from kvstore.tiering.manager import TieringManager
from kvstore.tiering.prefix import WHOLE, Prefix, load_groups, lookup_prefix, prepare_prefix, window_blocks
from kvstore.tiering.primary import PrimaryStats, PrimaryTier
from kvstore.tiering.ranks import ShardedStores
from kvstore.tiering.secondary import SecondaryTier
from kvstore.tiering.statistics import ManagerStats

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
