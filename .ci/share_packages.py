"""Let one environment import the packages of another, behind its own: `python share_packages.py OTHER_PYTHON`.

What was installed in editable mode is not shared: its own path files are not followed.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def share(packages: str, purelib: str | None = None) -> None:
    """Put the folder `packages` on the path of the environment whose site-packages are `purelib` (default: ours)."""
    Path(purelib or sysconfig.get_path("purelib"), "shared_packages.pth").write_text(packages + "\n")


if __name__ == "__main__":
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    other = subprocess.run([sys.argv[1], "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    share(sysconfig.get_path("purelib"), other)
