"""One shard of an archive: many blocks in one object, which stock zarr reads, and which says whose part it is.

::

    block 0, crc32c | zeros | block 1, crc32c | zeros | … | zeros | trailer | shard index, crc32c
    ^ page          ^ to a page                                   ^ so that all of it is whole pages

Where nothing compresses, each block begins on a page: tiers read into a shard in the making, and write out of one that
was read, with direct I/O and without a copy. The trailer says which shard of which plan this is, has the CRC of each
block as it is in a tier, and one of all before it; stock readers step over it. Layout of bytes: docs/formats.md.
"""

from __future__ import annotations

import mmap
import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvstore.integrity import crc32c
from kvstore.versions import FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from kvstore.archive.compression import Compression
    from kvstore.layout import BlockLayout

__all__ = ["PAGE", "SHARD_BYTES", "Packing", "ShardFacts", "ShardInMaking", "page_memory"]

PAGE = 4096
SHARD_BYTES = 64 << 20
"""Of blocks in one object. Two of them are in memory while an archive is made or restored."""

MAGIC = b"KVARCHV\n"
PLAN_BYTES = 32
# magic, version, KV-cache group, blocks there is room for, number of the shard, plan
_TRAILER = struct.Struct(f"<8sHHIQ{PLAN_BYTES}s")
_CRC = struct.Struct("<I")
_ABSENT = (1 << 64) - 1


def page_memory(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed memory of whole pages, in huge ones where the kernel has them; it lives as long as the array."""
    memory = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:nbytes]


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What the end of a shard says of the blocks that are there, by their place in it.

    `crcs` are of the blocks as they are in a tier, `spans` their offset and length as they are stored, CRC included.
    `crc` is of the whole object, if what stands before the end is what it was.
    """

    crcs: Mapping[int, int]
    spans: Mapping[int, tuple[int, int]]
    crc: int


@dataclass(frozen=True)
class Packing:
    """How the blocks of one KV-cache group become shards of `room` blocks each. Immutable; threads share it.

    `plan` (32 bytes) names what the whole archive is made of.
    """

    layout: BlockLayout
    group: int
    room: int
    plan: bytes
    compression: Compression

    @classmethod
    def of(cls, layout: BlockLayout, group: int, blocks: int, plan: bytes, compression: Compression) -> Packing:
        """As many blocks to a shard as `SHARD_BYTES` hold, one at least, no more than there are."""
        return cls(layout, group, room_for(layout, blocks), plan, compression)

    @cached_property
    def pitch(self) -> int:
        """Bytes from one block to the next, uncompressed."""
        return _to_page(self.layout.nbytes + _CRC.size)

    @cached_property
    def closing(self) -> int:
        """Bytes of trailer and index."""
        return _TRAILER.size + _CRC.size * (self.room + 2) + self._index_dtype.itemsize * self.room + _CRC.size

    @cached_property
    def memory_bytes(self) -> int:
        """What the largest shard takes in memory."""
        largest = max(self.pitch, self.compression.most(self.layout.nbytes) + _CRC.size)
        return _to_page(self.room * largest + self.closing)

    @property
    def _index_dtype(self) -> np.dtype[np.void]:
        return np.dtype([("offset", "<u8"), ("length", "<u8")])

    def close(self, number: int, crcs: Mapping[int, int], spans: Mapping[int, tuple[int, int]], body_crc: int) -> bytes:
        """Trailer and index of shard `number`. Blocks that are not there have a span of zarr's own: all ones."""
        head = _TRAILER.pack(MAGIC, FORMAT_VERSION, self.group, self.room, number, self.plan)
        head += b"".join(_CRC.pack(crcs.get(place, 0)) for place in range(self.room)) + _CRC.pack(body_crc)
        index = np.full(self.room, _ABSENT, "<u8").repeat(2).view(self._index_dtype)
        for place, span in spans.items():
            index[place] = span
        tail = index.tobytes()
        return head + _CRC.pack(crc32c(head)) + tail + _CRC.pack(crc32c(tail))

    def facts(self, closing: NDArray[np.uint8], number: int, body_bytes: int) -> ShardFacts | None:
        """What the last `closing` bytes of shard `number` say; None where they are damaged or another shard's."""
        if closing.nbytes != self.closing:
            return None
        raw = closing.tobytes()
        at = _TRAILER.size + _CRC.size * (self.room + 1)
        index_at = at + _CRC.size
        if _CRC.unpack_from(raw, at)[0] != crc32c(raw[:at]):
            return None
        if _CRC.unpack_from(raw, len(raw) - _CRC.size)[0] != crc32c(raw[index_at : -_CRC.size]):
            return None
        if raw[: _TRAILER.size] != _TRAILER.pack(MAGIC, FORMAT_VERSION, self.group, self.room, number, self.plan):
            return None
        crcs = np.frombuffer(raw, "<u4", self.room + 1, _TRAILER.size).tolist()
        index = np.frombuffer(raw, self._index_dtype, self.room, index_at).tolist()
        spans = {place: span for place, span in enumerate(index) if span != (_ABSENT, _ABSENT)}
        if any(offset + length > body_bytes or length <= _CRC.size for offset, length in spans.values()):
            return None
        return ShardFacts({place: crcs[place] for place in spans}, spans, crc32c(raw, crcs[-1]))

    def split(self, data: NDArray[np.uint8], number: int) -> ShardFacts | None:
        """`facts` of a whole shard."""
        body = data.nbytes - self.closing
        return self.facts(data[body:], number, body) if body > 0 else None

    def block(
        self, data: NDArray[np.uint8], facts: ShardFacts, place: int, *, checked: bool
    ) -> NDArray[np.uint8] | None:
        """One block of a whole shard: a view where nothing compresses; None where it is damaged.

        `checked`: all bytes of the shard are known to be what they were.
        """
        offset, length = facts.spans[place]
        packed = data[offset : offset + length - _CRC.size]
        crc = _CRC.unpack_from(data.data, offset + packed.nbytes)[0]
        if not checked and crc != crc32c(packed):
            return None
        if not self.compression.codec:
            return packed if packed.nbytes == self.layout.nbytes and crc == facts.crcs[place] else None
        block = np.empty(self.layout.nbytes, np.uint8)
        if not self.compression.decode_into(packed, block) or crc32c(block) != facts.crcs[place]:
            return None
        return block


class ShardInMaking:
    """One shard as it is put together in `memory` (`Packing.memory_bytes`), which is the caller's.

    Without compression: read each block into its `slot`, then name it with `fill`. With: `append` what `Packing`'s
    codec made of it. In the end `close`.
    """

    def __init__(self, packing: Packing, number: int, memory: NDArray[np.uint8]) -> None:
        self._packing, self._number, self._memory = packing, number, memory
        self._end = 0
        self._spans: dict[int, tuple[int, int]] = {}
        self.crcs: dict[int, int] = {}

    def slot(self, place: int) -> NDArray[np.uint8]:
        """Where block `place` belongs."""
        start = place * self._packing.pitch
        return self._memory[start : start + self._packing.layout.nbytes]

    def fill(self, places: list[int]) -> None:
        """The blocks of these places, in order, stand in their slots."""
        pitch, nbytes = self._packing.pitch, self._packing.layout.nbytes
        for place in places:
            start = place * pitch
            self._memory[self._end : start] = 0
            self._put(place, start, crc32c(self.slot(place)), nbytes)
            self._memory[self._end : start + pitch] = 0
            self._end = start + pitch

    def append(self, place: int, crc: int, packed: NDArray[np.uint8]) -> None:
        """Block `place`, whose CRC was `crc`, is `packed` as the codec made it."""
        start = self._end
        self._memory[start : start + packed.nbytes] = packed
        self._put(place, start, crc32c(packed), packed.nbytes)
        self.crcs[place] = crc

    def _put(self, place: int, start: int, crc: int, nbytes: int) -> None:
        _CRC.pack_into(self._memory.data, start + nbytes, crc)
        self._spans[place], self.crcs[place] = (start, nbytes + _CRC.size), crc
        self._end = start + nbytes + _CRC.size

    def close(self) -> tuple[NDArray[np.uint8], int]:
        """All bytes of the shard, in `memory`, whole pages; and their CRC."""
        total = _to_page(self._end + self._packing.closing)
        body = total - self._packing.closing
        self._memory[self._end : body] = 0
        body_crc = crc32c(self._memory[:body])
        closing = self._packing.close(self._number, self.crcs, self._spans, body_crc)
        self._memory[body:total] = np.frombuffer(closing, np.uint8)
        return self._memory[:total], crc32c(closing, body_crc)


def room_for(layout: BlockLayout, blocks: int) -> int:
    """As many blocks to a shard as `SHARD_BYTES` hold, one at least, no more than there are."""
    return max(1, min(blocks, SHARD_BYTES // layout.nbytes))


def _to_page(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
