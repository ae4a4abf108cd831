"""Compiles the C files beside it into one extension, where there is a C compiler and Python's headers: when kvstore is
built or installed, by `hatch_build.py`. `python kvstore/native/compiling.py` does so in a source tree.

What comes out works with every CPython from 3.11 on. Imports nothing of kvstore, because nothing of it is installed
then.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

__all__ = ["EXTENSION", "SOURCE", "compile_extension", "digest_of"]

SOURCE = Path(__file__).parent
"""The folder of the C files."""
EXTENSION = SOURCE / "_native.abi3.so"
FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")


def digest_of(source: Path = SOURCE) -> str:
    """What an extension says of the source that it was compiled from: one from other source is not used."""
    files = sorted(path for path in source.iterdir() if path.suffix in (".c", ".h"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def compile_extension(extension: Path = EXTENSION, *flags: str, source: Path = SOURCE) -> str | None:
    """Compile `extension`, which appears whole; None, or why that was not possible."""
    import shlex  # here, because who only asks for SOURCE compiles nothing
    import subprocess
    import sysconfig

    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it is for CPython with its GIL"
    draft = extension.with_name(f"{extension.name}.{os.getpid()}")
    define, include = f'-DSOURCE="{digest_of(source)}"', f"-I{sysconfig.get_paths()['include']}"
    try:
        compiler = shlex.split(os.environ.get("CC") or "cc")
        done = subprocess.run(
            [*compiler, *FLAGS, *flags, define, include, "-o", str(draft), *sorted(map(str, source.glob("*.c")))],
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
