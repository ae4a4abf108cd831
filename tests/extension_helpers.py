"""The C extension, compiled for tests, whatever is installed."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.native.compiling import EXTENSION, SOURCE, compile_extension

if TYPE_CHECKING:
    from types import ModuleType

_COMPILER = shlex.split(os.environ.get("CC") or "cc")[0]
_HEADER = Path(sysconfig.get_paths()["include"], "Python.h")

COMPILES = shutil.which(_COMPILER) is not None and _HEADER.exists()
"""Whether the machine has what compiling takes."""
NEEDS_COMPILER = pytest.mark.skipif(
    not COMPILES, reason=f"needs a C compiler ({_COMPILER}) and {_HEADER}: apt-get install gcc python3-dev, say"
)


def compiled(folder: Path, *flags: str, source: Path = SOURCE) -> ModuleType:
    """The extension, compiled into `folder` and imported from there."""
    extension = folder / EXTENSION.name
    assert compile_extension(extension, *flags, source=source) is None
    spec = importlib.util.spec_from_file_location("kvstore.native._native", extension)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
