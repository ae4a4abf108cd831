"""The circuit breaker of a secondary tier: a store that fails is left alone, tried again now and then, and taken back.

::

        three lookups and loads in a row fail, or one takes too long
    CLOSED ──────────────────────────────────────────────────► OPEN ◄───────────┐
      ▲                                                         │ pause is over │ it fails
      │                                                         ▼               │
      └─────────────────── it succeeds ────────────────── HALF_OPEN: one probe ─┘

While it is not CLOSED the tier answers lookups with misses, fails loads and sheds stores at once, without a call to the
store. What a request sees of an outage is therefore the time-out of one lookup or load, or three errors; not one of
them for each prefix.

**It stands in the tier, not around the store,** because only the tier knows which calls it has given up: a wrapper
would need threads of its own to see that a call hangs. Here all of it happens on the manager's thread.

**Reads decide.** A store that refuses to write and still reads is worth reading; what it does not take is counted as
failed stores, or shed when they pile up. A success takes back the failures of its own kind only: where lookups work
(out of a cache, or because their answers have no body) and loads do not, every promise would be broken.

**The probe** asks for a block that nobody has. That is a whole round trip, answered by no cache of lookups, which moves
no payload; no request waits for it, and there is never more than one. It runs on a transfer thread: while calls hang on
all of those, the tier could load nothing anyway, and stays open until one of them returns. For the same reason
there is no probe while a lookup hangs.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiering.jobs import TierJob
from kvstore.types import BlockKey, BlockRead

if TYPE_CHECKING:
    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.tiering.jobs import Calls

__all__ = ["Breaker", "BreakerState", "Probe"]

log = logging.getLogger(__name__)

FAILURES = 3
"""Lookups and loads that end with an error, without a success of their kind in between. One that takes too long is
enough: it has cost its time-out."""
PAUSE = 1.0
"""Seconds before the first probe."""
LONGEST = 32
"""Pauses double up to so many times the first one. A tier that was well for as long is forgiven."""


class BreakerState(StrEnum):
    """See the module's picture."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """For the tier at `url`; `pause` as in `PAUSE`. `trips` is how often it opened.

    Says once that it opens and once that it closes; what happens in between is silent.
    Threads: one, the manager's, makes all calls.
    """

    def __init__(self, url: str, pause: float = PAUSE) -> None:
        self.state = BreakerState.CLOSED
        self.trips = 0
        self._url = url
        self._first_pause = self._pause = pause
        self._failures: Counter[str] = Counter()
        self._opened = self._next_probe = 0.0
        self._closed = float("-inf")

    @property
    def refuses(self) -> bool:
        """The store is to be left alone."""
        return self.state is not BreakerState.CLOSED

    def heard(self, what: str, error: BaseException | None) -> None:
        """A lookup or a load ended in time: with an error, or without one."""
        self._failures[what] = self._failures[what] + 1 if error is not None else 0
        if error is not None and self._failures.total() >= FAILURES:
            failed = " and ".join(f"{count} {kind}s" for kind, count in sorted(self._failures.items()) if count)
            self._open(f"{failed} in a row failed, the last with {error!r}")

    def timed_out(self, what: str, seconds: float) -> None:
        """A call is under way for longer than that."""
        self._open(f"no end of a {what} within {seconds:.1f} s")

    def probe_is_due(self) -> bool:
        """True once for each probe that is to be made."""
        if self.state is not BreakerState.OPEN or time.monotonic() < self._next_probe:
            return False
        self.state = BreakerState.HALF_OPEN
        return True

    def probed(self, error: BaseException | None) -> None:
        """What came of the probe."""
        if error is not None:
            self._wait()
            return
        self._closed = time.monotonic()
        self._failures.clear()
        self.state = BreakerState.CLOSED
        log.warning("%s: answers again, after %.1f s", self._url, self._closed - self._opened)

    def _open(self, why: str) -> None:
        if self.refuses:
            return
        self._opened = time.monotonic()
        self.trips += 1
        if self._opened - self._closed > LONGEST * self._first_pause:
            self._pause = self._first_pause
        log.warning(
            "%s: %s. Until it answers again lookups are misses and stores are dropped; it is tried after about %.1f s",
            *(self._url, why, self._pause),
        )
        self._wait()

    def _wait(self) -> None:
        """Until the next probe: not all at once, where many processes lost the same server."""
        self.state = BreakerState.OPEN
        self._next_probe = time.monotonic() + self._pause * random.uniform(0.5, 1.0)
        self._pause = min(2 * self._pause, LONGEST * self._first_pause)


class Probe(TierJob):
    """A get of a block that nobody has, into memory of its own."""

    urgent = True

    def __init__(self, store: BlockStore, namespace: Namespace) -> None:
        super().__init__(store, namespace)
        self._key = BlockKey(random.randbytes(namespace.digest_bytes))
        self._memory = np.empty(namespace.block_bytes(0), np.uint8)

    def calls(self) -> Calls:
        yield self.verb("get_many_into", [BlockRead(self._key, self._memory.data)])
