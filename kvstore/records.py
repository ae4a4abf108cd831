"""The catalogue's records, as values and as bytes. Format version 1.

**Address**: namespace fingerprint (16 bytes), KV-cache group (u16, big-endian), digest (16 to 64 bytes).

**Databases** (integers little-endian except in keys, where byte order is sort order; times in ns since the epoch;
fields follow each other without padding):

| database | key | value |
|---|---|---|
| `meta` | address | flags u16, parent's length u16, hits u32, size u64, generation u64, created u64, last used u64, position i64, parent, marks |
| `age` | last used u64 big-endian, address | size u64, generation u64 |
| `marks` | `L` and a label or `T` and a tenant, a zero byte, address | nothing |
| `intents` | lease (16 bytes), number u64 big-endian | reserved u64, then what the backend wrote |
| `tombs` | `A`, address | until when it is not to be stored again u64 |
| | `U`, the same u64 big-endian, address | nothing |
| `namespaces` | fingerprint | the manifest as compact sorted ASCII JSON |
| `info` | `format` | version u32 |
| | `totals` | capacity u64 (0: none), blocks u64, used u64, reserved u64, overhead u64, next generation u64, next intent u64, pinned u64 |

`size` is what a block occupies as the device counts it. A mark is flags u8 (1: pinned), the lengths of label and tenant
u8 each, then both in UTF-8; marks follow each other to the end of the value. One `age` entry per `meta` entry without a
pin, always, so that the front of `age` is the next victim; one `marks` entry per label and per tenant of each block.
"""  # noqa: E501 - a table's row is a line

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.marks import PINNABLE, Mark
from kvstore.namespace import FINGERPRINT_BYTES
from kvstore.types import NO_PARENT, NO_POSITION, BlockInfo, BlockKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.namespace import Namespace

__all__ = [
    "NO_CAPACITY",
    "Entry",
    "Intent",
    "Totals",
    "Victim",
    "address_of",
    "addresses_of",
    "generation_of",
    "mark_prefix",
    "times_of",
    "used",
]

NO_CAPACITY = 0
"""How `info` says that the tier has no cap."""

_META = struct.Struct("<HHIQQQQq")
_GENERATION = struct.Struct("<Q")
_GENERATION_AT = struct.calcsize("<HHIQ")
_HITS = struct.Struct("<I")
_HITS_AT = struct.calcsize("<HH")
_MOST_HITS = 0xFFFFFFFF
_ORDER_IN_META = struct.Struct("<Q")
_LAST_USED_AT = struct.calcsize("<HHIQQQ")
_TIMES = struct.Struct("<QQ")
_TIMES_AT = struct.calcsize("<HHIQQ")
_AGE = struct.Struct("<QQ")
_ORDER = struct.Struct(">Q")
_RESERVED = struct.Struct("<Q")
_TOTALS = struct.Struct("<8Q")
_MARK = struct.Struct("<BBB")
_PINNED = 1
_GROUP = struct.Struct(">H")
_LEASE_BYTES = 16


def address_of(namespace: Namespace, key: BlockKey) -> bytes:
    """Where `key` stands in the catalogue: fingerprint, group, digest. 34 to 82 bytes."""
    return namespace.fingerprint + _GROUP.pack(key.group) + key.digest


def mark_prefix(*, label: str = "", tenant: str = "") -> bytes:
    """What the keys in `marks` of a label or of a tenant begin with; the rest is the address."""
    return (b"L" + label.encode() if label else b"T" + tenant.encode()) + b"\0"


def addresses_of(namespace: Namespace, keys: Sequence[BlockKey]) -> list[bytes]:
    """The address of each key, once it is sure that all can name a block there (`Namespace.check_keys`)."""
    digests = namespace.check_keys(keys)
    prefixes = [namespace.fingerprint + _GROUP.pack(group) for group in range(len(namespace.layouts))]
    if len(prefixes) == 1:
        return [prefixes[0] + digest for digest in digests]
    return [prefixes[key.group] + digest for key, digest in zip(keys, digests, strict=True)]


@dataclass(frozen=True, slots=True)
class Entry:
    """All that the catalogue knows of one block. `size` in bytes as the device counts, times in ns since the epoch."""

    address: bytes
    size: int
    created: int
    last_used: int
    generation: int = 0
    """Which written copy of the block this is: a later one has a higher number. 0 where nobody has numbered it yet."""
    hits: int = 0
    position: int = NO_POSITION
    parent: bytes = NO_PARENT
    flags: int = 0
    """None defined in version 1; kept as found."""
    marks: tuple[Mark, ...] = ()

    @property
    def pinned(self) -> bool:
        """Whether it is not to be evicted, and so has no place in `age`."""
        return any(mark.pinned for mark in self.marks)

    @property
    def key(self) -> BlockKey:
        """The block's key within its namespace."""
        (group,) = _GROUP.unpack_from(self.address, FINGERPRINT_BYTES)
        return BlockKey(self.address[FINGERPRINT_BYTES + 2 :], group)

    def info(self) -> BlockInfo:
        """As a store's `scan` reports it."""
        created, used = self.created / 1e9, self.last_used / 1e9
        return BlockInfo(self.key, self.size, created, used, self.hits, self.position, self.parent, self.marks)

    def packed(self) -> bytes:
        """The value in `meta`."""
        head = (self.flags, len(self.parent), self.hits, self.size, self.generation, self.created, self.last_used)
        return b"".join((_META.pack(*head, self.position), self.parent, *map(_packed_mark, self.marks)))

    @classmethod
    def unpacked(cls, address: bytes, value: memoryview | bytes) -> Entry:
        """The entry that `packed` made `value` of."""
        flags, length, hits, size, generation, created, used, position = _META.unpack_from(value)
        end = _META.size + length
        parent = bytes(value[_META.size : end])
        marks = _unpacked_marks(bytes(value[end:])) if end < len(value) else ()
        return cls(address, size, created, used, generation, hits, position, parent, flags, marks)

    def age(self) -> tuple[bytes, bytes]:
        """The item in `age`."""
        return _ORDER.pack(self.last_used) + self.address, _AGE.pack(self.size, self.generation)

    def index(self) -> Iterator[bytes]:
        """The keys in `marks`."""
        yield from (mark_prefix(label=label) + self.address for label in {mark.label for mark in self.marks} - {""})
        yield from (mark_prefix(tenant=name) + self.address for name in {mark.tenant for mark in self.marks} - {""})


def times_of(value: memoryview | bytes) -> tuple[int, int]:
    """When the block of a value in `meta` was created, and last used: `Entry.unpacked` for who asks nothing else."""
    created, last_used = _TIMES.unpack_from(value, _TIMES_AT)
    return created, last_used


def generation_of(value: memoryview | bytes) -> int:
    """The generation in a value in `meta`: `Entry.unpacked` for who asks nothing else."""
    (generation,) = _GENERATION.unpack_from(value, _GENERATION_AT)
    return int(generation)


def used(address: bytes, value: bytearray, last_used: int, hits: int) -> tuple[bytes, tuple[bytes, bytes]]:
    """Write a use into a value in `meta`; the block's key in `age` before that, and its item there after it.

    By way of an `Entry` it would take three times as long, and notes of use are the most of what is written. Raises
    `struct.error` for what is none.
    """
    _, length, counted, size, generation, _, before, _ = _META.unpack_from(value)
    if len(value) != _META.size + length:  # it has marks, or its length is damaged: that is not to be written back
        Entry.unpacked(address, bytes(value))
    after = max(before, last_used)
    _HITS.pack_into(value, _HITS_AT, min(counted + hits, _MOST_HITS))
    _ORDER_IN_META.pack_into(value, _LAST_USED_AT, after)
    return _ORDER.pack(before) + address, (_ORDER.pack(after) + address, _AGE.pack(size, generation))


def _packed_mark(mark: Mark) -> bytes:
    label, tenant = mark.label.encode(), mark.tenant.encode()
    return _MARK.pack(_PINNED if mark.pinned else 0, len(label), len(tenant)) + label + tenant


def _unpacked_marks(value: bytes) -> tuple[Mark, ...]:
    marks: list[Mark] = []
    start = 0
    while start < len(value):
        flags, label, tenant = _MARK.unpack_from(value, start)
        middle = start + _MARK.size + label
        end = middle + tenant
        try:
            marks.append(
                Mark(value[middle - label : middle].decode(), bool(flags & _PINNED), value[middle:end].decode())
            )
        except ValueError as error:  # no text of ours
            raise struct.error(f"no mark: {error}") from error
        start = end
    return tuple(marks)


@dataclass(frozen=True, slots=True)
class Victim:
    """A block as `age` has it: enough to evict it, if it is still as it was (see `Change.evict`)."""

    address: bytes
    last_used: int
    size: int
    generation: int

    @property
    def name(self) -> bytes:
        """Its key in `age`."""
        return _ORDER.pack(self.last_used) + self.address

    @classmethod
    def of(cls, entry: Entry) -> Victim:
        """The block of an entry, as it is there."""
        return cls(entry.address, entry.last_used, entry.size, entry.generation)

    @classmethod
    def unpacked(cls, name: memoryview | bytes, value: memoryview | bytes) -> Victim:
        """The victim whose item in `age` this is."""
        (last_used,) = _ORDER.unpack_from(name)
        return cls(bytes(name[_ORDER.size :]), last_used, *_AGE.unpack(value))


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
    pinned: int = 0
    """How much of `used` is in entries that are not to be evicted."""

    @property
    def room(self) -> int | None:
        """What may still be reserved: capacity less the rest. Negative when over the cap; None when there is none."""
        if self.capacity is None:
            return None
        return self.capacity - self.used - self.reserved - self.overhead

    @property
    def pinnable(self) -> int | None:
        """What may still be pinned; None when there is no cap."""
        return None if self.capacity is None else self.capacity // PINNABLE - self.pinned

    @property
    def evictable(self) -> int:
        """What evicting everything that may go would free."""
        return self.used - self.pinned

    def packed(self) -> bytes:
        """The value in `info`."""
        sums = (self.blocks, self.used, self.reserved, self.overhead)
        return _TOTALS.pack(self.capacity or NO_CAPACITY, *sums, self.next_generation, self.next_intent, self.pinned)

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

    def packed(self) -> bytes:
        """The value in `intents`."""
        return _RESERVED.pack(self.reserved) + self.payload

    @classmethod
    def unpacked(cls, name: memoryview | bytes, value: memoryview | bytes) -> Intent:
        """The intent whose item in `intents` this is."""
        (number,), (reserved,) = _ORDER.unpack_from(name, _LEASE_BYTES), _RESERVED.unpack_from(value)
        return cls(bytes(name[:_LEASE_BYTES]), number, reserved, bytes(value[_RESERVED.size :]))
