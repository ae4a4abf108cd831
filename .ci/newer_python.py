"""Prints the newest Python of at least 3.12 that runs here; nothing where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

MINORS = (14, 13, 12)


def candidates(minor: int) -> list[str]:
    """Where a Python 3.`minor` may be: on the PATH, or among the versions that pyenv keeps."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    kept = sorted(str(path) for path in root.glob(f"versions/3.{minor}.*/bin/python"))
    on_path = shutil.which(f"python3.{minor}")
    return ([on_path] if on_path else []) + kept


def runs(python: str) -> bool:
    """Whether it starts (a shim may not) and can make virtual environments."""
    return subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True, check=False).returncode == 0


print(next((python for minor in MINORS for python in candidates(minor) if runs(python)), ""))
