"""Whose turn it is to write to an LMDB environment: a lock like LMDB's own, that one need not wait for without end.

LMDB lets one transaction write at a time, over all processes, and whoever wants to be the next sleeps in a mutex: a
process that is stopped (SIGSTOP, a debugger, a frozen container) inside of one would hold up every writer of the
machine, silently, until it goes on. So `kvstore.environment` takes a turn before it begins: among the threads of this
process by a lock in memory, among processes by a record lock on the empty file `writer`. The kernel drops it with its
process and tells who has it. LMDB's mutex is free by then.

Who waits gives up after its patience, sooner where the holder is stopped, and almost at once while it is known that
nobody gets through. That is said once for each time it happens, and once when it is over.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import TierUnavailable
from kvstore.files import open_or_make

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["IN_PASSING_S", "PATIENCE_S", "WRITER", "Turns", "is_stopped"]

WRITER = "writer"
"""The file's name, in the environment's directory."""

PATIENCE_S = 10.0
"""How long a writer waits for others that are at work: a slow disk, and many before it."""
STOPPED_PATIENCE_S = 1.0
"""How long it waits for a process that is stopped."""
IN_PASSING_S = 0.1
"""The patience of who writes something down that can wait, a note of use, while somebody waits for a load."""
STALLED_SHARE = 0.01
"""Of its patience, what who comes later has while it is known that nobody gets through."""

_LONGEST_PAUSE_S = 0.001
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid

log = logging.getLogger("kvstore.catalogue")


class Turns:
    """The turns of one environment in this process. Thread-safe. A forked child has none of it."""

    def __init__(self, directory: Path, mode: int) -> None:
        self._path = directory / WRITER
        self._descriptor = open_or_make(self._path, os.O_RDWR, mode)
        self._here = threading.Lock()
        self._stalled_since: float | None = None

    def close(self) -> None:
        """Nobody takes a turn any more."""
        os.close(self._descriptor)

    @contextmanager
    def taken(self, patience_s: float = PATIENCE_S) -> Generator[None]:
        """Wait for a turn; it lasts until the body ends. Raises `TierUnavailable`, which says who is in the way."""
        began = time.monotonic()
        if self._stalled_since is not None:
            patience_s *= STALLED_SHARE
        if not self._here.acquire(timeout=patience_s):
            raise TierUnavailable(f"{self._path}: no turn to write within {patience_s:.3g} s")
        try:
            self._wait(began, patience_s)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        finally:
            self._here.release()

    def _wait(self, began: float, patience_s: float) -> None:
        pause = 5e-5
        while not self._is_ours():
            waited = time.monotonic() - began
            holder = self._holder() if waited > min(STOPPED_PATIENCE_S, patience_s) else 0
            if waited > patience_s or (holder and is_stopped(holder)):
                self._give_up(holder or self._holder(), waited, patience_s)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        if self._stalled_since is not None:
            log.warning("%s: writes again, after %.1f s", self._path.parent, time.monotonic() - self._stalled_since)
            self._stalled_since = None

    def _is_ours(self) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _holder(self) -> int:
        """The process that has the turn; 0 where it is over."""
        asked = fcntl.fcntl(self._descriptor, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        kind, _, _, _, process = _FLOCK.unpack(asked)
        return 0 if kind == fcntl.F_UNLCK else process

    def _give_up(self, holder: int, waited: float, patience_s: float) -> None:
        stopped = is_stopped(holder)
        which = f"process {holder}{', which is stopped,' if stopped else ''}" if holder > 0 else "another process"
        what = f"{self._path.parent}: {which} has held up all writers for {waited:.1f} s"
        if self._stalled_since is None and (stopped or patience_s >= PATIENCE_S):
            self._stalled_since = time.monotonic() - waited
            remedy = f"let it go on (kill -CONT {holder}) or end it" if stopped else "look what it waits for, or end it"
            log.warning("%s: %s. Until then nothing is stored here; blocks are still read", what, remedy)
        raise TierUnavailable(what)


def is_stopped(process: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger."""
    try:
        status = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:  # it ended, or is not to be seen
        return False
    return status.rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])
