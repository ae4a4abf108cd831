"""A disk of its own for a test, where the machine allows that."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZE = "192M"


@dataclass(frozen=True)
class Disk:
    """A folder to work in. `own`: nothing else is on its file system, so that the kernel's count is the tree's."""

    path: Path
    own: bool
    kind: str


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Disk]:
    """An ext4 of its own on a loop device; else a tmpfs of its own; else a folder among others."""
    path, image = folder / "disk", folder / "disk.img"
    path.mkdir()
    made = os.geteuid() == 0 and _ran("truncate", "-s", SIZE, image) and _ran("mkfs.ext4", "-q", "-F", "-m0", image)
    if made and _ran("mount", "-o", "loop", image, path):
        kind = "ext4"
    elif os.geteuid() == 0 and _ran("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "kvstore-test", path):
        kind = "tmpfs"
    else:
        yield Disk(path, own=False, kind="shared")
        return
    try:
        yield Disk(path, own=True, kind=kind)
    finally:
        _ran("umount", path)


def _ran(*command: object) -> bool:
    try:
        return subprocess.run([str(part) for part in command], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
