"""What the golden fixtures hold, as values: who made them wrote these, and who reads them expects these.

Never changed: what is to be added for a later version stands beside it.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np

from kvstore import BlockKey, BlockLayout, BlockWrite, Mark, Namespace, chain_digests
from kvstore.testing.clock import standing_clock

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

T0 = 1_790_000_000_000_000_000
"""When the first block was stored (ns since the epoch); each of the next ones was a second later."""
SECOND = 1_000_000_000
USED_S = 500
"""So many seconds after `T0` the blocks at `USED` were read, once."""
PURGED_S, REFUSED_S = 600, 86_400.0
LATER_S = 1000
"""When whoever reads the fixtures does so, tombstones are in force."""

OPERATOR_KEY = hashlib.sha256(b"golden operator key").digest()
TOKENS = [(7919 * place) % 50_021 for place in range(12)]
LABEL, TENANT = "système", "acme"


def _kv(dtype: str) -> BlockLayout:
    return BlockLayout.canonical(layers=2, tokens=4, heads=2, head_dim=8, dtype=dtype)


SPACES = {
    "plain": Namespace("golden/model", "revision-1", (_kv("float16"),), 4),
    "groups": Namespace(
        "golden/modèle 🗝",
        "revision-1",
        (_kv("float32"), BlockLayout.opaque(5000)),
        4,
        extra={"rope": "10000", "é": "/\x7f"},
    ),
    "bf16": Namespace("golden/model", "revision-1", (_kv("bfloat16"),), 4, digest_bytes=16),
    "fp8": Namespace("golden/model", "revision-2", (_kv("float8_e4m3fn"),), 4, key_scheme="other", digest_bytes=64),
}
"""Float32 has another size than float16; 5,000 bytes are a page and a rest; digests of 16, 32 and 64 bytes."""


@dataclass(frozen=True)
class GoldenBlock:
    """One block: of which namespace, and how manieth of all."""

    number: int
    space: str
    key: BlockKey
    position: int
    parent: bytes
    tenant: str = ""

    @property
    def namespace(self) -> Namespace:
        return SPACES[self.space]

    @property
    def content(self) -> NDArray[np.uint8]:
        return pattern(self.number, self.namespace.block_bytes(self.key.group))

    @property
    def created(self) -> int:
        return T0 + self.number * SECOND

    @property
    def write(self) -> BlockWrite:
        return BlockWrite(self.key, self.content, position=self.position, parent=self.parent, tenant=self.tenant)


def pattern(number: int, nbytes: int) -> NDArray[np.uint8]:
    """Byte i is (37 number + 7 i + i // 256) mod 251: no two blocks and no two pages are the same."""
    place = np.arange(nbytes)
    return ((37 * number + 7 * place + place // 256) % 251).astype(np.uint8)


def digests_of(space: str) -> list[bytes]:
    """Of three blocks, one after another."""
    namespace = SPACES[space]
    if namespace.digest_bytes <= 32:
        return chain_digests(TOKENS, 4, digest_bytes=namespace.digest_bytes)
    return [hashlib.sha512(f"{space}-{place}".encode()).digest() for place in range(3)]


def _blocks() -> list[GoldenBlock]:
    blocks: list[GoldenBlock] = []
    for space, namespace in SPACES.items():
        digests = digests_of(space)
        for group in range(len(namespace.layouts)):
            for place, digest in enumerate(digests):
                parent = digests[place - 1] if place else b""
                tenant = TENANT if space == "groups" and place == 1 else ""
                blocks.append(GoldenBlock(len(blocks), space, BlockKey(digest, group), place, parent, tenant))
    return blocks


BLOCKS = _blocks()
"""All of them, in the order in which they were stored."""
SEALED = [block for block in BLOCKS if block.space == "groups"]
"""Those of the sealed tiers."""
PURGED = [block for block in BLOCKS if (block.space, block.position) == ("plain", 2)]
"""Those that were purged again."""
USED = [block for block in BLOCKS if (block.space, block.position) == ("bf16", 1)]
"""Those that were read once."""
MARKED = [block for block in BLOCKS if (block.space, block.position, block.key.group) == ("groups", 0, 0)]
"""Those that got `MARK`."""
MARK = Mark(LABEL, pinned=True, tenant=TENANT)


def left(blocks: Sequence[GoldenBlock]) -> list[GoldenBlock]:
    """Without those that were purged."""
    return [block for block in blocks if block not in PURGED]


@contextmanager
def at(seconds: float) -> Generator[None]:
    """The clock stands so long after `T0`."""
    with standing_clock(T0 + int(seconds * SECOND)):
        yield


@contextmanager
def known_numbers(seed: str) -> Generator[None]:
    """What is drawn at random (ids, nonces, keys, names) is a row that begins with `seed`."""
    drawn = 0

    def some(nbytes: int = 32) -> bytes:
        nonlocal drawn
        drawn += 1
        return hashlib.shake_128(f"{seed}-{drawn}".encode()).digest(nbytes)

    with mock.patch("secrets.token_bytes", some), mock.patch("secrets.token_hex", lambda nbytes=32: some(nbytes).hex()):
        yield


def operator_key_in(folder: Path) -> Path:
    """A file with the operator's key."""
    path = folder / "operator.key"
    path.write_text(OPERATOR_KEY.hex() + "\n")
    return path
