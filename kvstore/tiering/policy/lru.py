"""Least recently used: the block that nobody used for longest leaves first."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.types import BlockKey

__all__ = ["LRU"]


class LRU:
    """An `EvictionPolicy` in the order of use; the end of a pin is the end of a use."""

    def __init__(self, slots: int) -> None:
        del slots  # it remembers nothing but the blocks themselves
        self._order: OrderedDict[BlockKey, None] = OrderedDict()

    def added(self, key: BlockKey) -> None:
        """Nothing to do before it is unpinned."""

    def touched(self, key: BlockKey) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def pinned(self, key: BlockKey) -> None:
        del self._order[key]

    def unpinned(self, key: BlockKey) -> None:
        self._order[key] = None

    def removed(self, key: BlockKey) -> None:
        self._order.pop(key, None)

    def evict(self) -> BlockKey | None:
        return self._order.popitem(last=False)[0] if self._order else None
