"""What a local tier knows of its blocks: sizes, ages, chains, totals, and what is in flight.

`file://` keeps its catalogue beside the blocks; `lmdb://` keeps it in the same environment as their bytes. The
operations here are parts of a transaction; the backends compose them (plan and find in a `Snapshot`; reserve, publish,
evict in a `Change`), so that capacity, order and totals are exact over processes and crashes.

What stands in which database, byte by byte: `kvstore.records`.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.environment import Environment
from kvstore.errors import (
    CapacityMismatchError,
    NewerFormatError,
    NotAStoreError,
    StoreDamagedError,
    StoreNotFoundError,
)
from kvstore.namespace import Namespace
from kvstore.records import FORMAT_VERSION, NO_CAPACITY, Entry, Intent, Totals, Victim, address_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence
    from pathlib import Path

    import lmdb

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
    "stored_capacity",
]

DATABASES = ("meta", "age", "intents", "namespaces", "info")
"""The named databases that `Environment.open` must be given (a backend may add its own)."""

SETTLED_ALONG = 32
"""Notes settled at the end of a write transaction that somebody wanted anyway (4 LMDB calls each)."""

SETTLE_DUE = 256
"""Notes after which `Catalog.note` asks for a `settle`."""


class Snapshot:
    """The catalogue as of one moment, in a read transaction. For one thread; use it within its `with` and briefly."""

    def __init__(self, txn: lmdb.Transaction[memoryview], catalog: Catalog) -> None:
        """For `Catalog.read` and `Catalog.write`."""
        self.txn = txn
        self._catalog = catalog
        databases = catalog.environment.databases
        self._meta, self._age, self._info = databases["meta"], databases["age"], databases["info"]
        self._intents, self._namespaces = databases["intents"], databases["namespaces"]

    def totals(self) -> Totals:
        """The sums; O(1)."""
        value = self.txn.get(b"totals", db=self._info)
        if value is None:
            raise StoreDamagedError(f"{self._catalog.environment.directory}: the catalogue has no totals")
        return Totals.unpacked(value)

    def find(self, addresses: Sequence[bytes]) -> list[Entry | None]:
        """The entry of each address, None where there is none."""
        found = {
            (address := bytes(key)): Entry.unpacked(address, value)
            for key, value in self.txn.cursor(self._meta).getmulti(addresses)
        }
        return [found.get(address) for address in addresses]

    def contains(self, addresses: Sequence[bytes]) -> list[bool]:
        """Whether each address has an entry. The cheapest question."""
        found = {bytes(key) for key in self.txn.cursor(self._meta).getmulti(addresses, values=False)}
        return [address in found for address in addresses]

    def oldest(self) -> Iterator[Victim]:
        """All blocks, least recently used first; what this process used since (`Catalog.note`) comes at the end."""
        young: list[Victim] = []
        for key, value in self.txn.cursor(self._age).iternext():
            victim = Victim.unpacked(key, value)
            if self._catalog.noted(victim.address):
                young.append(victim)
            else:
                yield victim
        yield from sorted(young, key=lambda victim: self._catalog.noted(victim.address))

    def scan(self, fingerprint: bytes, after: bytes = b"") -> Iterator[Entry]:
        """Every entry of one namespace in address order, from the first one behind the address `after`."""
        cursor = self.txn.cursor(self._meta)
        if cursor.set_range(max(fingerprint, after)):
            for key, value in cursor.iternext():
                address = bytes(key)
                if not address.startswith(fingerprint):
                    return
                if address != after:
                    yield Entry.unpacked(address, value)

    def intents(self, lease: bytes = b"") -> list[Intent]:
        """The intents of one lease, or of all."""
        found: list[Intent] = []
        cursor = self.txn.cursor(self._intents)
        for key, value in cursor.iternext() if cursor.set_range(lease or b"\0") else ():
            intent = Intent.unpacked(key, value)
            if lease and intent.lease != lease:
                break
            found.append(intent)
        return found

    def namespaces(self) -> list[Namespace]:
        """Those whose manifests were recorded. One that cannot be read is passed over (see `unreadable`)."""
        return [namespace for _, namespace in self._manifests() if namespace is not None]

    def unreadable(self) -> list[bytes]:
        """The fingerprints whose recorded manifests cannot be read, or are another namespace's."""
        return [fingerprint for fingerprint, namespace in self._manifests() if namespace is None]

    def _manifests(self) -> Iterator[tuple[bytes, Namespace | None]]:
        for key, value in self.txn.cursor(self._namespaces).iternext():
            fingerprint, namespace = bytes(key), None
            with suppress(AttributeError, KeyError, TypeError, ValueError):
                namespace = Namespace.from_manifest(json.loads(bytes(value)))
            yield fingerprint, namespace if namespace and namespace.fingerprint == fingerprint else None


class Change(Snapshot):
    """The catalogue inside a write transaction: what is changed here appears at once for everybody, or not at all.

    Nothing is taken from a plan on trust: each method checks again what it relies on. The totals follow by
    themselves.
    """

    def __init__(self, txn: lmdb.Transaction[memoryview], catalog: Catalog) -> None:
        """For `Catalog.write`."""
        super().__init__(txn, catalog)
        self._before = self._totals = super().totals()

    def totals(self) -> Totals:
        """The sums, with what was changed so far."""
        return self._totals

    def publish(self, entries: Sequence[Entry]) -> list[bool]:
        """Record blocks. False where the address has an entry already, which is left alone (the race was lost).

        Of equal addresses within `entries` the first wins.
        """
        taken = {
            bytes(key)
            for key in self.txn.cursor(self._meta).getmulti([entry.address for entry in entries], values=False)
        }
        fresh: list[Entry] = []
        won: list[bool] = []
        for entry in entries:
            won.append(entry.address not in taken)
            if won[-1]:
                taken.add(entry.address)
                fresh.append(entry)
        self._put(fresh)
        self._add(blocks=len(fresh), used=sum(entry.size for entry in fresh))
        return won

    def evict(self, victims: Iterable[Victim]) -> list[Victim]:
        """Take out each victim that nobody used, removed or replaced since it was read; returns those taken out."""
        gone = [
            victim
            for victim in victims
            if self.txn.delete(victim.name, db=self._age) and self.txn.delete(victim.address, db=self._meta)
        ]
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
        self._add(blocks=-len(gone), used=-sum(entry.size for entry in gone))
        return gone

    def generations(self, count: int) -> int:
        """`count` new generation numbers, never given out before; the first of them (>= 1)."""
        first = self._totals.next_generation
        self._add(next_generation=count)
        return first

    def reserve(self, lease: bytes, reserved: int, payload: bytes) -> Intent:
        """Record an intent and count its bytes as reserved; whether they fit (`totals().room`) the caller checks."""
        intent = Intent(lease, self._totals.next_intent, reserved, payload)
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
        self._totals = replace(self._totals, overhead=nbytes)

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

    def clear(self) -> None:
        """Forget every block and intent and zero the sums; format, cap, namespaces and counters stay."""
        for database in (self._meta, self._age, self._intents):
            self.txn.drop(database, delete=False)
        self._totals = replace(self._totals, blocks=0, used=0, reserved=0)

    def finish(self) -> None:
        """Write the totals if they changed. `Catalog.write` calls it."""
        if self._totals != self._before:
            self.txn.put(b"totals", self._totals.packed(), db=self._info)

    def _put(self, entries: Sequence[Entry]) -> None:
        if entries:
            self.txn.cursor(self._meta).putmulti([(entry.address, entry.packed()) for entry in entries])
            self.txn.cursor(self._age).putmulti([entry.age() for entry in entries])

    def _add(self, **differences: int) -> None:
        now = {name: getattr(self._totals, name) + difference for name, difference in differences.items()}
        self._totals = replace(self._totals, **now)


class Catalog:
    """The catalogue in an open environment. Thread-safe.

    What was used is noted in memory (`note`) and settled a few at a time within the next write transactions and at
    `settle`; a process that dies loses at most those notes.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._notes: dict[bytes, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def prepare(self, capacity: int | None, *, alone: bool) -> int | None:
        """Check the format, agree on the cap; the cap in force. Call it once, in `Presence.opening`.

        Whoever is alone may change the cap (and must then evict down to it); everybody else brings the same or none
        at all: `capacity=None` accepts what is there. Raises `NewerFormatError`, `CapacityMismatchError`. On a
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
    def write(self) -> Generator[Change]:
        """The write transaction, as `Environment.write`; a few notes are settled at its end."""
        with self.environment.write() as txn:
            change = Change(txn, self)
            yield change
            change.use(self._take(SETTLED_ALONG))
            change.finish()

    def note(self, addresses: Iterable[bytes], *, hits: int = 1) -> bool:
        """These blocks were used now (`hits=0`: touched, not read); of several the last is the oldest, so that the end
        of a prefix goes before its beginning. True when so many notes wait that the caller should `settle` from a
        thread that may wait for the write lock.
        """
        now = time.time_ns()
        with self._lock:
            for index, address in enumerate(addresses):
                _, before = self._notes.get(address, (0, 0))
                self._notes[address] = (now - index, before + hits)
            return len(self._notes) >= SETTLE_DUE

    def noted(self, address: bytes) -> int:
        """When this process last used a block, if that is not settled yet; else 0."""
        return self._notes.get(address, (0, 0))[0]

    def settle(self) -> None:
        """Write down every note, in transactions of bounded length. At close, and when `note` says so."""
        while self._notes:
            with self.write() as change:
                change.use(self._take(8 * SETTLED_ALONG))

    def _take(self, most: int) -> list[tuple[bytes, int, int]]:
        with self._lock:
            addresses = [address for address, _ in zip(self._notes, range(most), strict=False)]
            return [(address, *self._notes.pop(address)) for address in addresses]


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
    return False, replace(current, capacity=capacity)
