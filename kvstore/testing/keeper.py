"""Keeps a server for as long as somebody wants it: the program behind `kvstore.testing.servers`.

`python keeper.py FOLDER COMMAND…` runs the command until it ends, or until standard input does, which is a pipe that
only the process that asked for the server has. The kernel closes that pipe however the process ends, so that neither
the server nor FOLDER, which is removed, outlives a test run that was killed.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def main(folder: str, command: list[str]) -> None:
    """Run `command` in `folder`, which is removed at the end. Prints its process id; its own output is on stderr."""
    kernel = ctypes.CDLL(None)
    server = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        # There is one thread here, and it lives as long as the keeper: the server ends with it in any case.
        preexec_fn=lambda: kernel.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    try:
        print(server.pid, flush=True)
        select.select([sys.stdin, os.pidfd_open(server.pid)], [], [])
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
