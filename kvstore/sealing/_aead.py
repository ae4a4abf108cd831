"""`cryptography`, imported when the first key is used."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from kvstore.errors import MissingDependencyError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["NONCE_BYTES", "TAG_BYTES", "cipher", "invalid_tag"]

NONCE_BYTES = 12
TAG_BYTES = 16


def cipher(key: bytes) -> AESGCM:
    """AES-256-GCM under `key`. Raises `MissingDependencyError`."""
    return _classes()[0](key)


def invalid_tag() -> type[Exception]:
    """What the cipher raises for bytes that are not what was sealed."""
    return _classes()[1]


@cache
def _classes() -> tuple[type[AESGCM], type[Exception]]:
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise MissingDependencyError(
            'encryption= needs the package cryptography: pip install "kvstore-tiers[encryption]"'
        ) from error
    if not hasattr(AESGCM, "encrypt_into"):
        raise MissingDependencyError('encryption= needs cryptography 47 or newer: pip install -U "cryptography>=47"')
    return AESGCM, InvalidTag
