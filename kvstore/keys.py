"""From tokens to block digests: a SHA-256 chain that is the same in every process and on every machine.

    seed = SHA-256("kvstore-sha256-1" | field("model", …) | field("adapter", …) | field("salt", …))
    d[i] = SHA-256(d[i-1] | field("tokens", ids as little-endian uint64) | field("media", …) for media in the block)

where field(tag, value) is the tag and the value, each behind its length as a little-endian uint64: no two different
inputs have the same encoding, so adapter "ab" with salt "c" is not adapter "a" with salt "bc". d[0] follows the seed.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.types import BlockKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["KEY_SCHEME", "KeyExtras", "Media", "block_keys", "chain_digests"]

KEY_SCHEME = "kvstore-sha256-1"


@dataclass(frozen=True, slots=True)
class Media:
    """An image, a sound, … that stands at token `offset` of the prompt, named by a hash of its content."""

    offset: int
    content_hash: bytes
    kind: str = "image"


@dataclass(frozen=True, slots=True)
class KeyExtras:
    """What besides tokens decides a block's bytes (`model`, `adapter`, `media`) or who may share it (`salt`)."""

    model: str = ""
    adapter: str = ""
    salt: str = ""
    media: tuple[Media, ...] = ()


def chain_digests(
    tokens: Sequence[int], block_tokens: int, extras: KeyExtras | None = None, *, digest_bytes: int = 32
) -> list[bytes]:
    """One digest per full block of `block_tokens` tokens; a last, partial block has none.

    `digest_bytes` (16 to 32) truncates each digest that is returned, not the chain. Raises `ValueError` for token ids
    that are negative or not integers, and for media that stands beyond the tokens.
    """
    extras = extras or KeyExtras()
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"tokens must be one sequence of integers, not shape {ids.shape} of {ids.dtype}")
    if ids.size and int(ids.min()) < 0:
        raise ValueError(f"token ids are not negative; the smallest here is {ids.min()}")
    if block_tokens < 1 or not 16 <= digest_bytes <= 32:
        raise ValueError(f"block_tokens={block_tokens}, digest_bytes={digest_bytes}: at least 1, and 16 to 32")
    for media in extras.media:
        if not 0 <= media.offset < len(ids):
            raise ValueError(f"media at token {media.offset} stands outside the {len(ids)} tokens")
    raw = ids.astype("<u8")
    state = hashlib.sha256(
        KEY_SCHEME.encode()
        + _field("model", extras.model.encode())
        + _field("adapter", extras.adapter.encode())
        + _field("salt", extras.salt.encode())
    ).digest()
    digests: list[bytes] = []
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        step = hashlib.sha256(state + _field("tokens", raw[start : start + block_tokens].tobytes()))
        for entry in _media_fields(extras.media, start, start + block_tokens):
            step.update(entry)
        state = step.digest()
        digests.append(state[:digest_bytes])
    return digests


def block_keys(
    tokens: Sequence[int],
    block_tokens: int,
    extras: KeyExtras | None = None,
    *,
    group: int = 0,
    digest_bytes: int = 32,
) -> list[BlockKey]:
    """`chain_digests` as the keys of KV-cache group `group`."""
    return [
        BlockKey(digest, group) for digest in chain_digests(tokens, block_tokens, extras, digest_bytes=digest_bytes)
    ]


def _field(tag: str, value: bytes) -> bytes:
    name = tag.encode()
    return struct.pack("<Q", len(name)) + name + struct.pack("<Q", len(value)) + value


def _media_fields(media: Sequence[Media], start: int, stop: int) -> Iterator[bytes]:
    inside = (entry for entry in media if start <= entry.offset < stop)
    for entry in sorted(inside, key=lambda entry: (entry.offset, entry.kind, entry.content_hash)):
        offset = struct.pack("<Q", entry.offset - start)
        yield _field(
            "media",
            _field("offset", offset) + _field("kind", entry.kind.encode()) + _field("hash", entry.content_hash),
        )
