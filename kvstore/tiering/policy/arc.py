"""Adaptive replacement: blocks that were used again are kept apart from those that were used once.

After N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST'03, figure 4: there T1 and
T2 are the blocks used once and again, B1 and B2 their ghosts, p the target. A scan of blocks that nobody asks for
twice goes through the first half and leaves the second alone; ghosts, the keys of blocks that left, tell which half
was too small.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.types import BlockKey

__all__ = ["ARC"]


class _Half:
    """Blocks used once, or blocks used again: how many are ready, which of them may leave, and which left."""

    def __init__(self, most_ghosts: int) -> None:
        self.ready = 0
        self.order: OrderedDict[BlockKey, None] = OrderedDict()
        self.ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self._most_ghosts = most_ghosts

    def evict(self) -> BlockKey:
        key, _ = self.order.popitem(last=False)
        self.ready -= 1
        self.ghosts[key] = None
        if len(self.ghosts) > self._most_ghosts:
            self.ghosts.popitem(last=False)
        return key


class ARC:
    """An `EvictionPolicy` that adapts between recency and frequency. A use is a request that ended, not a pin.

    Where it departs from the paper:

    - each half has up to `slots` ghosts (in the paper T1 and B1 have that many places together, and all four lists
      twice as many): so 2 keys are remembered for each slot, and blocks that come back late are still recognised;
    - the target moves when a block has arrived, not when a slot was found for it, for it may never arrive; so the
      tie for |T1| = p, which the paper breaks by the block to come, is left to T2.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._target = 0.0
        self._once = _Half(slots)
        self._again = _Half(slots)
        self._half: dict[BlockKey, _Half] = {}
        self._unused: set[BlockKey] = set()

    def added(self, key: BlockKey) -> None:
        came_back = key in self._once.ghosts or key in self._again.ghosts
        if came_back:
            self._adapt(key)
        else:
            self._unused.add(key)
        self._half[key] = half = self._again if came_back else self._once
        half.ready += 1

    def touched(self, key: BlockKey) -> None:
        evictable = key in self._half[key].order
        if evictable:
            self.pinned(key)
        if key in self._unused:
            self._unused.remove(key)
        elif self._half[key] is self._once:
            self._half[key] = self._again
            self._once.ready -= 1
            self._again.ready += 1
        if evictable:
            self.unpinned(key)

    def pinned(self, key: BlockKey) -> None:
        del self._half[key].order[key]

    def unpinned(self, key: BlockKey) -> None:
        self._half[key].order[key] = None

    def removed(self, key: BlockKey) -> None:
        half = self._half.pop(key)
        half.ready -= 1
        half.order.pop(key, None)
        self._unused.discard(key)

    def evict(self) -> BlockKey | None:
        once, again = self._once, self._again
        half = once if once.order and (once.ready > self._target or not again.order) else again
        if not half.order:
            return None
        key = half.evict()
        del self._half[key]
        self._unused.discard(key)
        return key

    def _adapt(self, key: BlockKey) -> None:
        """A ghost is back: its half should have been larger, the more so the fewer ghosts that half has."""
        once, again = self._once.ghosts, self._again.ghosts
        if key in once:
            self._target = min(self._slots, self._target + max(1.0, len(again) / len(once)))
            del once[key]
        else:
            self._target = max(0.0, self._target - max(1.0, len(once) / len(again)))
            del again[key]
