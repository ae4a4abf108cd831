"""One sealed block: a header that says what it is, the block's bytes under AES-256-GCM, and the tag.

| offset | bytes | field |
|---|---|---|
| 0 | 8 | `KVSEAL1` and a line break |
| 8 | 2 | version |
| 10 | 2 | KV-cache group |
| 12 | 2 | digest length |
| 14 | 2 | flags, none known |
| 16 | 16 | id of the data key |
| 32 | 12 | nonce, random |
| 44 | 4 | zeros |
| 48 | 16 | namespace fingerprint |
| 64 | 64 | digest, zeros behind |
| 128 | n | ciphertext |
| 128 + n | 16 | tag |

Integers are little-endian. The header is the associated data, so the tag speaks for it as well. On each read kvstore
holds it against what was asked for (`unseal_into`), so a sealed block that was moved under another key or into another
namespace does not open; the codec of a stock reader, which is not told what is asked for, cannot do so. The nonce is
random, because one digest may carry different bytes (KV is not the same to the last bit in each computation), and no
two machines agree on a counter.
"""

from __future__ import annotations

import enum
import secrets
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.namespace import FINGERPRINT_BYTES, MAX_DIGEST_BYTES
from kvstore.sealing._aead import NONCE_BYTES, TAG_BYTES, cipher, invalid_tag
from kvstore.sealing.document import ID_BYTES
from kvstore.types import BlockKey
from kvstore.versions import FORMAT_VERSION, is_foreign

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvstore.sealing.keyring import DataKey, Ring

__all__ = ["HEADER_BYTES", "SEAL_BYTES", "SealHeader", "Unsealed", "open_into", "seal_into", "unseal_into"]

_HEADER = struct.Struct(f"<8sHHHH{ID_BYTES}s{NONCE_BYTES}s4x{FINGERPRINT_BYTES}s{MAX_DIGEST_BYTES}s")
_MAGIC = b"KVSEAL1\n"

HEADER_BYTES = _HEADER.size
SEAL_BYTES = HEADER_BYTES + TAG_BYTES
"""How much longer a sealed block is than the block."""


@dataclass(frozen=True, slots=True)
class SealHeader:
    """What stands before the ciphertext."""

    key_id: bytes
    nonce: bytes
    fingerprint: bytes
    key: BlockKey

    def packed(self) -> bytes:
        """Its bytes."""
        digest = self.key.digest
        return _HEADER.pack(
            *(_MAGIC, FORMAT_VERSION, self.key.group, len(digest), 0, self.key_id, self.nonce, self.fingerprint, digest)
        )

    @classmethod
    def unpacked(cls, data: bytes) -> SealHeader | None:
        """What `packed` made; None for anything else, and for what a later kvstore made (`is_foreign`)."""
        if len(data) != HEADER_BYTES:
            return None
        magic, version, group, length, flags, key_id, nonce, fingerprint, digest = _HEADER.unpack(data)
        if magic != _MAGIC or version != FORMAT_VERSION or is_foreign(version, flags, 0) or length > MAX_DIGEST_BYTES:
            return None
        return cls(key_id, nonce, fingerprint, BlockKey(digest[:length], group))

    @staticmethod
    def is_foreign(data: bytes) -> bool:
        """Whether a later kvstore made it, as far as it says so itself: for who has its checksum checked."""
        if len(data) != HEADER_BYTES:
            return False
        magic, version, _, _, flags, *_ = _HEADER.unpack(data)
        return magic == _MAGIC and is_foreign(version, flags, 0)


class Unsealed(enum.Enum):
    """What became of one sealed block that was to be opened."""

    GOOD = "good"
    """The buffer holds the block: it is what was sealed, for this key and in this namespace."""
    DAMAGED = "damaged"
    """It is not what was sealed, or was sealed for another key."""
    DESTROYED = "destroyed"
    """Its data key was destroyed: nobody will ever read it."""
    UNKNOWN = "unknown"
    """Its data key is not in this keyring, as this process knows it, or a later kvstore sealed it: another process may
    be able to open it."""


def seal_into(
    sealed: NDArray[np.uint8], payload: NDArray[np.uint8], data_key: DataKey, fingerprint: bytes, key: BlockKey
) -> None:
    """Seal `payload` into `sealed`, which has `SEAL_BYTES` more and no byte in common with it. Both are the caller's.

    The GIL is released meanwhile, for large blocks.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    header = SealHeader(data_key.id, nonce, fingerprint, key).packed()
    view = memoryview(sealed.data)
    view[:HEADER_BYTES] = header
    cipher(data_key.key).encrypt_into(nonce, payload.data, header, view[HEADER_BYTES:])


def unseal_into(
    ring: Ring,
    sealed: NDArray[np.uint8],
    into: NDArray[np.uint8],
    fingerprint: bytes,
    key: BlockKey,
    *,
    key_id: bytes | None = None,
) -> Unsealed:
    """Open `sealed`, which was stored for `key` in the namespace of that fingerprint, into `into`.

    `key_id`: what else says which data key it is sealed with, if something does. After anything but `GOOD` the contents
    of `into` are undefined. The GIL is released meanwhile, for large blocks.
    """
    start = sealed[:HEADER_BYTES].tobytes()
    header = SealHeader.unpacked(start)
    if header is None and SealHeader.is_foreign(start):
        return Unsealed.UNKNOWN
    if header is None or (header.fingerprint, header.key) != (fingerprint, key):
        return Unsealed.DAMAGED
    if key_id not in (None, header.key_id):
        return Unsealed.DAMAGED
    data_key = ring.key(header.key_id)
    if data_key is None:
        return Unsealed.DESTROYED if header.key_id in ring.destroyed else Unsealed.UNKNOWN
    return Unsealed.GOOD if open_into(sealed, into, data_key, header.nonce) else Unsealed.DAMAGED


def open_into(sealed: NDArray[np.uint8], into: NDArray[np.uint8], data_key: bytes, nonce: bytes) -> bool:
    """Decrypt `sealed` into `into` under `data_key`; whether it is what was sealed under it."""
    if sealed.nbytes != SEAL_BYTES + into.nbytes:
        return False
    view = memoryview(sealed.data)
    try:
        cipher(data_key).decrypt_into(nonce, view[HEADER_BYTES:], view[:HEADER_BYTES], into.data)
    except invalid_tag():
        return False
    return True
