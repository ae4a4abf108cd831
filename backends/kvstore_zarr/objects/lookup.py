"""Which blocks are there: by a listing where that is cheaper than to ask for each, with a memory of what was seen.

As long as what is left of the listing (`listing` estimates it) costs less than asking for the keys that it has not
reached, it goes on; then the rest is asked for one by one. What either costs is measured on the way: stores differ by a
factor of ten. A listing that takes long, or fails, is not waited for: the keys are asked for beside it, from the other
end, and whatever becomes of it a look-up takes little longer than to ask for each.

Only what was seen is remembered, for `ttl` seconds: a block that another process stores is found at once, one that it
removes is believed in for that long, unless a load found it gone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.objects.faults import RequestFailed
from kvstore.objects.side import WIDTH, side_by_side
from kvstore.retention import Retention, steady_s
from kvstore_zarr.objects.ages import Ages
from kvstore_zarr.objects.listing import PAGE, Beside, Estimate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from kvstore.objects.client import Listed, ObjectClient
    from kvstore.types import BlockKey
    from kvstore_zarr.metadata import NamespaceTree

__all__ = ["Lookup"]

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
MANY, MANY_TTL_S = 1 << 20, 30.0
"""Pages of a listing that was too late, or failed, and how long that is believed, if it does not end after all."""
HEAD_START, HEAD_START_S = 0.3, 0.05
"""So long a listing has the keys for itself: a share of what asking for all of them would take, but some seconds."""


class Lookup:
    """What is known of one tier's blocks, and how to find out. Thread-safe."""

    def __init__(
        self,
        client: ObjectClient,
        ttl: float,
        ages: Ages | None = None,
        inside: AbstractContextManager[None] | None = None,
    ) -> None:
        """`inside` is entered around a listing that may last longer than the call that began it."""
        self._client = client
        self._ttl = ttl
        self._inside = inside
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
        until = self._seen.get(path)
        return until is not None and until > steady_s()

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
        wanted = deque(asked)
        if not self._is_worth_listing(folder, len(asked)):
            return self._ask(wanted)
        listed: list[list[str]] = []
        listing = Beside(lambda: self._list(folder, wanted, listed), self._inside)
        listing.wait(self._head_start(len(asked)))
        if not listing.is_over:
            self._believe(folder, MANY, MANY_TTL_S)
        found = self._ask(wanted)
        return found.union(*listed)

    def _list(self, folder: str, wanted: deque[str], listed: list[list[str]]) -> None:
        """Take from the front of `wanted` what a listing reaches, as long as that is worth while: what is there is in
        `listed` by then.
        """
        estimate = Estimate(folder)
        try:
            for page in self._timed(self._client.list(folder)):
                if wanted:  # one that comes late could tell of what has gone meanwhile
                    listed.append([entry.path for entry in page if self._ages.alive(entry)])
                    self.remember(listed[-1])
                with suppress(IndexError):  # that was all, or somebody is asking for the last one
                    while wanted[0] <= page[-1].path:
                        wanted.popleft()
                if estimate.pages_left(page) * self._page_cost >= len(wanted):
                    break
            else:
                wanted.clear()
        except RequestFailed:  # where nothing else can be asked for either, that is raised
            self._believe(folder, MANY, MANY_TTL_S)
        else:
            self._believe(folder, estimate.pages, ESTIMATE_TTL_S)

    def _ask(self, wanted: deque[str]) -> set[str]:
        """Take from the end of `wanted`, asking for each, until nothing is left; what is there."""
        answers: list[tuple[str, bool]] = []

        def ask(_: int) -> None:
            while wanted:
                try:
                    path = wanted.pop()
                except IndexError:  # somebody else was quicker
                    return
                try:
                    answers.append((path, self._is_there(path)))
                except BaseException:
                    wanted.clear()  # what has not begun does not begin
                    raise

        began = time.monotonic()
        side_by_side(ask, range(min(WIDTH, len(wanted))))
        if len(answers) >= MEASURED_FROM:
            self._ask_s = _steadied(self._ask_s, (time.monotonic() - began) / len(answers))
        named = [path for path, there in answers if there]
        self.remember(named)
        return set(named)

    def _believe(self, folder: str, pages: int, ttl: float) -> None:
        """The listing has so many pages."""
        with self._lock:
            self._pages[folder] = pages, steady_s() + ttl

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

    def _head_start(self, keys: int) -> float:
        """Seconds for which a listing has so many keys for itself."""
        return max(HEAD_START_S, HEAD_START * keys * (self._ask_s or self._client.quickest / WIDTH))

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
