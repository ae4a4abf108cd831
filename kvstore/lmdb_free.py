"""What LMDB's free pages still hold, and its overwriting: a deleted value stays in the file, byte for byte.

LMDB keeps a list of free pages and takes from it when it next needs some, which may be never. So whoever purges
overwrites those pages in place. The list is read here from the file, while this process has LMDB's write lock and so
nobody else changes it; which pages it may hand out is LMDB's own rule: those that were freed before the oldest snapshot
that somebody reads, and before the last commit. Nothing of LMDB's is changed by that: what a free page holds is read by
nobody.

The list is believed only if it adds up: free pages, pages in use by each tree, and the two headers are all pages
there are (`lmdb_pages.Pages.unused`; `lmdb.verify` proves the same, by reading every page). Else nothing is
overwritten, and the caller is told.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import lmdb
import numpy as np

from kvstore.errors import StoreDamagedError
from kvstore.files import punch_hole, write_all
from kvstore.lmdb_files import PAGE, free_pages
from kvstore.lmdb_pages import PageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from numpy.typing import NDArray

    from kvstore.environment import Environment
    from kvstore.lmdb_pages import Numbers

__all__ = ["Wiped", "give_back_free_pages", "overwrite_free_pages", "ripen"]

_Act: TypeAlias = "Callable[[int, int, int], object]"
"""What is done with a run of free pages: of a descriptor, from an offset on, so many bytes."""

AT_ONCE = 16 << 20
"""Bytes overwritten while one write lock is held: as long as a put of a batch, and others take turns."""


@dataclass(slots=True)
class Wiped:
    """What was overwritten, in bytes; and what could not be: pages that snapshots have which somebody still reads."""

    overwritten: int = 0
    held: int = 0
    _done: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_), init=False)

    def fresh(self, pages: Numbers) -> Numbers:
        """Those that were not overwritten yet."""
        if pages.size and int(pages.max()) >= self._done.size:
            self._done = np.concatenate([self._done, np.zeros(int(pages.max()) + 1 - self._done.size, np.bool_)])
        return pages[~self._done[pages]] if pages.size else pages

    def overwrote(self, pages: Numbers) -> None:
        """These were, too."""
        self._done[pages] = True
        self.overwritten += pages.size * PAGE


def overwrite_free_pages(
    environment: Environment, advance: Callable[[int], object], *, freed_until: int, wiped: Wiped | None = None
) -> Wiped:
    """Write zeros over all pages that are free now, and what lies behind the last page in use; then to the device.

    `freed_until`: the transaction of the last removal that matters; what was freed later and cannot be overwritten is
    not counted as `held`. `wiped`: what earlier calls did, which this one adds to.

    In steps of `AT_ONCE` bytes, between which others write; `advance` is called with the bytes of each. Pages that are
    used and freed again meanwhile are not overwritten once more. Raises OSError, and `StoreDamagedError` where the list
    of free pages does not add up.
    """
    zeros = np.zeros(AT_ONCE, np.uint8).data
    wiped = wiped or Wiped()
    with _data_of(environment) as fd:
        while step := _step(environment, fd, lambda fd, at, size: write_all(fd, zeros[:size], at), freed_until, wiped):
            advance(step)
        os.fdatasync(fd)
    return wiped


def ripen(environment: Environment) -> None:
    """Two small commits, after which LMDB hands out what was freed before them; as far as a full disk lets it."""
    environment.check_readers()
    with suppress(lmdb.MapFullError, OSError):
        for _ in range(2):
            with environment.write() as txn:
                info = environment.databases["info"]
                totals = txn.get(b"totals", db=info)
                if totals is not None:
                    txn.put(b"totals", bytes(totals), db=info)


def give_back_free_pages(environment: Environment) -> None:
    """Have the file system take back the space of all pages that are free now: each occupies some again once LMDB
    takes it. Raises OSError, EOPNOTSUPP where that cannot be; and `StoreDamagedError` as `overwrite_free_pages`.
    """
    given = Wiped()
    with _data_of(environment) as fd:
        while _step(environment, fd, punch_hole, 0, given):
            pass


@contextmanager
def _data_of(environment: Environment) -> Generator[int]:
    fd = os.open(environment.directory / "data.mdb", os.O_RDWR | os.O_CLOEXEC)
    try:
        yield fd
    except PageError as error:
        raise StoreDamagedError(str(error)) from error
    finally:
        os.close(fd)


def _step(environment: Environment, fd: int, act: _Act, freed_until: int, wiped: Wiped) -> int:
    """`act` on what fits one step; how many bytes that were."""
    with environment.write() as txn:  # which changes nothing, and so leaves no trace
        newest = txn.id() - 1
        oldest = environment.oldest_snapshot(newest)
        listed, last_page = free_pages(fd, newest)
        wiped.held = PAGE * sum(len(pages) for freed, pages in listed if oldest <= freed <= freed_until)
        behind = np.arange(last_page + 1, -(-os.fstat(fd).st_size // PAGE))
        usable = np.concatenate([behind, *(pages for freed, pages in listed if freed < oldest)])
        chosen = np.sort(wiped.fresh(usable))[: AT_ONCE // PAGE]
        if chosen.size:
            environment.sync()  # else the headers on disk may still be of transactions that use these pages
        for first, count in _runs(chosen):
            act(fd, first * PAGE, count * PAGE)
    wiped.overwrote(chosen)
    return chosen.size * PAGE


def _runs(pages: Numbers) -> Iterator[tuple[int, int]]:
    """Sorted page numbers as runs: the first page and how many follow each other."""
    if not pages.size:
        return
    starts = np.flatnonzero(np.diff(pages) != 1) + 1
    for run in np.split(pages, starts):
        yield int(run[0]), run.size
