"""A namespace: all blocks that are bytewise interchangeable.

Its fingerprint is part of every address and of every block's frame, so that a block computed by another model,
revision, dtype or layout is a miss and never a wrong block.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.errors import InvalidBlockError
from kvstore.keys import KEY_SCHEME
from kvstore.layout import BlockLayout, as_bytes
from kvstore.types import NO_POSITION
from kvstore.untrusted import entry, fields, parsed, records

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvstore.types import BlockKey, BlockWrite

__all__ = ["FINGERPRINT_BYTES", "MAX_DIGEST_BYTES", "MIN_DIGEST_BYTES", "Namespace", "is_namespace_name"]

FINGERPRINT_BYTES = 16
MIN_DIGEST_BYTES, MAX_DIGEST_BYTES = 16, 64
MAX_POSITION = 1 << 63

_NAME = re.compile(rf"[0-9a-f]{{{2 * FINGERPRINT_BYTES}}}")
_DIGEST, _GROUP = operator.attrgetter("digest"), operator.attrgetter("group")


def is_namespace_name(name: str) -> bool:
    """Whether that can be the name of a namespace, and of its folder."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class Namespace:
    """What blocks must have in common to be interchangeable.

    - `model`, `revision`: identity of the weights; a revision that is not a commit or a content hash is a lie waiting.
    - `layouts`: one `BlockLayout` per KV-cache group, in group order.
    - `block_tokens`: tokens per block, the step of the digest chain.
    - `key_scheme`: how digests are derived from tokens, adapter, salt and media (`kvstore.keys` or the engine's own).
    - `digest_bytes`: their length.
    - `extra`: whatever else must match (engine, quantisation, rope overrides, …), as text.

    Raises `ValueError` when a field is empty or out of range, `TypeError` when it is of another type: what cannot be
    written down and read back the same would name blocks that nobody finds.
    """

    model: str
    revision: str
    layouts: tuple[BlockLayout, ...]
    block_tokens: int
    key_scheme: str = KEY_SCHEME
    digest_bytes: int = 32
    extra: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        for name in ("model", "revision", "key_scheme"):
            _check_text(name, getattr(self, name))
        for name, value in dict(self.extra).items():
            _check_text("a name in extra", name)
            _check_text(f"extra[{name!r}]", value)
        for name in ("block_tokens", "digest_bytes"):
            object.__setattr__(self, name, operator.index(getattr(self, name)))  # numpy's integers are no JSON
        object.__setattr__(self, "layouts", tuple(self.layouts))
        if not self.model:
            raise ValueError("a namespace needs a model name")
        if not self.layouts:
            raise ValueError("a namespace needs the layout of at least one KV-cache group")
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens is {self.block_tokens}; a block has at least one token")
        if not MIN_DIGEST_BYTES <= self.digest_bytes <= MAX_DIGEST_BYTES:
            raise ValueError(
                f"digest_bytes is {self.digest_bytes}; digests have {MIN_DIGEST_BYTES} to {MAX_DIGEST_BYTES} bytes"
            )
        identity = json.dumps(self.to_manifest(), sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(b"kvstore-namespace-1:" + identity.encode("ascii")).digest()
        object.__setattr__(self, "_fingerprint", digest[:FINGERPRINT_BYTES])
        object.__setattr__(self, "_name", self.fingerprint.hex())

    @property
    def fingerprint(self) -> bytes:
        """16 bytes: the start of SHA-256 over `kvstore-namespace-1:` and the manifest as sorted compact ASCII JSON."""
        fingerprint: bytes = self.__dict__["_fingerprint"]
        return fingerprint

    @property
    def name(self) -> str:
        """The fingerprint in hex: the namespace's name in every address."""
        name: str = self.__dict__["_name"]
        return name

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def block_bytes(self, group: int = 0) -> int:
        """Bytes in one block of KV-cache group `group`."""
        return self._layout(group).nbytes

    def check_key(self, key: BlockKey) -> None:
        """Raise `InvalidBlockError` unless `key` can name a block here."""
        if not isinstance(key.digest, bytes):  # pyright: ignore[reportUnnecessaryIsInstance] - callers are not all typed
            raise InvalidBlockError(f"a digest is bytes, not {type(key.digest).__name__}: {key.digest!r}")
        if len(key.digest) != self.digest_bytes:
            raise InvalidBlockError(
                f"{key!r} has a digest of {len(key.digest)} bytes; namespace {self.name} has {self.digest_bytes}"
            )
        self._layout(key.group)

    def check_keys(self, keys: Sequence[BlockKey]) -> list[bytes]:
        """The digests of `keys`, once it is sure that each can name a block here: `check_key` for a whole batch, at an
        eighth of its cost for each. Raises `InvalidBlockError` for the first that cannot.
        """
        digests = list(map(_DIGEST, keys))
        same = set(map(type, digests)) <= {bytes} and set(map(len, digests)) <= {self.digest_bytes}
        if not same or not set(map(_GROUP, keys)) <= set(range(len(self.layouts))):
            for key in keys:
                self.check_key(key)
        return digests

    def check_write(self, block: BlockWrite) -> NDArray[np.uint8]:
        """The data of `block` as a flat uint8 view, once it is sure that all of it fits here.

        Raises `InvalidBlockError`. Every backend calls this for each block it is to put, before it does anything.
        """
        if len(block.parent) not in (0, self.digest_bytes):
            raise InvalidBlockError(
                f"{block.key!r} names a parent of {len(block.parent)} bytes; namespace {self.name} has digests of"
                f" {self.digest_bytes}"
            )
        if not NO_POSITION <= block.position < MAX_POSITION:
            raise InvalidBlockError(f"{block.key!r} has position {block.position}; it is 0 or more, or NO_POSITION")
        return self.check_buffer(block.key, block.data)

    def check_buffer(self, key: BlockKey, buffer: Buffer, *, writable: bool = False) -> NDArray[np.uint8]:
        """`buffer` as a flat uint8 view, once it is sure that `key` fits here and the size is right.

        `writable=True` for a buffer that will be read into. Raises `InvalidBlockError`. Every backend calls this for
        each block it is to get, before it does anything.
        """
        self.check_key(key)
        try:
            flat = as_bytes(buffer)
        except InvalidBlockError as error:
            raise InvalidBlockError(f"{key!r}: {error}") from None
        expected = self.layouts[key.group].nbytes
        if flat.nbytes != expected:
            raise InvalidBlockError(
                f"{key!r}: the buffer has {flat.nbytes} bytes, a block of group {key.group} in namespace"
                f" {self.name} ({self.model}) has {expected}"
            )
        if writable and not flat.flags.writeable:
            raise InvalidBlockError(f"{key!r}: the buffer to read into is read-only: pass a writable one")
        return flat

    def _layout(self, group: int) -> BlockLayout:
        if not 0 <= group < len(self.layouts):
            raise InvalidBlockError(f"group {group}: namespace {self.name} has groups 0 to {len(self.layouts) - 1}")
        return self.layouts[group]

    def to_manifest(self) -> dict[str, Any]:
        """Every fingerprinted field as JSON-ready values; stored beside the blocks, read back by `from_manifest`."""
        return {
            "model": self.model,
            "revision": self.revision,
            "layouts": [layout.to_manifest() for layout in self.layouts],
            "block_tokens": self.block_tokens,
            "key_scheme": self.key_scheme,
            "digest_bytes": self.digest_bytes,
            "extra": dict(self.extra),
        }

    @classmethod
    def from_manifest(cls, manifest: object) -> Namespace:
        """The namespace that `to_manifest` described. Raises `ValueError` for whatever is not one."""
        said = fields(manifest, "a namespace")
        extra = fields(said.get("extra"), "what else must match")
        return cls(
            model=entry(said, "model", str),
            revision=entry(said, "revision", str),
            layouts=tuple(map(BlockLayout.from_manifest, records(said, "layouts"))),
            block_tokens=entry(said, "block_tokens", int),
            key_scheme=entry(said, "key_scheme", str),
            digest_bytes=entry(said, "digest_bytes", int),
            extra={name: entry(extra, name, str) for name in extra},
        )

    @classmethod
    def from_json(cls, manifest: bytes) -> Namespace:
        """`from_manifest`, of the manifest as JSON text. Raises `ValueError` for whatever is not one."""
        return cls.from_manifest(parsed(manifest))


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} of a namespace is text, not {value!r}")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(f"{name} of a namespace is no valid text: {value!r} has a lone surrogate")
