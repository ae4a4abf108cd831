"""What LMDB's free pages still hold, and its overwriting: a deleted value stays in the file, byte for byte.

LMDB keeps a list of free pages and takes from it when it next needs some, which may be never. So whoever purges
overwrites those pages in place. The list is read here from the file, while this process has LMDB's write lock and so
nobody else changes it; which pages it may hand out is LMDB's own rule: those that were freed before the oldest snapshot
that somebody reads, and before the last commit. Nothing of LMDB's is changed by that: what a free page holds is read by
nobody.

The list is believed only if it adds up: free pages, pages in use by each tree, and the two headers are all pages
there are (`lmdb.verify` proves the same, by reading every page). Else nothing is overwritten, and the caller is told.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import StoreDamagedError
from kvstore.lmdb_files import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.environment import Environment

__all__ = ["Wiped", "overwrite_free_pages"]

AT_ONCE = 16 << 20
"""Bytes overwritten while one write lock is held: as long as a put of a batch, and others take turns."""

_HEADER = 16
_PAGE_HEAD = struct.Struct("=QHHHH")  # number, pad, flags, lower, upper
_NODE = struct.Struct("=HHHH")  # low and high half of the size, flags, key's size
_TREE = struct.Struct("=IHHQQQQQ")  # pad, flags, depth, branch, leaf, overflow pages, entries, root
_META = struct.Struct("=IIQQ48s48sQQ")  # magic, version, address, map size, free tree, main tree, last page, txn
_U64 = struct.Struct("=Q")
_BRANCH, _LEAF, _BIG, _TREE_IN_NODE, _NO_PAGE = 0x01, 0x02, 0x01, 0x02, (1 << 64) - 1

_Pages = NDArray[np.uint64]


@dataclass(slots=True)
class Wiped:
    """What was overwritten, in bytes; and what could not be: pages that snapshots have which somebody still reads."""

    overwritten: int = 0
    held: int = 0


@dataclass(slots=True)
class _Progress:
    done: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    wiped: Wiped = field(default_factory=Wiped)

    def fresh(self, pages: _Pages) -> _Pages:
        """Those that were not overwritten yet."""
        if pages.size and int(pages.max()) >= self.done.size:
            self.done = np.concatenate([self.done, np.zeros(int(pages.max()) + 1 - self.done.size, np.bool_)])
        return pages[~self.done[pages]] if pages.size else pages


def overwrite_free_pages(environment: Environment, advance: Callable[[int], object], *, freed_until: int) -> Wiped:
    """Write zeros over all pages that are free now, and what lies behind the last page in use; then to the device.

    `freed_until`: the transaction of the last removal that matters; what was freed later and cannot be overwritten is
    not counted as `held`.

    In steps of `AT_ONCE` bytes, between which others write; `advance` is called with the bytes of each. Pages that are
    used and freed again meanwhile are not overwritten once more. Raises OSError, and `StoreDamagedError` where the list
    of free pages does not add up.
    """
    progress = _Progress()
    zeros = np.zeros(AT_ONCE, np.uint8).data
    fd = os.open(environment.directory / "data.mdb", os.O_RDWR | os.O_CLOEXEC)
    try:
        while step := _step(environment, fd, progress, zeros, freed_until):
            advance(step)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    return progress.wiped


def _step(environment: Environment, fd: int, progress: _Progress, zeros: memoryview, freed_until: int) -> int:
    """Overwrite what fits one step; how many bytes that were."""
    with environment.write() as txn:  # which changes nothing, and so leaves no trace
        size = os.fstat(fd).st_size
        free = _FreeList(memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ)), txn.id() - 1)
        usable, held = free.pages(environment.oldest_snapshot(txn.id() - 1), freed_until)
        behind = np.arange(free.last_page + 1, -(-size // PAGE), dtype=np.uint64)
        progress.wiped.held = held * PAGE
        chosen = np.sort(progress.fresh(np.concatenate([usable, behind])))[: AT_ONCE // PAGE]
        for first, count in _runs(chosen):
            _write(fd, zeros[: count * PAGE], first * PAGE)
    progress.done[chosen] = True
    progress.wiped.overwritten += chosen.size * PAGE
    return chosen.size * PAGE


def _runs(pages: _Pages) -> Iterator[tuple[int, int]]:
    """Sorted page numbers as runs: the first page and how many follow each other."""
    if not pages.size:
        return
    starts = np.flatnonzero(np.diff(pages) != 1) + 1
    for run in np.split(pages, starts):
        yield int(run[0]), run.size


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


class _FreeList:
    """The list of free pages as of one transaction. `view` is the data file, which nobody changes meanwhile."""

    def __init__(self, view: memoryview, transaction: int) -> None:
        self._view = view
        metas = [_META.unpack_from(view, page * PAGE + _HEADER) for page in (0, 1)]
        meta = max(metas, key=lambda one: int(one[7]))
        if meta[7] != transaction:
            raise StoreDamagedError(f"the file is of transaction {meta[7]}, LMDB is at {transaction}")
        self._free, self._main = _TREE.unpack(meta[4]), _TREE.unpack(meta[5])
        self.last_page = int(meta[6])

    def pages(self, oldest: int, freed_until: int) -> tuple[_Pages, int]:
        """The pages that nobody can see, and how many of those freed until then the `oldest` snapshot in use may."""
        usable: list[_Pages] = []
        held, listed = 0, 0
        for key, value in self._entries(self._free[7], self._free[2]):
            (count,) = _U64.unpack_from(value)
            pages = np.frombuffer(value, np.uint64, count, offset=8)
            listed += count
            (freed,) = _U64.unpack(key)
            if freed < oldest:
                usable.append(pages.copy())
            elif freed <= freed_until:
                held += count
        self._check(listed)
        found = np.concatenate(usable) if usable else np.zeros(0, np.uint64)
        if found.size and not 2 <= int(found.min()) <= int(found.max()) <= self.last_page:
            raise StoreDamagedError("a page outside of the file is in the list of free pages")
        if np.unique(found).size != found.size:
            raise StoreDamagedError("a page is in the list of free pages twice")
        return found, held

    def _check(self, listed: int) -> None:
        trees = [self._free, self._main]
        for _, value, is_tree in self._nodes(self._main[7], self._main[2]):
            if is_tree:
                trees.append(_TREE.unpack_from(value))
        in_use = 2 + sum(tree[3] + tree[4] + tree[5] for tree in trees)
        if in_use + listed != self.last_page + 1:
            raise StoreDamagedError(
                f"{in_use} pages in use and {listed} free ones are not the {self.last_page + 1} of the file"
            )

    def _entries(self, root: int, depth: int) -> Iterator[tuple[bytes, memoryview]]:
        return ((key, value) for key, value, _ in self._nodes(root, depth))

    def _nodes(self, root: int, depth: int) -> Iterator[tuple[bytes, memoryview, bool]]:
        """Key and value of each entry of the tree, and whether the value is a tree's record."""
        if root == _NO_PAGE:
            return
        view = self._view
        start = root * PAGE
        number, _, flags, lower, _ = _PAGE_HEAD.unpack_from(view, start)
        if number != root or not flags & (_BRANCH | _LEAF) or depth < 1:
            raise StoreDamagedError(f"page {root} is not what the tree above it says")
        for slot in range((lower - _HEADER) // 2):
            (at,) = struct.unpack_from("=H", view, start + _HEADER + 2 * slot)
            low, high, node_flags, key_size = _NODE.unpack_from(view, start + at)
            key_at = start + at + _NODE.size
            if flags & _BRANCH:
                yield from self._nodes(low | high << 16 | node_flags << 32, depth - 1)
                continue
            value_at = key_at + key_size
            nbytes = low | high << 16
            if node_flags & _BIG:
                value_at = _U64.unpack_from(view, value_at)[0] * PAGE + _HEADER
            is_tree = bool(node_flags & _TREE_IN_NODE)
            yield bytes(view[key_at : key_at + key_size]), view[value_at : value_at + nbytes], is_tree
