"""How moments, digests and choices are said to people, in tables, messages and notebooks alike."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["SHORT", "age", "counted", "listing", "moment", "short"]

SHORT = 12
"""Hex digits that tell blocks and namespaces of one tier apart: 48 bits."""


def age(moment: float | None) -> str:
    """How long ago, for people: `5 s`, `3.0 h`, `2.1 d`."""
    if moment is None:
        return "-"
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def moment(seconds: float) -> str:
    """Seconds since the epoch as ISO 8601 in UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def short(name: str) -> str:
    """The beginning of a digest or a namespace's name; any view takes it in place of the whole."""
    return name[:SHORT]


def counted(number: int, what: str) -> str:
    """`1 block`, `12,000 blocks`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def listing(names: Iterable[str], most: int = 8) -> str:
    """Some of the names, for a message."""
    found = sorted(names)
    rest = f" and {len(found) - most:,} more" if len(found) > most else ""
    return (", ".join(found[:most]) or "none") + rest
