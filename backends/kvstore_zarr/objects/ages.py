"""Which blocks of an object store have expired, as far as one process can know.

The store says when an object was written, the block's tail when it was made; who used it nobody says. So `ttl` counts
from storing, or from a use by this very process, where it stored or loaded the block before it expired.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvstore.retention import now_ns

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.objects.client import Listed
    from kvstore.retention import Retention

__all__ = ["Ages"]

USES = 100_000
"""Blocks of which it is remembered when this process used them, 250 bytes each."""


class Ages:
    """What one open store knows of its blocks' ages. Thread-safe. False where blocks are kept for ever."""

    def __init__(self, retention: Retention) -> None:
        self._retention = retention
        self._lock = threading.Lock()
        self._used: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._retention)

    def alive(self, entry: Listed) -> bool:
        """Whether an object that a listing shows has not expired. What has no date is alive."""
        return not entry.modified or self.alive_since(entry.path, int(entry.modified * 1e9))

    def alive_since(self, path: str, created: int) -> bool:
        """Whether a block that was made then (ns since the epoch) has not expired."""
        return not self._retention.has_expired(created, self._used.get(path, 0), self._retention.cutoff())

    def last_used(self, entry: Listed) -> float:
        """Seconds since the epoch."""
        return max(entry.modified, self._used.get(entry.path, 0) / 1e9)

    def used(self, path: str) -> None:
        """The block was stored, or loaded, or found by a put, and had not expired."""
        if not self._retention:
            return
        with self._lock:
            self._used.pop(path, None)
            self._used[path] = now_ns()
            while len(self._used) > USES:
                del self._used[next(iter(self._used))]

    def touched(self, paths: Iterable[str]) -> None:
        """The blocks were used without being read: of those that are known here, if they have not expired."""
        if self._retention:
            cutoff = self._retention.cutoff()
            for path in paths:
                if self._used.get(path, 0) > cutoff:
                    self.used(path)

    def forget(self, paths: Iterable[str]) -> None:
        """They are gone."""
        with self._lock:
            for path in paths:
                self._used.pop(path, None)
