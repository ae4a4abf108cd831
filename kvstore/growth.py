"""Whether a catalogue may grow for the sake of a store, or somebody's read that does not end is what makes it grow.

LMDB uses a page again that was freed, but not while a reader is older than that: a process that is stopped (SIGSTOP, a
debugger, a frozen container) inside a read transaction keeps all of them, and each put and each note of use takes new
ones. The file never shrinks. Under a capacity its growth would drive out the blocks, all of them in the end, and leave
no room for others when the process goes on. So whoever would make it grow asks here first, and leaves it then.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvstore.environment import DISK_HEADROOM, PAGE
from kvstore.turns import is_stopped

if TYPE_CHECKING:
    from kvstore.environment import Environment

__all__ = ["Growth", "why_no_page"]

BEHIND = 8
"""Transactions that were committed since a read began, from which on it keeps pages from being used again."""
LASTS_S = 1.0
"""How long that goes on before it is said, and before nobody waits for its end any more."""
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 64 << 20

log = logging.getLogger("kvstore.catalogue")


class Growth:
    """How large the data file of an environment may become while a read does not end: as it was before, and a 64th of
    the capacity more (1 MiB at least, 64 MiB at most). Thread-safe, as far as that matters: two may both say it.
    """

    def __init__(self, environment: Environment, capacity: int | None) -> None:
        self._environment = environment
        more = _MOST_BYTES if capacity is None else min(max(capacity // 64, _LEAST_BYTES), _MOST_BYTES)
        self._more = more // PAGE
        self._allowed = environment.pages() + self._more
        self._since: float | None = None
        self._said = False

    def is_held_up(self) -> bool:
        """Whether the file is as large as it may be, because of a read that does not end. Costs next to nothing while
        it is not.
        """
        pages = self._environment.pages()
        if pages <= self._allowed:
            return False
        self._environment.check_readers()
        process, behind = self._environment.oldest_reader()
        if behind <= BEHIND:
            self._go_on(pages)
            return False
        if self._since is None:
            self._since = time.monotonic()
        if self.lasts and not self._said:
            self._say(process, behind)
        return True

    @property
    def lasts(self) -> bool:
        """Whether that has been so for a while."""
        since = self._since
        return since is not None and time.monotonic() - since > LASTS_S

    def _go_on(self, pages: int) -> None:
        self._allowed = pages + self._more
        if self._said and self._since is not None:
            log.warning("%s: stores again, after %.1f s", self._environment.directory, time.monotonic() - self._since)
        self._since, self._said = None, False

    def _say(self, process: int, behind: int) -> None:
        self._said = True
        how, remedy = ", which is stopped,", f"goes on (kill -CONT {process}) or ends"
        if not is_stopped(process):
            how, remedy = "", "ends"
        log.warning(
            "%s: process %d%s reads as of %d transactions ago, so that nothing freed since can be used again. Until it"
            " %s nothing is stored here; blocks are still read",
            *(self._environment.directory, process, how, behind, remedy),
        )


def why_no_page(environment: Environment, error: Exception) -> str:
    """Why a change found no page to write to, and what helps, where `error` is what LMDB or the system said of it."""
    folder = environment.directory
    process, behind = environment.oldest_reader()
    read = f"the read of process {process}, which began {behind} transactions ago, ends" if behind else ""
    if isinstance(error, OSError):
        said = (
            f"{folder}: its disk is full, and to take something out needs some free pages, too: free"
            f" {DISK_HEADROOM >> 10} KiB on it and do this again, or remove the tier, which is a cache"
        )
        return f"{said}; it may be enough that {read}" if read else said
    if read:
        return f"{folder}: no page is free to write to until {read} (kill -CONT {process}, if it is stopped)"
    return (
        f"{folder}: its file is as large as its capacity lets it be, and no page of it is free: open it alone with a"
        " larger capacity, or remove it while nobody uses it (it is a cache)"
    )
