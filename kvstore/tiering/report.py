"""What a secondary tier tells the manager once per step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.tiering.primary import Slot
    from kvstore.types import BlockKey

__all__ = ["TierReport"]


@dataclass(slots=True)
class TierReport:
    """What `poll` collected: answers to `ask`, and the slots of transfers that changed their state."""

    answers: list[tuple[BlockKey, bool]] = field(default_factory=list["tuple[BlockKey, bool]"])
    loaded: list[Slot] = field(default_factory=list["Slot"])
    """They hold their block, intact. The transfer's pin is the manager's again."""
    failed: list[Slot] = field(default_factory=list["Slot"])
    """They do not, and nobody writes into them any more. The pin is the manager's again."""
    overdue: list[Slot] = field(default_factory=list["Slot"])
    """Given up, but somebody may still write into them: they stay pinned until they are `released`."""
    released: list[Slot] = field(default_factory=list["Slot"])
    """The tier has no more to do with them: stores that ended or were copied into staging, and overdue loads that
    ended after all. To be unpinned, nothing else."""
    dropped: list[Slot] = field(default_factory=list["Slot"])
    """Those of the `released` whose transfer came to nothing: stores that were shed, refused or failed, and loads."""
    stored: list[BlockKey] = field(default_factory=list["BlockKey"])
    """The store has these blocks now, because of a store that has just ended; their slots may have been released long
    before."""
