"""`kvstore.aes256gcm` for zarr-python: opens the chunks of an encrypted tier where the keys are at hand.

zarr-python finds it by entry point (group `zarr.codecs`). A codec sees nothing but the chunk, so the sealed block says
what it is (`kvstore.sealing.seal`); which keyring has its key, the array's document says. That keyring is one that a
tier of this process has open, or the one that the environment names::

    KVSTORE_ENCRYPTION=env:NAME or file:/path      KVSTORE_KEYRING=/path/of/keyring.json

Only kvstore seals: what zarr is told of a chunk does not say whose block it is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from zarr.abc.codec import BytesBytesCodec
from zarr.registry import register_codec

from kvstore.errors import DamagedBlockError, KeyringError
from kvstore.sealing import SEAL_BYTES, Keyring, KeySource, SealHeader, Unsealed, keyring_of, unseal_into
from kvstore.sealing.seal import HEADER_BYTES
from kvstore_zarr.metadata import SEAL_CODEC

if TYPE_CHECKING:
    from typing import Self

    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer

__all__ = ["AES256GCM", "register"]


@dataclass(frozen=True)
class AES256GCM(BytesBytesCodec):
    """Chunks that were sealed with the keyring of that id. Decodes; does not encode."""

    keyring: str

    is_fixed_size = True

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Raises ValueError for anything but what kvstore writes."""
        configuration = data.get("configuration")
        if data.get("name") != SEAL_CODEC or not isinstance(configuration, dict):
            raise ValueError(f"{data!r} does not describe the codec {SEAL_CODEC}")
        return cls(str(cast("dict[str, Any]", configuration)["keyring"]))

    def to_dict(self) -> dict[str, Any]:
        """As it stands in an array's document."""
        return {"name": SEAL_CODEC, "configuration": {"keyring": self.keyring}}

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:  # noqa: ARG002 - the same for all
        """How long a sealed chunk is."""
        return input_byte_length + SEAL_BYTES

    def _decode_sync(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer:
        sealed = chunk_data.as_numpy_array().view(np.uint8)
        opened = np.empty(max(0, sealed.nbytes - SEAL_BYTES), np.uint8)
        header = SealHeader.unpacked(sealed[:HEADER_BYTES].tobytes())
        if header is None:
            raise DamagedBlockError("the chunk is not a sealed block of kvstore")
        found = unseal_into(_keyring(self.keyring).ring(), sealed, opened, header.fingerprint, header.key)
        if found is Unsealed.DAMAGED:
            raise DamagedBlockError(f"{header.key!r} is not what was sealed: it does not open")
        if found is not Unsealed.GOOD:
            raise KeyringError(
                f"keyring {self.keyring} has no data key {header.key_id.hex()}: it was destroyed, or is new"
            )
        return chunk_spec.prototype.buffer.from_array_like(cast("Any", opened))

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer:
        return self._decode_sync(chunk_data, chunk_spec)

    def _encode_sync(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer | None:
        raise NotImplementedError("encrypted blocks are written by kvstore, which knows whose they are: use put_many")

    async def _encode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer | None:
        return self._encode_sync(chunk_data, chunk_spec)


def _keyring(keyring_id: str) -> Keyring:
    """Raises `KeyringError` where it is not at hand."""
    found = keyring_of(keyring_id)
    if found is not None:
        return found
    source, path = os.environ.get("KVSTORE_ENCRYPTION"), os.environ.get("KVSTORE_KEYRING")
    if not source or not path:
        raise KeyringError(
            f"these blocks are encrypted with keyring {keyring_id}: set KVSTORE_ENCRYPTION (env:NAME or file:/path) and"
            " KVSTORE_KEYRING (its path), or open the tier with kvstore"
        )
    given = _opened(source, path)
    if given.id != keyring_id:
        raise KeyringError(f"KVSTORE_KEYRING={path} is keyring {given.id}; the blocks are encrypted with {keyring_id}")
    return given


@lru_cache
def _opened(source: str, path: str) -> Keyring:
    return Keyring.open(path, KeySource.parse(source).read(), create=False)


def register() -> None:
    """Make zarr-python know it in this process, whether kvstore is installed or only on the path."""
    register_codec(SEAL_CODEC, AES256GCM)
