"""A clock that tests set, for whatever blocks are dated by and expire by (`kvstore.retention`)."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore.retention import Clock, set_clock

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["MovableClock", "movable_clock", "standing_clock"]


class MovableClock:
    """The real time and what it was moved by, in this process: time that passes, for the wall and the boot clock."""

    def __init__(self) -> None:
        self._moved = 0

    def advance(self, seconds: float) -> None:
        """Let so much time pass."""
        self._moved += int(seconds * 1e9)

    def wall(self) -> int:
        """Nanoseconds since the epoch."""
        return time.time_ns() + self._moved

    def steady(self) -> int:
        """Nanoseconds since the boot."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) + self._moved


@contextmanager
def movable_clock() -> Generator[MovableClock]:
    """All stores of this process go by the clock that is yielded, within the context."""
    moved = MovableClock()
    before = set_clock(Clock(moved.wall, moved.steady))
    try:
        yield moved
    finally:
        set_clock(before)


@contextmanager
def standing_clock(now_ns: int) -> Generator[None]:
    """All stores of this process take it for that moment (ns since the epoch), however long the context lasts."""
    before = set_clock(Clock(lambda: now_ns, lambda: 0))
    try:
        yield
    finally:
        set_clock(before)
