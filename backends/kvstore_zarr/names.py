"""One lock per block name, over all threads and processes: who changes what a name stands for holds it.

What it keeps true: **a file without a catalogue entry, looked at under its name's lock, is garbage.** A put renames its
file into place and publishes it under the lock; whoever removes a block (an eviction, a delete, a reclaim after a
kill) looks under the lock whether the name still stands for what is to be removed. So a late removal cannot hit a newer
copy, whatever died in between, and files need no generation numbers.

The locks are open-file-description locks on single bytes of one empty file, at offsets taken from the digests: two
names collide about never, a killed process lets go, and no inode of a block is involved.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore.errors import TierUnavailable
from kvstore.files import open_or_make
from kvstore_zarr.calls import lock_all, unlock

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from pathlib import Path

__all__ = ["NameLocks"]

_OFFSETS = (1 << 63) - 2

PATIENCE_S = 5.0
"""How long a name is waited for. It is kept for a rename and a transaction, or for the reads of a reindexing."""


class NameLocks:
    """The locks of one store. Thread-safe; each holding has a descriptor of its own."""

    def __init__(self, path: Path, mode: int) -> None:
        self._path = str(path)
        self._mode = mode

    @contextmanager
    def hold(self, addresses: Iterable[bytes]) -> Generator[None]:
        """Wait for the names' locks and hold them while the body runs. Not re-entrant.

        Taken in one order by everybody, so that no two wait for each other; the catalogue's write lock may be taken
        inside, never around. Raises `TierUnavailable` where somebody keeps one for `PATIENCE_S`: a process that is
        stopped, say.
        """
        deadline = time.monotonic() + PATIENCE_S
        fd = open_or_make(self._path, os.O_RDWR, self._mode)
        try:
            offsets = sorted({int.from_bytes(address[-8:], "big") % _OFFSETS for address in addresses})
            self._lock(fd, offsets, deadline)
            yield
        finally:
            # Said aloud, not left to close: a child forked meanwhile has the same open file.
            unlock(fd)
            os.close(fd)

    def _lock(self, fd: int, offsets: list[int], deadline: float) -> None:
        pause = 5e-5
        while offsets := offsets[lock_all(fd, offsets) :]:
            if time.monotonic() > deadline:
                raise TierUnavailable(
                    f"{self._path}: somebody has kept the name of a block for {PATIENCE_S:.0f} s: a process that is"
                    " stopped, or a device that hangs"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.001)
