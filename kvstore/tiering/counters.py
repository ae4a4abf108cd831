"""What a secondary tier did: every failure is counted, and the first of each kind is logged."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from kvstore.tiering.breaker import BreakerState

__all__ = ["Counters", "TierStats"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a secondary tier did since it was opened. Blocks unless it says otherwise; seconds are thread seconds."""

    url: str
    hits: int = 0
    """Lookups answered with yes."""
    misses: int = 0
    """Lookups answered with no, late answers and failures included."""
    loads: int = 0
    stores: int = 0
    exists: int = 0
    """Stores of a block that the tier had already."""
    full: int = 0
    """Stores refused for want of room."""
    refused: int = 0
    """Stores of blocks that were purged from the tier a short while ago."""
    shed: int = 0
    """Stores dropped because the tier fell behind, is left alone, or was closed before it came to them."""
    corrupt: int = 0
    failed_loads: int = 0
    """Blocks that a lookup had promised and a load did not deliver, damaged and overdue ones included."""
    failed_stores: int = 0
    failed_calls: int = 0
    """Calls that the backend ended with an exception."""
    overdue_calls: int = 0
    """Lookups and loads given up after their time-out, and stores that waited for staging as long."""
    marked: int = 0
    """Blocks that have what was said of them (`SecondaryTier.mark`), now or already."""
    pins_refused: int = 0
    """Those of them that were to be pinned and are not, for want of room for pins."""
    marks_dropped: int = 0
    """Blocks of which something was said that the store was not told: it was busy, it failed, or it is left alone."""
    bytes_loaded: int = 0
    bytes_stored: int = 0
    load_seconds: float = 0.0
    store_seconds: float = 0.0
    backlog_bytes: int = 0
    """Stores accepted and not finished, at this moment."""
    staging_bytes: int = 0
    """Staging memory that calls have, at this moment; those that were given up included."""
    breaker: BreakerState = BreakerState.CLOSED
    """At this moment. Unless it is closed, the tier leaves its store alone (`kvstore.tiering.breaker`)."""
    trips: int = 0
    """How often the breaker opened."""


class Counters:
    """The counters of `TierStats`, and the log of the tier at `url`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._counts: defaultdict[str, Any] = defaultdict(int)
        self._told: set[str] = set()

    def add(self, **more: float) -> None:
        """Add to counters, by their names in `TierStats`."""
        for name, number in more.items():
            self._counts[name] += number

    def failed(self, what: str, error: BaseException) -> None:
        """A call ended with an exception."""
        self.add(failed_calls=1)
        self.tell(what, "%s failed: %r", what, error)

    def overdue(self, what: str, seconds: float) -> None:
        """A call was given up."""
        self.add(overdue_calls=1)
        self.tell(f"overdue {what}", "no end of a %s within %.1f s", what, seconds)

    def tell(self, kind: str, message: str, *values: object) -> None:
        """Log the first of each kind."""
        if kind not in self._told:
            self._told.add(kind)
            log.warning(f"%s: {message} (said once; see the counters)", self._url, *values)

    def stats(self, **state: Any) -> TierStats:
        """All of them, and the `state` of this moment, by its names in `TierStats`."""
        return TierStats(self._url, **self._counts, **state)
