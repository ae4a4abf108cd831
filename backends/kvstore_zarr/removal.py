"""Files of blocks unlinked, overwritten and cut: what `deleting`, `purge`, `eviction` and `intents` are made of.

A file is unlinked and then cut to nothing, in this order, so that no name stands for less than a whole block and nobody
who has it open keeps the space.
"""

# ruff: noqa: PTH106, PTH108 - plain strings: a Path costs more than the system call it is made for

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvstore.files import NotAFileError, fill_with_zeros, open_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore_zarr.tier import LocalTier

__all__ = [
    "AT_ONCE",
    "Patience",
    "cut",
    "erase",
    "free",
    "in_batches",
    "inode_of",
    "is_erased",
    "overwrite",
    "release",
    "take_off",
    "take_off_for_good",
    "tried",
]

T = TypeVar("T")

_log = logging.getLogger("kvstore.file")
_told: set[str] = set()  # what was logged once
_NOT_TO_BE_OPENED = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE)

AT_ONCE = 64
"""Blocks taken off under the locks of their names, and files kept open until they are cut."""

READER_PATIENCE_S = 2.0
"""How long a removal waits for readers of its blocks before it leaves the last of their space to them."""


def in_batches(addresses: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Each address once, a bounded number at a time: locks of names are looked through one by one."""
    unique = list(dict.fromkeys(addresses))
    return (unique[start : start + AT_ONCE] for start in range(0, len(unique), AT_ONCE))


def inode_of(path: str) -> int | None:
    """Which file stands at `path`; None if none does."""
    try:
        return os.lstat(path).st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None


class _Forks:
    """Whether this process has ever forked, or is about to."""

    happened = False

    @classmethod
    def note(cls) -> None:
        """Before a fork."""
        cls.happened = True


os.register_at_fork(before=_Forks.note)


def release(fd: int) -> None:
    """Let go of a block file and of the lock on it, also where a child that this process forked has it open.

    Closing is enough where none can: a call less for each block that is read. What is not seen is a child that executes
    another program, as `subprocess` makes them, or that other code than Python forked: until it has done so, or ended,
    it keeps the lock, and the block is spared as if somebody read it.
    """
    if _Forks.happened:
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


class Patience:
    """How long one removal still waits for readers, in seconds, of all its blocks together."""

    def __init__(self) -> None:
        self.left = READER_PATIENCE_S


def erase(path: str, patience: Patience | None = None) -> None:
    """Unlink `path`; its space is free on return. Nothing happens if nothing is there.

    What is no regular file goes too, but for a directory that is not empty: somebody's, so it stays and is logged.
    """
    cut(take_off(path), patience)


def take_off(path: str) -> int:
    """Unlink `path`: as `erase`, but its space is free once the descriptor that this returns is `cut`. -1 where no file
    was, or it could not be opened: to unlink it takes no permission but its folder's.
    """
    fd = -1
    try:
        fd = open_file(path, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return -1
    except NotAFileError:
        _erase_other(path)
        return -1
    except OSError as error:
        if error.errno not in _NOT_TO_BE_OPENED:
            raise
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    return fd


def cut(fd: int, patience: Patience | None = None) -> None:
    """Free the space of an open file that has no name any more, once nobody reads it, and let go of it. Nothing happens
    if it is -1.
    """
    if fd < 0:
        return
    try:
        if _wait_for_readers(fd, patience or Patience()):
            free(fd)
    finally:
        release(fd)


def free(fd: int) -> None:
    """Free the space of an open file that has no name any more, whoever else has it open. A hard link that somebody
    made (`cp -al`) is a name: what it stands for is his, and stays.
    """
    if os.fstat(fd).st_nlink == 0:
        os.ftruncate(fd, 0)


def _wait_for_readers(fd: int, patience: Patience) -> bool:
    """Lock a file exclusively; False where somebody reads it until patience is lost."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if patience.left <= 0:
                return False
            began = time.monotonic()
            time.sleep(0.001)
            patience.left -= time.monotonic() - began
        else:
            return True


def overwrite(path: str) -> int:
    """Write zeros over the bytes of the file `path`, down to the device; how many. 0 where there is no such file."""
    try:
        fd = open_file(path, os.O_WRONLY)
    except (FileNotFoundError, NotADirectoryError, NotAFileError):
        return 0
    try:
        return fill_with_zeros(fd)  # a reader who came before gets zeros for a block, which it tells from one
    finally:
        os.close(fd)


def _erase_other(path: str) -> None:
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            os.rmdir(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            raise
        if path not in _told:
            _told.add(path)
            _log.warning("%s is a directory with something in it where a block should be: move it away", path)


def is_erased(tier: LocalTier, path: str, patience: Patience, *, purged: bool) -> bool:
    """Take a file away; False, and said once, where that is not permitted or its device fails."""
    fd = tried(path, partial(take_off_for_good, tier, path, overwriting=purged))
    if fd is not None:
        tried(path, partial(cut, fd, patience))  # it has no name any more: there is nothing to be tried again
    return fd is not None


def take_off_for_good(tier: LocalTier, path: str, *, overwriting: bool) -> int:
    """`take_off`, after its bytes were overwritten where that is asked."""
    if overwriting:
        tier.purged_bytes += overwrite(path)
    return take_off(path)


def tried(path: str, do: Callable[[], T]) -> T | None:
    """What `do` returns; None, and said once, where what it does to `path` is not permitted or the device fails."""
    try:
        return do()
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EACCES, errno.EIO, errno.EUCLEAN):
            raise
        if path not in _told:
            _told.add(path)
            _log.warning("%s cannot be removed (%s): it keeps its room, and is tried again", path, error.strerror)
        return None
