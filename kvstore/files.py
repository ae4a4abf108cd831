"""Files and folders of our own, opened and made so that nothing that stands under their names can surprise us; written
whole or not at all.

What several users share has its permissions before it has its name: whoever is killed in between leaves a draft
(`DRAFT`), and not a folder or a lock that only he may use.
"""

# ruff: noqa: PTH101, PTH102, PTH104, PTH106, PTH108, PTH112, PTH118, PTH119, PTH120, PTH208 - plain strings: a Path costs more than the system call it is made for

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import stat
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "DRAFT",
    "SHARED",
    "NotAFileError",
    "fill_with_zeros",
    "is_draft_of",
    "make_folder",
    "open_file",
    "open_or_make",
    "open_unchecked",
    "permit",
    "punch_hole",
    "rename_new",
    "replace_file",
    "sweep_drafts",
    "sync_folder",
    "write_all",
]

DRAFT = ".new-"
"""How the name begins of what is being made, beside what it is to be."""
_BESIDE = rf"{re.escape(DRAFT)}[0-9a-f]{{8}}-[0-9a-f]{{16}}"
"""The name of a draft of `make_folder` or `open_or_make`, both of which make it empty."""
_EMPTY = re.compile(rf"{_BESIDE}|{re.escape(DRAFT)}[0-9a-f]{{32}}")
_WRITTEN = frozenset({f"{DRAFT}state", f"{DRAFT}data.mdb"})
SHARED = 0o077
"""Of a mode: what others than the owner may."""
_ZEROS = memoryview(bytes(1 << 20))

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_HERE, _NO_REPLACE = -100, 1
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


def make_folder(path: str | Path, mode: int, *, draft: str | Path | None = None) -> None:
    """Make the directory `path`, unless it is there, with the search bits that go with the file permissions `mode`.

    `draft` is a path on the same file system that nobody else uses; one beside `path`, if none is given: then who was
    killed while he made the same leaves none.
    """
    if not mode & SHARED:
        _mkdir(path)
        return
    wanted = mode | (mode & 0o444) >> 2  # not left to the umask: the option says who may read
    if os.path.isdir(path):
        permit(path, wanted)
        return
    made = draft or _draft_beside(path)
    _mkdir(made)
    try:
        permit(made, wanted)
        rename_new(made, path)
    except OSError as error:
        with suppress(OSError):
            os.rmdir(made)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT) or not os.path.isdir(path):
            raise  # else somebody else made it, and may have swept our draft away
    if draft is None:
        _sweep_drafts_of(path)


def rename_new(source: str | Path, target: str | Path) -> None:
    """Rename a folder, and not over an empty one, in which another process may be about to make something: where the
    file system can tell (NFS cannot). Raises OSError, EEXIST where something stands there.
    """
    try:
        answer = _kernel.renameat2(_HERE, os.fsencode(source), _HERE, os.fsencode(target), _NO_REPLACE)
    except AttributeError:  # musl before 1.2.6
        answer, number = -1, errno.ENOSYS
    else:
        number = ctypes.get_errno()
    if answer and number in (errno.ENOSYS, errno.EINVAL):
        os.rename(source, target)
    elif answer:
        raise OSError(number, os.strerror(number), os.fspath(target))


def _mkdir(path: str | Path) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def open_or_make(path: str | Path, flags: int, mode: int) -> int:
    """A descriptor of the file `path` that all users of something share, a lock; made, if it is not there, and of
    exactly `mode`, if it is ours. Raises OSError.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC)
    except FileNotFoundError:
        if mode & SHARED:
            _make_shared(path, mode)
        fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        permit(fd, mode)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # then a next time
            os.close(fd)
            raise
    return fd


def _make_shared(path: str | Path, mode: int) -> None:
    """Have an empty file there, unless one is: it has its permissions when it can first be seen."""
    draft = _draft_beside(path)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        permit(fd, mode)
        with suppress(OSError):  # somebody else made it, or there are no links here: then it is made under its name
            os.link(draft, path)
    finally:
        os.close(fd)
        with suppress(FileNotFoundError):
            os.unlink(draft)


def _draft_beside(path: str | Path) -> str:
    return f"{_drafts_of(path)}{secrets.token_hex(8)}"


def _drafts_of(path: str | Path) -> str:
    """How the paths of all drafts of `path` begin: short, whatever its name."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f"{DRAFT}{zlib.crc32(os.fsencode(name)):08x}-")


def is_draft_of(path: str | Path, name: str) -> bool:
    """Whether `name` is one that `make_folder` or `open_or_make` gives to a draft of `path`."""
    return re.fullmatch(_BESIDE, name) is not None and name.startswith(os.path.basename(_drafts_of(path)))


def _sweep_drafts_of(path: str | Path) -> None:
    with suppress(OSError):  # a folder that may be written to, and not read
        for name in os.listdir(os.path.dirname(path)):
            if is_draft_of(path, name):
                _remove_empty(os.path.join(os.path.dirname(path), name))


def sweep_drafts(folder: str | Path) -> None:
    """Remove what somebody who was killed had been making in `folder`, a tier's: by their names, and what is made empty
    only if it is. For who knows that nobody is making anything. What cannot be removed stays.
    """
    for name in os.listdir(folder):
        if _EMPTY.fullmatch(name):
            _remove_empty(os.path.join(folder, name))
        elif name in _WRITTEN:
            with suppress(OSError):
                os.unlink(os.path.join(folder, name))


def _remove_empty(path: str) -> None:
    """Remove a file or a folder of ours, unless it holds something and so is not."""
    with suppress(OSError):
        status = os.lstat(path)
        if stat.S_ISDIR(status.st_mode):
            os.rmdir(path)
        elif stat.S_ISREG(status.st_mode) and not status.st_size:
            os.unlink(path)


def permit(file: int | str | Path, mode: int) -> None:
    """Give a file (a descriptor or a path) exactly `mode`, if it is ours: the umask has narrowed what it was made with,
    and of others' files it is for them to say.
    """
    status = os.stat(file)  # noqa: PTH116 - a descriptor or a path
    if status.st_uid == os.geteuid() and status.st_mode & 0o777 != mode:
        os.chmod(file, mode | status.st_mode & stat.S_ISGID)  # a folder that a group works in stays one


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
