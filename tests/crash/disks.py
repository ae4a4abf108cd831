"""A disk of its own for a test, where the machine allows that."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = "192M"


@dataclass(frozen=True)
class Disk:
    """A folder to work in. `own`: nothing else is on its file system, so that the kernel's count is the tree's."""

    path: Path
    own: bool
    kind: str


@contextlib.contextmanager
def small_disk() -> Iterator[Disk]:
    """An ext4 of its own on a loop device; else a tmpfs of its own; else a folder among others."""
    # Not below pytest's own folders, which it removes while a run that was killed still has them mounted.
    with tempfile.TemporaryDirectory(prefix="kvstore-disk-") as folder:
        path, image = Path(folder) / "disk", Path(folder) / "disk.img"
        path.mkdir()
        kind = _mount(path, image)
        try:
            yield Disk(path, own=bool(kind), kind=kind or "shared")
        finally:
            if kind:
                _ran("umount", "-l", path)


def _mount(path: Path, image: Path) -> str:
    if os.geteuid() != 0:
        return ""
    made = _ran("truncate", "-s", SIZE, image) and _ran("mkfs.ext4", "-q", "-F", "-m0", image)
    # Without delayed allocation: with it `statvfs` counts what is being allocated twice, for a moment. A file that is
    # written anew over and over and never has more than 20 MiB was seen as 22.
    if made and _ran("mount", "-o", "loop,nodelalloc", image, path):
        return "ext4"
    return "tmpfs" if _ran("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "kvstore-test", path) else ""


def _ran(*command: object) -> bool:
    try:
        return subprocess.run([str(part) for part in command], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
