"""The sweep of an object store, `sweep=1h`: one of those who have it open removes what `ttl` and `capacity` say.

A daemon thread for each open store looks at the lease (`lease`) once per interval; who holds it sweeps with
`kvstore.collection`, page by page, with pauses. It ends with the store, and never begins in a forked child.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.collection import Collected, Rules, collect, survey
from kvstore.errors import KVStoreError
from kvstore.retention import TTL, TTL_FROM, now_ns
from kvstore.url import format_size
from kvstore_zarr.objects.lease import Lease

if TYPE_CHECKING:
    from kvstore.abc import BlockStore
    from kvstore.objects.client import ObjectClient
    from kvstore.url import TierURL

__all__ = ["SweepCounts", "Sweeper", "rules_of"]

_log = logging.getLogger("kvstore.objects")

FIRST_AFTER_S = 5.0
"""When a store that was opened looks for the first time: not while an engine starts."""
PAUSE_S = 0.05
"""Between two batches of a thousand blocks, so that a sweep is no load that anybody notices."""
MOST_REMOVED = 200_000
"""Blocks removed in one sweep; the next one goes on."""
LOW_WATER = 0.9
"""Part of the capacity to which a sweep goes down, once it is exceeded: until the next one the store grows again."""


@dataclass(frozen=True, slots=True)
class SweepCounts:
    """What this process has swept since it opened the store. `last` is seconds since the epoch, 0 for never."""

    sweeps: int = 0
    looked_at: int = 0
    expired: int = 0
    over: int = 0
    bytes: int = 0
    failed: int = 0
    last: float = 0.0


class _StoppedError(Exception):
    """The store is closing, the lease was lost, or enough was removed."""


def rules_of(url: TierURL, capacity: int | None) -> Rules:
    """What the options of a URL say is to be kept."""
    return Rules(url.option(TTL), url.option(TTL_FROM) == "stored", capacity, LOW_WATER)


class Sweeper:
    """The thread of one open store."""

    def __init__(self, store: BlockStore, client: ObjectClient, interval: float, rules: Rules) -> None:
        self._store = weakref.ref(store)
        self._interval, self._rules = interval, rules
        self._lease = Lease(client, interval)
        self._name = str(store.url)
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._bound = client.timeout + 1.0
        self.counts = SweepCounts()
        self._thread = threading.Thread(target=self._run, name="kvstore-sweep", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End what is under way, at most within the time of a request, and let others have the lease."""
        if self._pid != os.getpid():
            return
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(self._bound)
        if not self._thread.is_alive():
            self._lease.release()

    def _run(self) -> None:
        wait = min(FIRST_AFTER_S, self._interval)
        while not self._stop.wait(wait * random.uniform(0.5, 1.0)):
            wait = self._interval
            store = self._store()
            if store is None:
                return
            try:
                self._take_turn(store)
            except _StoppedError:
                pass
            except KVStoreError as error:  # told each time: an interval is long
                self._count(failed=1)
                if not self._stop.is_set():
                    _log.warning("%s: the sweep failed, and is tried again in %.0f s: %s", self._name, wait, error)
            except Exception:
                self._count(failed=1)
                _log.exception("%s: the sweep failed, and is tried again in %.0f s", self._name, wait)
            del store

    def _take_turn(self, store: BlockStore) -> None:
        lease = self._lease
        if not lease.take() or lease.held is None:
            return
        if now_ns() / 1e9 - lease.held.swept >= 0.9 * self._interval:
            self._sweep(store)
        else:
            lease.renew()

    def _sweep(self, store: BlockStore) -> None:
        began, done = time.monotonic(), Collected()
        renewed = began
        looked_at = 0

        def advance(blocks: int) -> None:
            nonlocal renewed, looked_at
            looked_at += blocks
            if self._stop.wait(PAUSE_S) or done.expired + done.over >= MOST_REMOVED:
                raise _StoppedError
            if time.monotonic() - renewed > self._interval:
                if not self._lease.renew():
                    raise _StoppedError
                renewed = time.monotonic()

        try:
            found = survey(store, self._rules, advance=advance)
            looked_at = 0
            collect(store, found, done=done, advance=advance)
            looked_at = sum(space.blocks for space in found.spaces)
        finally:
            self._count(1, looked_at, done.expired, done.over, done.bytes, last=now_ns() / 1e9)
            if not self._stop.is_set():
                self._lease.renew(swept=True)
        _log.info(
            "%s: swept in %.1f s: of %d blocks %d had expired and %d were over the capacity, %s are gone",
            *(self._name, time.monotonic() - began, looked_at, done.expired, done.over, format_size(done.bytes)),
        )

    def _count(
        self, sweeps: int = 0, looked_at: int = 0, expired: int = 0, over: int = 0, nbytes: int = 0, *,
        failed: int = 0, last: float = 0.0,
    ) -> None:  # fmt: skip
        old = self.counts
        self.counts = SweepCounts(
            old.sweeps + sweeps, old.looked_at + looked_at, old.expired + expired, old.over + over,
            old.bytes + nbytes, old.failed + failed, last or old.last,
        )  # fmt: skip
