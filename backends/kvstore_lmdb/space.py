"""How the cap on a tier becomes a bound that LMDB itself keeps, and how much of it blocks may fill.

The data file grows and never shrinks, and what it will grow by is known only when LMDB has looked for free pages. So
the bound is the size of the map: LMDB refuses the page behind it (`MapFullError`), within the transaction, before
anything is written. Everybody who shares the tier agrees on the cap, hence on the map. Eviction keeps enough free pages
for that to happen seldom. A disk that others fill is a smaller map of the same kind, as far as eviction goes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvstore.environment import LOCK_BYTES, MAP_SIZE, PAGE
from kvstore.presence import PRESENCE_BYTES

if TYPE_CHECKING:
    from kvstore.catalog import Totals

__all__ = ["SMALLEST_CAPACITY", "Space"]

_CHUNK_BYTES = 4 << 20
_SLACK_BYTES = 16 << 20
_BESIDE = LOCK_BYTES + PRESENCE_BYTES + 4 * PAGE  # the other files, and the directory with room for its entries
_EXTENTS = 256  # of the file's pages one may be the file system's own, when it is fragmented (ext4: 1 in 340, seen)
_TREES = 64 * PAGE  # LMDB's headers, its list of free pages, and what a change to a tree copies


SMALLEST_CAPACITY = _BESIDE + (1 << 20)
"""Bytes below which a tier would hold its own records and little else."""


@dataclass(frozen=True, slots=True)
class Space:
    """The arithmetic of one tier's cap; all in bytes. Without a cap only `chunk` is of use."""

    capacity: int | None
    file_bytes: int | None = None
    """What the data file can come to occupy on the disk as it is now; None where nobody looked."""
    keep_free: int = 0
    """What the file leaves of the disk: it grows no more then, and blocks go to make room in it."""

    @property
    def evicts(self) -> bool:
        """Whether blocks go to make room for others."""
        return self.capacity is not None or self.keep_free > 0

    @property
    def map_size(self) -> int:
        """What LMDB may map, hence the most that the data file can have."""
        if self.capacity is None:
            return MAP_SIZE
        return min((self.capacity - _BESIDE) // (_EXTENTS + 1) * _EXTENTS // PAGE * PAGE, MAP_SIZE)

    @property
    def chunk(self) -> int:
        """Payload that goes into one transaction: LMDB holds it in memory and keeps other writers waiting.

        Four calls of 16 MiB wait for each other most of the time, where those of 4 MiB are copied and checked while
        another one is written: with blocks of 64 KiB twice as fast, for an eighth more CPU.
        """
        return min(_CHUNK_BYTES, self._reach // 16)

    @property
    def _reach(self) -> int:
        return self.map_size if self.file_bytes is None else min(self.map_size, self.file_bytes)

    def on_disk(self, file_bytes: int) -> Space:
        """The same tier, whose data file can come to occupy `file_bytes` on its disk."""
        return replace(self, file_bytes=file_bytes)

    def room(self, totals: Totals, tree_bytes: int) -> int | None:
        """What blocks may still occupy, under the cap and on the disk; None where nothing bounds them."""
        bounds = [] if totals.room is None else [totals.room]
        if self.file_bytes is not None:
            bounds.append(self.file_bytes - self.file_bytes // 50 - _TREES - tree_bytes - totals.used)
        return min(bounds, default=None)

    def overhead(self, tree_bytes: int) -> int:
        """What of the cap is no block's: everything beside the map, LMDB's trees, and 2 % for gaps between blocks."""
        if self.capacity is None:
            return 0
        return self.capacity - self.map_size + _TREES + tree_bytes + self.map_size // 50

    def slack(self, need: int, attempt: int) -> int:
        """Free space to have beside the `need` of a transaction, on its `attempt` (0, 1, …).

        LMDB uses a freed page again in the second transaction after: two jobs. Where LMDB found no run of pages long
        enough all the same, more at each attempt, up to 30 % of the map: beyond, eviction cannot be what helps (a
        reader that does not end pins every page that was freed since).
        """
        if not self.evicts:
            return 0
        job = max(min(_SLACK_BYTES, self._reach // 16), need)
        return min(2 * job + attempt * need, max(2 * job, self._reach * 3 // 10))
