"""Lookups in one store: what was asked since the last step goes in one call, and there is one call at a time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvstore.tiering.jobs import Lookup
from kvstore.tiering.pool_apart import pool_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.abc import BlockStore
    from kvstore.background import Bell
    from kvstore.namespace import Namespace
    from kvstore.tiering.breaker import Breaker
    from kvstore.tiering.counters import Counters
    from kvstore.tiering.pool import Jobs
    from kvstore.types import BlockKey

__all__ = ["Questions"]


class Questions:
    """Asked on the manager's thread, answered in bounded time: who gets no answer within `timeout` seconds is told no.

    The lookups have a thread of their own (or a place in the store's own process), so that they wait for no transfer.
    """

    def __init__(
        self, store: BlockStore, namespace: Namespace, timeout: float, counters: Counters, breaker: Breaker
    ) -> None:
        self._store = store
        self.namespace = namespace
        self._timeout = timeout
        self._counters = counters
        self._breaker = breaker
        self._thread: Jobs[Lookup] = pool_for(store, 1, f"kvstore-{store.url.scheme}-lookup")
        self._noted: dict[BlockKey, None] = {}
        self._asking: Lookup | None = None

    def ring(self, bell: Bell) -> None:
        """Ring `bell` whenever a call has ended."""
        self._thread.bell = bell

    @property
    def idle(self) -> bool:
        """Nobody waits for an answer; a call that was given up may still be under way."""
        return not self._noted and (self._asking is None or self._asking.given_up)

    @property
    def stuck(self) -> bool:
        """A call was given up and has not returned."""
        return self._asking is not None and self._asking.given_up

    def ask(self, keys: Iterable[BlockKey]) -> None:
        """Is it there? Noted for the next `submit`."""
        self._noted.update(dict.fromkeys(keys))

    def submit(self) -> None:
        """Ask what was noted, unless a call is under way."""
        if self._noted and self._asking is None:
            self._asking = Lookup(self._store, self.namespace, list(self._noted))
            self._noted.clear()
            self._thread.submit(self._asking)

    def collect(self) -> list[tuple[BlockKey, bool]]:
        """Answers since the last call, those included that are no because nothing came in time."""
        answers: list[tuple[BlockKey, bool]] = []
        for lookup in self._thread.collect():
            self._asking = None
            if lookup.error is not None:
                self._counters.failed("lookup", lookup.error)
            if not lookup.given_up:
                self._breaker.heard("lookup", lookup.error)
                answers += self._answered(lookup.keys, lookup.found or [False] * len(lookup.keys))
        asking = self._asking
        if asking is not None and not asking.given_up and time.monotonic() - asking.made > self._timeout:
            asking.given_up = True
            self._counters.overdue("lookup", self._timeout)
            self._breaker.timed_out("lookup", self._timeout)
            answers += self._answered(asking.keys, [False] * len(asking.keys))
        return answers

    def refuse(self) -> list[tuple[BlockKey, bool]]:
        """Answer no to what was noted."""
        noted = list(self._noted)
        self._noted.clear()
        return self._answered(noted, [False] * len(noted))

    def cancel(self) -> None:
        """Nobody wants to know any more: what has not been asked is not going to be."""
        self._noted.clear()
        if self._asking is not None and self._thread.cancel(self._asking):
            self._asking = None

    def close(self, timeout: float) -> bool:
        """End the thread; True if it ended within `timeout` seconds."""
        return self._thread.close(timeout)

    def _answered(self, keys: Sequence[BlockKey], found: Sequence[bool]) -> list[tuple[BlockKey, bool]]:
        hits = sum(found)
        self._counters.add(hits=hits, misses=len(keys) - hits)
        return list(zip(keys, found, strict=True))
