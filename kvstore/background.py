"""What whoever works behind a scheduler's thread has in common: it is told of ends without a lock, and yields."""

from __future__ import annotations

import contextlib
import threading

__all__ = ["NICENESS", "Bell"]

NICENESS = 10
"""Added to that of the process for transfer threads (Linux), and for a process that has a store to itself."""


class Bell:
    """Rung whenever a job has ended: what somebody waits for who has nothing else to do.

    One C lock, held while it is silent: who rings never waits, and rings that nobody waited for are one ring.
    """

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        """Wake who waits, or who waits next."""
        with contextlib.suppress(RuntimeError):  # rung already
            self._silent.release()

    def wait(self, timeout: float = -1) -> bool:
        """Until it is rung, or was since the last call; False after `timeout` seconds, if that is not negative. For one
        thread.
        """
        return self._silent.acquire(timeout=timeout)
