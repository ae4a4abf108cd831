"""Least recently used: the block that was not touched for longest leaves first."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.types import BlockKey

__all__ = ["LRU"]


class LRU:
    """An `EvictionPolicy` in the order of use. A pin is a use, so few pinned blocks stand among the first victims."""

    def __init__(self) -> None:
        self._order: OrderedDict[BlockKey, None] = OrderedDict()

    def added(self, key: BlockKey) -> None:
        self._order[key] = None

    def touched(self, key: BlockKey) -> None:
        self._order.move_to_end(key)

    def removed(self, key: BlockKey) -> None:
        del self._order[key]

    def victims(self) -> Iterator[BlockKey]:
        return iter(self._order)
