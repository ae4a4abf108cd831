"""The manifest of an archive: the document that is written last and makes it one, and what callers see of it.

It names every other object with its size and CRC, and ends with a digest of itself, so that no byte of an archive can
change unnoticed. Written in one form only: what is not byte for byte what would be written is damaged.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.archive.compression import Compression
from kvstore.archive.errors import ArchiveDamagedError
from kvstore.namespace import Namespace
from kvstore.untrusted import entry, fields, members, parsed, record, records
from kvstore.versions import FORMAT_VERSION, check_version

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.types import BlockKey

__all__ = [
    "DRAFT_NAME",
    "LAST_MOMENT",
    "MANIFEST_NAME",
    "ArchiveInfo",
    "Manifest",
    "Segment",
    "Stored",
    "plan_of",
    "silent",
]

MANIFEST_NAME = "kvstore-archive.json"
DRAFT_NAME = "kvstore-archive.draft.json"
"""There while an archive is in the making: whoever finds it without a manifest may go on with it, or remove it."""


LAST_MOMENT = 253_402_300_799
"""The end of the year 9999, up to which an archive can be kept."""


@dataclass(frozen=True, slots=True)
class ArchiveInfo:
    """What an archive is. Times are seconds since the epoch.

    `name` is the last part of its URL, `url` and `source` (the tier it was taken from) show no credentials. `blocks`
    are those of all KV-cache groups, `tokens` how many tokens the prefix has. `nbytes` is what the blocks are in a
    tier, `stored_bytes` what the archive is. `keep_until` is None where it may be removed at any time.
    `has_token_ids`: the prompt itself is in it.
    """

    url: str
    name: str
    label: str
    namespace: Namespace
    blocks: int
    tokens: int
    nbytes: int
    stored_bytes: int
    compression: str
    created: float
    version: str
    source: str
    keep_until: float | None
    has_token_ids: bool


@dataclass(frozen=True, slots=True)
class Stored:
    """An object of an archive: its size, and the CRC-32C of all of it."""

    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class Segment:
    """The blocks of one KV-cache group: how many, how many to a shard, and where the first stands in its prefix.

    `start` is its position, `parent` the digest of the block before it: of a group with a sliding window only the last
    blocks may be there.
    """

    blocks: int
    room: int
    start: int
    parent: bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that the document says. `segments` are by KV-cache group; `objects` all others than the manifest, by path."""

    namespace: Namespace
    segments: tuple[Segment, ...]
    compression: Compression
    plan: bytes
    label: str
    created: float
    version: str
    source: str
    keep_until: float | None
    has_token_ids: bool
    nbytes: int
    objects: Mapping[str, Stored] = field(default_factory=dict[str, "Stored"])

    @property
    def blocks(self) -> int:
        """Of all groups."""
        return sum(segment.blocks for segment in self.segments)

    @property
    def tokens(self) -> int:
        """Of the prefix: where the blocks of the first group end."""
        first = next(segment for segment in self.segments if segment.blocks)
        return (first.start + first.blocks) * self.namespace.block_tokens

    def info(self, url: str, name: str) -> ArchiveInfo:
        """For callers; `url` is fit to be shown."""
        return ArchiveInfo(
            url=url,
            name=name,
            label=self.label,
            namespace=self.namespace,
            blocks=self.blocks,
            tokens=self.tokens,
            nbytes=self.nbytes,
            stored_bytes=sum(stored.size for stored in self.objects.values()),
            compression=str(self.compression),
            created=self.created,
            version=self.version,
            source=self.source,
            keep_until=self.keep_until,
            has_token_ids=self.has_token_ids,
        )

    def facts(self) -> dict[str, Any]:
        """Whatever is not about single objects, as JSON-ready values."""
        return {
            "format": FORMAT_VERSION,
            "fingerprint": self.namespace.name,
            "namespace": self.namespace.to_manifest(),
            "groups": [
                {"blocks": one.blocks, "blocks_per_shard": one.room, "start": one.start, "parent": one.parent.hex()}
                for one in self.segments
            ],
            "compression": str(self.compression),
            "plan": self.plan.hex(),
            "label": self.label,
            "created": self.created,
            "version": self.version,
            "source": self.source,
            "keep_until": self.keep_until,
            "token_ids": self.has_token_ids,
            "nbytes": self.nbytes,
        }

    def dump(self) -> bytes:
        """The document."""
        objects = {path: [stored.size, stored.crc] for path, stored in sorted(self.objects.items())}
        return _sealed({"kvstore_archive": self.facts(), "objects": objects})

    @classmethod
    def parse(cls, data: bytes, place: str) -> Manifest:
        """What `dump` wrote. `place` is for messages. Raises `ArchiveDamagedError`, `NewerFormatError`, or
        `OlderFormatError`.
        """
        try:
            document = fields(parsed(data), "it")
            facts = record(document, "kvstore_archive")
            if _sealed({name: value for name, value in document.items() if name != "sha256"}) != data:
                raise ValueError("its digest is another one")
            check_version(entry(facts, "format", int), place, "remove it, and archive the prefix anew")
            return cls._read(facts, record(document, "objects"))
        except ValueError as error:
            raise ArchiveDamagedError(
                f"{place}: the manifest of this archive is damaged ({error}); what it holds cannot be trusted: remove"
                " it, and archive the prefix anew"
            ) from error

    @classmethod
    def _read(cls, facts: Mapping[str, Any], objects: Mapping[str, Any]) -> Manifest:
        """Raises `ValueError` for what `dump` cannot have written."""
        namespace = Namespace.from_manifest(facts.get("namespace"))
        segments = tuple(map(_segment, records(facts, "groups")))
        _check(facts, namespace, segments)
        return cls(
            namespace=namespace,
            segments=segments,
            compression=Compression.parse(entry(facts, "compression", str)),
            plan=bytes.fromhex(entry(facts, "plan", str)),
            label=entry(facts, "label", str),
            created=_moment(facts, "created"),
            version=entry(facts, "version", str),
            source=entry(facts, "source", str),
            keep_until=None if facts.get("keep_until", ...) is None else _moment(facts, "keep_until"),
            has_token_ids=entry(facts, "token_ids", bool),
            nbytes=entry(facts, "nbytes", int),
            objects={path: _stored(objects, path) for path in objects},
        )


def plan_of(
    namespace: Namespace, keys: Sequence[BlockKey], segments: Sequence[Segment], compression: Compression
) -> bytes:
    """32 bytes that name what an archive is made of: which blocks, in which order, and how they are stored."""
    rooms = [segment.room for segment in segments]
    text = f"kvstore-archive-{FORMAT_VERSION}:{namespace.name}:{compression}:{rooms}:"
    digest = hashlib.sha256(text.encode())
    for key in keys:
        digest.update(key.group.to_bytes(2, "big") + key.digest)
    return digest.digest()


def _segment(said: Mapping[str, Any]) -> Segment:
    blocks, room, start = (entry(said, name, int) for name in ("blocks", "blocks_per_shard", "start"))
    return Segment(blocks, room, start, bytes.fromhex(entry(said, "parent", str)))


def _stored(objects: Mapping[str, Any], path: str) -> Stored:
    size, crc = members(objects, path, int)
    return Stored(size, crc)


def _moment(facts: Mapping[str, Any], name: str) -> float:
    """Seconds since the epoch, of which a date can be made."""
    kind = float if type(facts.get(name)) is float else int
    moment: float = entry(facts, name, kind)
    if not 0 <= moment <= LAST_MOMENT:
        raise ValueError(f"{name!r} is {moment}, and no time")
    return moment


def _check(facts: Mapping[str, Any], namespace: Namespace, segments: Sequence[Segment]) -> None:
    """Raise `ValueError` where what a manifest says cannot be, whoever wrote it."""
    if facts.get("fingerprint") != namespace.name or len(segments) != len(namespace.layouts):
        raise ValueError("it contradicts itself about its namespace")
    if min(one.blocks for one in segments) < 0 or not any(one.blocks for one in segments):
        raise ValueError("it has no blocks")
    if min(one.room for one in segments) < 1 or min(one.start for one in segments) < 0:
        raise ValueError("it has shards that cannot be")


def silent(blocks: int) -> None:
    """Progress that nobody wants to hear of."""


def _sealed(document: dict[str, Any]) -> bytes:
    """As it is stored, with a digest of it."""
    digest = hashlib.sha256(_dump(document)).hexdigest()
    return _dump({**document, "sha256": digest})


def _dump(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=1).encode() + b"\n"
