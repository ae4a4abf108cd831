"""How many files this process may have open for what it evicts, all its stores and threads together.

A put holds its victims' files from their choice to their end (`eviction`), and small blocks are many: without a bound,
a few puts beside each other would take every descriptor of the process, and then evict what they cannot replace.
"""

from __future__ import annotations

import resource
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["Share", "descriptors"]

AT_LEAST = 4
"""What each job gets, whatever others have: nobody waits for a descriptor."""
_UNBOUNDED = 4096


class Share:
    """What one job has been granted. For one thread."""

    def __init__(self) -> None:
        self.granted = 0
        self.is_exhausted = False
        """Whether the process had no descriptor left at all."""

    def grant(self, wanted: int) -> int:
        """As many of those wanted as this job may have now: a quarter of what others leave, so that they find some."""
        with _lock:
            left = max(0, _most() - _shares.granted)
            granted = min(wanted, max(AT_LEAST, left // 4))
            _shares.granted += granted
        self.granted += granted
        return granted

    def give_back(self, count: int) -> None:
        """Of those granted so many are not needed, or no more."""
        with _lock:
            _shares.granted -= count
        self.granted -= count


@contextmanager
def descriptors() -> Generator[Share]:
    """A share for one job; what it was granted is free again when the body ends."""
    share = Share()
    try:
        yield share
    finally:
        share.give_back(share.granted)


def _most() -> int:
    """A quarter of what the process may have open: the rest is for readers, for other libraries, for its engine."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNBOUNDED if soft == resource.RLIM_INFINITY else min(_UNBOUNDED, soft // 4)


class _Shares:
    granted = 0


_lock = threading.Lock()
_shares = _Shares()
