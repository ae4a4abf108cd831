"""The receipt of a purge: for each tier and namespace what went, what is left, and what no removal reaches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.types import Residue, Unseen

if TYPE_CHECKING:
    from kvstore.purging.request import Request

__all__ = ["Receipt", "SpaceReceipt", "TierReceipt"]

ENGINES = (
    "Engines hold copies of blocks in GPU and host memory, which no tier can reach: reset their own caches before the"
    " tombstones end. vLLM: POST /reset_prefix_cache?reset_external=true until it answers success (the route is there"
    " with VLLM_SERVER_DEV_MODE=1), or LLM.reset_prefix_cache(reset_connector=True), or restart it."
)
ARCHIVES = "Archives are copies of their own, and were not looked at: kvstore archive list, kvstore archive rm."


@dataclass(slots=True)
class SpaceReceipt:
    """One namespace: what of it was to go, or went. `shared`: blocks that others than the tenant asked for used too."""

    namespace: str
    model: str
    blocks: int = 0
    bytes: int = 0
    pinned: int = 0
    shared: int = 0


@dataclass(slots=True)
class TierReceipt:
    """One tier. `spaces` is what was found, or, if it was no dry run, what was removed."""

    url: str
    began: float
    seconds: float = 0.0
    spaces: list[SpaceReceipt] = field(default_factory=list[SpaceReceipt])
    left: int = 0
    """Blocks that were to go and are still there."""
    stored_since: int = 0
    """Blocks like those asked for that somebody has stored since the purge began, and that are there."""
    refused_until: float | None = None
    """Until when the removed blocks are not stored again; None: no tombstones. Seconds since the epoch."""
    others_know_within: float = 0.0
    """Seconds until other processes know of it."""
    overwritten: int = 0
    """Bytes that were written over, on local devices."""
    remains: list[Residue] = field(default_factory=list[Residue])
    """What no removal reaches."""
    erasable: bool | None = None
    """Whether the data keys of the removed blocks are destroyed, so that no copy of them can be read. None: the tier is
    not encrypted.
    """
    failed: list[str] = field(default_factory=list[str])
    unseen: list[Unseen] = field(default_factory=list["Unseen"])
    """What could not be looked into, and is still there: some of it may have to go."""

    @property
    def blocks(self) -> int:
        """Blocks over all namespaces."""
        return sum(space.blocks for space in self.spaces)

    @property
    def bytes(self) -> int:
        """What they occupied."""
        return sum(space.bytes for space in self.spaces)

    @property
    def complete(self) -> bool:
        """Whether all that was to go is gone, as far as the tier goes."""
        return not self.failed and not self.left and not self.unseen


@dataclass(slots=True)
class Receipt:
    """What was asked, what was done, and what remains. Times are seconds since the epoch."""

    asked: Request
    dry_run: bool
    began: float
    ended: float = 0.0
    tiers: list[TierReceipt] = field(default_factory=list[TierReceipt])
    elsewhere: tuple[str, ...] = (ENGINES, ARCHIVES)
    """Copies that are not in the tiers, and what to do about them."""

    @property
    def complete(self) -> bool:
        """Whether every tier is."""
        return all(tier.complete for tier in self.tiers)

    @property
    def nothing_found(self) -> bool:
        """Whether no tier had a block of those asked for: what was asked for may be misspelt."""
        return not any(tier.blocks for tier in self.tiers)
