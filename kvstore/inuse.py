"""What is open may be used by many threads, is closed when none is inside, and belongs to one process.

Under `kvstore.keyvalue` and `kvstore.environment`: each verb is a `with` block of one `InUse`.
"""

from __future__ import annotations

import os
import threading

from kvstore.errors import StoreClosedError

__all__ = ["InUse"]

CLOSE_TIMEOUT_S = 30.0
"""How long `end` waits for other threads before it gives up."""


class InUse:
    """A `with` block is one use, in whichever thread; uses may nest. `what` is what messages call the thing."""

    def __init__(self, what: object) -> None:
        self.what = what
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._inside, self._ended = 0, False

    def __enter__(self) -> None:
        """Raises `StoreClosedError` after `end`, and in a process that was forked from the one that made this."""
        if self._pid != os.getpid():  # before the lock, which another thread may have held at the fork
            raise StoreClosedError(
                f"{self.what} was opened by the process that this one was forked from: open it after the fork"
                " (multiprocessing: use the spawn start method)"
            )
        with self._lock:
            if self._ended:
                raise StoreClosedError(f"{self.what} was closed: open it again")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._ended and not self._inside:
                self._idle.notify_all()

    def end(self, timeout: float | None = None) -> bool:
        """Let nobody in any more and wait for those inside; whether the caller may now take the thing apart.

        True once. False where that was done before, in a forked child, and when somebody is still inside after
        `timeout` seconds (default: `CLOSE_TIMEOUT_S`): what they use must then stay as it is.
        """
        if self._pid != os.getpid():
            return False
        with self._idle:
            if self._ended:
                return False
            self._ended = True
            return self._idle.wait_for(lambda: not self._inside, CLOSE_TIMEOUT_S if timeout is None else timeout)
