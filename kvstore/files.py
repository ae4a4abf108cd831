"""Files and folders of our own, opened and made so that nothing that stands under their names can surprise us; written
whole or not at all.
"""

# ruff: noqa: PTH101, PTH102, PTH104, PTH108, PTH112, PTH120 - plain strings: a Path costs more than the system call it is made for

from __future__ import annotations

import ctypes
import errno
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "NotAFileError",
    "fill_with_zeros",
    "make_folder",
    "open_file",
    "open_unchecked",
    "permit",
    "punch_hole",
    "replace_file",
    "sync_folder",
    "write_all",
]

_ZEROS = memoryview(bytes(1 << 20))

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_kernel = ctypes.CDLL(None, use_errno=True)
_fallocate = _kernel.fallocate64 if hasattr(_kernel, "fallocate64") else _kernel.fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class NotAFileError(OSError):
    """Under the name of a file stands a directory, a link, a pipe, a device or a socket."""


def open_file(path: str, flags: int) -> int:
    """A descriptor of the regular file `path`, without waiting for anybody: opening a pipe would wait for its writer.

    Raises `NotAFileError` where something else stands, or whatever open(2) says.
    """
    fd = open_unchecked(path, flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotAFileError(errno.EINVAL, "no regular file", path)
    return fd


def open_unchecked(path: str, flags: int) -> int:
    """As `open_file`, but a pipe or a folder may be open on return: for who looks at its size anyway."""
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR) or _is_something_else(path):
            raise NotAFileError(error.errno, "no regular file", path) from error
        raise


def _is_something_else(path: str) -> bool:
    try:
        return not stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def make_folder(path: str | Path, mode: int) -> None:
    """Make the directory `path`, unless it is there, with the search bits that go with the file permissions `mode`."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        if not mode & 0o077:
            return
    permit(path, mode | (mode & 0o444) >> 2)  # not left to the umask: the option says who may read


def permit(file: int | str | Path, mode: int) -> None:
    """Give a file (a descriptor or a path) exactly `mode`, if it is ours: the umask has narrowed what it was made with,
    and of others' files it is for them to say.
    """
    status = os.stat(file)  # noqa: PTH116 - a descriptor or a path
    if status.st_uid == os.geteuid() and status.st_mode & 0o777 != mode:
        os.chmod(file, mode)


def sync_folder(folder: Path | str) -> None:
    """Bring the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(fd: int, data: bytes | memoryview, offset: int = 0) -> None:
    """Write all of `data` into a file, however little of it a call takes. Raises OSError, e.g. for a full disk."""
    rest = memoryview(data).cast("B")
    while rest:
        done = os.pwrite(fd, rest, offset)
        if done <= 0:
            raise OSError(errno.EIO, f"a write of {rest.nbytes} bytes wrote none")
        rest, offset = rest[done:], offset + done


def fill_with_zeros(fd: int) -> int:
    """Write zeros over all bytes of a file, down to the device; how many. Raises OSError."""
    size = os.fstat(fd).st_size
    for start in range(0, size, len(_ZEROS)):
        write_all(fd, _ZEROS[: size - start], start)
    os.fdatasync(fd)
    return size


def punch_hole(fd: int, offset: int, nbytes: int) -> None:
    """Have the file system take back the space of these bytes of a file; they are zeros then, and its length stays.

    Raises OSError, EOPNOTSUPP where it cannot.
    """
    if _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, nbytes):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def replace_file(path: str | Path, data: bytes, *, draft: str | Path, mode: int) -> None:
    """Put a file of these bytes and permissions in place of what stands at `path`, on disk on return: whole or, where
    an OSError is raised, not at all. `draft` is a path beside it that nobody else uses; what stands there is lost.
    """
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        try:
            permit(fd, mode)
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
    sync_folder(os.path.dirname(path))
