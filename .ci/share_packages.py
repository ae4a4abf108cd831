"""Let one environment import the packages of another, behind its own: `python share_packages.py OTHER_PYTHON`.

What was installed in editable mode is not shared: its own path files are not followed.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

NAME = "shared_packages.pth"


def share(folders: str, purelib: str | None = None) -> None:
    """Put `folders`, one a line, on the path of the environment whose site-packages are `purelib` (default: ours)."""
    Path(purelib or sysconfig.get_path("purelib"), NAME).write_text(folders + "\n")


def ours() -> str:
    """Our site-packages, and what was shared with us: a path file that is found on a shared path is not read."""
    own = Path(sysconfig.get_path("purelib"))
    shared = (own / NAME).read_text() if (own / NAME).exists() else ""
    return f"{own}\n{shared}"


if __name__ == "__main__":
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    other = subprocess.run([sys.argv[1], "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    share(ours(), other)
