"""The labelled points between the steps of a put, where a test may stop or kill the process.

A block is safe at every one of them; the tests prove it by replacing `checkpoint` in a process that is to die.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["STEPS", "checkpoint"]

STEPS = ("planned", "reserved", "removed", "written", "renamed", "published")
"""In the order in which a put of blocks that need room passes them; `written` once for each block."""


def _pass_by(step: str) -> None:
    del step


checkpoint: Callable[[str], None] = _pass_by
"""Called with the name of each step. Does nothing, unless a test put something else here."""
