"""One LMDB environment, opened so that none of LMDB's known traps can be stepped into.

Under the catalogue of `file://` and under the entries of `lmdb://`. Nothing else in kvstore calls `lmdb` to open
anything. Each measure below stands for a crash or a hang that was seen:

- the map size depends on the tier's cap alone (`MAP_SIZE` where there is none), so all processes agree on it;
- no writemap (a full disk would be SIGBUS), `lock.mdb` is allocated before LMDB maps it, space is checked first;
- the file's header and length are checked before LMDB maps it (a truncated file would be SIGBUS);
- all named databases are opened in one write transaction (elsewhere `open_db` can deadlock on the GIL);
- one environment per process and directory, counted: LMDB's locks do not survive a second opening;
- use after a fork is refused; network file systems and separate PID namespaces are refused with the remedy.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import lmdb

__all__ = ["MAP_SIZE", "PAGE", "Environment", "check_filesystem", "damage"]

PAGE = 4096
"""Bytes in an LMDB page here; also what the device is assumed to allocate at least."""

MAP_SIZE = 1 << 44
"""16 TiB of address space, none of it memory: larger than any local tier, small beside the 128 TiB of a process."""


def check_filesystem(path: Path) -> None:
    """Raise `StoreAccessError` if the existing `path` is on a network or FUSE file system.

    LMDB needs coherent shared memory and POSIX locks between all users; `flock` and `O_DIRECT` mean little there too.
    """
    raise NotImplementedError


def damage(directory: Path, *, thorough: bool) -> str | None:
    """What is wrong with the environment in `directory`, in words; None when it may be opened (or there is none).

    Reads `data.mdb` with plain reads, never through LMDB. Otherwise quick (header pages, length: catches what would
    be SIGBUS); `thorough` walks every page that is in use (`lmdb.verify`; 0.3 s for 100,000 catalogue entries) and
    finds every lost write, for use after an unclean close. Nobody may have the environment open for writing.
    Does not see a flipped byte inside a value: that is what block checksums are for.
    """
    raise NotImplementedError


class Environment:
    """An open LMDB environment with its named databases. Thread-safe; belongs to the process that opened it."""

    databases: Mapping[str, lmdb._Database]
    """Handles by name; those that a read-only opening did not find are left out."""

    @classmethod
    def open(
        cls,
        directory: Path,
        names: Sequence[str],
        *,
        readonly: bool = False,
        sync: bool = False,
        readahead: bool = False,
        mode: int = 0o600,
        map_size: int = MAP_SIZE,
    ) -> Environment:
        """Open (and create, unless `readonly`) the environment in the existing `directory`.

        `names` are its named databases, all made at once. `sync`: every commit is on disk when it returns.
        `readahead`: for large values; off for small records. A directory that this process has open already gives
        the same environment again, which is closed when each opener has closed it.

        Call it under the gate (`Presence.opening`). Raises `StoreNotFoundError` (read-only and nothing there),
        `StoreDamagedError` (see `damage`, quick), `StoreFullError` (no space to create it), `StoreAccessError`.
        """
        raise NotImplementedError

    @contextmanager
    def read(self) -> Iterator[lmdb.Transaction[memoryview]]:
        """A read transaction whose values are views into the map, valid until it ends. Keep it short: the pages of
        everything removed meanwhile cannot be used again until it has ended. Never waits for a writer.
        """
        raise NotImplementedError
        yield

    @contextmanager
    def write(self) -> Iterator[lmdb.Transaction[memoryview]]:
        """The write transaction: one at a time over all processes; committed when the body ends, aborted if it raises.

        Few calls: each releases the GIL, and waits to get it back, while every other writer waits for this one.
        Raises `lmdb.MapFullError` (nothing was changed) and `OSError` with ENOSPC when the disk is full (likewise).
        """
        raise NotImplementedError
        yield

    def check_readers(self) -> int:
        """Free the reader slots of processes that died; their number. Their snapshots no longer pin pages."""
        raise NotImplementedError

    def file_bytes(self) -> int:
        """What the environment's two files occupy on the device (`st_blocks`)."""
        raise NotImplementedError

    def sync(self) -> None:
        """Bring every commit so far to disk."""
        raise NotImplementedError

    def close(self) -> None:
        """Close it, once every opener in this process has; transactions must have ended. A second call does nothing."""
        raise NotImplementedError
