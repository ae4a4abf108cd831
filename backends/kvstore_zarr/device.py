"""Block files in and out of memory: one vectored call a part, past the page cache where the file system allows it.

O_DIRECT wants addresses, offsets and lengths that are multiples of a page. Files are (see `format`); a caller's buffer
that is not goes through a bounce buffer of this thread's, which holds a part of a block.

Large blocks move in parts, each of which is checked in its turn: were all of a block checked before any of it is
written, the device would wait for as many blocks as there are threads.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvstore.errors import StoreAccessError
from kvstore.files import open_file, permit
from kvstore.integrity import address_in_memory, crc32c
from kvstore_zarr.calls import BlockFile, Then, Whole
from kvstore_zarr.format import PAGE, PART_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore_zarr.format import BlockFrame

    Fill: TypeAlias = Callable[[NDArray[np.uint8]], object]

__all__ = [
    "BlockDevice",
    "aligned_empty",
    "probe_direct",
    "probe_direct_read",
]


TOGETHER = 16
"""Files that are written in one call: 8 MiB of blocks of 0.5 MiB. To get the GIL back in between takes longer than what
Python has to do for a block.
"""


def aligned_empty(nbytes: int) -> NDArray[np.uint8]:
    """`nbytes` of zeroed, page-aligned memory that lives as long as the array (whole pages are taken)."""
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=np.uint8)[:nbytes]


def probe_direct(folder: Path) -> str | None:
    """Write and read a page in `folder` with O_DIRECT: None if that works, else why not.

    Really tried, because some file systems take the flag at open and refuse the transfer. Raises OSError when
    `folder` cannot be written at all.
    """
    if not hasattr(os, "O_DIRECT"):
        return "this platform has no O_DIRECT"
    name = folder / f"probe-{os.getpid()}-{threading.get_ident()}"
    page = aligned_empty(PAGE)
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError as error:
        name.unlink(missing_ok=True)  # some file systems create the file before they refuse the flag
        if error.errno != errno.EINVAL:
            raise
        return f"the file system refuses O_DIRECT: {error.strerror}"
    try:
        moved = os.pwritev(fd, [page.data], 0), os.preadv(fd, [page.data], 0)
        return None if moved == (PAGE, PAGE) else f"O_DIRECT moved {moved} of {PAGE} bytes"
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return f"the file system refuses O_DIRECT transfers: {error.strerror}"
    finally:
        os.close(fd)
        name.unlink()


def probe_direct_read(file: Path) -> str | None:
    """Read the first page of `file` with O_DIRECT: None if that works, else why not. Writes nothing."""
    if not hasattr(os, "O_DIRECT"):
        return "this platform has no O_DIRECT"
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        return f"the file system refuses O_DIRECT: {error.strerror}"
    try:
        os.preadv(fd, [aligned_empty(PAGE).data], 0)
    except OSError as error:
        return f"the file system refuses O_DIRECT transfers: {error.strerror}"
    finally:
        os.close(fd)
    return None


class _Scratch(threading.local):
    """This thread's page-aligned memory: two pages for the closing of a file that moves alone, and for those of files
    that are written together; a bounce buffer and room for a whole sealed block once they are needed.
    """

    def __init__(self) -> None:
        self.closings = aligned_empty(TOGETHER * 2 * PAGE).reshape(TOGETHER, 2 * PAGE)
        self.closing = aligned_empty(2 * PAGE)
        self._bounce: NDArray[np.uint8] | None = None
        self._staging = aligned_empty(0)

    def staging(self, nbytes: int) -> NDArray[np.uint8]:
        if self._staging.nbytes < nbytes:
            self._staging = aligned_empty(nbytes)
        return self._staging[:nbytes]

    @property
    def bounce(self) -> NDArray[np.uint8]:
        if self._bounce is None:
            self._bounce = aligned_empty(PART_BYTES)
        return self._bounce


def _probe(folder: Path, sample: Path) -> str | None:
    try:
        return probe_direct(folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return probe_direct_read(sample)


class BlockDevice:
    """How the store opens block files and moves their bytes: all that it asks of the system for a block, or a part of a
    large one, in one go (`calls`). Threads share one.
    """

    def __init__(self, *, direct: bool) -> None:
        self.direct = direct
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._scratch = _Scratch()

    @classmethod
    def choose(cls, io: str, folder: Path, *, sample: Path, readonly: bool) -> tuple[BlockDevice, str | None]:
        """The device that option `io` (auto, direct, buffered) means in `folder`, and why it is not direct, if so.

        Found out by writing to `folder`, or, where nothing may or can be written, by reading the file `sample`.
        Raises `StoreAccessError` for `direct` where that does not work, OSError where `folder` cannot be written.
        """
        if io == "buffered":
            reason: str | None = "io=buffered was asked for"
        else:
            reason = probe_direct_read(sample) if readonly else _probe(folder, sample)
        if reason is not None and io == "direct":
            raise StoreAccessError(f"io=direct is not possible in {folder}: {reason}; use io=auto or io=buffered")
        return cls(direct=reason is None), reason

    def create(self, path: str, mode: int, fd: int = -1) -> BlockFile:
        """The file `path` that is to be written: a new one, whose permissions are `mode` less the umask until `finish`,
        or one that is open for that already.
        """
        return BlockFile(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | self._flags, mode, fd)

    def finish(self, file: BlockFile, mode: int) -> int:
        """What a file that was written occupies, in bytes; its permissions are `mode` from now on, if it is ours."""
        if file.mode & 0o777 != mode:
            permit(file.path, mode)  # not left to the umask: the option says who may read
        return file.occupied

    def open(self, path: str, *, writable: bool = False) -> int:
        """A descriptor of the regular file `path`, for reading or also for overwriting it in place. As `open_file`."""
        return open_file(path, (os.O_RDWR if writable else os.O_RDONLY) | self._flags)

    def look_into(self, path: str, frame: BlockFrame) -> BlockFile:
        """The file `path` that is to be read, if it is one and has the size of a block: it is locked while it is open,
        and nobody is waited for.
        """
        return BlockFile(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | self._flags, frame.file_bytes)

    def staging(self, frame: BlockFrame) -> NDArray[np.uint8]:
        """This thread's page-aligned memory for all of a file; valid until the thread's next transfer."""
        return self._scratch.staging(frame.file_bytes)

    def write_file(self, file: BlockFile, data: NDArray[np.uint8], *, sync: bool) -> None:
        """As `write`, of a file that stands in staging memory."""
        file.write(0, data, None, Then.END_SYNCED if sync else Then.END)

    def read_file(self, file: BlockFile, data: NDArray[np.uint8], *, close: bool) -> bool:
        """As `read`, into staging memory; whether it was read."""
        return file.read(0, data, None, Then.END if close else Then.GO_ON)

    def write(
        self,
        file: BlockFile,
        frame: BlockFrame,
        payload: NDArray[np.uint8],
        fill: Fill,
        *,
        sync: bool,
    ) -> None:
        """Write all of a file: `payload`, and the closing, of which `fill` writes everything but the checksums.
        `sync`: down to the disk. It is unlocked and closed then.

        Raises OSError, e.g. for a full disk: what is open is the caller's to close.
        """
        file.crc, closing = 0, self._scratch.closing
        for start, end in frame.parts:
            body = payload[start : min(end, frame.whole)]
            if self._needs_bounce(body):
                bounce = self._scratch.bounce[: body.nbytes]
                np.copyto(bounce, body)
                body = bounce
            if end == frame.payload_bytes:
                fill(closing)
                then = Then.END_SYNCED if sync else Then.END
                file.write(start, body, closing[: frame.closing], then, frame.sums)
            else:
                file.write(start, body, None, Then.GO_ON)

    def write_all(self, blocks: Sequence[tuple[BlockFile, BlockFrame, NDArray[np.uint8], Fill]], *, sync: bool) -> None:
        """As `write`, of several files; some at a time in one call without the GIL, where they take one go each. Each
        `file.error` says what became of it.
        """
        then = Then.END_SYNCED if sync else Then.END
        wholes: list[Whole] = []
        for file, frame, payload, fill in blocks:
            body = payload[: frame.whole]
            if payload.nbytes > PART_BYTES or self._needs_bounce(body):
                with suppress(OSError):
                    self.write(file, frame, payload, fill, sync=sync)
            else:
                closing = self._scratch.closings[len(wholes)]
                fill(closing)
                wholes.append(Whole(file, body, closing[: frame.closing], frame.sums))
            if len(wholes) == TOGETHER:
                BlockFile.write_all(wholes, then)
                wholes.clear()
        BlockFile.write_all(wholes, then)

    def read(
        self, file: BlockFile, frame: BlockFrame, payload: NDArray[np.uint8], *, close: bool
    ) -> tuple[NDArray[np.uint8], int] | None:
        """Read all of a file into `payload`: its closing, valid until this thread's next transfer, and the checksum of
        what was read; None if a step failed. `close`: and unlock it, when it was read; else it is the caller's.
        """
        file.crc, closing = 0, self._scratch.closing[: frame.closing]
        for start, end in frame.parts:
            body = payload[start : min(end, frame.whole)]
            bounce = self._scratch.bounce[: body.nbytes] if self._needs_bounce(body) else body
            last = end == frame.payload_bytes
            if not file.read(start, bounce, closing if last else None, Then.END if last and close else Then.GO_ON):
                return None
            if bounce is not body:
                np.copyto(body, bounce)
        payload[frame.whole :] = closing[: frame.rest]
        return closing, crc32c(closing[: frame.rest], file.crc)

    def _needs_bounce(self, body: NDArray[np.uint8]) -> bool:
        return self.direct and body.nbytes > 0 and address_in_memory(body) % PAGE != 0
