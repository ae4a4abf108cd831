"""A process of a demo: started with a job on stdin, it tells what it does on stdout and leaves its result in a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from kvstore.errors import KVStoreError
from kvstore.interrupts import uninterrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["WorkerFailed", "run_worker"]


class WorkerFailed(KVStoreError, RuntimeError):  # noqa: N818 - names what happened, in a process of the demo
    """A process of the demo ended early; the message has the end of what it wrote to stderr."""


def run_worker(command: Sequence[str], job: dict[str, Any], folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Run `python -P *command` in a process of its own, which ends with the caller; what `stock.main` made of the job.

    `folder` holds what the process writes, `stderr.txt` included. Raises `WorkerFailed`.
    """
    result, log = folder / "result.json", folder / "stderr.txt"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TQDM_DISABLE": "1"}
    with log.open("w", encoding="utf-8") as errors, ExitStack() as stack:
        with uninterrupted():
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-P", *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=environment,
                    encoding="utf-8",
                )
            )
            stack.push(_Ending(process))
        if process.stdin is None or process.stdout is None:
            raise WorkerFailed("no pipe to the process")
        with process.stdin as pipe:
            json.dump(job | {"result": str(result)}, pipe)
        for line in process.stdout:
            say(f"      {line.rstrip()}")
    if process.returncode != 0:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
        raise WorkerFailed(f"the process of this step ended with {process.returncode}:\n{tail}")
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


class _Ending:
    """Ends a process when the body it belongs to failed: it would go on in a folder that is removed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()
            self._process.wait()
