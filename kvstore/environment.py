"""One LMDB environment, opened so that none of LMDB's known traps can be stepped into.

Under the catalogue of `file://` and under the entries of `lmdb://`. Nothing else in kvstore calls `lmdb` to open
anything. Each measure below stands for a crash or a hang that was seen:

- every process maps the same size: `MAP_SIZE`, or one that follows from the tier's cap;
- no writemap (a full disk would be SIGBUS), `lock.mdb` is allocated before LMDB maps it, space is checked first;
- the file's header and length are checked before LMDB maps it (a truncated file would be SIGBUS);
- all named databases are opened in one write transaction (elsewhere `open_db` can deadlock on the GIL);
- one environment per process and directory, counted: LMDB's locks do not survive a second opening;
- use after a fork is refused; network file systems and separate PID namespaces are refused with the remedy;
- a write transaction holds up the writers of all processes, and each LMDB call in it gives the GIL away: beside one
  busy Python thread, 16 puts took 36 ms. With a switch interval of 50 us meanwhile they take 0.8 ms.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import lmdb

from kvstore.errors import (
    StoreAccessError,
    StoreClosedError,
    StoreDamagedError,
    StoreFullError,
    StoreNotFoundError,
    StoreOpenError,
)
from kvstore.lmdb_files import PAGE, check_filesystem, damage, filesystem_of
from kvstore.presence import permit

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from pathlib import Path

    from lmdb import _Database as Database  # pyright: ignore[reportPrivateUsage]

__all__ = ["LOCK_BYTES", "MAP_SIZE", "PAGE", "Environment", "check_filesystem", "damage", "filesystem_of"]

MAP_SIZE = 1 << 44
"""16 TiB of address space, none of it memory: larger than any local tier, small beside the 128 TiB of a process."""

LOCK_BYTES = 17 * PAGE
"""Size of `lock.mdb`: 1,085 reader slots of 64 bytes, one for each read transaction that is open at a moment."""

CREATION_BYTES = 1 << 20
"""Free space without which no environment is created."""

DISK_HEADROOM = 64 * PAGE
"""Bytes that stay free on the disk, for the pages that a change needs which takes blocks out."""

CLOSE_TIMEOUT_S = 30.0
"""How long `close` waits for transactions of other threads before it leaves the environment mapped for them."""

SWITCH_INTERVAL_S = 5e-5


@dataclass(slots=True)
class _Opened:
    """The one real environment of this process in one directory, and how many `Environment`s lend it."""

    env: lmdb.Environment
    databases: Mapping[str, Database]
    pid: int
    readonly: bool
    sync: bool
    map_size: int
    remedy: str
    lenders: int = 1
    damaged: bool = False


REMEDY = "Remove the directory to start anew"

_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.BadTxnError,
    lmdb.CursorFullError,
    struct.error,
)
"""What LMDB says of a page that cannot be, and `struct` of a record."""

_opened: dict[tuple[int, int], _Opened] = {}
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

    def __init__(self, directory: Path, key: tuple[int, int], opened: _Opened) -> None:
        """For `open`."""
        self.directory, self.databases, self.readonly = directory, opened.databases, opened.readonly
        self._key, self._opened = key, opened
        self._idle = threading.Condition(threading.Lock())
        self._active, self._closed = 0, False

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
                _make_ready(directory, readonly=readonly, mode=mode, remedy=remedy)
                opened = _opened[key] = _really_open(
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
        env = self._enter()
        try:
            with env.begin(buffers=True) as txn:
                yield txn
        except _DAMAGE as error:
            raise self._damaged(error) from error
        finally:
            self._leave()

    @contextmanager
    def write(self) -> Generator[lmdb.Transaction[memoryview]]:
        """The write transaction: one at a time over all processes; committed when the body ends, aborted if it raises.

        Few calls: each releases the GIL, and waits to get it back, while every other writer waits for this one.
        Raises `lmdb.MapFullError`, `StoreDamagedError`, or `OSError` (ENOSPC when the device is full, else EIO), and
        nothing was changed then.
        """
        env = self._enter()
        try:
            txn = env.begin(write=True, buffers=True)
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
        except _DAMAGE as error:
            raise self._damaged(error) from error
        except lmdb.Error as error:
            full = isinstance(error, lmdb.DiskError) or _free_bytes(self.directory) < CREATION_BYTES
            number = errno.ENOSPC if full else errno.EIO
            raise OSError(number, f"{os.strerror(number)} ({error})", str(self.directory / "data.mdb")) from error
        finally:
            self._leave()

    @property
    def damaged(self) -> bool:
        """Whether a transaction of this process met a page or a record that cannot be."""
        return self._opened.damaged

    def _damaged(self, error: Exception) -> StoreDamagedError:
        self._opened.damaged = True
        return StoreDamagedError(f"{self.directory / 'data.mdb'} is damaged: {error}. {self._opened.remedy}")

    def check_readers(self) -> int:
        """Free the reader slots of processes that died; their number. Their snapshots no longer pin pages."""
        env = self._enter()
        try:
            return env.reader_check()
        finally:
            self._leave()

    def file_bytes(self) -> int:
        """What the environment's two files occupy on the device (`st_blocks`)."""
        return sum((self.directory / name).stat().st_blocks * 512 for name in ("data.mdb", "lock.mdb"))

    def attainable_bytes(self) -> int:
        """What the data file can come to occupy: what it does, and what its disk has left but for `DISK_HEADROOM`."""
        free = max(0, _free_bytes(self.directory) - DISK_HEADROOM)
        return (self.directory / "data.mdb").stat().st_blocks * 512 + free

    def pages(self) -> int:
        """Pages that the data file has ever come to use: its length does not shrink."""
        env = self._enter()
        try:
            return env.info()["last_pgno"] + 1
        finally:
            self._leave()

    def sync(self) -> None:
        """Bring every commit so far to disk."""
        env = self._enter()
        try:
            env.sync(True)
        finally:
            self._leave()

    def compact(self, target: Path) -> None:
        """Write what is alive to a new data file `target`, synced; the environment itself is not changed."""
        env = self._enter()
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            env.copyfd(descriptor, compact=True)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            self._leave()

    def close(self) -> None:
        """Close it, once every opener in this process has. Waits for transactions that other threads have open (at most
        `CLOSE_TIMEOUT_S`; then it stays mapped for them). A second call does nothing, nor one in a forked child.
        """
        if self._closed or os.getpid() != self._opened.pid:
            return
        with self._idle:
            if self._closed:
                return
            self._closed = True
            quiet = self._idle.wait_for(lambda: not self._active, CLOSE_TIMEOUT_S)
        with _opened_lock:
            if quiet:
                self._opened.lenders -= 1
            if not self._opened.lenders:
                del _opened[self._key]
                self._opened.env.close()

    def ensure_open(self) -> None:
        """Raise `StoreClosedError` if it was closed, or opened by the process that this one was forked from."""
        self._enter()
        self._leave()

    def _enter(self) -> lmdb.Environment:
        if os.getpid() != self._opened.pid:
            raise StoreClosedError(
                f"{self.directory} was opened by the process that this one was forked from: open it after the fork"
                " (multiprocessing: use the spawn start method)"
            )
        with self._idle:
            if self._closed:
                raise StoreClosedError(f"{self.directory} was closed: open it again")
            self._active += 1
        return self._opened.env

    def _leave(self) -> None:
        with self._idle:
            self._active -= 1
            if self._closed and not self._active:
                self._idle.notify_all()


def _identity(directory: Path) -> tuple[int, int]:
    status = directory.stat()
    return status.st_dev, status.st_ino


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    if not status.f_blocks:  # ramfs and some others do not say
        return sys.maxsize
    return status.f_bavail * status.f_frsize


def _check_same(directory: Path, opened: _Opened, *, readonly: bool, sync: bool, map_size: int) -> None:
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


def _make_ready(directory: Path, *, readonly: bool, mode: int, remedy: str) -> None:
    """Everything that LMDB would meet with a signal or a vague error, met here with a clear one."""
    if not (directory / "data.mdb").exists():
        if readonly:
            raise StoreNotFoundError(f"{directory} holds no environment, and read-only creates none")
        if _free_bytes(directory) < CREATION_BYTES:
            raise StoreFullError(f"{directory}: less than {CREATION_BYTES} bytes are free on its disk: make room")
    elif problem := damage(directory, thorough=False):
        raise StoreDamagedError(f"{problem}. {remedy}")
    try:
        descriptor = os.open(directory / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        try:
            if not readonly:
                permit(descriptor, mode)
            os.posix_fallocate(descriptor, 0, LOCK_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno == errno.EROFS and readonly:
            return  # LMDB goes without locks there: nobody can write
        kind = StoreFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreAccessError
        remedy = "make room" if kind is StoreFullError else "check owner and permissions"
        if error.errno in (errno.EACCES, errno.EPERM):
            remedy = (
                "whoever reads must be able to write this one file, LMDB's table of readers: let the tier's owner open"
                " it with mode=0660 or mode=0666"
            )
        raise kind(f"{directory / 'lock.mdb'}: {error.strerror}: {remedy}") from error


def _really_open(
    directory: Path,
    names: Sequence[str],
    *,
    readonly: bool,
    sync: bool,
    readahead: bool,
    mode: int,
    map_size: int,
    remedy: str,
) -> _Opened:
    try:
        env = lmdb.open(
            str(directory),
            map_size=map_size,
            readonly=readonly,
            create=not readonly,
            sync=sync,
            metasync=sync,
            writemap=False,
            map_async=False,
            readahead=readahead,
            max_readers=LOCK_BYTES // 64,
            max_dbs=len(names),
            max_spare_txns=16,
            mode=mode,
            lib_version=0,
        )
    except lmdb.Error as error:
        raise _explained(directory, error, remedy) from error
    try:
        env.reader_check()
        databases = _open_databases(env, names, readonly=readonly)
        if not readonly:
            permit(directory / "data.mdb", mode)
    except lmdb.Error as error:
        env.close()
        raise _explained(directory, error, remedy) from error
    return _Opened(env, databases, os.getpid(), readonly, sync, map_size, remedy)


def _open_databases(env: lmdb.Environment, names: Sequence[str], *, readonly: bool) -> dict[str, Database]:
    if not readonly:
        with env.begin(write=True) as txn:
            return {name: env.open_db(name.encode(), txn=txn) for name in names}
    found: dict[str, Database] = {}
    for name in names:  # a transaction of its own each, which py-lmdb keeps the handle of; no lock is waited for
        try:
            found[name] = env.open_db(name.encode(), create=False)
        except lmdb.NotFoundError:
            continue
    return found


def _explained(directory: Path, error: lmdb.Error, remedy: str) -> StoreOpenError:
    """What LMDB's error means for the tier in `directory`, and what to do about it."""
    if isinstance(error, lmdb.LockError):
        return StoreAccessError(
            f"{directory}: LMDB's lock file is held by a process that this one cannot see, as when two containers with"
            " PID namespaces of their own share a directory: give them one PID namespace (docker --pid, Kubernetes"
            " shareProcessNamespace), or a directory each"
        )
    if isinstance(error, lmdb.DiskError | lmdb.MapFullError):
        return StoreFullError(f"{directory}: no room to open the environment ({error}): make room, or raise the cap")
    if isinstance(error, (lmdb.VersionMismatchError, *_DAMAGE)):
        return StoreDamagedError(f"{directory}: {error}. {remedy}")
    if isinstance(error, lmdb.MemoryError):
        return StoreAccessError(
            f"{directory}: no address space for LMDB's map, 16 TiB of it unless the tier has a capacity (no memory is"
            f" taken; {error}): raise `ulimit -v` to unlimited, give the tier a capacity, or open fewer tiers at once"
        )
    return StoreAccessError(f"{directory}: LMDB cannot open it: {error}")
