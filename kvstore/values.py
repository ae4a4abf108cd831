"""Names and values of blocks in a store that has nothing but names and values (`kvstore.keyvalue`).

Names are ASCII, of `0-9 a-z -`, at most 167 letters, so that they are file names, database keys and parts of URLs:

    manifest-<fingerprint>                    a namespace's manifest, JSON
    <fingerprint>-<group>-<digest>            one block: head | payload           (fingerprint and digest in hex)
    format                                    the version, in decimal

    head, 128 bytes, little-endian:   magic (`kvvalue` and a zero byte), version u16, flags u16 (1: sealed),
                                      length of the parent u16, 2 zeros, created u64 (ns since the epoch), position i64,
                                      parent (64 bytes, zeros behind), id of the data key (16 bytes), 8 zeros,
                                      crc32c(payload) u32, crc32c(address | all of the head before it) u32
    address, which is not stored:     fingerprint (16 bytes), group u16 big-endian, digest

The payload of an encrypted store is the sealed block (`kvstore.sealing.seal`).
The last checksum binds a block to its key and its namespace: a value that was copied or renamed is damage.
A block of a later version is a miss and left alone; what no reader of this one can make anything of has other names.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.integrity import crc32c
from kvstore.records import address_of
from kvstore.retention import now_ns
from kvstore.sealing import SEAL_BYTES, SealHeader, Unsealed, seal_into, unseal_into
from kvstore.sealing.seal import HEADER_BYTES as SEAL_HEADER_BYTES
from kvstore.types import NO_PARENT, NO_POSITION, BlockInfo, BlockKey
from kvstore.versions import FORMAT_VERSION, MUST_KNOW, is_foreign

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.namespace import Namespace
    from kvstore.sealing import DataKey, Ring
    from kvstore.types import BlockWrite

__all__ = [
    "FORMAT",
    "HEAD_BYTES",
    "MANIFEST",
    "PURGED",
    "SEALED",
    "Facts",
    "Reading",
    "key_of",
    "name_of",
    "stored_bytes",
    "value_of",
]

MANIFEST = "manifest-"
"""What the names of manifests start with."""
PURGED = "purged-"
"""What the names of tombstones begin with, and the name of a value that is there where there may be some."""

SEALED = "sealed"
"""The name of a value that is there where blocks are sealed: the id of the keyring, in hex."""

FORMAT = "format"
"""The name of a value that says which version the others are of. A device that evicts may take it."""

_HEAD = struct.Struct("<8sHHH2xQq64s16s8xI")
_SEAL = struct.Struct("<I")
_MAGIC = b"kvvalue\0"
_IS_SEALED = 1

HEAD_BYTES = _HEAD.size + _SEAL.size


class Facts(NamedTuple):
    """What a head tells: when the block was made (ns since the epoch), where it stands in its prefix."""

    created: int
    position: int
    parent: bytes
    payload_crc: int
    key_id: bytes = b""
    """Of the data key that the payload is sealed with; empty where it is not sealed."""
    known: bool = True

    def packed(self, namespace: Namespace, key: BlockKey) -> bytes:
        """The head of that block."""
        length, parent = len(self.parent), self.parent
        flags = _IS_SEALED if self.key_id else 0
        head = _HEAD.pack(
            *(_MAGIC, FORMAT_VERSION, flags, length, self.created, self.position, parent, self.key_id, self.payload_crc)
        )
        return head + _seal(namespace, key, head)

    @classmethod
    def unpacked(cls, namespace: Namespace, key: BlockKey, head: bytes) -> Facts | None:
        """The facts that `packed` made `head` of, for the same block; None for anything else."""
        if not _is_whole(namespace, key, head):
            return None
        _, version, flags, length, created, position, parent, key_id, payload_crc = _HEAD.unpack(head[: _HEAD.size])
        if version != FORMAT_VERSION or is_foreign(version, flags, _IS_SEALED):
            return None
        is_sealed = flags & MUST_KNOW == _IS_SEALED
        return cls(created, position, parent[:length], payload_crc, key_id if is_sealed else b"")

    @classmethod
    def unknown(cls) -> Facts:
        """Of a block whose head cannot be read: damaged, or of a later version."""
        return cls(now_ns(), NO_POSITION, NO_PARENT, 0, known=False)

    def info(self, key: BlockKey, stored_bytes: int) -> BlockInfo:
        """As a scan reports it. Uses are not counted: to note them would make each read a write."""
        created = self.created / 1e9
        return BlockInfo(key, stored_bytes, created, created, 0, self.position, self.parent, dated=self.known)


class Reading:
    """One block that is being read: what has to arrive, and whether it did."""

    def __init__(self, namespace: Namespace, key: BlockKey, into: NDArray[np.uint8], ring: Ring | None = None) -> None:
        """`ring`: the data keys of an encrypted store."""
        self.namespace, self.key, self.into, self._ring = namespace, key, into, ring
        self.head = bytearray(HEAD_BYTES)
        self._payload = into if ring is None else np.empty(SEAL_BYTES + into.nbytes, np.uint8)
        # One byte more than there is to read: a value that is longer shows.
        self.buffers = [memoryview(self.head), self._payload.data, memoryview(bytearray(1))]

    def opened(self, count: int) -> Unsealed:
        """Whether the `count` bytes that came are the whole block; if they are, it is in the caller's buffer."""
        facts = Facts.unpacked(self.namespace, self.key, bytes(self.head))
        if facts is None and _is_left_alone(self.namespace, self.key, bytes(self.head)):
            return Unsealed.UNKNOWN
        if (
            count != HEAD_BYTES + self._payload.nbytes
            or facts is None
            or bool(facts.key_id) != (self._ring is not None)
        ):
            return Unsealed.DAMAGED
        found = Unsealed.GOOD
        if self._ring is not None:
            space = self.namespace.fingerprint
            found = unseal_into(self._ring, self._payload, self.into, space, self.key, key_id=facts.key_id)
            if found is Unsealed.GOOD:  # the tag has spoken for every byte
                return found
        return found if facts.payload_crc == crc32c(self._payload) else Unsealed.DAMAGED

    def is_foreign(self) -> bool:
        """Whether a later kvstore made what came, of which `opened` said that it is `UNKNOWN`."""
        sealed = self._payload[:SEAL_HEADER_BYTES].tobytes()
        head = bytes(self.head)
        return _is_left_alone(self.namespace, self.key, head) or (
            self._ring is not None and SealHeader.is_foreign(sealed)
        )

    def facts(self) -> Facts:
        """What the head says of a block that is intact."""
        return Facts.unpacked(self.namespace, self.key, bytes(self.head)) or Facts.unknown()


def _is_whole(namespace: Namespace, key: BlockKey, head: bytes) -> bool:
    """Whether it is the head of that block, of whatever version."""
    return head.startswith(_MAGIC) and head[_HEAD.size :] == _seal(namespace, key, head[: _HEAD.size])


def _is_left_alone(namespace: Namespace, key: BlockKey, head: bytes) -> bool:
    """Whether a later kvstore wrote it, which reads it."""
    _, version, flags, *_ = _HEAD.unpack(head[: _HEAD.size].ljust(_HEAD.size, b"\0"))
    return _is_whole(namespace, key, head) and is_foreign(version, flags, _IS_SEALED)


def _seal(namespace: Namespace, key: BlockKey, head: bytes) -> bytes:
    return _SEAL.pack(crc32c(head, crc32c(address_of(namespace, key))))


def value_of(
    namespace: Namespace,
    block: BlockWrite,
    data: NDArray[np.uint8],
    data_key: DataKey | None = None,
    *,
    created: int | None = None,
) -> list[memoryview]:
    """The parts of the value of a block whose bytes are `data`: its head, and the payload, not copied; or sealed under
    `data_key`. `created`: ns since the epoch; now, if not given.
    """
    if data_key is not None:
        sealed = np.empty(SEAL_BYTES + data.nbytes, np.uint8)
        seal_into(sealed, data, data_key, namespace.fingerprint, block.key)
        data = sealed
    key_id, when = b"" if data_key is None else data_key.id, now_ns() if created is None else created
    facts = Facts(when, block.position, block.parent, crc32c(data), key_id)
    return [memoryview(facts.packed(namespace, block.key)), data.data]


def name_of(namespace: Namespace, key: BlockKey) -> str:
    """Under which name a block is stored."""
    return f"{namespace.name}-{key.group}-{key.digest.hex()}"


def key_of(namespace: Namespace, name: str) -> BlockKey | None:
    """The key of a block's name; None for a name that kvstore did not give."""
    try:
        _, group, digest = name.split("-")
        key = BlockKey(bytes.fromhex(digest), int(group))
        namespace.check_key(key)
    except ValueError:  # of which InvalidBlockError is one
        return None
    return key if name == name_of(namespace, key) else None


def stored_bytes(namespace: Namespace, key: BlockKey, *, sealed: bool = False) -> int:
    """How long a block's value is."""
    return HEAD_BYTES + namespace.block_bytes(key.group) + (SEAL_BYTES if sealed else 0)
