"""The tiers of a manager, from what its constructor was given: taken as they are, or made for one namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.tiering.policy import DEFAULT_POLICY
from kvstore.tiering.primary import PrimaryTier
from kvstore.tiering.secondary import SecondaryTier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.tiering.policy import PolicyFactory
    from kvstore.url import TierURL

__all__ = ["primary_tier", "secondary_tiers"]


def primary_tier(
    primary: PrimaryTier | None,
    slots: int | None,
    namespace: Namespace,
    policy: str | PolicyFactory | None,
    *,
    shared: bool,
) -> PrimaryTier:
    """The one that was given, or a new one of so many slots. Raises `ValueError` where a block has no room in one."""
    if (primary is None) == (slots is None):
        raise ValueError("a manager needs either primary_slots or a primary tier")
    if primary is not None and policy is not None:
        raise ValueError("a primary tier has its policy already: choose it there, or pass primary_slots instead")
    largest = max(layout.nbytes for layout in namespace.layouts)
    if primary is None:
        primary = PrimaryTier(slots or 0, largest, policy=policy or DEFAULT_POLICY, shared=shared)
    if primary.slot_bytes < largest:
        raise ValueError(f"the primary tier has slots of {primary.slot_bytes} bytes, blocks have up to {largest}")
    return primary


def secondary_tiers(
    tiers: Sequence[str | Mapping[str, Any] | TierURL | BlockStore | SecondaryTier],
    namespace: Namespace,
    primary: PrimaryTier,
    *,
    io_process: bool,
) -> tuple[SecondaryTier, ...]:
    """All of them, or none: those that were opened are closed again when one cannot be."""
    opened: list[SecondaryTier] = []
    try:
        for tier in tiers:
            if not isinstance(tier, SecondaryTier):
                backlog = primary.slots * primary.slot_bytes // 2
                tier = SecondaryTier(
                    tier, namespace, backlog_bytes=backlog, io_process=io_process, memory=primary.memory.data
                )
            opened.append(tier)
    except BaseException:
        for tier in opened:
            tier.close(timeout=1.0)
        raise
    return tuple(opened)
