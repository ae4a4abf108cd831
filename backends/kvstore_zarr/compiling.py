"""Compiles `_calls.c`, where there is a C compiler and Python's headers: when kvstore is built or installed, by
`hatch_build.py`. `python backends/kvstore_zarr/compiling.py` does so in a source tree.

What comes out works with every CPython from 3.11 on. Imports nothing of kvstore, because nothing of it is installed
then.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

__all__ = ["EXTENSION", "SOURCE", "compile_extension", "digest_of"]

SOURCE = Path(__file__).with_name("_calls.c")
EXTENSION = Path(__file__).with_name("_calls.abi3.so")
FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-shared", "-Wall", "-Wextra")


def digest_of(source: bytes) -> str:
    """What an extension says of the source that it was compiled from: one from other source is not used."""
    return hashlib.sha256(source).hexdigest()


def compile_extension(extension: Path = EXTENSION, *flags: str, source: Path = SOURCE) -> str | None:
    """Compile `extension`, which appears whole; None, or why that was not possible."""
    import shlex  # here, because who only asks for SOURCE compiles nothing
    import subprocess
    import sysconfig

    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it is for CPython with its GIL"
    draft = extension.with_name(f"{extension.name}.{os.getpid()}")
    define, include = f'-DSOURCE="{digest_of(source.read_bytes())}"', f"-I{sysconfig.get_paths()['include']}"
    try:
        compiler = shlex.split(os.environ.get("CC") or "cc")
        done = subprocess.run(
            [*compiler, *FLAGS, *flags, define, include, "-o", str(draft), str(source)],
            capture_output=True, encoding="utf-8", errors="replace", check=False,
        )  # fmt: skip
        if done.returncode:
            return f"{shlex.join(compiler)} failed: {done.stderr.strip()}"
        draft.replace(extension)
    except (OSError, ValueError) as error:  # a ValueError: quotes in CC that nothing closes
        return f"no C compiler, or no place for what it makes: {error}"
    finally:
        draft.unlink(missing_ok=True)
    return None


if __name__ == "__main__":
    sys.exit(compile_extension())
