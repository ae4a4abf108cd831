"""What a block asks of the system, in one go: without the GIL where the C extension is there.

    read     open, flock (shared, without waiting), fstat, preadv, unlock, close
    write    open, pwritev, fsync if that is asked for, fstat, unlock, close

and the checksum of what was read, or is to be written. What the blocks of a job ask of it together: to be renamed, what
their folders occupy, the locks of their names.

Each call that Python makes of the system lets go of the GIL and has to get it back, which among sixteen threads costs
more than the call; C (`kvstore.native`) lets go of it once. Where that is not there plain Python does the same. A block
that moves in parts is opened with the first and closed with the last.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from kvstore import native
from kvstore.integrity import crc32c

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    import numpy as np
    from numpy.typing import NDArray

    Outcome: TypeAlias = tuple[int, int, int, int, int, int, int]
    Piece: TypeAlias = NDArray[np.uint8] | None
    Job: TypeAlias = tuple[bool, int, str, int, int, int, NDArray[np.uint8], Piece, int, int, int, int]
    Move: TypeAlias = Callable[[bool, int, str, int, int, int, NDArray[np.uint8], Piece, int, int, int, int], Outcome]

__all__ = [
    "PYTHON",
    "SIZE_DIFFERS",
    "TOO_SHORT",
    "BlockFile",
    "Calls",
    "Step",
    "Then",
    "Whole",
    "how",
    "in_c",
    "lock_all",
    "made_by",
    "occupied_all",
    "rename_all",
    "unlock",
]

SIZE_DIFFERS = errno.EBADMSG
"""What `Step.EXPECT` fails with, where the file has another size."""
TOO_SHORT = errno.ENODATA
"""What `Step.MOVE` fails with, where the file ends before."""
NO_SUM = -1
"""A checksum that is not wanted."""
_CRC = struct.Struct("<I")
_FLOCK = struct.Struct("hhqqi0q")  # struct flock of 64-bit Linux: type, whence, start, length, pid


class Step(IntEnum):
    """What is done with a file, in this order; the same numbers as in `calls.c`."""

    OPEN = 0
    LOCK = 1
    EXPECT = 2
    MOVE = 3
    SYNC = 4
    LOOK = 5
    CLOSE = 6
    DONE = 7


class Then(IntEnum):
    """What follows a part; the same numbers as in `calls.c`."""

    GO_ON = 0
    END = 1
    END_SYNCED = 2


class BlockFile:
    """A file that is read or written from its opening to its end. For one thread.

    `error` is 0, or the errno of the `step` that failed; `fd` what is open then, or -1: the caller's to close. `mode`,
    `occupied` (bytes) and `inode` are what was seen of it: before it was read, or when it was written. `crc` is the
    CRC-32C of all bodies that were moved, where whoever moves them has set it to 0 before.
    """

    __slots__ = ("_flags", "_number", "crc", "error", "fd", "inode", "mode", "occupied", "path", "step")

    def __init__(self, path: str, flags: int, number: int, fd: int = -1) -> None:
        """`flags` to open it with, unless it is open already, as `fd`; `number`: the permissions of a new file, or the
        size that one has to have that is read.
        """
        self.path, self._flags, self._number, self.fd = path, flags, number, fd
        self.error, self.step = 0, int(Step.DONE)
        self.mode = self.occupied = self.inode = 0
        self.crc = NO_SUM

    def write(
        self, offset: int, body: NDArray[np.uint8], closing: Piece, then: Then, sums: tuple[int, int] = (0, 0)
    ) -> None:
        """Write `body`, and `closing` behind it, all of both. `sums`: where two checksums are put into `closing` before
        (`BlockFrame.sums`). Raises OSError.
        """
        self._move(True, offset, body, closing, then, *sums)
        if self.error:
            raise self.failure()

    @staticmethod
    def write_all(wholes: Sequence[Whole], then: Then) -> None:
        """Write files one after the other, each to its end; each `error` says what became of it."""
        jobs: list[Job] = []
        for whole in wholes:
            whole.file.crc = 0
            jobs.append(whole.file._job(True, 0, whole.body, whole.closing, then, *whole.sums))
        for whole, outcome in zip(wholes, made_by.move_all(jobs), strict=True):
            whole.file._came_to(outcome, seen=True)

    def read(self, offset: int, body: NDArray[np.uint8], closing: Piece, then: Then) -> bool:
        """Fill `body` and `closing`; whether that worked."""
        self._move(False, offset, body, closing, then)
        return not self.error

    def _move(
        self, writing: bool, offset: int, body: NDArray[np.uint8], closing: Piece, then: Then, at: int = 0,
        until: int = 0,
    ) -> None:  # fmt: skip
        seen = self.fd < 0 or writing
        outcome = made_by.move(*self._job(writing, offset, body, closing, then, at, until))
        self._came_to(outcome, seen=seen)

    def _job(
        self, writing: bool, offset: int, body: NDArray[np.uint8], closing: Piece, then: Then, at: int, until: int
    ) -> Job:
        flags, number = self._flags, self._number
        return writing, self.fd, self.path, flags, number, offset, body, closing, then, self.crc, at, until

    def _came_to(self, outcome: Outcome, *, seen: bool) -> None:
        self.error, self.step, self.fd, mode, occupied, inode, self.crc = outcome
        if seen:
            self.mode, self.occupied, self.inode = mode, occupied, inode

    def failure(self) -> OSError:
        """The error of the step that failed: a FileNotFoundError where that is what it is."""
        return OSError(self.error, os.strerror(self.error), self.path)


@dataclass(frozen=True, slots=True)
class Whole:
    """A file that is to be written in one go: `body`, and `closing` behind it, with its two checksums at `sums`."""

    file: BlockFile
    body: NDArray[np.uint8]
    closing: NDArray[np.uint8]
    sums: tuple[int, int]


def rename_all(paths: Sequence[str], targets: Sequence[str]) -> list[int]:
    """Rename each of `paths` to that of `targets` which stands in its place; the errno of each, or 0."""
    return [-value for value in made_by.of_paths(list(paths), list(targets))]


def occupied_all(paths: Sequence[str]) -> list[int]:
    """What the device says that each path occupies, in bytes; 0 where there is none. Raises OSError."""
    values = made_by.of_paths(list(paths))
    for number, value in enumerate(values):
        if value == -errno.ENOENT:
            values[number] = 0
        elif value < 0:
            raise OSError(-value, os.strerror(-value), paths[number])
    return values


def lock_all(fd: int, offsets: Sequence[int]) -> int:
    """Lock single bytes of an open file, in their order, for whoever has it open: how many, up to one that is locked
    already. Nobody is waited for. Raises OSError where the file system has no such locks.
    """
    return made_by.lock_all(fd, list(offsets))


def unlock(fd: int) -> None:
    """Let go of all that `lock_all` locked, whoever else has the file open by the same opening."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))


def _move(
    writing: bool, fd: int, path: str, flags: int, number: int, offset: int, body: NDArray[np.uint8], closing: Piece,
    then: int, crc: int, at: int, until: int,
) -> Outcome:  # fmt: skip
    step, mode, occupied, inode = Step.OPEN, 0, 0, 0
    try:
        if fd < 0:
            fd = os.open(path, flags, number)
            if not writing:
                step = Step.LOCK
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                step = Step.EXPECT
                status = os.fstat(fd)
                mode, occupied, inode = status.st_mode, status.st_blocks * 512, status.st_ino
                if status.st_size != number:
                    return SIZE_DIFFERS, step, fd, mode, occupied, inode, crc
        step = Step.MOVE
        if writing:
            crc = _sealed(body, closing, crc, at, until)
        _transfer(writing, fd, offset, [piece.data for piece in (body, closing) if piece is not None and piece.nbytes])
        if not writing and crc != NO_SUM:
            crc = crc32c(body, crc)
        if then == Then.END_SYNCED:
            step = Step.SYNC
            os.fsync(fd)
        if then != Then.GO_ON:
            if writing:
                step = Step.LOOK
                status = os.fstat(fd)
                mode, occupied, inode = status.st_mode, status.st_blocks * 512, status.st_ino
            step = Step.CLOSE
            fcntl.flock(fd, fcntl.LOCK_UN)  # not left to close: a child forked meanwhile has the same open file
            gone, fd = fd, -1
            os.close(gone)
    except OSError as failure:
        return failure.errno or errno.EIO, step, fd, mode, occupied, inode, crc
    return 0, Step.DONE, fd, mode, occupied, inode, crc


def _one_by_one(move: Move, jobs: list[Job]) -> list[Outcome]:
    return [move(*job) for job in jobs]


def _sealed(body: NDArray[np.uint8], closing: Piece, crc: int, at: int, until: int) -> int:
    """The checksum of `body`; into `closing` go that of what stands before `at` as well, and from there on, of all up
    to `until`.
    """
    if crc == NO_SUM:
        return crc
    crc = crc32c(body, crc)
    if until and closing is not None:
        _CRC.pack_into(closing.data, at, crc32c(closing[:at], crc))
        _CRC.pack_into(closing.data, until, crc32c(closing[at:until]))
    return crc


def _summed_in_python(move: Callable[..., Outcome]) -> Move:
    """`move` of an extension that moves, and does not sum up on this processor."""

    def moved(
        writing: bool, fd: int, path: str, flags: int, number: int, offset: int, body: NDArray[np.uint8],
        closing: Piece, then: int, crc: int, at: int, until: int,
    ) -> Outcome:  # fmt: skip
        if writing:
            crc = _sealed(body, closing, crc, at, until)
        outcome = move(writing, fd, path, flags, number, offset, body, closing, then, NO_SUM, 0, 0)
        if not writing and crc != NO_SUM and not outcome[0]:
            crc = crc32c(body, crc)
        return (*outcome[:6], crc)

    return moved


def _transfer(writing: bool, fd: int, offset: int, left: list[memoryview]) -> None:
    while left:
        moved = os.pwritev(fd, left, offset) if writing else os.preadv(fd, left, offset)
        if moved == 0:
            raise OSError(errno.EIO if writing else TOO_SHORT, "no more bytes")
        offset += moved
        while left and moved >= left[0].nbytes:
            moved -= left.pop(0).nbytes
        if moved:
            left[0] = left[0][moved:]


def _of_paths(paths: list[str], targets: list[str] | None = None) -> list[int]:
    """What each path occupies, in bytes, or that it was renamed to its target (0); an errno is negative."""
    values = [0] * len(paths)
    for number, path in enumerate(paths):
        try:
            if targets is None:
                values[number] = os.lstat(path).st_blocks * 512
            else:
                os.rename(path, targets[number])  # noqa: PTH104 - a string, as everywhere here
        except OSError as failure:
            values[number] = -(failure.errno or errno.EIO)
    return values


def _lock_all(fd: int, offsets: list[int]) -> int:
    for number, offset in enumerate(offsets):
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0))
        except (BlockingIOError, PermissionError):
            return number
    return len(offsets)


@dataclass(frozen=True, slots=True)
class Calls:
    """Who makes the calls."""

    move: Move
    """A part of a block between memory and its file: errno, step, descriptor, mode, bytes occupied, inode and checksum,
    as of `BlockFile`.
    """
    move_all: Callable[[list[Job]], list[Outcome]]
    """The same of several files, one after the other."""
    of_paths: Callable[..., list[int]]
    """What each path of a list occupies, in bytes; or, renamed to that of a second list, 0. An errno is negative."""
    lock_all: Callable[[int, list[int]], int]
    """As the function of that name."""


PYTHON = Calls(_move, partial(_one_by_one, _move), _of_paths, _lock_all)
"""One by one, from Python."""


def in_c(extension: ModuleType) -> Calls:
    """By way of the extension."""
    move, move_all = extension.move, extension.move_all
    if not extension.SUMS:
        move = _summed_in_python(move)
        move_all = partial(_one_by_one, move)
    return Calls(move, move_all, extension.of_paths, extension.lock_all)


def _choose() -> tuple[Calls, str]:
    if (extension := native.extension) is None:
        return PYTHON, f"system calls one by one, from Python ({native.reason})"
    return in_c(extension), "a block's system calls in one, from C"


made_by, how = _choose()
"""What moves blocks, where a test may put `PYTHON`; and what that is, in words."""
