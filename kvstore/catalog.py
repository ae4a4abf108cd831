"""What a local tier knows of its blocks: sizes, ages, chains, marks, totals, and what is in flight.

`file://` keeps its catalogue beside the blocks; `lmdb://` keeps it in the same environment as their bytes. The
operations here are parts of a transaction; the backends compose them (plan and find in a `Snapshot`; reserve, publish,
evict in a `Change`), so that capacity, order and totals are exact over processes and crashes.

What stands in which database, byte by byte: `kvstore.records`.
"""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import lmdb

from kvstore.environment import Environment
from kvstore.errors import (
    CapacityMismatchError,
    NewerFormatError,
    NotAStoreError,
    StoreFullError,
    StoreNotFoundError,
)
from kvstore.marking import marked, unmarked
from kvstore.marks import PINNABLE
from kvstore.records import (
    FORMAT_VERSION,
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

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from pathlib import Path

    from kvstore.marks import Mark, MarkOutcome
    from kvstore.namespace import Namespace

__all__ = [
    "DATABASES",
    "FORMAT_VERSION",
    "NO_CAPACITY",
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

DATABASES = ("meta", "age", "marks", "intents", "namespaces", "info", "tombs")
"""The named databases that `Environment.open` must be given (a backend may add its own)."""

SETTLED_ALONG = 32
"""Notes settled at the end of a write transaction that somebody wanted anyway (4 LMDB calls each)."""

SETTLE_DUE = 256
"""Notes after which `Catalog.note` asks for a `settle`."""

MARKED_AT_ONCE = 256
"""Blocks marked in one transaction: some 5 LMDB calls each, while every other writer waits."""


class Change(Snapshot):
    """The catalogue inside a write transaction: what is changed here appears at once for everybody, or not at all.

    Nothing is taken from a plan on trust: each method checks again what it relies on. The totals follow by
    themselves.
    """

    def __init__(self, txn: lmdb.Transaction[memoryview], catalog: Catalog) -> None:
        """For `Catalog.write`."""
        super().__init__(txn, catalog)
        self._before = self._totals = super().totals()
        self._added: dict[str, int] = {}

    def totals(self) -> Totals:
        """The sums, with what was changed so far."""
        if self._added:
            now = {name: getattr(self._totals, name) + added for name, added in self._added.items()}
            self._totals = replace(self._totals, **now)
            self._added.clear()
        return self._totals

    def publish(self, entries: Sequence[Entry]) -> list[bool]:
        """Record blocks. False where the address has an entry already, which is left alone (the race was lost), or is
        buried (`buried` says which).

        Of equal addresses within `entries` the first wins.
        """
        taken = {
            bytes(key)
            for key in self.txn.cursor(self._meta).getmulti([entry.address for entry in entries], values=False)
        }
        if self.tombs:
            taken |= self.tombs.buried([entry.address for entry in entries])
            self.tombs.collect(SETTLED_ALONG)
        fresh: list[Entry] = []
        won: list[bool] = []
        for entry in entries:
            won.append(entry.address not in taken)
            if won[-1]:
                taken.add(entry.address)
                fresh.append(entry)
        self._put(fresh)
        self._index(fresh)
        self._account(fresh)
        return won

    def evict(self, victims: Iterable[Victim]) -> list[Victim]:
        """Take out each victim that nobody used, pinned, removed or replaced since it was read; returns those taken
        out.
        """
        gone = [victim for victim in victims if self.txn.delete(victim.name, db=self._age)]
        self._unindex(self.find([victim.address for victim in gone]))
        for victim in gone:
            self.txn.delete(victim.address, db=self._meta)
        self._add(blocks=-len(gone), used=-sum(victim.size for victim in gone))
        return gone

    def discard(self, addresses: Iterable[bytes], generation: int | None = None) -> list[Entry]:
        """Take out blocks however young (only a given `generation`, if given); returns the entries taken out."""
        gone: list[Entry] = []
        for address in addresses:
            value = self.txn.get(address, db=self._meta)
            entry = Entry.unpacked(address, value) if value is not None else None
            if entry is not None and generation in (None, entry.generation):
                self.txn.delete(entry.age()[0], db=self._age)
                self.txn.delete(address, db=self._meta)
                gone.append(entry)
        self._unindex(gone)
        self._account(gone, -1)
        return gone

    def mark(self, addresses: Sequence[bytes], mark: Mark) -> list[MarkOutcome]:
        """Add a mark to each block, as far as it may be pinned."""
        outcomes, changed = marked(self.find(addresses), mark, self.totals().pinnable)
        self._change(changed)
        return outcomes

    def unmark(self, addresses: Sequence[bytes], mark: Mark) -> list[bool]:
        """Take back what `mark` stands for; True for each block that had some of it."""
        outcomes, changed = unmarked(self.find(addresses), mark)
        self._change(changed)
        return outcomes

    def generations(self, count: int) -> int:
        """`count` new generation numbers, never given out before; the first of them (>= 1)."""
        first = self.totals().next_generation
        self._add(next_generation=count)
        return first

    def reserve(self, lease: bytes, reserved: int, payload: bytes) -> Intent:
        """Record an intent and count its bytes as reserved; whether they fit (`totals().room`) the caller checks."""
        intent = Intent(lease, self.totals().next_intent, reserved, payload)
        self.txn.put(intent.name, intent.packed(), db=self._intents)
        self._add(reserved=reserved, next_intent=1)
        return intent

    def amend(self, intent: Intent, reserved: int, payload: bytes) -> Intent:
        """Replace an intent by one with the same number and other contents."""
        self.release(intent)
        amended = replace(intent, reserved=reserved, payload=payload)
        self.txn.put(amended.name, amended.packed(), db=self._intents)
        self._add(reserved=reserved)
        return amended

    def release(self, intent: Intent) -> None:
        """Drop an intent and its reservation. One that is gone already is no error and changes nothing."""
        value = self.txn.get(intent.name, db=self._intents)
        if value is not None:
            reserved = Intent.unpacked(intent.name, value).reserved
            self.txn.delete(intent.name, db=self._intents)
            self._add(reserved=-reserved)

    def set_overhead(self, nbytes: int) -> None:
        """Say how much is kept aside for what is neither `used` nor `reserved` (directories, the catalogue itself)."""
        self._totals = replace(self.totals(), overhead=nbytes)

    def add_namespace(self, namespace: Namespace) -> None:
        """Record the manifest, unless it is there and sound."""
        manifest = json.dumps(namespace.to_manifest(), sort_keys=True, separators=(",", ":")).encode("ascii")
        known = self.txn.get(namespace.fingerprint, db=self._namespaces)
        if known is None or bytes(known) != manifest:
            self.txn.put(namespace.fingerprint, manifest, db=self._namespaces)

    def use(self, notes: Iterable[tuple[bytes, int, int]]) -> None:
        """Make blocks younger: (address, last used, hits to add) each; unknown ones are passed over."""
        noted = {address: (last_used, hits) for address, last_used, hits in notes}
        used: list[Entry] = []
        for entry in filter(None, self.find(list(noted))):
            last_used, hits = noted[entry.address]
            self.txn.delete(entry.age()[0], db=self._age)
            hits = min(entry.hits + hits, 0xFFFFFFFF)
            used.append(replace(entry, last_used=max(entry.last_used, last_used), hits=hits))
        self._put(used)

    def redate(self, victims: Iterable[Victim]) -> None:
        """Set the times of blocks that are ahead of the clock (`Snapshot.ahead`) to now."""
        now = now_ns()
        ahead = [victim for victim in victims if self.txn.delete(victim.name, db=self._age)]
        entries = filter(None, self.find([victim.address for victim in ahead]))
        self._put([replace(entry, last_used=now, created=min(entry.created, now)) for entry in entries])

    def drop_namespace(self, fingerprint: bytes) -> bool:
        """Forget a namespace's manifest, unless it has blocks; whether it is forgotten."""
        if next(self.scan(fingerprint), None) is not None:
            return False
        self.txn.delete(fingerprint, db=self._namespaces)
        return True

    def clear(self) -> None:
        """Forget every block and intent and zero the sums; format, cap, namespaces, tombstones and counters stay."""
        for database in (self._meta, self._age, self._marks, self._intents):
            self.txn.drop(database, delete=False)
        self._totals = replace(self.totals(), blocks=0, used=0, reserved=0, pinned=0)

    def finish(self) -> None:
        """Write the totals if they changed. `Catalog.write` calls it."""
        totals = self.totals()
        if totals != self._before:
            self.txn.put(b"totals", totals.packed(), db=self._info)

    def _put(self, entries: Sequence[Entry]) -> None:
        if entries:
            self.txn.cursor(self._meta).putmulti([(entry.address, entry.packed()) for entry in entries])
            self.txn.cursor(self._age).putmulti([entry.age() for entry in entries if not entry.pinned])

    def _change(self, changed: Sequence[tuple[Entry, Entry]]) -> None:
        """Put an entry's marks in place of what they were."""
        before, after = [old for old, _ in changed], [new for _, new in changed]
        self._unindex(before)
        self._account(before, -1)
        for entry in after:
            if entry.pinned:
                self.txn.delete(entry.age()[0], db=self._age)
        self._put(after)
        self._index(after)
        self._account(after)

    def _index(self, entries: Iterable[Entry]) -> None:
        keys = [key for entry in entries if entry.marks for key in entry.index()]
        if keys:
            self.txn.cursor(self._marks).putmulti([(key, b"") for key in keys])

    def _unindex(self, entries: Iterable[Entry | None]) -> None:
        for entry in entries:
            if entry is not None and entry.marks:
                for key in entry.index():
                    self.txn.delete(key, db=self._marks)

    def _account(self, entries: Sequence[Entry], sign: int = 1) -> None:
        """Count entries in, or out (`sign=-1`)."""
        used, pinned = sum(entry.size for entry in entries), sum(entry.size for entry in entries if entry.pinned)
        self._add(blocks=sign * len(entries), used=sign * used, pinned=sign * pinned)

    def _add(self, **differences: int) -> None:
        for name, difference in differences.items():
            self._added[name] = self._added.get(name, 0) + difference


class Catalog:
    """The catalogue in an open environment. Thread-safe.

    What was used is noted in memory (`note`) and settled a few at a time within the next write transactions and at
    `settle`; a process that dies loses at most those notes.
    """

    def __init__(self, environment: Environment, retention: Retention | None = None) -> None:
        self.environment = environment
        self.retention = retention or Retention()
        """How long this opener keeps blocks: `Snapshot.alive` and `expired` go by it."""
        self.patrolled = b""
        """Up to where `Snapshot.expired` has looked for old blocks."""
        self._notes: dict[bytes, tuple[int, int]] = {}
        self._noted_since = 0
        self._lock = threading.Lock()

    def prepare(self, capacity: int | None, *, alone: bool) -> int | None:
        """Check the format, agree on the cap; the cap in force. Call it once, in `Presence.opening`.

        Whoever is alone may change the cap (and must then evict down to it); everybody else brings the same or none
        at all: `capacity=None` accepts what is there. Raises `NewerFormatError`, `CapacityMismatchError`, and
        `StoreFullError` for a cap that leaves too little beside what is pinned. On a read-only environment nothing is
        written.
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
    def write(self, patience_s: float = PATIENCE_S) -> Generator[Change]:
        """The write transaction, as `Environment.write`; a few notes are settled at its end."""
        with self.environment.write(patience_s) as txn:
            change = Change(txn, self)
            yield change
            change.use(self._take(SETTLED_ALONG))
            change.finish()

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
            return len(self._notes) >= SETTLE_DUE or (due is not None and now - self._noted_since >= due)

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

    def settle(self, patience_s: float = PATIENCE_S) -> None:
        """Write down every note, in transactions of bounded length. At close, and when `note` says so."""
        while self._notes:
            with self.write(patience_s) as change:
                change.use(self._take(8 * SETTLED_ALONG))

    def settle_in_passing(self) -> None:
        """`settle`, for who has something better to do: as far as others that write, and the device, let it."""
        with suppress(OSError, lmdb.Error):
            self.settle(IN_PASSING_S)

    def _take(self, most: int) -> list[tuple[bytes, int, int]]:
        with self._lock:
            addresses = [address for address, _ in zip(self._notes, range(most), strict=False)]
            return [(address, *self._notes.pop(address)) for address in addresses]


def _in_parts(addresses: Sequence[bytes], act: Callable[[Sequence[bytes]], list[T]]) -> list[T]:
    """`act` on a bounded number of addresses at a time."""
    starts = range(0, len(addresses), MARKED_AT_ONCE)
    return [outcome for start in starts for outcome in act(addresses[start : start + MARKED_AT_ONCE])]


def stored_capacity(directory: Path) -> int | None:
    """The cap of the tier whose catalogue is in `directory`: bytes, `NO_CAPACITY`, or None where there is no catalogue.

    Changes nothing, so it comes before a writable opening, under the gate. Raises `NewerFormatError`, and
    `NotAStoreError` if the environment there is something else's.
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
    found = int.from_bytes(version, "little")
    if found > FORMAT_VERSION:
        raise NewerFormatError(
            f"{environment.directory} has format version {found}; this kvstore knows versions up to {FORMAT_VERSION}:"
            " upgrade kvstore-tiers, or use another directory"
        )
    current = Totals.unpacked(totals)
    if capacity is None or capacity == current.capacity:
        return False, current
    if not alone:
        raise CapacityMismatchError(
            f"{environment.directory} has capacity={current.capacity or 'none'}, which other users rely on now;"
            f" capacity={capacity} was asked for: give the same or leave it out; to change it, close the tier"
            " everywhere and open it with the new one"
        )
    if capacity < PINNABLE * current.pinned:
        raise StoreFullError(
            f"{environment.directory}: {current.pinned} bytes are pinned there, and of a capacity of {capacity} no more"
            f" than one part in {PINNABLE} may be: give at least {PINNABLE * current.pinned}, or take back pins first"
        )
    return False, replace(current, capacity=capacity)
