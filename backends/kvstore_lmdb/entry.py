"""One block as one LMDB value: a header that binds the payload to its key, then the payload.

It stands in `blocks` under its generation (`place_of`), which its entry in the catalogue knows. Generations are given
out in order, and blocks go about in the order in which they came: so a put and an eviction change a page or two of that
tree for many blocks. Under the blocks' addresses, which are random, they changed two for each, copied and written.

| offset | bytes | field |
|---|---|---|
| 0 | 8 | `kvblock` and a zero byte |
| 8 | 2 | version |
| 10 | 2 | KV-cache group |
| 12 | 2 | digest length |
| 14 | 2 | flags; 1: the payload is a sealed block (`kvstore.sealing.seal`) |
| 16 | 16 | namespace fingerprint |
| 32 | 64 | digest, zeros behind |
| 96 | 8 | payload length |
| 104 | 8 | created, ns since the epoch |
| 112 | 8 | zeros |
| 120 | 4 | CRC-32C of the payload |
| 124 | 4 | CRC-32C of bytes 0 to 124 |
| 128 | | payload |

Integers are little-endian. Any later version keeps all up to the digest, and the last checksum, where they are, so that
this one can tell its blocks from damage (`is_left_alone`). LMDB keeps such a value in whole pages of its own: 16 bytes
of LMDB's, then the value.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.environment import PAGE
from kvstore.integrity import copied, crc32c
from kvstore.namespace import FINGERPRINT_BYTES
from kvstore.sealing import SEAL_BYTES, SealHeader, Unsealed, seal_into
from kvstore.sealing import unseal_into as unseal
from kvstore.sealing.seal import HEADER_BYTES as SEAL_HEADER_BYTES
from kvstore.types import BlockKey
from kvstore.versions import FORMAT_VERSION, MUST_KNOW, is_foreign

if TYPE_CHECKING:
    from kvstore.namespace import Namespace
    from kvstore.sealing import DataKey, Ring

__all__ = [
    "HEADER_BYTES",
    "Bytes",
    "fill",
    "identified",
    "is_intact",
    "is_left_alone",
    "key_id_in",
    "open_into",
    "place_of",
    "stored_bytes",
]

Bytes = NDArray[np.uint8]

HEADER_BYTES = 128

_MAGIC, _LMDB_PAGE_HEADER = b"kvblock\0", 16
_SEALED = 1
_FIELDS = struct.Struct("<8sHHHH16s64sQQ8xI")
_CRC = struct.Struct("<I")
_PLACE = struct.Struct(">Q")


def place_of(generation: int) -> bytes:
    """The key in `blocks` of the value of that generation: 8 bytes, in order."""
    return _PLACE.pack(generation)


def stored_bytes(payload_bytes: int) -> int:
    """What a block occupies in the data file, in bytes: 513 pages for 2 MiB, 17 for 64 KiB."""
    return -(-(_LMDB_PAGE_HEADER + HEADER_BYTES + payload_bytes) // PAGE) * PAGE


def fill(
    value: Bytes, namespace: Namespace, key: BlockKey, payload: Bytes, created: int, data_key: DataKey | None = None
) -> None:
    """Write the entry into `value`, which has `HEADER_BYTES` more than `payload`; with a `data_key` it is sealed, and
    `value` has `SEAL_BYTES` more than that. The GIL is released meanwhile.
    """
    body = value[HEADER_BYTES:]
    if data_key is None:
        crc = copied(body, payload)
    else:
        seal_into(body, payload, data_key, namespace.fingerprint, key)
        crc = crc32c(body)
    head = _FIELDS.pack(
        _MAGIC,
        FORMAT_VERSION,
        key.group,
        len(key.digest),
        0 if data_key is None else _SEALED,
        namespace.fingerprint,
        key.digest,
        body.nbytes,
        created,
        crc,
    )
    head += _CRC.pack(crc32c(head))
    value[:HEADER_BYTES] = np.frombuffer(head, np.uint8)


def open_into(value: memoryview, into: Bytes, address: bytes, ring: Ring | None) -> Unsealed:
    """Copy the payload of `value`, which lies in LMDB's map, into `into`, and check it; with a `ring` it is opened.
    `address` names the block. The GIL is released meanwhile.
    """
    if ring is not None:
        return unseal_into(value, into, address, ring)
    if len(value) == HEADER_BYTES + into.nbytes:
        crc = copied(into, value[HEADER_BYTES:])
        if crc == _checksum_in(bytes(value[:HEADER_BYTES]), into.nbytes, address):
            return Unsealed.GOOD
    return Unsealed.UNKNOWN if is_left_alone(value, address) else Unsealed.DAMAGED


def identified(value: memoryview | bytes) -> tuple[bytes, int] | None:
    """Whose block stands in `value` (its address) and when it was stored, as far as its header can be trusted; None
    where it cannot. Reads the header alone.
    """
    header = bytes(value[:HEADER_BYTES])
    if len(header) != HEADER_BYTES or crc32c(header[: _FIELDS.size]) != _CRC.unpack_from(header, _FIELDS.size)[0]:
        return None
    magic, version, group, length, _, fingerprint, digest, nbytes, created, _ = _FIELDS.unpack_from(header)
    if (magic, version, nbytes) != (_MAGIC, FORMAT_VERSION, len(value) - HEADER_BYTES):
        return None
    return fingerprint + group.to_bytes(2, "big") + digest[:length], created


def is_intact(header: bytes, payload: Bytes, address: bytes) -> bool:
    """Whether these are the bytes that were once put under `address`, in its namespace, not sealed."""
    checksum = _checksum_in(header, payload.nbytes, address)
    return checksum is not None and crc32c(payload) == checksum


def _checksum_in(header: bytes, payload_bytes: int, address: bytes, flags: int = 0) -> int | None:
    """What an intact header of this block says of its payload; None for any other header."""
    if len(header) != HEADER_BYTES:
        return None
    magic, version, group, length, said, fingerprint, digest, nbytes, _, checksum = _FIELDS.unpack_from(header)
    (own,) = _CRC.unpack_from(header, _FIELDS.size)
    intact = (
        (magic, version, nbytes, said & MUST_KNOW) == (_MAGIC, FORMAT_VERSION, payload_bytes, flags)
        and crc32c(header[: _FIELDS.size]) == own
        and address == fingerprint + group.to_bytes(2, "big") + digest[:length]
    )
    return checksum if intact else None


def is_left_alone(value: memoryview, address: bytes | None = None) -> bool:
    """Whether `value`, no block of ours, is one of a later kvstore, which reads it; of `address`, if given."""
    header = bytes(value[:HEADER_BYTES])
    if len(header) != HEADER_BYTES or crc32c(header[: _FIELDS.size]) != _CRC.unpack_from(header, _FIELDS.size)[0]:
        return False
    magic, version, group, length, flags, fingerprint, digest, *_ = _FIELDS.unpack_from(header)
    is_here = address is None or address == fingerprint + group.to_bytes(2, "big") + digest[:length]
    return magic == _MAGIC and is_here and is_foreign(version, flags, _SEALED)


def is_later(value: memoryview, address: bytes) -> bool:
    """Whether a later kvstore wrote `value`, or sealed what is in it; of one that `open_into` said is `UNKNOWN`."""
    return is_left_alone(value, address) or SealHeader.is_foreign(bytes(value[HEADER_BYTES:][:SEAL_HEADER_BYTES]))


def key_id_in(value: memoryview) -> bytes | None:
    """The id of the data key that the payload of `value` is sealed with; None where it is not sealed."""
    header = SealHeader.unpacked(bytes(value[HEADER_BYTES : HEADER_BYTES + SEAL_HEADER_BYTES]))
    return None if header is None else header.key_id


def unseal_into(value: memoryview, into: Bytes, address: bytes, ring: Ring) -> Unsealed:
    """Open the sealed payload of `value`, which lies in LMDB's map, into `into`, and hold all of it against `address`.

    It takes no longer than to copy it. The GIL is released meanwhile.
    """
    if len(value) != HEADER_BYTES + SEAL_BYTES + into.nbytes:
        return Unsealed.UNKNOWN if is_left_alone(value, address) else Unsealed.DAMAGED
    header, sealed = bytes(value[:HEADER_BYTES]), np.frombuffer(value, np.uint8, offset=HEADER_BYTES)
    checksum = _checksum_in(header, sealed.nbytes, address, _SEALED)
    if checksum is None:
        return Unsealed.UNKNOWN if is_left_alone(value, address) else Unsealed.DAMAGED
    fingerprint, group = address[:FINGERPRINT_BYTES], address[FINGERPRINT_BYTES : FINGERPRINT_BYTES + 2]
    key = BlockKey(address[FINGERPRINT_BYTES + 2 :], int.from_bytes(group, "big"))
    found = unseal(ring, sealed, into, fingerprint, key)
    if found is not Unsealed.GOOD and crc32c(sealed) != checksum:
        return Unsealed.DAMAGED
    return found
