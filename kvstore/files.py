"""Files and folders of our own, opened and made so that nothing that stands under their names can surprise us."""

# ruff: noqa: PTH102, PTH112 - plain strings: a Path costs more than the system call it is made for

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from kvstore.presence import permit

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["NotAFileError", "make_folder", "open_file", "open_unchecked"]


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
