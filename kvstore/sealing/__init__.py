"""Encryption at rest: blocks are sealed before they leave this process, and opened after they have come back.

::

    encryption=env:NAME | file:/path      the operator's key: 32 random bytes, kept by the operator
            │ wraps
    keyring=/path/outside/the/tier        a random data key for each tenant (`keyring`)
            │ seals
    header | ciphertext | tag             what a tier stores in place of a block (`seal`)

A backend asks `open_sealer` once, when it opens, and has then a `Sealer`, or None for a tier that is not sealed.
`cryptography` is imported when the first key is used.
"""

from kvstore.sealing.keyring import DataKey, Keyring, Ring
from kvstore.sealing.options import ENCRYPTION, KEYRING, SEALING, KeySource
from kvstore.sealing.records import record_seal, recorded_seals
from kvstore.sealing.seal import SEAL_BYTES, SealHeader, Unsealed, seal_into, unseal_into
from kvstore.sealing.sealer import PLAIN, Sealer, check_options, keyring_of, open_sealer

__all__ = [
    "ENCRYPTION",
    "KEYRING",
    "PLAIN",
    "SEALING",
    "SEAL_BYTES",
    "DataKey",
    "KeySource",
    "Keyring",
    "Ring",
    "SealHeader",
    "Sealer",
    "Unsealed",
    "check_options",
    "keyring_of",
    "open_sealer",
    "record_seal",
    "recorded_seals",
    "seal_into",
    "unseal_into",
]
