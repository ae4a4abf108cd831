"""Opens sealed blocks from what docs/formats.md says of them and of the keyring. Imports nothing of kvstore.

What `kvstore.sealing` does is written down here a second time, on purpose, as `checker` does it for all the rest.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

if TYPE_CHECKING:
    from pathlib import Path

HEADER = struct.Struct("<8sHHHH16s12s4s16s64s")
_FIELDS = ("magic", "version", "group", "digest_bytes", "zeros", "key_id", "nonce", "more_zeros", "fingerprint",
           "digest")  # fmt: skip
HEADER_BYTES, TAG_BYTES = HEADER.size, 16
SEAL_BYTES = HEADER_BYTES + TAG_BYTES


@dataclass(frozen=True)
class Keys:
    """A keyring, opened: its id, the data keys by their ids, whose each is, and the ids of those that are no more."""

    keyring: bytes
    data: dict[bytes, bytes]
    tenants: dict[bytes, str]
    destroyed: frozenset[bytes]


@dataclass(frozen=True)
class Opened:
    """A sealed block, opened. `key_id` says with which key it is sealed, `readable` whether the keyring has that."""

    payload: bytes
    key_id: bytes
    readable: bool
    wrong: list[str]


def read_keys(keyring: Path, operator_key: bytes) -> Keys:
    """What the keyring has. Raises whatever comes of one that is torn, damaged, or of another operator's key."""
    return keys_in(keyring.read_bytes(), operator_key)


def keys_in(text: bytes, operator_key: bytes) -> Keys:
    """What a keyring of that text has."""
    document: dict[str, Any] = json.loads(text)
    if document["kvstore_keyring"] != 1:
        raise ValueError(f"a keyring of version {document['kvstore_keyring']}")
    unhex, operator = bytes.fromhex, AESGCM(operator_key)
    keyring_id, check = unhex(document["id"]), document["check"]
    if operator.decrypt(unhex(check["nonce"]), unhex(check["wrapped"]), b"kvstore-keyring-check-1:" + keyring_id):
        raise ValueError("the check wraps something")
    data, tenants = dict[bytes, bytes](), dict[bytes, str]()
    for entry in document["keys"]:
        key_id, tenant = unhex(entry["id"]), entry["tenant"]
        belongs_to = b"kvstore-data-key-1:" + keyring_id + key_id + tenant.encode()
        data[key_id] = operator.decrypt(unhex(entry["nonce"]), unhex(entry["wrapped"]), belongs_to)
        tenants[key_id] = tenant
    current = [entry["tenant"] for entry in document["keys"] if entry["current"]]
    if len(set(current)) != len(current):
        raise ValueError("a tenant has two current keys")
    return Keys(keyring_id, data, tenants, frozenset(map(unhex, document["destroyed"])))


def unsealed(sealed: bytes, place: tuple[bytes, int, bytes], keys: Keys) -> Opened:
    """The block in `sealed`, which stands at that fingerprint, group and digest."""
    fingerprint, group, digest = place
    header = sealed[:HEADER_BYTES]
    if len(sealed) < SEAL_BYTES:
        return Opened(b"", b"", readable=True, wrong=["too short for a sealed block"])
    fields: dict[str, Any] = dict(zip(_FIELDS, HEADER.unpack(header), strict=True))
    expected = {"magic": b"KVSEAL1\n", "version": 1, "group": group, "digest_bytes": len(digest), "zeros": 0,
                "more_zeros": bytes(4), "fingerprint": fingerprint, "digest": digest.ljust(64, b"\0")}  # fmt: skip
    wrong = [f"seal: {name}" for name, right in expected.items() if fields[name] != right]
    key_id = fields["key_id"]
    if key_id not in keys.data:
        wrong += ["seal: a key that never was"] * (key_id not in keys.destroyed)
        return Opened(b"", key_id, readable=False, wrong=wrong)
    try:
        payload = AESGCM(keys.data[key_id]).decrypt(fields["nonce"], sealed[HEADER_BYTES:], header)
    except InvalidTag:
        return Opened(b"", key_id, readable=True, wrong=[*wrong, "seal: tag"])
    return Opened(payload, key_id, readable=True, wrong=wrong)
