"""One LMDB environment, opened so that none of LMDB's known traps can be stepped into.

Under the catalogue of `file://` and under the entries of `lmdb://`; nothing else in kvstore opens LMDB. How that is
done stands in `lmdb_opening`, what LMDB's errors mean in `lmdb_errors`. Each measure below stands for a crash or a hang
that was seen:

- every process maps the same size: `MAP_SIZE`, or one that follows from the tier's cap;
- no writemap (a full disk would be SIGBUS), `lock.mdb` is allocated before LMDB maps it, space is checked first;
- the file's header and length are checked before LMDB maps it (a truncated file would be SIGBUS);
- all named databases are opened in one write transaction (elsewhere `open_db` can deadlock on the GIL);
- one environment per process and directory, counted: LMDB's locks do not survive a second opening;
- a process that is stopped inside a write transaction holds up the others for a time, and not silently (`turns`);
- use after a fork is refused; network file systems and separate PID namespaces are refused with the remedy;
- a write transaction holds up the writers of all processes, and each LMDB call in it gives the GIL away: beside one
  busy Python thread, 16 puts took 36 ms. With a switch interval of 50 us meanwhile they take 0.8 ms.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import lmdb

from kvstore.errors import StoreAccessError, StoreDamagedError
from kvstore.inuse import InUse
from kvstore.lmdb_errors import DAMAGE, REMEDY
from kvstore.lmdb_files import PAGE, check_filesystem, damage, filesystem_of, is_network
from kvstore.lmdb_opening import CREATION_BYTES, LOCK_BYTES, MAP_SIZE, Opened, free_bytes, make_ready, really_open
from kvstore.lmdb_pages import TREE_BYTES, Tree
from kvstore.turns import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from pathlib import Path

    from lmdb import _Database as Database  # pyright: ignore[reportPrivateUsage]

__all__ = ["LOCK_BYTES", "MAP_SIZE", "PAGE", "Environment", "check_filesystem", "damage", "filesystem_of", "is_network"]

DISK_HEADROOM = 64 * PAGE
"""Bytes that stay free on the disk, for the pages that a change needs which takes blocks out."""

SWITCH_INTERVAL_S = 5e-5

_opened: dict[tuple[int, int], Opened] = {}
_opened_lock = threading.Lock()


@dataclass(slots=True)
class _Prompt:
    """Lowers the interpreter's switch interval while any thread is inside."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    inside: int = 0
    usual: float = 0.0

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.usual = sys.getswitchinterval()
                sys.setswitchinterval(min(self.usual, SWITCH_INTERVAL_S))
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                sys.setswitchinterval(self.usual)


_prompt = _Prompt()


def _forget_locks() -> None:
    """In a forked child: no lock that another thread held at that moment may stay shut."""
    global _opened_lock, _prompt
    _opened_lock, _prompt = threading.Lock(), _Prompt()


os.register_at_fork(after_in_child=_forget_locks)


class Environment:
    """An open LMDB environment with its named databases. Thread-safe; belongs to the process that opened it.

    A medium that fails to read a mapped page, or a file cut short while it is open, ends the process (SIGBUS): that
    is LMDB's way of reading, and no option changes it.
    """

    databases: Mapping[str, Database]
    """Handles by name; those that a read-only opening did not find are left out."""

    def __init__(self, directory: Path, key: tuple[int, int], opened: Opened) -> None:
        """For `open`."""
        self.directory, self.databases, self.readonly = directory, opened.databases, opened.readonly
        self._key, self._opened = key, opened
        self._use = InUse(directory)

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
        remedy: str = REMEDY,
    ) -> Environment:
        """Open (and create, unless `readonly`) the environment in the existing `directory`.

        `names` are its named databases, all made at once. `sync`: every commit is on disk when it returns.
        `readahead`: for large values; off for small records. `map_size` bounds the file: the same in all processes.
        `remedy` is what an error says is to be done about damage.
        A directory that this process has open already gives the same environment again, whatever `readahead`; it is
        closed when each opener has closed it.

        Call it under the gate (`Presence.opening`). Raises `StoreNotFoundError` (read-only and nothing there),
        `StoreDamagedError` (see `damage`, quick), `StoreFullError` (no space to create it), `StoreAccessError`.
        """
        check_filesystem(directory)
        with _opened_lock:
            key = _identity(directory)
            opened = _opened.get(key)
            if opened is not None:
                _check_same(directory, opened, readonly=readonly, sync=sync, map_size=map_size)
                opened.lenders += 1
            else:
                make_ready(directory, readonly=readonly, mode=mode, remedy=remedy)
                opened = _opened[key] = really_open(
                    *(directory, names),
                    readonly=readonly,
                    sync=sync,
                    readahead=readahead,
                    mode=mode,
                    map_size=map_size,
                    remedy=remedy,
                )
        return cls(directory, key, opened)

    @contextmanager
    def read(self) -> Generator[lmdb.Transaction[memoryview]]:
        """A read transaction whose values are views into the map, valid until it ends. Keep it short: the pages of
        everything removed meanwhile cannot be used again until it has ended. Never waits for a writer.
        """
        with self._use:
            try:
                with self._opened.env.begin(buffers=True) as txn:
                    yield txn
            except DAMAGE as error:
                raise self._damaged(error) from error

    @contextmanager
    def write(self, patience_s: float = PATIENCE_S) -> Generator[lmdb.Transaction[memoryview]]:
        """The write transaction: one at a time over all processes; committed when the body ends, aborted if it raises.

        Few calls: each releases the GIL, and waits to get it back, while every other writer waits for this one.
        Raises `lmdb.MapFullError`, `StoreDamagedError`, `TierUnavailable` when it does not come to its turn within
        `patience_s` (`kvstore.turns`), or `OSError` (ENOSPC when the device is full, else EIO), and nothing was changed
        then.
        """
        turns = self._opened.turns
        with self._use, turns.taken(patience_s) if turns is not None else nullcontext():
            try:
                txn = self._opened.env.begin(write=True, buffers=True)
                try:
                    # Not while this thread waits for the lock or the device: others would be hurried for long.
                    with _prompt:
                        yield txn
                    txn.commit()
                except BaseException:
                    txn.abort()
                    raise
            except lmdb.MapFullError:
                raise
            except DAMAGE as error:
                raise self._damaged(error) from error
            except lmdb.Error as error:
                raise self._refused(error) from error

    @property
    def damaged(self) -> bool:
        """Whether a transaction of this process met a page or a record that cannot be."""
        return self._opened.damaged

    def _refused(self, error: lmdb.Error) -> OSError:
        full = isinstance(error, lmdb.DiskError) or free_bytes(self.directory) < CREATION_BYTES
        number = errno.ENOSPC if full else errno.EIO
        return OSError(number, f"{os.strerror(number)} ({error})", str(self.directory / "data.mdb"))

    def _damaged(self, error: Exception) -> StoreDamagedError:
        self._opened.damaged = True
        return StoreDamagedError(f"{self.directory / 'data.mdb'} is damaged: {error}. {self._opened.remedy}")

    def check_readers(self) -> int:
        """Free the reader slots of processes that died; their number. Their snapshots no longer pin pages."""
        with self._use:
            return self._opened.env.reader_check()

    def last_transaction(self) -> int:
        """The number of the last one that was committed."""
        with self._use:
            return self._opened.env.info()["last_txnid"]

    def oldest_snapshot(self, newest: int) -> int:
        """The oldest transaction whose outcome some process still reads; `newest` where nobody reads anything older.

        For who has the write lock, and `newest` is the last transaction: no reader can begin with an older one then.
        """
        return min([newest, *(transaction for transaction, _ in self._readers())])

    def oldest_reader(self) -> tuple[int, int]:
        """The process whose read is the oldest, and how many transactions were committed since it began; 0 and 0 where
        nobody reads.
        """
        last = self.last_transaction()
        began, process = min(self._readers(), default=(last, 0))
        return process, max(0, last - began)

    def _readers(self) -> list[tuple[int, int]]:
        """Of each reader the transaction whose outcome it reads, and its process."""
        with self._use:
            fields = [line.split() for line in self._opened.env.readers().splitlines()[1:]]
        return [(int(one[-1]), int(one[0])) for one in fields if len(one) == 3 and one[-1].isdigit()]

    def file_bytes(self) -> int:
        """What the environment's two files occupy on the device (`st_blocks`)."""
        return sum((self.directory / name).stat().st_blocks * 512 for name in ("data.mdb", "lock.mdb"))

    def attainable_bytes(self, keep_free: int = 0) -> int:
        """What the data file can come to occupy: what it does, and what its disk has left but for `keep_free` (and in
        any case `DISK_HEADROOM`).
        """
        free = max(0, free_bytes(self.directory) - max(DISK_HEADROOM, keep_free))
        return (self.directory / "data.mdb").stat().st_blocks * 512 + free

    def pages(self) -> int:
        """Pages that the data file has ever come to use: its length does not shrink."""
        with self._use:
            return self._opened.env.info()["last_pgno"] + 1

    def sync(self) -> None:
        """Bring every commit so far to disk."""
        with self._use:
            self._opened.env.sync(True)

    def live_pages(self, txn: lmdb.Transaction[memoryview]) -> int:
        """Pages that a compacted copy has: what the databases use, and the headers. A few reads, however many.

        Databases that this version does not know, of a later one, are copied as well.
        """
        stats = [txn.stat(), *(txn.stat(database) for database in self.databases.values())]
        known = {name.encode() for name in self.databases}
        others = [bytes(record) for name, record in txn.cursor() if bytes(name) not in known]
        trees = [Tree.unpacked("of another version", record) for record in others if len(record) == TREE_BYTES]
        pages = sum(one["branch_pages"] + one["leaf_pages"] + one["overflow_pages"] for one in stats)
        return 2 + pages + sum(tree.branches + tree.leaves + tree.overflow for tree in trees)

    def write_compacted(self, descriptor: int) -> None:
        """Write what is alive to an empty file, as a new data file; the environment itself is not changed. Raises
        OSError.
        """
        with self._use:
            try:
                self._opened.env.copyfd(descriptor, compact=True)
            except lmdb.Error as error:
                raise self._refused(error) from error

    @property
    def is_shared(self) -> bool:
        """Whether somebody else in this process has it open, be it a call that does not end."""
        return self._opened.lenders > 1

    def close(self, *, sync: bool = False) -> bool:
        """Close it, once every opener in this process has. Waits for transactions that other threads have open (at most
        `kvstore.inuse.CLOSE_TIMEOUT_S`; then it stays mapped for them, and the answer is False). A second call does
        nothing, nor one in a forked child.

        `sync`: then bring every commit to disk, to which nobody who had it open here can add one any more. Where that
        raises it is closed all the same.
        """
        if not self._use.end():
            return False
        try:
            if sync:
                self._opened.env.sync(True)
        finally:
            self._let_go()
        return True

    def _let_go(self) -> None:
        with _opened_lock:
            self._opened.lenders -= 1
            if not self._opened.lenders:
                del _opened[self._key]
                self._opened.env.close()
                if self._opened.turns is not None:
                    self._opened.turns.close()

    def ensure_open(self) -> None:
        """Raise `StoreClosedError` if it was closed, or opened by the process that this one was forked from."""
        with self._use:
            pass


def _identity(directory: Path) -> tuple[int, int]:
    status = directory.stat()
    return status.st_dev, status.st_ino


def _check_same(directory: Path, opened: Opened, *, readonly: bool, sync: bool, map_size: int) -> None:
    if opened.pid != os.getpid():
        raise StoreAccessError(
            f"{directory} is open in the process that this one was forked from, and LMDB cannot open it twice: start"
            " this process with the spawn method, or open the tier only after the fork"
        )
    if (
        (opened.readonly and not readonly)
        or (sync and not opened.sync)
        or (map_size != opened.map_size and not readonly)
    ):
        raise StoreAccessError(
            f"{directory} is open in this process already, with other options (readonly={opened.readonly},"
            f" sync={opened.sync}): use that store, close it first, or give the same options"
        )
