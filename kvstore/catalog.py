"""What a local tier knows of its blocks: sizes, ages, chains, marks, totals, and what is in flight.

`file://` keeps its catalogue beside the blocks; `lmdb://` keeps it in the same environment as their bytes. The
operations here are parts of a transaction; the backends compose them (plan and find in a `Snapshot`; reserve, publish,
evict in a `Change`), so that capacity, order and totals are exact over processes and crashes.

A write transaction is `kvstore.change`, a read transaction `kvstore.snapshot`. What stands in which database, byte by
byte: `kvstore.records`.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import lmdb

from kvstore.change import SETTLED_ALONG, Change
from kvstore.environment import Environment
from kvstore.errors import (
    CapacityMismatchError,
    NotAStoreError,
    StoreFullError,
    StoreNotFoundError,
    TierUnavailable,
)
from kvstore.marking import marked
from kvstore.marks import PINNABLE
from kvstore.records import (
    NO_CAPACITY,
    Entry,
    Intent,
    Totals,
    Victim,
    address_of,
    addresses_of,
)
from kvstore.retention import Retention, now_ns
from kvstore.snapshot import Snapshot
from kvstore.turns import IN_PASSING_S, PATIENCE_S
from kvstore.versions import FORMAT_VERSION, check_version

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from pathlib import Path

    from kvstore.growth import Growth
    from kvstore.marks import Mark, MarkOutcome
    from kvstore.presence import Presence

__all__ = [
    "DATABASES",
    "NO_CAPACITY",
    "SETTLE_DUE_UNREAD",
    "Catalog",
    "Change",
    "Entry",
    "Intent",
    "Snapshot",
    "Totals",
    "Victim",
    "address_of",
    "addresses_of",
    "stored_capacity",
]

T = TypeVar("T")

Note: TypeAlias = "tuple[bytes, int, int]"
"""The address of a block, when it was used (ns since the epoch), and how often it was read."""

DATABASES = ("meta", "age", "marks", "intents", "namespaces", "info", "tombs")
"""The named databases that `Environment.open` must be given (a backend may add its own)."""

SETTLE_DUE = 256
"""Notes after which `Catalog.note` asks for a `settle`; so many go into one transaction of it."""

SETTLE_DUE_UNREAD = 1 << 14
"""The same where nobody goes by the order of use: a block that is used again meanwhile is written down once."""

SETTLE_AGAIN_S = 1.0
"""For how long nobody settles in passing after that failed: others have the write lock, or the disk is full."""

MOST_NOTES = 1 << 16
"""Notes kept while they cannot be settled, some 10 MB of them; those that came first are forgotten."""

MARKED_AT_ONCE = 256
"""Blocks marked in one transaction: some 5 LMDB calls each, while every other writer waits."""


class Catalog:
    """The catalogue in an open environment. Thread-safe.

    What was used is noted in memory (`note`) and settled a few at a time within the next write transactions and at
    `settle`; a process that dies loses at most those notes, and a commit that fails loses none.
    """

    def __init__(self, environment: Environment, retention: Retention | None = None) -> None:
        self.environment = environment
        self.growth: Growth | None = None
        """What says whether the environment may grow, where it has to be asked."""
        self.retention = retention or Retention()
        """How long this opener keeps blocks: `Snapshot.alive` and `expired` go by it."""
        self.settle_due = SETTLE_DUE
        """After how many notes `note` asks for a `settle`."""
        self.patrolled = b""
        """Up to where `Snapshot.expired` has looked for old blocks."""
        self._notes: dict[bytes, tuple[int, int]] = {}
        self._noted_since = 0
        self._lock = threading.Lock()
        self._settling = threading.Lock()
        self._settle_from = 0.0

    def prepare(self, capacity: int | None, *, alone: bool) -> int | None:
        """Check the format, agree on the cap; the cap in force. Call it once, in `Presence.opening`.

        Whoever is alone may change the cap (and must then evict down to it); everybody else brings the same or none
        at all: `capacity=None` accepts what is there. Raises `NewerFormatError`, `OlderFormatError`,
        `CapacityMismatchError`, and `StoreFullError` for a cap that leaves too little beside what is pinned. On a
        read-only environment nothing is written.
        """
        if self.environment.readonly:
            with self.environment.read() as txn:
                return _agreed(self.environment, txn, capacity, alone=False)[1].capacity
        with self.environment.write() as txn:
            fresh, totals = _agreed(self.environment, txn, capacity, alone=alone)
            info = self.environment.databases["info"]
            if fresh:
                txn.put(b"format", FORMAT_VERSION.to_bytes(4, "little"), db=info)
            stored = txn.get(b"totals", db=info)
            if stored is None or bytes(stored) != totals.packed():  # on a full disk not even this may be written
                txn.put(b"totals", totals.packed(), db=info)
        return totals.capacity

    @contextmanager
    def read(self) -> Generator[Snapshot]:
        """A consistent view, without waiting for anybody."""
        with self.environment.read() as txn:
            yield Snapshot(txn, self)

    @contextmanager
    def write(self, patience_s: float = PATIENCE_S, *, settled: int = SETTLED_ALONG) -> Generator[Change]:
        """The write transaction, as `Environment.write`; a few notes are settled at its end."""
        taken: list[Note] = []
        most = 0 if self.is_held_up() else settled
        try:
            with self.environment.write(patience_s) as txn:
                change = Change(txn, self)
                yield change
                taken = self._take(most)
                change.use(taken)
                change.finish()
            taken = []
        finally:
            self._put_back(taken)

    def is_held_up(self) -> bool:
        """Whether nothing is to be stored or noted, for the environment would grow, and no end to that is in sight."""
        return self.growth is not None and self.growth.is_held_up()

    @property
    def is_held_up_for_long(self) -> bool:
        """Whether it was found to be so a while ago already: not to be waited for."""
        return self.growth is not None and self.growth.lasts

    def note(self, addresses: Iterable[bytes], *, hits: int = 1) -> bool:
        """These blocks were used now (`hits=0`: touched, not read); of several the last is the oldest, so that the end
        of a prefix goes before its beginning. True when so many notes wait, or so long, that the caller should `settle`
        from a thread that may wait for the write lock.
        """
        now, due = now_ns(), self.retention.note_of_use_due_ns()
        with self._lock:
            if not self._notes:
                self._noted_since = now
            for index, address in enumerate(addresses):
                _, before = self._notes.get(address, (0, 0))
                self._notes[address] = (now - index, before + hits)
            self._forget()
            return len(self._notes) >= self.settle_due or now - self._noted_since >= due

    def noted(self, address: bytes) -> int:
        """When this process last used a block, if that is not settled yet; else 0."""
        return self._notes.get(address, (0, 0))[0]

    def mark(self, addresses: Sequence[bytes], mark: Mark) -> list[MarkOutcome]:
        """Add a mark to each block. Nothing is written, and nobody waited for, where there is nothing to add."""
        return _in_parts(addresses, lambda some: self._marked(some, mark))

    def _marked(self, addresses: Sequence[bytes], mark: Mark) -> list[MarkOutcome]:
        with self.read() as snapshot:
            outcomes, changed = marked(snapshot.find(addresses), mark, snapshot.totals().pinnable)
        if changed:
            with self.write() as change:
                return change.mark(addresses, mark)
        return outcomes

    def unmark(self, addresses: Sequence[bytes], mark: Mark) -> list[bool]:
        """Take back what `mark` stands for from each block; True for each that had some of it."""
        return _in_parts(addresses, lambda some: self._unmarked(some, mark))

    def _unmarked(self, addresses: Sequence[bytes], mark: Mark) -> list[bool]:
        with self.write() as change:
            return change.unmark(addresses, mark)

    def ended_tombstones(self, *, remove: bool = False) -> int:
        """How many have ended, and are collected by and by; `remove` collects them now."""
        with self.read() as snapshot:
            ended = snapshot.tombs.ended()
        for _ in range(0, ended if remove else 0, MARKED_AT_ONCE):
            with self.write() as change:
                change.tombs.collect(MARKED_AT_ONCE)
        return ended

    def settle(self, patience_s: float = PATIENCE_S, *, fewer_than: int = 1) -> None:
        """Write down every note, in transactions of bounded length, or some until `fewer_than` wait; where there are
        any, those of one transaction.
        """
        is_first = True
        while len(self._notes) >= (1 if is_first else fewer_than) and not self.is_held_up():
            with self.write(patience_s, settled=SETTLE_DUE):
                is_first = False

    def settle_in_passing(self) -> None:
        """`settle`, for who has something better to do: a transaction of it, or until fewer notes than are due wait; as
        far as others that write, and the device, let it. One thread at a time tries, and after a failure none for
        `SETTLE_AGAIN_S`, so that few loads wait.
        """
        if time.monotonic() < self._settle_from or not self._settling.acquire(blocking=False):
            return
        try:
            self.settle(IN_PASSING_S, fewer_than=self.settle_due)
        except (OSError, lmdb.Error):
            self._settle_from = time.monotonic() + SETTLE_AGAIN_S
        finally:
            self._settling.release()

    def close(self, presence: Presence, *, last: bool) -> None:
        """Close the environment, in the body of `Presence.closing`. The `last` user brings it to disk once nobody is
        inside any more, and has `presence` remember what it is like then. Raises `TierUnavailable` where a call does
        not end: nobody is to take for clean what it may still write.
        """
        environment = self.environment
        if environment.damaged:
            presence.distrust()
        if not environment.close(sync=last) and last:
            raise TierUnavailable(f"{environment.directory}: a call in it does not end, and it is not left clean")
        if last:
            presence.seal(environment.directory / "data.mdb")

    def _take(self, most: int) -> list[Note]:
        with self._lock:
            addresses = [address for address, _ in zip(self._notes, range(most), strict=False)]
            return [(address, *self._notes.pop(address)) for address in addresses]

    def _put_back(self, notes: Sequence[Note]) -> None:
        """What was taken for a transaction that was not committed is noted as before."""
        with self._lock:
            for address, used, hits in notes:
                later, more = self._notes.get(address, (0, 0))
                self._notes[address] = (max(used, later), hits + more)
            self._forget()

    def _forget(self) -> None:
        """Keep notes bounded, where nothing can be settled for long. Under the lock."""
        while len(self._notes) > MOST_NOTES:
            del self._notes[next(iter(self._notes))]


def _in_parts(addresses: Sequence[bytes], act: Callable[[Sequence[bytes]], list[T]]) -> list[T]:
    """`act` on a bounded number of addresses at a time."""
    starts = range(0, len(addresses), MARKED_AT_ONCE)
    return [outcome for start in starts for outcome in act(addresses[start : start + MARKED_AT_ONCE])]


def stored_capacity(directory: Path) -> int | None:
    """The cap of the tier whose catalogue is in `directory`: bytes, `NO_CAPACITY`, or None where there is no catalogue.

    Changes nothing, so it comes before a writable opening, under the gate. Raises `NewerFormatError`,
    `OlderFormatError`, and `NotAStoreError` if the environment there is something else's.
    """
    try:
        environment = Environment.open(directory, DATABASES, readonly=True)
    except StoreNotFoundError:
        return None
    try:
        if not environment.databases:
            with environment.read() as txn:
                if txn.stat()["entries"]:
                    raise NotAStoreError(f"{directory} holds an LMDB environment that kvstore did not write")
            return None
        if "info" not in environment.databases:
            raise NotAStoreError(f"{directory} holds an LMDB environment that kvstore did not write")
        with environment.read() as txn:
            fresh, totals = _agreed(environment, txn, None, alone=False)
            return None if fresh else totals.capacity or NO_CAPACITY
    finally:
        environment.close()


def _agreed(
    environment: Environment, txn: lmdb.Transaction[memoryview], capacity: int | None, *, alone: bool
) -> tuple[bool, Totals]:
    """Whether the catalogue is new, and its totals with the cap that is to be in force."""
    info = environment.databases["info"]
    version, totals = txn.get(b"format", db=info), txn.get(b"totals", db=info)
    if version is None or totals is None:
        return True, Totals(capacity, 0, 0, 0, 0)
    remedy = "remove this directory, or move it away; it is a cache, and is filled anew"
    check_version(int.from_bytes(version, "little"), str(environment.directory), remedy)
    current = Totals.unpacked(totals)
    if capacity is None or capacity == current.capacity:
        return False, current
    if not alone:
        why = "which a read-only opening does not change" if environment.readonly else "which other users rely on now"
        raise CapacityMismatchError(
            f"{environment.directory} has capacity={current.capacity or 'none'}, {why};"
            f" capacity={capacity} was asked for: give the same or leave it out; to change it, close the tier"
            " everywhere and open it for writing with the new one"
        )
    if capacity < PINNABLE * current.pinned:
        raise StoreFullError(
            f"{environment.directory}: {current.pinned} bytes are pinned there, and of a capacity of {capacity} no more"
            f" than one part in {PINNABLE} may be: give at least {PINNABLE * current.pinned}, or take back pins first"
        )
    return False, replace(current, capacity=capacity)
