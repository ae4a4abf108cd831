"""One block as one file: where its bytes stand, what seals it, and what must hold when it is read back.

::

    payload | crc32c(payload) | tail: facts, zeros, crc32c | shard index, crc32c
    ^ the zarr inner chunk ---^ ^ skipped by stock readers   ^ constant for a given size

The file is a whole number of pages, so that O_DIRECT moves it in one call: the payload's whole pages straight from or
to the caller's memory, and the rest, the *closing*, through one or two pages of our own. The tail's checksum runs over
everything from the payload's checksum to its own place, the zeros included, and so binds the payload to the facts:
every bit of the file is covered, and a block under another block's name is caught. Integers are little-endian.

In an encrypted tier the payload is the sealed block (`kvstore.sealing.seal`), and the tail also has its data key's id.

What any later version keeps, so that this one can tell its blocks from damage (`is_left_alone`): the index at the end,
which says where the tail begins; magic, version and flags at its start; its checksum before the index.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvstore.integrity import crc32c
from kvstore.namespace import FINGERPRINT_BYTES, MAX_DIGEST_BYTES
from kvstore.types import BlockKey
from kvstore.versions import FORMAT_VERSION, MUST_KNOW, is_foreign

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["PAGE", "PART_BYTES", "WORD_BYTES", "BlockFacts", "BlockFrame", "DigestWords", "is_left_alone"]

PAGE = 4096
PART_BYTES = 4 << 20
"""The most of a payload that is moved in one call of the system."""
WORD_BYTES = 7
"""A digest word: zarr dimensions are signed 64-bit integers, so 8 bytes do not fit."""

MAGIC = b"KVBLOCK\n"
_CRC = struct.Struct("<I")
_INDEX = struct.Struct("<QQ")
# magic, version, flags, group, digest length, parent length, payload bytes, generation, created (ns since the epoch),
# position, namespace fingerprint, digest, parent digest
_TAIL = struct.Struct(f"<8sHHHBBQQQq{FINGERPRINT_BYTES}s{MAX_DIGEST_BYTES}s{MAX_DIGEST_BYTES}s")
_INDEX_BYTES = _INDEX.size + _CRC.size
_CLOSING_MIN = _CRC.size + _TAIL.size + _CRC.size + _INDEX_BYTES
_SEALED = 1
"""In the flags: the payload is a sealed block, and the id of its data key (16 bytes) follows the parent's digest."""
_KEY_ID_BYTES = 16
_START = struct.Struct("<8sHH")
_LONGEST_TAIL = 1 << 20


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """What a block's tail says of it. `created` is in nanoseconds since the epoch.

    `generation` numbers the copies ever written in a store, so that the removal of an old copy cannot hit a new one.
    """

    fingerprint: bytes
    key: BlockKey
    payload_bytes: int
    generation: int
    created: int
    position: int
    parent: bytes
    key_id: bytes = b""
    """Of the data key that a sealed payload is sealed with."""


@lru_cache
def _widths(digest_bytes: int) -> tuple[int, ...]:
    full, rest = divmod(digest_bytes - 1, WORD_BYTES)
    return (WORD_BYTES,) * full + ((rest,) if rest else ())


@dataclass(frozen=True, slots=True)
class DigestWords:
    """How a digest becomes a place in a sparse array: the first byte a folder, the rest words of up to 7 bytes."""

    digest_bytes: int

    @property
    def widths(self) -> tuple[int, ...]:
        """Bytes in each word; all are full but the last."""
        return _widths(self.digest_bytes)

    def folder(self, digest: bytes) -> str:
        """The name of the array that holds `digest`: its first byte in hex."""
        return f"{digest[0]:02x}"

    def index(self, digest: bytes) -> tuple[int, ...]:
        """The digest's place along the array's leading axes: its words, most significant byte first."""
        starts = range(1, self.digest_bytes, WORD_BYTES)
        return tuple([int.from_bytes(digest[start : start + WORD_BYTES], "big") for start in starts])

    def digest(self, folder: str, index: tuple[int, ...]) -> bytes:
        """The digest that `folder` and `index` name. Raises ValueError or OverflowError if there is none."""
        if len(index) != len(self.widths) or len(folder) != 2:
            raise ValueError(f"{folder}/{index} does not name a digest of {self.digest_bytes} bytes")
        words = [word.to_bytes(width, "big") for word, width in zip(index, self.widths, strict=True)]
        return bytes.fromhex(folder) + b"".join(words)


class BlockFrame:
    """The frame around payloads of one size. Immutable; threads share it.

    `sealed`: the payloads are sealed blocks, and `payload_bytes` is how long those are. `file_bytes` is the size of the
    file, `whole` the part of the payload that is whole pages, `rest` the bytes after it that stand at the start of the
    closing, `closing` the size of the closing: whole pages, `whole + closing == file_bytes`. `sums` is where its two
    checksums stand: the payload's, and that of all from there up to the second.
    """

    def __init__(self, payload_bytes: int, *, sealed: bool = False) -> None:
        self.payload_bytes = payload_bytes
        self.sealed = sealed
        self._flags, key_id_bytes = (_SEALED, _KEY_ID_BYTES) if sealed else (0, 0)
        self.file_bytes = math.ceil((payload_bytes + _CLOSING_MIN + key_id_bytes) / PAGE) * PAGE
        self.whole = payload_bytes // PAGE * PAGE
        self.rest = payload_bytes - self.whole
        self.closing = self.file_bytes - self.whole
        self._step = math.ceil(payload_bytes / math.ceil(payload_bytes / PART_BYTES) / PAGE) * PAGE  # equal parts
        entry = _INDEX.pack(0, payload_bytes + _CRC.size)
        self._index = entry + _CRC.pack(crc32c(entry))
        self._tail_at = self.rest + _CRC.size
        self._tail_end = self._tail_at + _TAIL.size + key_id_bytes
        self._tail_crc_at = self.closing - _INDEX_BYTES - _CRC.size
        self.sums = self.rest, self._tail_crc_at

    @property
    def parts(self) -> Iterator[tuple[int, int]]:
        """Where the pieces of the payload begin and end that are moved and checked in turns."""
        for start in range(0, self.payload_bytes, self._step):
            yield start, min(start + self._step, self.payload_bytes)

    def seal(self, closing: NDArray[np.uint8], payload: NDArray[np.uint8], facts: BlockFacts) -> None:
        """Fill `closing` (at least `self.closing` bytes, the caller's) so that it completes `payload`."""
        self.fill(closing, payload, facts)
        _CRC.pack_into(closing.data, self.rest, crc32c(payload))
        _CRC.pack_into(closing.data, self._tail_crc_at, crc32c(closing[self.rest : self._tail_crc_at]))

    def fill(self, closing: NDArray[np.uint8], payload: NDArray[np.uint8], facts: BlockFacts) -> None:
        """`seal`, but for the two checksums."""
        if self.sealed and not facts.key_id:
            raise ValueError(f"{facts.key!r} is not sealed, and is not to be written into an encrypted tier")
        closing[: self.rest] = payload[self.whole :]
        closing[self._tail_end : self._tail_crc_at] = 0
        view = closing.data
        key = facts.key
        _TAIL.pack_into(
            *(view, self._tail_at, MAGIC, FORMAT_VERSION, self._flags, key.group, len(key.digest), len(facts.parent)),
            *(facts.payload_bytes, facts.generation, facts.created, facts.position),
            *(facts.fingerprint, key.digest, facts.parent),
        )
        if self.sealed:
            view[self._tail_end - _KEY_ID_BYTES : self._tail_end] = facts.key_id
        view[self.closing - _INDEX_BYTES : self.closing] = self._index

    def facts(self, closing: NDArray[np.uint8]) -> BlockFacts | None:
        """What the tail says, or None where it or the shard index is damaged, or frames a payload of another size or
        kind.
        """
        view = closing.data
        if bytes(view[self.closing - _INDEX_BYTES : self.closing]) != self._index:
            return None
        if _CRC.unpack_from(view, self._tail_crc_at)[0] != crc32c(closing[self.rest : self._tail_crc_at]):
            return None
        key_id = bytes(view[self._tail_at + _TAIL.size : self._tail_end])
        facts = _unpack_tail(_TAIL.unpack_from(view, self._tail_at), self._flags, key_id)
        return facts if facts is not None and facts.payload_bytes == self.payload_bytes else None

    def payload_is_intact(self, closing: NDArray[np.uint8], payload: NDArray[np.uint8], crc: int | None = None) -> bool:
        """Whether `payload`, of the checksum `crc`, if that is known, is the one that `closing` completes; its last
        `rest` bytes are already in place.
        """
        return bool(_CRC.unpack_from(closing.data, self.rest)[0] == (crc32c(payload) if crc is None else crc))


def is_left_alone(size: int, read: Callable[[int, int], bytes]) -> bool:
    """Whether a file of `size` bytes that is no block of ours is a whole one of a later kvstore, which reads it.

    `read` gives so many bytes from an offset; fewer where the file has become shorter, as one does that is removed.
    """
    if size < _CLOSING_MIN:
        return False
    end = read(size - _INDEX_BYTES, _INDEX_BYTES)
    if len(end) != _INDEX_BYTES:
        return False
    offset, length = _INDEX.unpack_from(end)
    start = length - _CRC.size
    if end[_INDEX.size :] != _CRC.pack(crc32c(end[: _INDEX.size])) or offset or not 0 <= start <= size - _CLOSING_MIN:
        return False
    if size - start > _LONGEST_TAIL:
        return False
    tail = read(start, size - start - _INDEX_BYTES)
    if tail[-_CRC.size :] != _CRC.pack(crc32c(tail[: -_CRC.size])):
        return False
    magic, version, flags = _START.unpack_from(tail, _CRC.size)
    return magic == MAGIC and is_foreign(version, flags, _SEALED)


def _unpack_tail(fields: tuple[Any, ...], expected: int, key_id: bytes) -> BlockFacts | None:
    magic, version, flags, group, digest_bytes, parent_bytes, payload, generation, created, position = fields[:10]
    fingerprint, digest, parent = fields[10:]
    if (magic, version, flags & MUST_KNOW) != (MAGIC, FORMAT_VERSION, expected):
        return None
    if max(digest_bytes, parent_bytes) > MAX_DIGEST_BYTES:
        return None
    key = BlockKey(digest[:digest_bytes], group)
    return BlockFacts(fingerprint, key, payload, generation, created, position, parent[:parent_bytes], key_id)
