"""How long a block is kept: the options `ttl` and `ttl_from`, the clock they are measured by, and what follows.

Every backend asks here whether a block has expired, and `kvstore.collection` what is to go from a store. An expired
block is hidden at once and removed by and by: the room it takes is given back by puts (`allowance` says how much at a
time), by `kvstore gc` and, in object stores, by a sweep. So a clock that is wrong for a while costs little: what it hid
is served again when it is right.

A `ttl` is each opener's own: it says what this one serves and takes back. Of several who share a tier the shortest
decides when a block goes.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.url import Option, choice, parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvstore.types import BlockInfo
    from kvstore.url import TierURL

__all__ = [
    "TTL",
    "TTL_FROM",
    "Allowance",
    "Clock",
    "Limit",
    "Retention",
    "moment_of",
    "now_ns",
    "oldest_beyond",
    "set_clock",
    "steady_s",
]

STEADY_WITHIN_S = 60.0
"""How far the wall clock may be from where it should be, before it is said to have jumped."""
BELIEVED_AFTER_S = 3600.0
"""How long a wall clock that has jumped must stand before it is believed: long enough to be put right."""
AHEAD_S = 300.0
"""How far a block's times may be ahead of the clock, because another process' clock is, before they are set right."""
CREDIBLE_NS = 1_767_225_600_000_000_000
"""The beginning of 2026: a clock that says less is wrong, and nothing is set right by it."""
_USE_DUE_NS = 60_000_000_000
REMOVED_A_SECOND = 64
"""Expired blocks that a process takes back in a second at most, beside two for each that it puts."""


def _positive_duration(text: Any) -> float:
    seconds = parse_duration(text)
    if not 0.001 <= seconds <= 1e9:
        raise ValueError("expected a time of at least 1ms, such as 30min, 12h or 7d")
    return seconds


TTL: Option[float | None] = Option(
    "ttl", _positive_duration, None, "how long a block is kept: 12h, 7d; default: as long as there is room"
)
TTL_FROM: Option[str] = Option(
    "ttl_from",
    choice("used", "stored"),
    "used",
    "what ttl counts from: used (the last use that is known) or stored (however often a block is used)",
)


class Clock:
    """The time of day, without its jumps. Thread-safe.

    Between two looks the time that passed is what the boot clock says, which no one sets; where the wall clock says
    otherwise by more than `STEADY_WITHIN_S`, it is believed only after `BELIEVED_AFTER_S`. So neither a clock that is
    set forward empties a tier in a blink, nor does one that was set back keep blocks for long.
    """

    def __init__(
        self,
        wall: Callable[[], int] = time.time_ns,
        steady: Callable[[], int] = lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME),
    ) -> None:
        self._wall, self._steady = wall, steady
        self._lock = threading.Lock()
        self._anchor = wall(), steady()
        self._jumped: int | None = None  # when, on the boot clock

    def steady(self) -> int:
        """Nanoseconds since the boot."""
        return self._steady()

    def now(self) -> int:
        """Nanoseconds since the epoch."""
        wall, steady = self._wall(), self._steady()
        then, steady_then = self._anchor
        expected = then + steady - steady_then
        if self._jumped is None and abs(wall - expected) <= STEADY_WITHIN_S * 1e9:
            return wall
        with self._lock:
            return self._after_a_jump(wall, steady, expected)

    def _after_a_jump(self, wall: int, steady: int, expected: int) -> int:
        if abs(wall - expected) <= STEADY_WITHIN_S * 1e9:
            self._jumped = None
            return wall
        if self._jumped is None:
            self._jumped = steady
        if steady - self._jumped < BELIEVED_AFTER_S * 1e9:
            return expected
        self._anchor, self._jumped = (wall, steady), None
        return wall


_clock = Clock()


def now_ns() -> int:
    """The time by which blocks are dated and expire, in nanoseconds since the epoch."""
    return _clock.now()


def steady_s() -> float:
    """Seconds on a clock that only goes forward, as `time.monotonic`, which tests can move together with `now_ns`."""
    return _clock.steady() / 1e9


def set_clock(clock: Clock) -> Clock:
    """Have all stores of this process go by `clock`; returns the one before. For tests (`kvstore.testing.clock`)."""
    global _clock
    before, _clock = _clock, clock
    return before


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the blocks of one open store are kept. `ttl` in nanoseconds, None: for ever."""

    ttl: int | None = None
    from_stored: bool = False

    @classmethod
    def of(cls, url: TierURL) -> Retention:
        """As the options of a validated URL say."""
        seconds = url.option(TTL)
        return cls(None if seconds is None else int(seconds * 1e9), url.option(TTL_FROM) == "stored")

    def __bool__(self) -> bool:
        return self.ttl is not None

    def cutoff(self) -> int:
        """What was used (or stored) at this moment or before has expired now. 0 without a `ttl`."""
        return 0 if self.ttl is None else now_ns() - self.ttl

    def moment(self, created: int, last_used: int) -> int:
        """From when on the block's time runs; what it is held against is `cutoff`. All in ns since the epoch."""
        return created if self.from_stored else max(created, last_used)

    def has_expired(self, created: int, last_used: int, cutoff: int) -> bool:
        """Whether a block with these times, and without a pin, had expired at `cutoff`."""
        return self.ttl is not None and self.moment(created, last_used) <= cutoff

    def note_of_use_due_ns(self) -> int:
        """How long a process may keep to itself that it used a block: others would evict it, or take it for expired."""
        return _USE_DUE_NS if self.ttl is None or self.from_stored else min(self.ttl // 8, _USE_DUE_NS)


class Allowance:
    """How many expired blocks a process may take back with a put: so many that it keeps up, so few that nobody waits
    for it, and that no error of a clock empties a tier at once. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since, self._saved = time.monotonic(), float(REMOVED_A_SECOND)

    def take(self, blocks: int) -> int:
        """For a put of so many blocks."""
        now = time.monotonic()
        with self._lock:
            self._saved = min(REMOVED_A_SECOND, self._saved + REMOVED_A_SECOND * (now - self._since))
            self._since, whole = now, int(self._saved)
            self._saved -= whole
        return 2 * blocks + whole


@dataclass(frozen=True, slots=True)
class Limit:
    """What goes, as a moment: all that was used before it, and of what was used just then `tie_bytes`."""

    before: float = float("-inf")
    tie_bytes: int = 0


def oldest_beyond(sized: Iterable[tuple[float, int]], excess: int) -> Limit:
    """The moment up to which blocks have to go, the oldest first, for `excess` bytes to be freed. `sized`: the time and
    the bytes of each.
    """
    limit = Limit()
    for moment, total in _by_moment(sized):
        if excess <= 0:
            break
        limit = Limit(moment, min(excess, total))
        excess -= total
    return limit


def _by_moment(sized: Iterable[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    import numpy as np

    pairs = np.fromiter(sized, np.dtype([("moment", "f8"), ("size", "i8")]))
    moments, places = np.unique(pairs["moment"], return_inverse=True)
    totals = np.zeros(len(moments), np.int64)
    np.add.at(totals, places, pairs["size"])
    yield from zip(moments.tolist(), totals.tolist(), strict=True)


def moment_of(info: BlockInfo, *, from_stored: bool) -> float:
    """From when on a scanned block's time runs; seconds since the epoch."""
    return info.created if from_stored else max(info.created, info.last_used)
