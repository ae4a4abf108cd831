"""Which block leaves the primary tier first: the contract of an eviction policy.

A policy only orders keys. The primary tier tells it what happens to ready blocks and asks for victims; blocks in
flight are unknown to it, and pinned ones are passed over by the primary tier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.types import BlockKey

__all__ = ["EvictionPolicy"]


class EvictionPolicy(Protocol):
    """The order in which ready blocks should leave. Called by the manager's thread only; every call is O(1)."""

    def added(self, key: BlockKey) -> None:
        """A block became ready."""
        ...

    def touched(self, key: BlockKey) -> None:
        """A ready block was used."""
        ...

    def removed(self, key: BlockKey) -> None:
        """A ready block is gone, evicted or not."""
        ...

    def victims(self) -> Iterator[BlockKey]:
        """Ready blocks, the one to lose first in front. Abandoned at the first that is not pinned."""
        ...
