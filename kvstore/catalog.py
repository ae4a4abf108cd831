"""What a local tier knows of its blocks: sizes, ages, chains, totals, and what is in flight. Format version 0.

`file://` keeps its catalogue beside the blocks; `lmdb://` keeps it in the same environment as their bytes. The
operations here are parts of a transaction; the backends compose them (plan and find in a `Snapshot`; reserve, publish,
evict in a `Change`), so that capacity, order and totals are exact over processes and crashes.

**Address**: namespace fingerprint (16 bytes), KV-cache group (u16, big-endian), digest (16 to 64 bytes).

**Databases** (integers little-endian except in keys, where byte order is sort order; times in ns since the epoch):

| database | key | value |
|---|---|---|
| `meta` | address | flags u16, parent length u16, hits u32, size u64, generation u64, created u64, last used u64, position i64, parent |
| `age` | last used u64 big-endian, address | size u64, generation u64 |
| `intents` | lease (16 bytes), number u64 big-endian | reserved u64, then whatever the backend wrote |
| `namespaces` | fingerprint | the manifest as compact sorted JSON |
| `info` | `format` | version u32 |
| | `capacity` | u64, 0 for none |
| | `totals` | blocks u64, used u64, reserved u64, overhead u64, next generation u64, next intent u64 |

`size` is what a block occupies as the device counts it. One `age` entry per `meta` entry, always, so that the front of
`age` is the next victim.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.types import NO_PARENT, NO_POSITION, BlockInfo, BlockKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import lmdb

    from kvstore.environment import Environment
    from kvstore.namespace import Namespace

__all__ = [
    "DATABASES",
    "FORMAT_VERSION",
    "Catalog",
    "Change",
    "Entry",
    "Intent",
    "Snapshot",
    "Totals",
    "Victim",
    "address_of",
]

FORMAT_VERSION = 0

DATABASES = ("meta", "age", "intents", "namespaces", "info")
"""The named databases that `Environment.open` must be given (a backend may add its own)."""


def address_of(namespace: Namespace, key: BlockKey) -> bytes:
    """Where `key` stands in the catalogue: fingerprint, group, digest. 34 to 82 bytes."""
    raise NotImplementedError


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
        raise NotImplementedError

    def info(self) -> BlockInfo:
        """As a store's `scan` reports it."""
        raise NotImplementedError


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

    blocks: int
    used: int
    """Sum of `size` over all entries."""
    reserved: int
    """Sum of `reserved` over all intents."""
    overhead: int
    """What the backend said it keeps aside for everything else (`Change.set_overhead`)."""
    capacity: int | None

    @property
    def room(self) -> int | None:
        """What may still be reserved: capacity less the rest. Negative when over the cap; None when there is none."""
        if self.capacity is None:
            return None
        return self.capacity - self.used - self.reserved - self.overhead


@dataclass(frozen=True, slots=True)
class Intent:
    """What a put or a removal in flight may leave behind if its process dies. `payload` is the backend's business."""

    lease: bytes
    number: int
    reserved: int
    payload: bytes


class Snapshot:
    """The catalogue as of one moment, in a read transaction. For one thread; use it within its `with` and briefly."""

    txn: lmdb.Transaction[memoryview]

    def totals(self) -> Totals:
        """The sums; O(1)."""
        raise NotImplementedError

    def find(self, addresses: Sequence[bytes]) -> list[Entry | None]:
        """The entry of each address, None where there is none."""
        raise NotImplementedError

    def contains(self, addresses: Sequence[bytes]) -> list[bool]:
        """Whether each address has an entry. The cheapest question."""
        raise NotImplementedError

    def oldest(self) -> Iterator[Victim]:
        """All blocks, least recently used first, less those that this process used since (see `Catalog.note`)."""
        raise NotImplementedError

    def scan(self, fingerprint: bytes) -> Iterator[Entry]:
        """Every entry of one namespace, in address order."""
        raise NotImplementedError

    def intents(self, lease: bytes = b"") -> list[Intent]:
        """The intents of one lease, or of all."""
        raise NotImplementedError

    def namespaces(self) -> list[Namespace]:
        """Those whose manifests were recorded. One that cannot be read is passed over."""
        raise NotImplementedError


class Change(Snapshot):
    """The catalogue inside a write transaction: what is changed here appears at once for everybody, or not at all.

    Nothing is taken from a plan on trust: each method checks again what it relies on. The totals follow by
    themselves.
    """

    def publish(self, entries: Sequence[Entry]) -> list[bool]:
        """Record blocks. False where the address has an entry already, which is left alone (the race was lost).

        Of equal addresses within `entries` the first wins.
        """
        raise NotImplementedError

    def evict(self, victims: Iterable[Victim]) -> list[Victim]:
        """Take out each victim that nobody used, removed or replaced since it was read; returns those taken out."""
        raise NotImplementedError

    def discard(self, addresses: Iterable[bytes], generation: int | None = None) -> list[Entry]:
        """Take out blocks however young (only a given `generation`, if given); returns the entries taken out."""
        raise NotImplementedError

    def generations(self, count: int) -> int:
        """`count` new generation numbers, never given out before; the first of them (>= 1)."""
        raise NotImplementedError

    def reserve(self, lease: bytes, reserved: int, payload: bytes) -> Intent:
        """Record an intent and count its bytes as reserved. Whether they fit is the caller's check (`totals().room`)."""
        raise NotImplementedError

    def amend(self, intent: Intent, reserved: int, payload: bytes) -> Intent:
        """Replace an intent by one with the same number and other contents."""
        raise NotImplementedError

    def release(self, intent: Intent) -> None:
        """Drop an intent and its reservation. One that is gone already is no error and changes nothing."""
        raise NotImplementedError

    def set_overhead(self, nbytes: int) -> None:
        """Say how much is kept aside for what is neither `used` nor `reserved` (directories, the catalogue itself)."""
        raise NotImplementedError

    def add_namespace(self, namespace: Namespace) -> None:
        """Record the manifest, unless it is there."""
        raise NotImplementedError


class Catalog:
    """The catalogue in an open environment. Thread-safe.

    What was used is noted in memory (`note`) and settled a few at a time within the next write transactions and at
    `settle`; a process that dies loses at most those notes.
    """

    def __init__(self, environment: Environment) -> None:
        raise NotImplementedError

    def prepare(self, capacity: int | None, *, alone: bool) -> int | None:
        """Check the format, agree on the cap; the cap in force. Call it once, in `Presence.opening`.

        Whoever is alone may change the cap (and must then evict down to it); everybody else brings the same or none
        at all: `capacity=None` accepts what is there. The first one decides. Raises `NewerFormatError`,
        `CapacityMismatchError`, `StoreDamagedError`. On a read-only environment nothing is written.
        """
        raise NotImplementedError

    @contextmanager
    def read(self) -> Iterator[Snapshot]:
        """A consistent view, without waiting for anybody."""
        raise NotImplementedError
        yield

    @contextmanager
    def write(self) -> Iterator[Change]:
        """The write transaction, as `Environment.write`; a few notes are settled at its end."""
        raise NotImplementedError
        yield

    def note(self, addresses: Iterable[bytes], *, hits: int = 1) -> bool:
        """These blocks were used now (`hits=0`: touched, not read). True when so many notes wait that the caller
        should `settle` from a thread that may wait for the write lock.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """Write down every note, in transactions of bounded length. At close, and when `note` says so."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget every block and intent and zero the totals; format, cap and namespaces stay. Before a rebuild."""
        raise NotImplementedError
