"""Which block leaves the primary tier first: the contract of an eviction policy, and the policies that have a name.

A policy only orders keys. The primary tier tells it what becomes of ready blocks and asks whom to evict; blocks in
flight are unknown to it, and blocks that somebody pins are out of its order until they are unpinned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kvstore.errors import ConfigurationError
from kvstore.tiering.policy.arc import ARC
from kvstore.tiering.policy.lru import LRU

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.types import BlockKey

__all__ = ["ARC", "DEFAULT_POLICY", "LRU", "POLICIES", "EvictionPolicy", "PolicyFactory", "make_policy"]


class EvictionPolicy(Protocol):
    """The order in which ready blocks should leave. Made for a number of slots; remembers O(slots) keys.

    Every call is O(1), however many blocks are pinned, and made by the manager's thread only. Each key goes through
    `added`, then any number of the next three, then leaves by `evict` or `removed`; it may come back afterwards.
    """

    def added(self, key: BlockKey) -> None:
        """A block became ready: new, or back after it had left. It is pinned by who brought it: `unpinned` follows.

        No use yet: the request that it was brought for is told by `touched`, like every other.
        """
        ...

    def touched(self, key: BlockKey) -> None:
        """A request that used this block has ended. The block may be pinned or not."""
        ...

    def pinned(self, key: BlockKey) -> None:
        """Somebody uses this block now, after nobody did: it must not be evicted."""
        ...

    def unpinned(self, key: BlockKey) -> None:
        """Nobody uses this block any more: it may be evicted, as one of the younger ones."""
        ...

    def removed(self, key: BlockKey) -> None:
        """This block is gone without having been evicted (damaged, purged), pinned or not."""
        ...

    def evict(self) -> BlockKey | None:
        """Choose the block to lose and take it out of the order; None when there is none that nobody pins."""
        ...


PolicyFactory: TypeAlias = Callable[[int], EvictionPolicy]
"""Makes a policy for a number of slots. Any such callable will do for `policy=`, the class of a policy for example."""

POLICIES: Mapping[str, PolicyFactory] = {"arc": ARC, "lru": LRU}
"""The policies that can be chosen by name."""

DEFAULT_POLICY = "lru"


def make_policy(policy: str | PolicyFactory, slots: int) -> EvictionPolicy:
    """A policy by name, or by a factory of your own. Raises `ConfigurationError` for an unknown name."""
    if not isinstance(policy, str):
        return policy(slots)
    if policy not in POLICIES:
        raise ConfigurationError(
            f"unknown eviction policy {policy!r}. Known: {', '.join(sorted(POLICIES))}; for one of your own pass a"
            " callable that takes the number of slots and returns an EvictionPolicy"
        )
    return POLICIES[policy](slots)
