"""Which blocks are there: by a listing where that is cheaper than to ask for each, with a memory of what was seen.

Digests are evenly spread over the 256 folders of a group, so the first page of a listing tells how many pages there
are: as many objects as stand in the folders that it has in full, times 256 by their number. As long as what is left of
the listing costs less than asking for the keys that it has not reached, it goes on; then the rest is asked for one by
one. What either costs is measured on the way: stores differ by a factor of ten.

Only what was seen is remembered, for `ttl` seconds: a block that another process stores is found at once, one that it
removes is believed in for that long, unless a load found it gone.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from typing import TYPE_CHECKING

from kvstore.objects.side import side_by_side
from kvstore.retention import Retention, steady_s
from kvstore_zarr.objects.ages import Ages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore.objects.client import Listed, ObjectClient
    from kvstore.types import BlockKey
    from kvstore_zarr.metadata import NamespaceTree

__all__ = ["Lookup"]

PAGE = 1000
PAGE_COST = 32
"""A page of a listing takes as long as asking for so many objects, 32 at a time, until this store has been measured
(22 on loopback, 14 ms by 0.6 ms; 100 and more where a service lists slowly).
"""
PAGE_COSTS = (16.0, 256.0)
"""What a measurement may say: a store that stumbled once is not to decide for good."""
MEASURED_FROM = 64
"""Objects asked for in one go, from which on their time says something."""
RISE = 1.25
"""A store that has become slower is believed so by so much each time; one that was faster, at once."""
ANSWERS = 100_000
"""Blocks remembered, 250 bytes each."""
ESTIMATE_TTL_S = 600.0
"""How long it is believed how many objects a group has."""
FOLDERS = 256


class Lookup:
    """What is known of one tier's blocks, and how to find out. Thread-safe."""

    def __init__(self, client: ObjectClient, ttl: float, ages: Ages | None = None) -> None:
        self._client = client
        self._ttl = ttl
        self._ages = ages or Ages(Retention())
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}  # path -> until when it is believed in; the oldest first
        self._page_s = self._ask_s = 0.0  # what one of them takes; 0: not known yet
        self._pages: dict[str, tuple[int, float]] = {}  # group's folder -> pages of its listing, until when

    def remember(self, paths: Iterable[str]) -> None:
        """These blocks were just seen, or stored."""
        if not self._ttl:
            return
        until = steady_s() + self._ttl
        with self._lock:
            for path in paths:
                self._seen.pop(path, None)
                self._seen[path] = until
            while len(self._seen) > ANSWERS:
                del self._seen[next(iter(self._seen))]

    def forget(self, path: str) -> None:
        """This block is not there, or not as it should be."""
        with self._lock:
            self._seen.pop(path, None)

    def believes(self, path: str) -> bool:
        """Whether the block was seen lately."""
        return self._seen.get(path, 0.0) > steady_s()

    def present(self, tree: NamespaceTree, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each block is there, or was lately."""
        paths = [tree.block(key) for key in keys]
        there = {path for path in paths if self.believes(path)}
        unknown: dict[str, list[str]] = {}
        for key, path in zip(keys, paths, strict=True):
            if path not in there:
                unknown.setdefault(tree.group_folder(key.group), []).append(path)
        for folder, asked in unknown.items():
            there |= self._look(folder, sorted(set(asked)))
        return [path in there for path in paths]

    def _look(self, folder: str, asked: list[str]) -> set[str]:
        """Those of the paths, which are sorted and all below `folder`, at which there is something."""
        found: set[str] = set()
        if self._is_worth_listing(folder, len(asked)):
            estimate = _Estimate(folder)
            for page in self._timed(self._client.list(folder)):
                paths = [entry.path for entry in page if self._ages.alive(entry)]
                self.remember(paths)
                found.update(paths)
                asked = asked[bisect_right(asked, page[-1].path) :]
                if estimate.pages_left(page) * self._page_cost >= len(asked):
                    break
            else:
                asked = []
            with self._lock:
                self._pages[folder] = (estimate.pages, steady_s() + ESTIMATE_TTL_S)
        began = time.monotonic()
        answers = side_by_side(self._is_there, asked)
        if len(asked) >= MEASURED_FROM:
            self._ask_s = _steadied(self._ask_s, (time.monotonic() - began) / len(asked))
        named = [path for path, there in zip(asked, answers, strict=True) if there]
        self.remember(named)
        return found.union(named)

    def _is_there(self, path: str) -> bool:
        if not self._ages:
            return self._client.exists(path)
        entry = self._client.look(path)
        return entry is not None and self._ages.alive(entry)

    def _is_worth_listing(self, folder: str, keys: int) -> bool:
        pages, until = self._pages.get(folder, (1, 0.0))
        if until < steady_s():
            pages = 1
        return self._client.lists_in_pages and pages * self._page_cost < keys

    @property
    def _page_cost(self) -> float:
        """A page of a listing takes as long here as asking for so many objects."""
        if not (self._page_s and self._ask_s):
            return PAGE_COST
        least, most = PAGE_COSTS
        return min(max(self._page_s / self._ask_s, least), most)

    def _timed(self, pages: Iterator[Sequence[Listed]]) -> Iterator[Sequence[Listed]]:
        while True:
            began = time.monotonic()
            page = next(pages, None)
            if page is None:
                return
            if len(page) == PAGE:
                self._page_s = _steadied(self._page_s, time.monotonic() - began)
            yield page


def _steadied(known: float, measured: float) -> float:
    """Noise only ever adds: of two figures the smaller one is nearer to the truth, unless it is old."""
    return min(measured, known * RISE) if known else measured


class _Estimate:
    """How many pages the listing of a group has, from those that were read."""

    def __init__(self, folder: str) -> None:
        self._start = len(folder) + 1
        self._counts: dict[str, int] = {}
        self._read = 0
        self.pages = 0

    def pages_left(self, page: Sequence[Listed]) -> int:
        """After one more page; 0 when the last folder was reached and nothing can follow."""
        for entry in page:
            name = entry.path[self._start : self._start + 3]
            self._counts[name] = self._counts.get(name, 0) + 1
        self._read += 1
        last = page[-1].path[self._start : self._start + 3]
        left = self._left(last)
        self.pages = self._read + left
        return left

    def _left(self, last: str) -> int:
        whole = sum(count for name, count in self._counts.items() if name != last)
        seen = whole + self._counts[last]
        try:
            done = int(last[:2], 16) if last.endswith("/") else FOLDERS
        except ValueError:
            return 0 if last > "ff/" else FOLDERS  # somebody else's: where this ends is not known
        objects = whole * FOLDERS / done if done else seen * FOLDERS
        return math.ceil(max(0.0, objects - seen) / PAGE)
