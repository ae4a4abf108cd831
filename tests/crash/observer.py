"""An onlooker in a process of its own: how much does the tree occupy, every ten milliseconds?

It knows nothing of kvstore. It adds up `st_blocks` of every file and folder, each inode once. A walk is not atomic: a
file that was seen before it shrank and another that was seen after it grew count together, though they never stood
together, and the other way round. Where the tree has a file system to itself, the kernel's own count (`statvfs`) is
taken as well: that one is exact (see `disks`), and counts files that were unlinked while open, too.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from ctypes import Array, c_int64
    from pathlib import Path

INTERVAL_S = 0.01

FIELDS = ("stop", "walks", "walk_max", "walks_over", "counts_max", "counts_over", "slowest_walk_us")


@dataclass(frozen=True)
class Observation:
    """What the observer saw, in bytes; `counts_*` are None without a file system of its own."""

    walks: int
    walk_max: int
    walks_over: int
    counts_max: int | None
    counts_over: int | None
    slowest_walk_s: float


def occupied(root: Path) -> int:
    """The sum of `st_blocks` over the whole tree, in bytes, each inode once."""
    return 512 * sum({entry.st_ino: entry.st_blocks for entry in _stats(os.fspath(root))}.values())


def _stats(folder: str) -> Iterator[os.stat_result]:
    """Every file and folder below and including `folder`; what vanishes meanwhile is passed over."""
    try:
        yield os.lstat(folder)
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _stats(entry.path)
                else:
                    yield os.lstat(entry.path)
    except FileNotFoundError:
        return


def counted(root: Path) -> int:
    """What the file system that holds `root` has given out, in bytes."""
    state = os.statvfs(root)
    return (state.f_blocks - state.f_bfree) * state.f_frsize


def observe(root: Path, cap: int, own_disk: bool, board: Array[c_int64]) -> None:
    """Sample until `board[0]` is set; the findings go into the rest of `board`, in the order of FIELDS."""
    empty = counted(root) - occupied(root) if own_disk else 0
    while not board[0]:
        started = time.perf_counter()
        if own_disk:
            count = counted(root) - empty
            board[4] = max(board[4], count)
            board[5] += count > cap
        walk = occupied(root)
        took = time.perf_counter() - started
        board[1] += 1
        board[2] = max(board[2], walk)
        board[3] += walk > cap
        board[6] = max(board[6], int(took * 1e6))
        time.sleep(max(0.0, INTERVAL_S - took))


def read_observation(board: Array[c_int64], own_disk: bool) -> Observation:
    """The board's numbers by name."""
    _, walks, walk_max, walks_over, counts_max, counts_over, slowest = board
    exact = (counts_max, counts_over) if own_disk else (None, None)
    return Observation(walks, walk_max, walks_over, *exact, slowest / 1e6)
