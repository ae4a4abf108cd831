"""The pages of an LMDB data file, read without LMDB: do its trees and its list of free pages hang together?

LMDB trusts its pages: one that is not what it should be may end the process, or be written through. So who opens a tier
alone looks first (`kvstore.lmdb_files.damage`). Every branch and leaf is read, a level at a time, by numpy; of a large
value only where it lies: its bytes have a checksum of ours. `Pages` also reads the entries of a damaged file, as far as
sound pages lead to them, and the list of free pages for who overwrites those (`kvstore.lmdb_free`).
"""

from __future__ import annotations

import os
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

__all__ = ["PAGE", "TREE_BYTES", "Nodes", "Numbers", "PageError", "Pages", "Tree"]

PAGE = 4096
"""Bytes in an LMDB page here; also what the device is assumed to allocate at least."""

Bytes: TypeAlias = "NDArray[np.uint8]"
Numbers: TypeAlias = "NDArray[np.int64]"

_HEADER = 16
_NODE = 8
_FIRST = 2
"""The pages before it are the two headers."""

_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_BIG, _SUBTREE = 1, 2
_DEEPEST = 32
_NO_ROOT = (1 << 64) - 1
_AT_ONCE = 512
_TREE = struct.Struct("=IHHQQQQQ")
TREE_BYTES = _TREE.size
"""Of LMDB's record of a database."""


class PageError(Exception):
    """What is wrong with a page, in words."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What LMDB's record of a database says: how many pages and entries there are, and where the first page is."""

    name: str
    depth: int
    branches: int
    leaves: int
    overflow: int
    entries: int
    root: int

    @classmethod
    def unpacked(cls, name: str, record: bytes) -> Tree:
        """From the 48 bytes that LMDB keeps."""
        _, _, depth, branches, leaves, overflow, entries, root = _TREE.unpack(record)
        return cls(name, depth, branches, leaves, overflow, entries, root)


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of some pages: page (its index in `data`) and place of each; sizes in bytes."""

    numbers: Numbers
    data: Bytes
    page: Numbers
    place: Numbers
    flags: Numbers
    key_bytes: Numbers
    value_bytes: Numbers
    child: Numbers

    def key(self, node: int) -> bytes:
        """Its key."""
        start = int(self.place[node]) + _NODE
        return self.data[self.page[node], start : start + int(self.key_bytes[node])].tobytes()

    def value(self, node: int) -> bytes:
        """What stands behind its key on the page: its value, or where that lies (`extents`)."""
        start = int(self.place[node]) + _NODE + int(self.key_bytes[node])
        nbytes = 8 if self.flags[node] & _BIG else int(self.value_bytes[node])
        return self.data[self.page[node], start : start + nbytes].tobytes()

    def subtrees(self) -> Iterator[Tree]:
        """The records of databases among them. Raises `PageError`."""
        for node in np.flatnonzero(self.flags & _SUBTREE).tolist():
            if self.value_bytes[node] != _TREE.size:
                raise PageError(f"page {self.numbers[self.page[node]]} has no record of a database where one must be")
            yield Tree.unpacked(self.key(node).decode("ascii", "replace"), self.value(node))

    @property
    def big(self) -> Numbers:
        """The nodes whose value lies on pages of its own."""
        return np.flatnonzero(self.flags & _BIG)

    def extents(self) -> tuple[Numbers, Numbers]:
        """First page and number of pages of each large value."""
        big = self.big
        starts = (self.place + _NODE + self.key_bytes)[big]
        raw = self.data[self.page[big][:, None], starts[:, None] + np.arange(8)]
        first = np.ascontiguousarray(raw).view(np.uint64).reshape(-1).astype(np.int64)
        return first, (_HEADER - 1 + self.value_bytes[big]) // PAGE + 1


class Pages:
    """A data file whose newest header says that its last page is `last`, opened as `descriptor`."""

    def __init__(self, descriptor: int, last: int) -> None:
        self._descriptor, self._last = descriptor, last

    def check(self, main: Tree, free: Tree, *, values: bool = False) -> None:
        """Raise `PageError` for the first thing that is wrong with the trees or the list of free pages; with `values`,
        with the header of a large value as well, of which each costs a read.
        """
        seen: list[Numbers] = []
        extents: list[tuple[Numbers, Numbers]] = []
        for nodes in self._checked(main, seen, extents):
            for tree in nodes.subtrees():
                for inner in self._checked(tree, seen, extents):
                    if np.any(inner.flags & _SUBTREE):
                        raise PageError(f"database {tree.name} has a database in it")
        unused = [listed for nodes in self._checked(free, seen, extents) for _, listed in self._free(nodes)]
        self._check_apart(seen, extents, unused)
        for first, count in extents if values else ():
            for number, length in zip(first.tolist(), count.tolist(), strict=True):
                self._check_large(number, length)

    def end(self, main: Tree, free: Tree) -> int:
        """The number behind the last page that something lies on. Raises `PageError` where a tree is not sound."""
        seen: list[Numbers] = []
        extents: list[tuple[Numbers, Numbers]] = []
        named = [tree for nodes in self._checked(main, seen, extents) for tree in nodes.subtrees()]
        for tree in (*named, free):
            for _ in self._checked(tree, seen, extents):
                pass
        ends = [numbers + 1 for numbers in seen] + [first + count for first, count in extents]
        return max((int(one.max()) for one in ends if len(one)), default=_FIRST)

    def unused(self, main: Tree, free: Tree) -> list[tuple[int, Numbers]]:
        """The list of free pages: a transaction, and the pages that it freed. Raises `PageError` unless they and those
        that the databases say they use are all there are. Of the databases, only their records are read.
        """
        seen: list[Numbers] = []
        extents: list[tuple[Numbers, Numbers]] = []
        named = [tree for nodes in self._checked(main, seen, extents) for tree in nodes.subtrees()]
        found = [one for nodes in self._checked(free, seen, extents) for one in self._free(nodes)]
        self._check_apart(seen, extents, [pages for _, pages in found])
        in_use = _FIRST + sum(tree.branches + tree.leaves + tree.overflow for tree in (main, free, *named))
        listed = sum(len(pages) for _, pages in found)
        if in_use + listed != self._last + 1:
            raise PageError(f"{in_use} pages in use and {listed} free ones are not the {self._last + 1} of the file")
        return found

    def leaves(self, tree: Tree, seen: list[Numbers] | None = None) -> Iterator[Nodes]:
        """The nodes of a tree's leaves, some pages at a time. Raises `PageError` where a page on the way is none.

        `seen` is told the numbers of all pages.
        """
        level = np.array([tree.root] if tree.root != _NO_ROOT else [], np.int64)
        if tree.depth > _DEEPEST or (tree.root == _NO_ROOT) != (tree.entries == 0):
            raise PageError(f"the record of database {tree.name} cannot be")
        for depth in range(tree.depth, 0, -1):
            below: list[Numbers] = []
            for start in range(0, len(level), _AT_ONCE):
                numbers = level[start : start + _AT_ONCE]
                nodes = self._nodes(numbers, _LEAF if depth == 1 else _BRANCH)
                if seen is not None:
                    seen.append(numbers)
                if depth == 1:
                    yield nodes
                else:
                    below.append(nodes.child)
            level = np.concatenate(below) if below else level
            if depth > 1 and len(level) > tree.leaves + tree.branches:
                raise PageError(f"database {tree.name} has more pages than its record says")

    def entries(self, tree: Tree) -> Iterator[tuple[bytes, Callable[[], bytes]]]:
        """The keys of a tree, and what reads their values or raises `PageError`, as far as sound pages lead to them."""
        for nodes in self._sound_leaves(tree):
            first = dict(zip(nodes.big.tolist(), nodes.extents()[0].tolist(), strict=True))
            for node in range(len(nodes.page)):
                if node in first:
                    yield nodes.key(node), partial(self.large, first[node], int(nodes.value_bytes[node]))
                else:
                    yield nodes.key(node), partial(nodes.value, node)

    def trees(self, main: Tree) -> list[Tree]:
        """The named databases, as far as sound pages lead to them."""
        found: list[Tree] = []
        for nodes in self._sound_leaves(main):
            with suppress(PageError):
                found += nodes.subtrees()
        return found

    def _sound_leaves(self, tree: Tree) -> Iterator[Nodes]:
        """As `leaves`, past every page that is none, with all that only it leads to."""
        level = [tree.root] if tree.root != _NO_ROOT else []
        for depth in range(min(tree.depth, _DEEPEST), 0, -1):
            below: list[int] = []
            for number in level[: tree.leaves + tree.branches]:
                with suppress(PageError, OSError, OverflowError):
                    nodes = self._nodes(np.array([number], np.int64), _LEAF if depth == 1 else _BRANCH)
                    if depth == 1:
                        yield nodes
                    below += nodes.child.tolist() if depth > 1 else []
            level = below

    def read(self, numbers: Numbers) -> Bytes:
        """These pages, one a row."""
        found = np.empty((len(numbers), PAGE), np.uint8)
        for row, number in zip(found, numbers.tolist(), strict=True):
            if not _FIRST <= number <= self._last:
                raise PageError(f"a page {number} is referred to, and the last one is {self._last}")
            if os.preadv(self._descriptor, [row.data], number * PAGE) != PAGE:
                raise PageError(f"page {number} is behind the end of the file")
        return found

    def large(self, first: int, nbytes: int) -> bytes:
        """A large value, by its first page; its page's header is checked. Raises `PageError`."""
        self._check_large(first, (_HEADER - 1 + nbytes) // PAGE + 1)
        return os.pread(self._descriptor, nbytes, first * PAGE + _HEADER)

    def _check_large(self, first: int, pages: int) -> None:
        if not _FIRST <= first <= self._last + 1 - pages:
            raise PageError(
                f"a value on page {first} and {pages - 1} more is referred to, and the last is {self._last}"
            )
        found = os.pread(self._descriptor, _HEADER, first * PAGE)
        number, _, flags, count = struct.unpack("=QHHI", found.ljust(_HEADER, b"\0"))
        if (number, flags, count) != (first, _OVERFLOW, pages):
            raise PageError(f"page {first} is not the beginning of a value of {pages} pages")

    def _checked(self, tree: Tree, seen: list[Numbers], values: list[tuple[Numbers, Numbers]]) -> Iterator[Nodes]:
        """The leaves of a tree, whose counts are held against its record at the end."""
        entries = overflow = 0
        own: list[Numbers] = []
        for nodes in self.leaves(tree, own):
            first, count = nodes.extents()
            values.append((first, count))
            entries, overflow = entries + len(nodes.page), overflow + int(count.sum())
            yield nodes
        seen += own
        if (entries, overflow) != (tree.entries, tree.overflow) or sum(map(len, own)) != tree.branches + tree.leaves:
            raise PageError(f"database {tree.name} is not as large as its record says")

    def _nodes(self, numbers: Numbers, kind: int) -> Nodes:
        data = self.read(numbers)
        words = data.view(np.uint16).astype(np.int64)
        stored = data[:, :8].copy().view(np.uint64).reshape(-1).astype(np.int64)
        lower, upper = words[:, 6], words[:, 7]
        count = (lower - _HEADER) >> 1
        fits = (count >= (2 if kind == _BRANCH else 1)) & (lower <= upper) & (upper <= PAGE) & (lower & 1 == 0)
        _demand((stored == numbers) & (words[:, 5] == kind) & fits, numbers, "leaf" if kind == _LEAF else "branch")
        page = np.repeat(np.arange(len(numbers)), count)
        within = np.arange(len(page)) - np.repeat(np.cumsum(count) - count, count)
        place = words[page, _HEADER // 2 + within]
        named = numbers[page]
        _demand((place >= upper[page]) & (place <= PAGE - _NODE) & (place & 1 == 0), named, "page: a node is outside")
        low, high, flags, key_bytes = (words[page, (place >> 1) + word] for word in range(4))
        value_bytes = low | high << 16 if kind == _LEAF else np.zeros_like(low)
        here = np.where(flags & _BIG, 8, value_bytes) if kind == _LEAF else value_bytes
        end = place + (_NODE + key_bytes + here + 1 & ~1)
        _demand(end <= PAGE, named, "page: a node is too long")
        # LMDB leaves nothing between the nodes of a page: who believes a size that is wrong writes beyond.
        order = np.argsort(page * PAGE + place)
        following = np.append(place[order][1:], 0)
        last = np.append(np.diff(page[order]) > 0, True)
        _demand(end[order] == np.where(last, PAGE, following), named[order], "page: its nodes do not lie side by side")
        _demand(np.minimum.reduceat(place, np.cumsum(count) - count) == upper, numbers, "page: it has room among nodes")
        _demand((kind == _BRANCH) | (flags <= _SUBTREE), named, "page: a node has unknown flags")
        return Nodes(numbers, data, page, place, flags, key_bytes, value_bytes, low | high << 16 | flags << 32)

    def _free(self, nodes: Nodes) -> Iterator[tuple[int, Numbers]]:
        """Each record's transaction, and the numbers of free pages that it lists."""
        first = dict(zip(nodes.big.tolist(), nodes.extents()[0].tolist(), strict=True))
        for node in range(len(nodes.page)):
            value = nodes.value(node)
            if node in first:
                value = self.large(first[node], int(nodes.value_bytes[node]))
            listed = np.frombuffer(value[: len(value) // 8 * 8], np.uint64).astype(np.int64)
            # LMDB may reserve a record that it then has no use for: fewer pages than there is room for, mostly none.
            if not len(listed) or not 0 <= listed[0] < len(listed) or len(value) % 8 or nodes.key_bytes[node] != 8:
                raise PageError("the list of free pages has a record that cannot be")
            yield int.from_bytes(nodes.key(node), sys.byteorder), listed[1 : 1 + int(listed[0])]

    def _check_apart(self, seen: list[Numbers], values: list[tuple[Numbers, Numbers]], unused: list[Numbers]) -> None:
        """No page is of two trees, of two values, or free as well."""
        single = np.concatenate([*seen, *unused]) if seen or unused else np.empty(0, np.int64)
        first = np.concatenate([single, *(start for start, _ in values)])
        count = np.concatenate([np.ones_like(single), *(number for _, number in values)])
        order = np.argsort(first, kind="stable")
        first, end = first[order], (first + count)[order]
        if len(first) and (first[0] < _FIRST or end.max() > self._last + 1):
            raise PageError(f"a page outside of the {self._last + 1} of the file is referred to")
        twice = np.flatnonzero(first[1:] < end[:-1])
        if len(twice):
            raise PageError(f"page {first[twice[0] + 1]} is in use twice, or free and in use")


def _demand(holds: NDArray[np.bool_] | bool, numbers: Numbers, what: str) -> None:
    wrong = np.flatnonzero(~np.broadcast_to(holds, numbers.shape))
    if len(wrong):
        raise PageError(f"page {numbers[wrong[0]]} is no sound {what}")
