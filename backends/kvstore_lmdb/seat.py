"""One seat for all threads of this process that move small blocks: who has it runs, the others sleep.

A block of 64 KiB is four short calls that let go of the GIL and want it back. One thread alone gets it at once; several
take it from each other between any two calls, and to wake one that sleeps takes longer than the copy it wakes up for:
four threads together moved half of what one did, at four times its CPU. So they take turns, a MiB each, in which the
GIL is still given away, to whoever else wants it.

The seat is for what is in memory. Who had to wait for the device gives it up, and takes none until its call is over;
whoever has waited for it longer than `PATIENCE_S` puts a new one beside it: the holder hangs, was stopped, or did not
survive a fork.
"""

from __future__ import annotations

import threading
import time
from resource import RUSAGE_THREAD, getrusage

__all__ = ["PATIENCE_S", "SMALL_BYTES", "Seat"]

SMALL_BYTES = 256 << 10
"""Up to here a block is small. From 512 KiB on two threads that copy side by side are as fast as one, or faster."""

PATIENCE_S = 0.1
"""How long one waits: for three hundred others, each with its MiB."""

_SUSPECT_S = 5e-5
"""What a block out of memory takes, three times; one that came from the device takes longer."""


class _Place:
    """Where the seat stands."""

    lock = threading.Lock()


class Seat:
    """A call's use of the seat: `with seat` for each part of it. For one thread; `needed` is false for large blocks."""

    __slots__ = ("_lock", "_needed", "_reads", "_since")

    def __init__(self, *, needed: bool) -> None:
        self._needed = needed
        self._lock: threading.Lock | None = None
        self._since, self._reads = 0.0, 0

    def __enter__(self) -> Seat:
        if self._needed:
            lock = _Place.lock
            if not lock.acquire(timeout=PATIENCE_S):
                lock = threading.Lock()
                lock.acquire()
                _Place.lock = lock
            self._lock, self._since, self._reads = lock, time.monotonic(), _reads_of_the_device()
        return self

    def keep(self) -> None:
        """After each block: keep the seat, unless it came from the device."""
        if self._lock is not None:
            before, self._since = self._since, time.monotonic()
            if self._since - before > _SUSPECT_S and _reads_of_the_device() != self._reads:
                self._needed = False
                self.__exit__()

    def __exit__(self, *_: object) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()


def _reads_of_the_device() -> int:
    """What grows when this thread has the device read, be it ahead, or touches a page that is not in memory."""
    used = getrusage(RUSAGE_THREAD)
    return used.ru_inblock + used.ru_majflt
