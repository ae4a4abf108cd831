"""What marking and unmarking make of catalogue entries: which change, into what, and what is said of each.

Nothing is written here, so that a read transaction can tell whether there is anything to write.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.marks import MOST_MARKS, MarkOutcome, with_mark, without_mark

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.marks import Mark
    from kvstore.records import Entry

__all__ = ["marked", "unmarked"]

Changed = list[tuple["Entry", "Entry"]]
"""Entries as they are and as they are to be."""


def marked(entries: Sequence[Entry | None], mark: Mark, pinnable: int | None) -> tuple[list[MarkOutcome], Changed]:
    """Each entry with `mark` as well; None is a block that is not there. `pinnable`: bytes that may still be pinned."""
    outcomes: list[MarkOutcome] = []
    changed: dict[bytes, tuple[Entry, Entry]] = {}
    for entry in entries:
        if entry is None:
            outcomes.append(MarkOutcome.MISSING)
            continue
        _, now = changed.get(entry.address, (entry, entry))
        pins = mark.pinned and not now.pinned
        refused = pins and pinnable is not None and now.size > pinnable
        marks = with_mark(now.marks, replace(mark, pinned=False) if refused else mark)
        if len(marks) > MOST_MARKS:
            outcomes.append(MarkOutcome.FAILED)
            continue
        outcomes.append(MarkOutcome.UNPINNED if refused else MarkOutcome.MARKED)
        if pins and not refused and pinnable is not None:
            pinnable -= now.size
        if marks != now.marks:
            changed[entry.address] = entry, replace(now, marks=marks)
    return outcomes, list(changed.values())


def unmarked(entries: Sequence[Entry | None], mark: Mark) -> tuple[list[bool], Changed]:
    """Each entry without what `mark` stands for."""
    outcomes: list[bool] = []
    changed: dict[bytes, tuple[Entry, Entry]] = {}
    for entry in entries:
        if entry is None or entry.address in changed:
            outcomes.append(False)
            continue
        marks = without_mark(entry.marks, mark)
        outcomes.append(marks != entry.marks)
        if outcomes[-1]:
            changed[entry.address] = entry, replace(entry, marks=marks)
    return outcomes, list(changed.values())
