"""The process that a store has to itself: launched with one end of a socket, heard until it has opened the store."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from kvstore.apart.messages import Frames, frame
from kvstore.errors import StoreOpenError

if TYPE_CHECKING:
    import socket

    from kvstore.abc import Capabilities
    from kvstore.url import TierURL

__all__ = ["END_S", "OPEN", "launched", "opened", "put_down", "received"]

OPEN = 0
"""The ticket of what a process does first."""
END_S = 2.0
"""Seconds that a process is given to end, once it should or was killed."""
_RECEIVED_BYTES = 1 << 16
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[3]); from kvstore.apart.serving import serve;"
    " serve(int(sys.argv[1]), int(sys.argv[2]))"
)


def launched(theirs: socket.socket, url: TierURL) -> subprocess.Popen[bytes]:
    """One that serves the socket, which is closed here. Raises `StoreOpenError`."""
    with theirs:
        arguments = [str(theirs.fileno()), str(os.getpid()), json.dumps(sys.path)]
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", _START, *arguments],  # -P: imports nothing of the working directory
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
            )
        except OSError as error:
            raise StoreOpenError(
                f"{url}: no I/O process can be started: {error}. Raise the limits on processes, memory and open files,"
                " or leave io_process out"
            ) from error


def opened(wire: socket.socket, process: subprocess.Popen[bytes], url: TierURL) -> tuple[TierURL, Capabilities]:
    """Have it open the store at `url`, and wait until it has. Raises whatever opening it there raises."""
    with contextlib.suppress(OSError):  # it has ended: said below
        wire.sendall(frame(("open", url)))
    frames = Frames()
    while came := received(wire):
        for _, about, error in frames.add(came):
            if error is not None:
                raise error
            known: tuple[TierURL, Capabilities] = about
            return known
    raise StoreOpenError(
        f"{url}: its I/O process ended before it had opened the store (exit status {put_down(process)});"
        " what it printed says why"
    )


def put_down(process: subprocess.Popen[bytes]) -> int | None:
    """Kill it, unless it has ended. Its exit status; None if it is in a call that the kernel does not let go of."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    return process.returncode


def received(wire: socket.socket) -> bytes:
    """What comes next, nothing at its end."""
    try:
        return wire.recv(_RECEIVED_BYTES)
    except OSError:  # reset by a process that died with something unread
        return b""
