"""What tests of loads and stores that hang share: a tier that gives them up soon, and its staging in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiering_helpers import BLOCK, SPACE

from kvstore.tiering import SecondaryTier, TieringManager

if TYPE_CHECKING:
    from kvstore import BlockStore


def impatient(store: BlockStore, **options: Any) -> SecondaryTier:
    """A tier that gives up loads and stores after 0.2 s."""
    return SecondaryTier(store, SPACE, **{"threads": 2, "load_timeout": 0.2, **options})


def staged_blocks(manager: TieringManager) -> int:
    """Blocks of staging memory that calls to the first tier have."""
    return manager.stats().tiers[0].staging_bytes // BLOCK
