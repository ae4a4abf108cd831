"""Tombstones of tiers without a catalogue: small documents beside the blocks, which every opener reads now and then.

A document names blocks, one a line, and its own name says until when they are not to be stored or served again, so that
one that has ended need not be read. What this process buries it knows at once; what others bury it learns when it
next looks, at most `seen_s` later. Where there are no documents, a look is one request.
"""

from __future__ import annotations

import secrets
import threading
from typing import TYPE_CHECKING, Protocol

from kvstore.retention import now_ns, steady_s
from kvstore.tombs import Remembered

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Graveyard", "Shelf"]

AT_ONCE = 10_000
"""Blocks named in one document."""


class Shelf(Protocol):
    """Where a tier keeps such documents; all names are theirs, made of `0` to `9`, `a` to `f` and `-`."""

    def names(self) -> Iterable[str]:
        """Those that are there."""
        ...

    def read(self, name: str) -> bytes | None:
        """What one says; None where it went meanwhile."""
        ...

    def write(self, name: str, text: bytes) -> None:
        """Keep one more."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Take some away."""
        ...


class Graveyard:
    """What one open store knows of the tombstones in its tier. Thread-safe; raises what its shelf raises."""

    def __init__(self, shelf: Shelf, seen_s: float, *, looked: bool = False) -> None:
        """`looked`: there are none at this moment."""
        self.seen_s = seen_s
        self._shelf = shelf
        self._lock = threading.Lock()
        self._known = Remembered[str]()
        self._read: set[str] = set()
        self._looked: float | None = steady_s() if looked else None

    def refused(self, names: Iterable[str], *, anew: bool = False) -> set[str]:
        """Those of the blocks that are not to be stored, nor believed in. Looks for what others buried, if due, or
        `anew` in any case.
        """
        self._look(anew=anew)
        return self.known(names)

    def knows_any(self, *, looking: bool = True) -> bool:
        """Whether any block is refused, as far as is known here; `looking`: after a look at what others buried."""
        if looking:
            self._look()
        return bool(self._known)

    def known(self, names: Iterable[str]) -> set[str]:
        """Those of the blocks that are not to be served, as far as is known here."""
        return {name for name in names if name in self._known} if self._known else set()

    def bury(self, names: Sequence[str], until: int) -> None:
        """Have them refused until then (ns since the epoch), by everybody."""
        self.collect()
        for start in range(0, len(names), AT_ONCE):
            some = names[start : start + AT_ONCE]
            document = f"{-(-until // 1_000_000_000):x}-{secrets.token_hex(8)}"
            self._shelf.write(document, "\n".join(some).encode())
            with self._lock:
                self._read.add(document)
                self._known.add(some, until)

    def ended(self) -> list[str]:
        """The documents that have."""
        now = now_ns() // 1_000_000_000
        return [name for name in self._shelf.names() if (until := _until(name)) is not None and until < now]

    def collect(self) -> list[str]:
        """Remove the documents that have ended; which."""
        ended = self.ended()
        if ended:
            self._shelf.remove(ended)
        return ended

    def _look(self, *, anew: bool = False) -> None:
        due = anew or self._looked is None or steady_s() - self._looked >= self.seen_s
        # Others wait for the first look alone.
        if not due or not self._lock.acquire(blocking=anew or self._looked is None):
            return
        try:
            if not anew and self._looked is not None and steady_s() - self._looked < self.seen_s:
                return
            looking = steady_s()
            now = now_ns() // 1_000_000_000
            there = {name: until for name in self._shelf.names() if (until := _until(name)) is not None}
            for name, until in there.items():
                if name not in self._read and until >= now and (text := self._shelf.read(name)) is not None:
                    self._known.add(text.decode(errors="replace").splitlines(), until * 1_000_000_000)
            self._read = set(there)
            self._looked = looking
        finally:
            self._lock.release()


def _until(name: str) -> int | None:
    """Until when the blocks of a document are refused, in seconds since the epoch; None for what is no document."""
    until, _, token = name.partition("-")
    try:
        int(token, 16)
        return int(until, 16)
    except ValueError:
        return None
