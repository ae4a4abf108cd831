"""What a local tier knows of its blocks: sizes, ages, chains, totals, and what is in flight. Format version 0.

`file://` keeps its catalogue beside the blocks; `lmdb://` keeps it in the same environment as their bytes. The
operations here are parts of a transaction; the backends compose them (plan and find in a `Snapshot`; reserve, publish,
evict in a `Change`), so that capacity, order and totals are exact over processes and crashes.

**Address**: namespace fingerprint (16 bytes), KV-cache group (u16, big-endian), digest (16 to 64 bytes).

**Databases** (integers little-endian except in keys, where byte order is sort order; times in ns since the epoch;
fields follow each other without padding):

| database | key | value |
|---|---|---|
| `meta` | address | flags u16, parent's length u16, hits u32, size u64, generation u64, created u64, last used u64, position i64, parent |
| `age` | last used u64 big-endian, address | size u64, generation u64 |
| `intents` | lease (16 bytes), number u64 big-endian | reserved u64, then what the backend wrote |
| `namespaces` | fingerprint | the manifest as compact sorted ASCII JSON |
| `info` | `format` | version u32 |
| | `totals` | capacity u64 (0: none), blocks u64, used u64, reserved u64, overhead u64, next generation u64, next intent u64 |

`size` is what a block occupies as the device counts it. One `age` entry per `meta` entry, always, so that the front of
`age` is the next victim.
"""  # noqa: E501 - a table's row is a line

from __future__ import annotations

import json
import struct
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvstore.environment import Environment
from kvstore.errors import (
    CapacityMismatchError,
    NewerFormatError,
    NotAStoreError,
    StoreDamagedError,
    StoreNotFoundError,
)
from kvstore.namespace import FINGERPRINT_BYTES, Namespace
from kvstore.types import NO_PARENT, NO_POSITION, BlockInfo, BlockKey

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

FORMAT_VERSION = 0

DATABASES = ("meta", "age", "intents", "namespaces", "info")
"""The named databases that `Environment.open` must be given (a backend may add its own)."""

NO_CAPACITY = 0
"""How `info` says that the tier has no cap."""

SETTLED_ALONG = 32
"""Notes settled at the end of a write transaction that somebody wanted anyway (4 LMDB calls each)."""

SETTLE_DUE = 256
"""Notes after which `Catalog.note` asks for a `settle`."""

_META = struct.Struct("<HHIQQQQq")
_AGE = struct.Struct("<QQ")
_ORDER = struct.Struct(">Q")
_RESERVED = struct.Struct("<Q")
_FORMAT = struct.Struct("<I")
_TOTALS = struct.Struct("<7Q")
_GROUP = struct.Struct(">H")
_LEASE_BYTES = 16


def address_of(namespace: Namespace, key: BlockKey) -> bytes:
    """Where `key` stands in the catalogue: fingerprint, group, digest. 34 to 82 bytes."""
    return namespace.fingerprint + _GROUP.pack(key.group) + key.digest


@dataclass(frozen=True, slots=True)
class Entry:
    """All that the catalogue knows of one block. `size` in bytes as the device counts, times in ns since the epoch."""

    address: bytes
    size: int
    created: int
    last_used: int
    generation: int = 0
    """Which written copy of the block this is: a later one has a higher number. 0 where a backend has no need of it."""
    hits: int = 0
    position: int = NO_POSITION
    parent: bytes = NO_PARENT
    flags: int = 0
    """None defined in version 0; kept as found."""

    @property
    def key(self) -> BlockKey:
        """The block's key within its namespace."""
        (group,) = _GROUP.unpack_from(self.address, FINGERPRINT_BYTES)
        return BlockKey(self.address[FINGERPRINT_BYTES + 2 :], group)

    def info(self) -> BlockInfo:
        """As a store's `scan` reports it."""
        created, used = self.created / 1e9, self.last_used / 1e9
        return BlockInfo(self.key, self.size, created, used, self.hits, self.position, self.parent)

    def packed(self) -> bytes:
        """The value in `meta`."""
        head = (self.flags, len(self.parent), self.hits, self.size, self.generation, self.created, self.last_used)
        return _META.pack(*head, self.position) + self.parent

    @classmethod
    def unpacked(cls, address: bytes, value: memoryview | bytes) -> Entry:
        """The entry that `packed` made `value` of."""
        flags, length, hits, size, generation, created, used, position = _META.unpack_from(value)
        parent = bytes(value[_META.size : _META.size + length])
        return cls(address, size, created, used, generation, hits, position, parent, flags)

    def age(self) -> tuple[bytes, bytes]:
        """The item in `age`."""
        return _ORDER.pack(self.last_used) + self.address, _AGE.pack(self.size, self.generation)


@dataclass(frozen=True, slots=True)
class Victim:
    """A block as `age` has it: enough to evict it, if it is still as it was (see `Change.evict`)."""

    address: bytes
    last_used: int
    size: int
    generation: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the whole tier, exact within one transaction. Bytes as the device counts them."""

    capacity: int | None
    blocks: int
    used: int
    """Sum of `size` over all entries."""
    reserved: int
    """Sum of `reserved` over all intents."""
    overhead: int
    """What the backend said it keeps aside for everything else (`Change.set_overhead`)."""
    next_generation: int = 1
    next_intent: int = 0

    @property
    def room(self) -> int | None:
        """What may still be reserved: capacity less the rest. Negative when over the cap; None when there is none."""
        if self.capacity is None:
            return None
        return self.capacity - self.used - self.reserved - self.overhead

    def packed(self) -> bytes:
        """The value in `info`."""
        sums = (self.blocks, self.used, self.reserved, self.overhead, self.next_generation, self.next_intent)
        return _TOTALS.pack(self.capacity or NO_CAPACITY, *sums)

    @classmethod
    def unpacked(cls, value: memoryview | bytes) -> Totals:
        """The totals that `packed` made `value` of."""
        capacity, *sums = _TOTALS.unpack(value)
        return cls(capacity or None, *sums)


@dataclass(frozen=True, slots=True)
class Intent:
    """What a put or a removal in flight may leave behind if its process dies. `payload` is the backend's business."""

    lease: bytes
    number: int
    reserved: int
    payload: bytes

    @property
    def name(self) -> bytes:
        """Its key in `intents`."""
        return self.lease + _ORDER.pack(self.number)


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
            (last_used,) = _ORDER.unpack_from(key)
            victim = Victim(bytes(key[_ORDER.size :]), last_used, *_AGE.unpack(value))
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
            name = bytes(key)
            if not name.startswith(lease):
                break
            (number,), (reserved,) = _ORDER.unpack_from(name, _LEASE_BYTES), _RESERVED.unpack_from(value)
            found.append(Intent(name[:_LEASE_BYTES], number, reserved, bytes(value[_RESERVED.size :])))
        return found

    def namespaces(self) -> list[Namespace]:
        """Those whose manifests were recorded. One that cannot be read is passed over."""
        found: list[Namespace] = []
        for _, value in self.txn.cursor(self._namespaces).iternext():
            with suppress(KeyError, TypeError, ValueError):
                found.append(Namespace.from_manifest(json.loads(bytes(value))))
        return found


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
            if self.txn.delete(_ORDER.pack(victim.last_used) + victim.address, db=self._age)
            and self.txn.delete(victim.address, db=self._meta)
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
        self.txn.put(intent.name, _RESERVED.pack(reserved) + payload, db=self._intents)
        self._add(reserved=reserved, next_intent=1)
        return intent

    def amend(self, intent: Intent, reserved: int, payload: bytes) -> Intent:
        """Replace an intent by one with the same number and other contents."""
        self.release(intent)
        self.txn.put(intent.name, _RESERVED.pack(reserved) + payload, db=self._intents)
        self._add(reserved=reserved)
        return replace(intent, reserved=reserved, payload=payload)

    def release(self, intent: Intent) -> None:
        """Drop an intent and its reservation. One that is gone already is no error and changes nothing."""
        value = self.txn.get(intent.name, db=self._intents)
        if value is not None:
            (reserved,) = _RESERVED.unpack_from(value)
            self.txn.delete(intent.name, db=self._intents)
            self._add(reserved=-reserved)

    def set_overhead(self, nbytes: int) -> None:
        """Say how much is kept aside for what is neither `used` nor `reserved` (directories, the catalogue itself)."""
        self._totals = replace(self._totals, overhead=nbytes)

    def add_namespace(self, namespace: Namespace) -> None:
        """Record the manifest, unless it is there."""
        manifest = json.dumps(namespace.to_manifest(), sort_keys=True, separators=(",", ":")).encode("ascii")
        self.txn.put(namespace.fingerprint, manifest, overwrite=False, db=self._namespaces)

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
                txn.put(b"format", _FORMAT.pack(FORMAT_VERSION), db=info)
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
    (found,) = _FORMAT.unpack(version)
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
