"""Opening an LMDB environment: what LMDB would meet with a signal or a vague error is met before it does.

Between `kvstore.lmdb_files`, which looks at the files, and `kvstore.environment`, which sees to it that a process opens
a directory once.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lmdb

from kvstore.errors import (
    StoreAccessError,
    StoreDamagedError,
    StoreFullError,
    StoreNotFoundError,
    TierUnavailable,
)
from kvstore.files import DRAFT, SHARED, open_or_make, permit
from kvstore.lmdb_errors import explained
from kvstore.lmdb_files import PAGE, damage
from kvstore.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from lmdb import _Database as Database  # pyright: ignore[reportPrivateUsage]

__all__ = ["CREATION_BYTES", "LOCK_BYTES", "MAP_SIZE", "Opened", "free_bytes", "make_ready", "really_open"]

MAP_SIZE = 1 << 44
"""16 TiB of address space, none of it memory: larger than any local tier, small beside the 128 TiB of a process."""

LOCK_BYTES = 17 * PAGE
"""Size of `lock.mdb`: 1,085 reader slots of 64 bytes, one for each read transaction that is open at a moment."""

CREATION_BYTES = 1 << 20
"""Free space without which no environment is created."""


@dataclass(slots=True)
class Opened:
    """The one real environment of this process in one directory, and how many `Environment`s lend it."""

    env: lmdb.Environment
    databases: Mapping[str, Database]
    pid: int
    readonly: bool
    sync: bool
    map_size: int
    remedy: str
    turns: Turns | None
    """Whose turn it is to write; None where nobody here may."""
    lenders: int = 1
    damaged: bool = False


def free_bytes(directory: Path) -> int:
    """What its disk has left for whoever is not root; without bound where the file system does not say."""
    status = os.statvfs(directory)
    if not status.f_blocks:  # ramfs and some others do not say
        return sys.maxsize
    return status.f_bavail * status.f_frsize


def make_ready(directory: Path, *, readonly: bool, mode: int, remedy: str) -> None:
    """Everything that LMDB would meet with a signal or a vague error, met here with a clear one."""
    if not (directory / "data.mdb").exists():
        if readonly:
            raise StoreNotFoundError(
                f"{directory} is not there, or has no tier in it: check the path; a read-only opening makes none"
            )
        if free_bytes(directory) < CREATION_BYTES:
            raise StoreFullError(f"{directory}: less than {CREATION_BYTES} bytes are free on its disk: make room")
    elif problem := damage(directory, thorough=False):
        raise StoreDamagedError(f"{problem}. {remedy}")
    try:
        descriptor = _open_locks(directory / "lock.mdb", readonly=readonly, mode=mode)
        try:
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


def _open_locks(path: Path, *, readonly: bool, mode: int) -> int:
    if readonly:
        with suppress(FileNotFoundError):
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    return open_or_make(path, os.O_RDWR, mode)


def _make_data(directory: Path, mode: int) -> None:
    """An empty environment, which has its permissions when it can first be seen: LMDB leaves them to the umask."""
    draft = directory / f"{DRAFT}data.mdb"
    lmdb.open(str(draft), subdir=False, lock=False, map_size=CREATION_BYTES, mode=0o600).close()
    permit(draft, mode)
    draft.rename(directory / "data.mdb")


def really_open(
    directory: Path,
    names: Sequence[str],
    *,
    readonly: bool,
    sync: bool,
    readahead: bool,
    mode: int,
    map_size: int,
    remedy: str,
) -> Opened:
    """Open it, as `Environment.open` was asked to, where `make_ready` found nothing against it."""
    turns = None if readonly else Turns(directory, mode)
    env: lmdb.Environment | None = None
    try:
        if not readonly and mode & SHARED and not (directory / "data.mdb").exists():
            _make_data(directory, mode)
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
        env.reader_check()
        databases = _open_databases(env, names, turns)
        if turns is not None:
            permit(directory / "data.mdb", mode)
    except BaseException as error:
        for opened in (env, turns):
            if opened is not None:
                opened.close()
        if isinstance(error, lmdb.Error):
            raise explained(directory, error, remedy) from error
        if isinstance(error, TierUnavailable):
            raise StoreAccessError(f"{directory} cannot be opened for writing: {error}") from error
        raise
    return Opened(env, databases, os.getpid(), readonly, sync, map_size, remedy, turns)


def _open_databases(env: lmdb.Environment, names: Sequence[str], turns: Turns | None) -> dict[str, Database]:
    if turns is not None:
        with turns.taken(), env.begin(write=True) as txn:
            return {name: env.open_db(name.encode(), txn=txn) for name in names}
    found: dict[str, Database] = {}
    for name in names:  # a transaction of its own each, which py-lmdb keeps the handle of; no lock is waited for
        try:
            found[name] = env.open_db(name.encode(), create=False)
        except lmdb.NotFoundError:
            continue
    return found
