"""The version of what kvstore writes, and what a reader does with another one. The rule in words: docs/formats.md.

A tier says its version where it is opened (a namespace's document, `info` of an environment, a value `format`): another
one is an error then (`check_version`). A block says its version too: one of a later kvstore in a tier of ours is a miss
and left alone (`is_foreign`), because whoever wrote it can read it; it is never taken for damage.
"""

from __future__ import annotations

from kvstore.errors import NewerFormatError, NotAStoreError, OlderFormatError

__all__ = ["FORMAT_VERSION", "MUST_KNOW", "check_version", "is_foreign"]

FORMAT_VERSION = 1
"""Of blocks, tiers and archives. What is written by this version is read by every later one."""

MUST_KNOW = 0x00FF
"""The flags without which a block cannot be read; who does not know one of the others passes over it."""


def check_version(found: object, place: str, what_to_do: str) -> None:
    """Raise `NewerFormatError` or `OlderFormatError` where `place` says that it is of another version than ours, and
    `NotAStoreError` where what it says is no version.

    `what_to_do` with one that is too old (it was written before there was a promise to read it), or damaged. Which of
    both it is nothing here can tell: who has better evidence looks at that first.
    """
    if type(found) is not int:
        raise NotAStoreError(f"{place} is of format {found!r}, which is no version: it was damaged; {what_to_do}")
    if found == FORMAT_VERSION:
        return
    if found < FORMAT_VERSION:
        raise OlderFormatError(
            f"{place} is of format {found}, from before version {FORMAT_VERSION}, which is not read any more (or that"
            f" number was damaged): {what_to_do}"
        )
    raise NewerFormatError(
        f"{place} is of format {found}; this kvstore knows up to {FORMAT_VERSION}: upgrade kvstore-tiers, or use"
        f" another location. If no later kvstore ever wrote there, that number was damaged: {what_to_do}"
    )


def is_foreign(version: int, flags: int, known: int) -> bool:
    """Whether a block that says this of itself is a later kvstore's: to be left alone, and not read."""
    return version > FORMAT_VERSION or (version == FORMAT_VERSION and bool(flags & MUST_KNOW & ~known))
