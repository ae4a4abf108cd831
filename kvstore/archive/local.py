"""Archives in local folders: files of a directory, as a shared tier has them, and large ones past the page cache.

So an archive is written and read as fast as the device is, and pushes nobody's files out of memory.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, cast

from kvstore.archive.packing import PAGE, page_memory
from kvstore.files import open_file
from kvstore.objects.directory_client import DirectoryClient

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

__all__ = ["LocalClient"]

DIRECT_BYTES = 1 << 20
"""From here on a file is worth moving past the page cache."""
CALL_BYTES = 1 << 30
"""The kernel moves less than 2 GiB in one call."""


class LocalClient(DirectoryClient):
    """The files below one folder."""

    name: ClassVar[str] = "local"

    def _get(self, path: str, start: int) -> Buffer:
        if start == 0:
            with suppress(OSError):  # whatever is wrong is found and told by the usual way
                found = _read_direct(self._at(path))
                if found is not None:
                    return found.data
        return super()._get(path, start)

    def _write(self, path: str, parts: Sequence[NDArray[np.uint8]]) -> None:
        super()._write(path, [] if _is_direct(parts) else parts)
        if _is_direct(parts):
            _write_direct(path, parts[0])

    def _delete(self, path: str) -> None:
        super()._delete(path)
        folder = self._at(path)
        while (folder := folder.rpartition("/")[0]).startswith(self._at("").rstrip("/")):
            try:
                os.rmdir(folder)  # noqa: PTH106
            except OSError:
                break
            self._ready.discard(folder)


def _is_direct(parts: Sequence[NDArray[np.uint8]]) -> bool:
    part = parts[0]
    whole_pages = part.ctypes.data % PAGE == 0 and part.nbytes % PAGE == 0
    return len(parts) == 1 and part.nbytes >= DIRECT_BYTES and whole_pages


def _write_direct(path: str, data: NDArray[np.uint8]) -> None:
    """Fill the empty file `path`, and have it on the device."""
    done = 0
    with suppress(OSError):  # the file system has no O_DIRECT, or not for this: the rest goes the usual way
        done = _moved(path, os.O_WRONLY | os.O_DIRECT, os.pwritev, data, 0)
    if done < data.nbytes:
        done = _moved(path, os.O_WRONLY, os.pwritev, data, done)
    if done < data.nbytes:
        raise OSError(errno.EIO, "the file takes no more", path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_direct(path: str) -> NDArray[np.uint8] | None:
    """All of the file, None where it is small or cannot be read so."""
    descriptor = open_file(path, os.O_RDONLY | os.O_DIRECT)
    try:
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if size < DIRECT_BYTES:
        return None
    memory = page_memory(-(-size // PAGE) * PAGE)
    done = _moved(path, os.O_RDONLY | os.O_DIRECT, os.preadv, memory, 0)
    return memory[:size] if done == size else None


def _moved(path: str, flags: int, call: object, data: NDArray[np.uint8], start: int) -> int:
    """Move `data` from offset `start` on; how far that went before the file ended."""
    move = cast("Callable[[int, list[memoryview], int], int]", call)
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        done = start
        while done < data.nbytes:
            count = move(descriptor, [data[done : done + CALL_BYTES].data], done)
            done += count
            if count == 0 or (flags & os.O_DIRECT and count % PAGE):
                break
        return done
    finally:
        os.close(descriptor)
