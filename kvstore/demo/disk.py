"""What the demo does to a tier behind its back: forget cached pages, flip one byte of one block."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["drop_page_cache", "flip_byte", "local_files", "resident_pages"]


def local_files(url: str) -> list[Path]:
    """The files of a tier on this machine, largest first; none if it is elsewhere."""
    location = TierURL.parse(url).location
    root = Path(location) if location.startswith("/") else None
    if root is None or not root.exists():
        return []
    files = [root] if root.is_file() else [path for path in root.rglob("*") if path.is_file()]
    return sorted(files, key=lambda path: -path.stat().st_size)


def drop_page_cache(url: str) -> str:
    """Drop a tier's files from the page cache, which their owner may do; `dropped`, or why not.

    Only when no process has them open: mapped pages stay.
    """
    files = local_files(url)
    if not files:
        return "not dropped: the tier is not on this machine"
    kept = [path for path in files if not _drop(path)]
    return f"not dropped: {len(kept)} of {len(files)} files stayed in it" if kept else "dropped"


def _drop(path: Path) -> bool:
    """Whether none of the file's pages is left in the cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)  # pages that are not on the device yet would stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return resident_pages(path) == 0


def resident_pages(path: Path) -> int:
    """How many of a file's pages are in the page cache (`mincore`; a read that must not wait would fetch some)."""
    size = path.stat().st_size
    if size == 0:
        return 0
    answer = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("rb") as file:
        content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(size), answer):
        raise OSError(ctypes.get_errno(), "mincore failed", str(path))
    return sum(page & 1 for page in answer)


def flip_byte(url: str, payload: bytes) -> int:
    """Flip one bit in the middle of a block's payload wherever it lies in the tier's files; how many places those are.

    The block is found by its content, so this knows nothing of a tier's format; 0 where it is compressed or elsewhere.
    """
    return sum(
        _flip(path, offset + len(payload) // 2) for path in local_files(url) for offset in _places(path, payload)
    )


def _places(path: Path, payload: bytes) -> Iterator[int]:
    if path.stat().st_size < len(payload):
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        offset = content.find(payload)
        while offset >= 0:
            yield offset
            offset = content.find(payload, offset + len(payload))


def _flip(path: Path, offset: int) -> int:
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        return file.write(bytes([byte[0] ^ 1]))
