"""The keyring's document: what stands in its file, wrapped by the operator's key.

::

    {"kvstore_keyring": 1, "id": "<32 hex digits>", "check": {"nonce", "wrapped"},
     "keys": [{"id", "tenant", "created", "current", "nonce", "wrapped"}, …], "destroyed": ["<id>", …]}

Bytes are hex, `created` is in seconds since the epoch. `wrapped` is AES-256-GCM under the operator's key; what it
belongs to (keyring, data key, tenant) is its associated data, so that no entry can be passed off as another's. `check`
wraps nothing: it tells whether an operator's key is the right one, of a keyring without any data key too.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, replace
from typing import Any

from kvstore.errors import KeyringError
from kvstore.retention import now_ns
from kvstore.sealing._aead import NONCE_BYTES, cipher, invalid_tag

__all__ = ["ID_BYTES", "Document", "WrappedKey"]

VERSION = 1
ID_BYTES = 16
DATA_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """One data key as it stands in the file. `current`: what is stored for its tenant now is sealed under it."""

    id: bytes
    tenant: str
    created: int
    current: bool
    nonce: bytes
    wrapped: bytes

    @classmethod
    def made(cls, keyring: bytes, tenant: str, operator_key: bytes) -> WrappedKey:
        """A new random data key for `tenant`."""
        blank = cls(secrets.token_bytes(ID_BYTES), tenant, now_ns() // 10**9, True, b"", b"")
        return blank._around(keyring, secrets.token_bytes(DATA_KEY_BYTES), operator_key)

    def rewrapped(self, keyring: bytes, old: bytes, new: bytes) -> WrappedKey:
        """The same data key under another operator's key."""
        key = self.unwrapped(keyring, old)
        if key is None:
            raise KeyringError(f"data key {self.id.hex()} is damaged: it cannot be wrapped anew")
        return self._around(keyring, key, new)

    def unwrapped(self, keyring: bytes, operator_key: bytes) -> bytes | None:
        """The data key; None where the entry is damaged or wrapped by another operator's key."""
        return _unwrapped(operator_key, self.nonce, self.wrapped, self._belongs_to(keyring))

    def _around(self, keyring: bytes, key: bytes, operator_key: bytes) -> WrappedKey:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return replace(self, nonce=nonce, wrapped=cipher(operator_key).encrypt(nonce, key, self._belongs_to(keyring)))

    def _belongs_to(self, keyring: bytes) -> bytes:
        return b"kvstore-data-key-1:" + keyring + self.id + self.tenant.encode()

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            "id": self.id.hex(),
            "tenant": self.tenant,
            "created": self.created,
            "current": self.current,
            "nonce": self.nonce.hex(),
            "wrapped": self.wrapped.hex(),
        }

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> WrappedKey:
        """What `to_json` wrote."""
        return cls(
            bytes.fromhex(entry["id"]), str(entry["tenant"]), int(entry["created"]), bool(entry["current"]),
            bytes.fromhex(entry["nonce"]), bytes.fromhex(entry["wrapped"]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Document:
    """All of it. `destroyed` are the ids of data keys that are no more: what was sealed under them is gone for good."""

    id: bytes
    check_nonce: bytes
    check: bytes
    keys: tuple[WrappedKey, ...] = ()
    destroyed: tuple[bytes, ...] = ()

    @classmethod
    def new(cls, operator_key: bytes) -> Document:
        """An empty keyring."""
        return cls(secrets.token_bytes(ID_BYTES), b"", b"")._checked_by(operator_key)

    def _checked_by(self, operator_key: bytes) -> Document:
        nonce = secrets.token_bytes(NONCE_BYTES)
        check = cipher(operator_key).encrypt(nonce, b"", b"kvstore-keyring-check-1:" + self.id)
        return replace(self, check_nonce=nonce, check=check)

    def is_wrapped_by(self, operator_key: bytes) -> bool:
        """Whether that is the operator's key of this keyring."""
        associated = b"kvstore-keyring-check-1:" + self.id
        return _unwrapped(operator_key, self.check_nonce, self.check, associated) is not None

    def current(self, tenant: str) -> WrappedKey | None:
        """The data key that seals what is stored for `tenant` now."""
        return next((key for key in self.keys if key.current and key.tenant == tenant), None)

    def with_key(self, tenant: str, operator_key: bytes) -> Document:
        """With a new current data key for `tenant`; the one it had stays, for what is sealed under it."""
        kept = (replace(key, current=key.current and key.tenant != tenant) for key in self.keys)
        return replace(self, keys=(*kept, WrappedKey.made(self.id, tenant, operator_key)))

    def without(self, ids: frozenset[bytes]) -> Document:
        """Without those data keys, which counts them as destroyed."""
        gone = tuple(key.id for key in self.keys if key.id in ids)
        return replace(
            self, keys=tuple(key for key in self.keys if key.id not in ids), destroyed=(*self.destroyed, *gone)
        )

    def rewrapped(self, old: bytes, new: bytes) -> Document:
        """The same data keys under another operator's key. Raises `KeyringError` for a damaged one."""
        keys = tuple(key.rewrapped(self.id, old, new) for key in self.keys)
        return replace(self, keys=keys)._checked_by(new)

    def packed(self) -> bytes:
        """The file's bytes."""
        document = {
            "kvstore_keyring": VERSION,
            "id": self.id.hex(),
            "check": {"nonce": self.check_nonce.hex(), "wrapped": self.check.hex()},
            "keys": [key.to_json() for key in self.keys],
            "destroyed": [key_id.hex() for key_id in self.destroyed],
        }
        return json.dumps(document, indent=1).encode() + b"\n"

    @classmethod
    def unpacked(cls, data: bytes, where: str) -> Document:
        """What `packed` made. Raises `KeyringError` for anything else."""
        try:
            found = json.loads(data)
            version = found["kvstore_keyring"]
            if version != VERSION:
                raise KeyringError(
                    f"{where} is a keyring of version {version}; this kvstore knows {VERSION}: upgrade it. If no later"
                    " kvstore ever wrote it, that number was damaged: restore it from a copy"
                )
            return cls(
                bytes.fromhex(found["id"]),
                bytes.fromhex(found["check"]["nonce"]),
                bytes.fromhex(found["check"]["wrapped"]),
                tuple(map(WrappedKey.from_json, found["keys"])),
                tuple(map(bytes.fromhex, found["destroyed"])),
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise KeyringError(f"{where} is no keyring, or a damaged one: restore it from a copy") from error


def _unwrapped(operator_key: bytes, nonce: bytes, wrapped: bytes, associated: bytes) -> bytes | None:
    try:
        return cipher(operator_key).decrypt(nonce, wrapped, associated)
    except (invalid_tag(), ValueError):
        return None
