"""What requests and operators say of blocks: labels, pins and tenants. Said by `BlockStore.mark_many`, read in a scan.

A block of a prefix that several share has several marks, one for each pair of label and tenant. A pin belongs to its
mark: who takes back one label's pin takes back no other's. A block with any pin is not evicted.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

__all__ = ["MOST_MARKS", "MOST_TEXT_BYTES", "PINNABLE", "Mark", "MarkOutcome", "with_mark", "without_mark"]

MOST_TEXT_BYTES = 128
"""Of a label or a tenant, in UTF-8."""

MOST_MARKS = 64
"""On one block: every use of a block copies them."""

PINNABLE = 2
"""One part in so many of a store's capacity may be pinned, so that what is new finds room, too."""


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """One thing said of a block. `label` groups blocks for whoever wants to find, keep or remove them together,
    `tenant` says whose they are, `pinned` asks that they be not evicted. An empty text says nothing.

    Where marks are looked for or taken back, a mark stands for all that have what it says: `Mark("handbook")` for those
    with this label, `Mark(tenant="acme")` for those of this tenant, `Mark("handbook", pinned=True)` for the pins of
    this label, `Mark()` for all.

    Raises `ValueError` for a text of more than `MOST_TEXT_BYTES`, or with anything in it that cannot be printed.
    """

    label: str = ""
    pinned: bool = False
    tenant: str = ""

    def __post_init__(self) -> None:
        for name, text in (("label", self.label), ("tenant", self.tenant)):
            if not text.isprintable():  # a lone surrogate is not, either
                raise ValueError(f"{name} {text!r} has something in it that cannot be printed: use letters and digits")
            if len(text.encode()) > MOST_TEXT_BYTES:
                raise ValueError(f"{name} {text[:20]!r}… has more than {MOST_TEXT_BYTES} bytes: choose a shorter one")

    def names(self, other: Mark) -> bool:
        """Whether `other` has all that this mark says."""
        return (
            self.label in ("", other.label)
            and self.tenant in ("", other.tenant)
            and (other.pinned or not self.pinned)
        )  # fmt: skip


class MarkOutcome(enum.Enum):
    """What became of one block that was to be marked."""

    MARKED = "marked"
    """It has the mark, now or already."""
    UNPINNED = "unpinned"
    """It has the mark without the pin: no more of the capacity may be pinned (see `PINNABLE`)."""
    MISSING = "missing"
    """No such block, or a store that keeps no marks."""
    FAILED = "failed"
    """It was left as it is: the store is read-only, or the block has `MOST_MARKS` marks already."""


def with_mark(held: tuple[Mark, ...], mark: Mark) -> tuple[Mark, ...]:
    """`held`, and `mark` as well, in order. A pin that is there stays, whether `mark` has it or not."""
    if mark == Mark():
        return held
    for old in held:
        if (old.label, old.tenant) == (mark.label, mark.tenant):
            return held if old.pinned or not mark.pinned else tuple(mark if one is old else one for one in held)
    return tuple(sorted((*held, mark)))


def without_mark(held: tuple[Mark, ...], mark: Mark) -> tuple[Mark, ...]:
    """`held` without those that `mark` names; if it is pinned, without their pins alone."""
    if not mark.pinned:
        return tuple(one for one in held if not mark.names(one))
    freed = (replace(one, pinned=False) if mark.names(one) else one for one in held)
    return tuple(one for one in freed if one != Mark())
