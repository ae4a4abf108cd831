"""A seat for the threads of this process that load small blocks, and one for those that store them: who has it runs,
the others sleep.

A block of 64 KiB is some short calls that let go of the GIL and want it back. One thread alone gets it at once; several
take it from each other between any two calls, and to wake one that sleeps takes longer than the copy it wakes up for:
four threads together moved half of what one did, at four times its CPU. So one sits at a time: for a MiB of a load; of
a store for a chunk, from its first byte to the commit, which is one long call, beside which the next may prepare. The
GIL is given away all the same, to whoever else wants it. Who sits next nobody decides: who has just got up may sit down
again, and nobody waits for longer than `PATIENCE_S` for that.

The seat is for what is in memory. Who had to wait for the device gives it up, and takes none until its call is over;
whoever has waited for it longer than `PATIENCE_S` puts a new one beside it: the holder hangs, was stopped, waits for
another process, or did not survive a fork.
"""

from __future__ import annotations

import threading
import time
from resource import RUSAGE_THREAD, getrusage

__all__ = ["LOADS", "PATIENCE_S", "SMALL_BYTES", "STORES", "Place", "Seat"]

SMALL_BYTES = 256 << 10
"""Up to here a block is small. From 512 KiB on two threads that copy side by side are as fast as one, or faster."""

PATIENCE_S = 0.1
"""How long one waits: for three hundred others, each with its MiB."""

_SUSPECT_S = 5e-5
"""What a block out of memory takes, three times; one that came from the device takes longer."""


class Place:
    """Where a seat stands."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


LOADS, STORES = Place(), Place()
"""Two, for a load is not to wait until a store gets its turn to write."""


class Seat:
    """A call's use of a seat: `with seat` for each part of it. For one thread; none is `needed` for large blocks."""

    __slots__ = ("_lock", "_needed", "_place", "_reads", "_since")

    def __init__(self, place: Place, *, needed: bool) -> None:
        self._place, self._needed = place, needed
        self._lock: threading.Lock | None = None
        self._since, self._reads = 0.0, 0

    @classmethod
    def of(cls, place: Place, largest: int) -> Seat:
        """For blocks of at most `largest` bytes."""
        return cls(place, needed=0 < largest <= SMALL_BYTES)

    def __enter__(self) -> Seat:
        if self._needed:
            lock = self._place.lock
            if not lock.acquire(timeout=PATIENCE_S):
                lock = threading.Lock()
                lock.acquire()
                self._place.lock = lock
            self._lock, self._since, self._reads = lock, time.monotonic(), _reads_of_the_device()
        return self

    def keep(self) -> None:
        """After each block: keep the seat, unless it came from the device."""
        if self._lock is not None:
            before, self._since = self._since, time.monotonic()
            if self._since - before > _SUSPECT_S and _reads_of_the_device() != self._reads:
                self.close()

    def close(self) -> None:
        """Give it up, and take none any more."""
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
