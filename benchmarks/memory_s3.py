"""Starts `memory_s3.c`, an S3 server fast enough not to be what is measured: compiled when needed, gone afterwards."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).with_name("memory_s3.c")


def compiler() -> str | None:
    """A C compiler, if there is one."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@contextmanager
def memory_s3() -> Iterator[int]:
    """The port of a server on 127.0.0.1 that ends with the context, or with this process."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        program = Path(folder, "memory_s3")
        subprocess.run([compiler() or "cc", "-O2", "-pthread", "-o", program, SOURCE], check=True)
        with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            yield int(server.stdout.readline() if server.stdout else 0)


def environment(port: int) -> dict[str, str]:
    """The standard variables that lead a client there."""
    return {
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }
