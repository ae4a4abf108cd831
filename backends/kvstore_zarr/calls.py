"""What a block asks of the system, in one go: without the GIL where the C extension is there.

    read     open, flock (shared, without waiting), fstat, preadv, unlock, close
    write    open, pwritev, fsync if that is asked for, fstat, unlock, close

Each call that Python makes of the system lets go of the GIL and has to get it back, which among sixteen threads costs
more than the call; `_calls.c` lets go of it once. Where that is not there (no C compiler at the installation) plain
Python does the same; `KVSTORE_CALLS=python` asks for it. A block that moves in parts is opened with the first and
closed with the last.
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import os
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias, cast

from kvstore_zarr.compiling import SOURCE, digest_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    Outcome: TypeAlias = tuple[int, int, int, int, int, int]
    Piece: TypeAlias = NDArray[np.uint8] | None
    Move: TypeAlias = Callable[[bool, int, str, int, int, int, Piece, Piece, int], Outcome]

__all__ = ["SIZE_DIFFERS", "TOO_SHORT", "BlockFile", "Step", "Then", "how", "move", "move_in_python"]

SIZE_DIFFERS = errno.EBADMSG
"""What `Step.EXPECT` fails with, where the file has another size."""
TOO_SHORT = errno.ENODATA
"""What `Step.MOVE` fails with, where the file ends before."""
_ONE_BY_ONE = "system calls one by one, from Python"


class Step(IntEnum):
    """What is done with a file, in this order; the same numbers as in `_calls.c`."""

    OPEN = 0
    LOCK = 1
    EXPECT = 2
    MOVE = 3
    SYNC = 4
    LOOK = 5
    CLOSE = 6
    DONE = 7


class Then(IntEnum):
    """What follows a part; the same numbers as in `_calls.c`."""

    GO_ON = 0
    END = 1
    END_SYNCED = 2


class BlockFile:
    """A file that is read or written from its opening to its end. For one thread.

    `error` is 0, or the errno of the `step` that failed; `fd` what is open then, or -1: the caller's to close. `mode`,
    `occupied` (bytes) and `inode` are what was seen of it: before it was read, or when it was written.
    """

    __slots__ = ("_flags", "_number", "error", "fd", "inode", "mode", "occupied", "path", "step")

    def __init__(self, path: str, flags: int, number: int, fd: int = -1) -> None:
        """`flags` to open it with, unless it is open already, as `fd`; `number`: the permissions of a new file, or the
        size that one has to have that is read.
        """
        self.path, self._flags, self._number, self.fd = path, flags, number, fd
        self.error, self.step = 0, int(Step.DONE)
        self.mode = self.occupied = self.inode = 0

    def write(self, offset: int, body: NDArray[np.uint8], closing: Piece, then: Then) -> None:
        """Write `body`, and `closing` behind it, all of both. Raises OSError."""
        self._move(True, offset, body, closing, then)
        if self.error:
            raise self.failure()

    def read(self, offset: int, body: NDArray[np.uint8], closing: Piece, then: Then) -> bool:
        """Fill `body` and `closing`; whether that worked."""
        self._move(False, offset, body, closing, then)
        return not self.error

    def _move(self, writing: bool, offset: int, body: NDArray[np.uint8], closing: Piece, then: Then) -> None:
        seen = self.fd < 0 or writing
        outcome = move(writing, self.fd, self.path, self._flags, self._number, offset, body, closing, then)
        self.error, self.step, self.fd = outcome[:3]
        if seen:
            self.mode, self.occupied, self.inode = outcome[3:]

    def failure(self) -> OSError:
        """The error of the step that failed: a FileNotFoundError where that is what it is."""
        return OSError(self.error, os.strerror(self.error), self.path)


def move_in_python(
    writing: bool, fd: int, path: str, flags: int, number: int, offset: int, body: Piece, closing: Piece, then: int
) -> Outcome:
    """Move a part of a block: errno, step, descriptor, mode, bytes occupied and inode, as of `BlockFile`."""
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
                    return SIZE_DIFFERS, step, fd, mode, occupied, inode
        step = Step.MOVE
        _transfer(writing, fd, offset, [piece.data for piece in (body, closing) if piece is not None and piece.nbytes])
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
        return failure.errno or errno.EIO, step, fd, mode, occupied, inode
    return 0, Step.DONE, fd, mode, occupied, inode


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


def _choose() -> tuple[Move, str]:
    if os.environ.get("KVSTORE_CALLS") == "python":
        return move_in_python, f"{_ONE_BY_ONE} (KVSTORE_CALLS=python)"
    try:
        extension = importlib.import_module("kvstore_zarr._calls")
        if digest_of(SOURCE.read_bytes()) != extension.SOURCE:
            return move_in_python, f"{_ONE_BY_ONE} ({extension.__file__} was compiled from other source)"
        return cast("Move", extension.move), "a block's system calls in one, from C"
    except (ImportError, OSError, AttributeError):
        return move_in_python, f"{_ONE_BY_ONE} (installed without a C compiler)"


move, how = _choose()
"""What moves blocks, where a test may put `move_in_python`; and what that is, in words."""
