"""Objects as files of a directory that several machines share (NFS, Lustre, CephFS, SMB): what a remote tier lies in.

A file is written under a name of its own in the folder where it will stand, closed (on NFS a full disk is told only
then), and given its name: by a hard link, which fails where a file stands already, or by a rename where the file system
has no links. Both are one step for every machine, and nothing here needs locks or shared memory. Calls have no
time-out of their own: a server that is gone holds them in the kernel, for as long as its mount options say.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvstore.environment import filesystem_of, is_network
from kvstore.errors import NotAStoreError
from kvstore.files import NotAFileError, fill_with_zeros, make_folder, open_file, permit, sync_folder, write_all
from kvstore.objects.client import Arrived, Listed, ObjectClient
from kvstore.objects.faults import Kind, RequestFailed
from kvstore.objects.settings import TIMEOUT
from kvstore.presence import explained
from kvstore.url import DURABILITY, MODE, READONLY, local_path

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvstore.url import TierURL

__all__ = ["DirectoryClient"]

DRAFT = ".kvstore-draft-"
DRAFT_LIVES_S = 3600.0
"""A draft that is older than this was left by a process that died; no two machines' clocks differ by as much."""

_KINDS = {
    errno.ENOENT: Kind.MISSING,
    errno.ENOTDIR: Kind.MISSING,
    errno.EEXIST: Kind.EXISTS,
    errno.EACCES: Kind.DENIED,
    errno.EPERM: Kind.DENIED,
    errno.EROFS: Kind.DENIED,
    errno.ENOSPC: Kind.FULL,
    errno.EDQUOT: Kind.FULL,
    errno.EFBIG: Kind.FULL,
    errno.ETIMEDOUT: Kind.TIMEOUT,
}
"""Anything else (EIO, ESTALE, a host that is down) may pass."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


class DirectoryClient(ObjectClient):
    """The files below one directory."""

    name: ClassVar[str] = "directory"
    lists_in_pages = False

    def __init__(self, url: TierURL) -> None:
        super().__init__(url.option(TIMEOUT))
        self._root = local_path(url)
        self._mode = url.option(MODE)
        self._durable = url.option(DURABILITY) == "fsync"
        self._ready: set[str] = set()
        with explained(self._root):
            if not url.option(READONLY):
                self._root.parent.mkdir(parents=True, exist_ok=True)
                make_folder(self._root, self._mode)
            if self._root.exists() and not self._root.is_dir():
                raise NotAStoreError(f"{self._root} is not a directory: choose another path")
        self.notes = _notes(self._root)

    def close(self) -> None:
        pass

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _get(self, path: str, start: int) -> Buffer:
        with open(open_file(self._at(path), os.O_RDONLY), "rb", buffering=0) as file:
            found = np.empty(max(0, os.fstat(file.fileno()).st_size - start), np.uint8)
            file.seek(start)
            return found[: _read(file, found)].data

    def _get_into(self, path: str, parts: Sequence[NDArray[np.uint8]]) -> Arrived:
        with open(open_file(self._at(path), os.O_RDONLY), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            fits = size == sum(part.nbytes for part in parts)
            return Arrived(sum(_read(file, part) for part in parts) if fits else size)

    def _put(self, path: str, parts: Sequence[NDArray[np.uint8]], *, new: bool) -> None:
        target = self._at(path)
        folder = target.rpartition("/")[0]
        draft = f"{folder}/{DRAFT}{secrets.token_hex(8)}"
        try:
            try:
                self._make_ready(folder)
                self._write(draft, parts)
            except FileNotFoundError:  # somebody removed the folder, or one above it
                self._ready.discard(folder)
                self._make_ready(folder)
                self._write(draft, parts)
            if new:
                _link(draft, target)
            else:
                os.replace(draft, target)  # noqa: PTH105
            if self._durable:
                sync_folder(folder)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(draft)  # noqa: PTH108

    def _write(self, path: str, parts: Sequence[NDArray[np.uint8]]) -> None:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._mode), "wb", 0) as file:
            permit(file.fileno(), self._mode)
            offset = 0
            for part in parts:
                write_all(file.fileno(), part.data, offset)
                offset += part.nbytes
            if self._durable:
                os.fsync(file.fileno())

    def _exists(self, path: str) -> bool:
        return stat.S_ISREG(os.lstat(self._at(path)).st_mode)

    def _look(self, path: str) -> Listed:
        status = os.lstat(self._at(path))
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, "no file", path)
        return Listed(path, status.st_size, status.st_mtime)

    def _delete(self, path: str) -> None:
        if path.rpartition("/")[2].startswith(DRAFT):
            _remove(self._at(path))
        else:
            os.unlink(self._at(path))  # noqa: PTH108

    def overwrite(self, path: str) -> None:
        """The file goes under a draft's name first, so that nobody reads half of it; and is gone then."""
        folder = self._at(path).rpartition("/")[0]
        draft = f"{folder}/{DRAFT}{secrets.token_hex(8)}"
        with suppress(FileNotFoundError):
            os.rename(self._at(path), draft)  # noqa: PTH104
            try:
                with open(open_file(draft, os.O_WRONLY), "wb", 0) as file:
                    fill_with_zeros(file.fileno())
            finally:
                os.unlink(draft)  # noqa: PTH108

    def _leftovers(self) -> Sequence[Listed]:
        found: list[Listed] = []
        for folder, folders, files in os.walk(self._root):
            for name in [*folders, *files]:
                if name.startswith(DRAFT):
                    with suppress(FileNotFoundError):
                        status = os.lstat(f"{folder}/{name}")
                        size = status.st_size if stat.S_ISREG(status.st_mode) else 0
                        found.append(Listed(os.path.relpath(f"{folder}/{name}", self._root), size, status.st_mtime))
        return found

    def empty_since(self, folder: str) -> float | None:
        changed = 0.0
        for path, _, files in os.walk(self._at(folder)):
            if files:
                return None
            with suppress(FileNotFoundError):
                changed = max(changed, os.lstat(path).st_mtime)
        return changed or None

    def remove_folder(self, folder: str) -> None:
        for path, _, _ in os.walk(self._at(folder), topdown=False):
            with suppress(OSError):  # somebody's file is in it, or a writer's
                os.rmdir(path)  # noqa: PTH106

    def _pages(self, folder: str, after: str) -> Iterator[Sequence[Listed]]:
        """A page for each directory."""
        names: list[str] = []
        page: list[Listed] = []
        with os.scandir(self._at(folder) if folder else self._root) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    names.append(path)
                elif not entry.name.startswith(DRAFT) and path > after and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):  # removed meanwhile
                        status = entry.stat(follow_symlinks=False)
                        page.append(Listed(path, status.st_size, status.st_mtime))
        if page:
            yield sorted(page, key=lambda listed: listed.path)
        for name in sorted(names):
            with suppress(FileNotFoundError):
                yield from self._pages(name, after)

    def _folders(self) -> Sequence[str]:
        with os.scandir(self._root) as entries:
            return [entry.name for entry in entries if entry.is_dir()]

    def fault_of(self, error: Exception) -> RequestFailed:
        kind = _KINDS.get(error.errno or 0, Kind.UNREACHABLE) if isinstance(error, OSError) else Kind.REFUSED
        return RequestFailed(Kind.MISSING if isinstance(error, NotAFileError) else kind, str(error))

    def _make_ready(self, folder: str) -> None:
        """It is there, and what dead processes left in it is gone."""
        if folder in self._ready:
            return
        missing: list[str] = []
        above = folder
        while not os.path.isdir(above):  # noqa: PTH112
            missing.append(above)
            above = above.rpartition("/")[0]
        for path in reversed(missing):
            make_folder(path, self._mode, draft=f"{path.rpartition('/')[0]}/{DRAFT}{os.urandom(8).hex()}")
        _sweep(folder)
        self._ready.add(folder)


def _read(file: io.FileIO, into: NDArray[np.uint8]) -> int:
    """Fill `into` from where the file stands; how many bytes there were."""
    done = 0
    while done < into.nbytes and (more := file.readinto(into[done:].data)):
        done += more
    return done


def _link(draft: str, target: str) -> None:
    try:
        os.link(draft, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise RequestFailed(Kind.UNSUPPORTED, f"this file system has no hard links: {error}") from error


def _sweep(folder: str) -> None:
    with os.scandir(folder) as entries:
        drafts = [entry.path for entry in entries if entry.name.startswith(DRAFT)]
    for draft in drafts:
        with suppress(FileNotFoundError):
            if time.time() - os.stat(draft).st_mtime > DRAFT_LIVES_S:  # noqa: PTH116
                _remove(draft)


def _remove(path: str) -> None:
    """A file, or a folder that was being made."""
    try:
        os.unlink(path)  # noqa: PTH108
    except (IsADirectoryError, PermissionError):
        if not os.path.isdir(path):  # noqa: PTH112
            raise
        os.rmdir(path)  # noqa: PTH106


def _notes(root: Path) -> tuple[str, ...]:
    kind = filesystem_of(root) if root.exists() else ""
    if not kind or is_network(kind):
        return ()
    local = f"{root} is on {kind}, a file system of this machine"
    return (f"{local}: without remote=true the tier has an exact capacity, and direct I/O",)
