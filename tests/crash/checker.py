"""Reads a tier from its published format alone, and says what is wrong with it. Imports nothing of kvstore.

What is checked is what the formats promise (the docstrings of `kvstore_zarr.format`, `kvstore_zarr.metadata`,
`kvstore.catalog` and `kvstore_lmdb`), written down here a second time, on purpose: a mistake that the store makes in
the same way when it writes and when it reads would show here and nowhere else.

A block's payload is the one that `content` derives from its place, so a whole block of another key is found too. With
`keys` the tier has to be encrypted with that keyring, every block in it.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import google_crc32c
import lmdb
import numpy as np
from content import content
from unsealing import SEAL_BYTES, unsealed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from unsealing import Keys

PAGE = 4096
MAP_SIZE = 1 << 42
"""More than any tier here; a reader that mapped less would not see what came after it opened."""


@dataclass(frozen=True)
class Verdict:
    """A check's result: how many blocks are there, what they occupy in bytes, and everything that is wrong.

    `noise` are addresses of blocks that are whole, and whose data key is no more.
    """

    blocks: int
    used: int
    wrong: list[str]
    noise: list[str] = field(default_factory=list[str])


@dataclass
class Findings:
    """What a check found. `blocks` has each visible block's address and the bytes it occupies."""

    keys: Keys | None = None
    blocks: dict[bytes, int] = field(default_factory=dict[bytes, int])
    generations: dict[bytes, int] = field(default_factory=dict[bytes, int])
    wrong: list[str] = field(default_factory=list[str])
    strangers: list[str] = field(default_factory=list[str])
    """Files that are neither blocks nor documents nor the tier's own records: temporaries."""
    noise: list[str] = field(default_factory=list[str])


def address(fingerprint: bytes, group: int, digest: bytes) -> bytes:
    """How the catalogue names a block: fingerprint, group (u16, big-endian), digest."""
    return fingerprint + struct.pack(">H", group) + digest


def crc(data: bytes) -> int:
    return int(google_crc32c.value(data))


def check_payload(payload: bytes, place: tuple[bytes, int, bytes], size: int, findings: Findings) -> list[str]:
    """What is wrong with the bytes that stand for the block of `size` bytes at that place."""
    if findings.keys is None:
        return ["payload"] * (payload != content(*place, size).tobytes())
    opened = unsealed(payload, place, findings.keys)
    if not opened.readable:
        findings.noise.append(address(*place).hex())
        return opened.wrong
    return opened.wrong + ["payload"] * (opened.payload != content(*place, size).tobytes())


# file://


def check_blocks(root: Path, keys: Keys | None = None) -> Findings:
    """Every visible block of a `file://` tier."""
    findings = Findings(keys)
    for folder in sorted(root.iterdir()):
        if len(folder.name) == 32 and folder.is_dir():
            _check_namespace(folder, findings)
    return findings


def _check_namespace(folder: Path, findings: Findings) -> None:
    attributes = json.loads((folder / "zarr.json").read_text())["attributes"]["kvstore"]
    space = attributes["namespace"]
    fingerprint = bytes.fromhex(folder.name)
    said = attributes.get("sealed", {}).get("keyring")
    if said != (findings.keys.keyring.hex() if findings.keys else None):
        findings.wrong.append(f"{folder}: sealed with the keyring {said}")
    sizes = [_layout_bytes(layout) for layout in space["layouts"]]
    suffixes = [".0" * len(layout["shape"]) for layout in space["layouts"]]
    widths = attributes["digest_words"]["bytes"]
    if sum(widths) + 1 != space["digest_bytes"]:
        findings.wrong.append(f"{folder}: words of {widths} bytes for digests of {space['digest_bytes']}")
    for group, (size, suffix) in enumerate(zip(sizes, suffixes, strict=True)):
        for path in _files(folder / f"g{group}"):
            digest = _digest(path, widths, suffix)
            if path.name == "zarr.json":
                findings.wrong += _document_problems(path, said)
            elif digest is None:
                findings.strangers.append(str(path))
            else:
                _check_file(path, (fingerprint, group, digest), size, findings)


def _document_problems(path: Path, keyring: str | None) -> list[str]:
    """Whether a group's or an array's document says of its codecs what the namespace's says."""
    document = json.loads(path.read_text())
    if document["node_type"] == "group":
        return []
    (sharding,) = document["codecs"]
    codecs = {codec["name"]: codec.get("configuration") for codec in sharding["configuration"]["codecs"]}
    expected = ["bytes", "kvstore.aes256gcm", "crc32c"] if keyring else ["bytes", "crc32c"]
    wrong = list(codecs) != expected or (keyring and codecs["kvstore.aes256gcm"] != {"keyring": keyring})
    return [f"{path}: {codecs}"] * bool(wrong)


_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "uint8": 1}


def _layout_bytes(layout: dict[str, Any]) -> int:
    return int(np.prod(layout["shape"])) * _ITEM_BYTES[layout["dtype"]]


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file()) if folder.exists() else iter(())


def _digest(path: Path, widths: list[int], suffix: str) -> bytes | None:
    """The digest that a block's file name and folder spell."""
    words = path.name.removesuffix(suffix).split(".")
    if not path.name.endswith(suffix) or len(words) != len(widths):
        return None
    try:
        parts = [int(word).to_bytes(width, "big") for word, width in zip(words, widths, strict=True)]
        return bytes.fromhex(path.parent.name) + b"".join(parts)
    except (ValueError, OverflowError):
        return None


_TAIL = struct.Struct("<8sHHHBBQQQq16s64s64s")
_TAIL_FIELDS = ("magic", "version", "flags", "group", "digest_bytes", "parent_bytes", "payload_bytes", "generation",
                "created", "position", "fingerprint", "digest", "parent")  # fmt: skip


def _check_file(path: Path, place: tuple[bytes, int, bytes], size: int, findings: Findings) -> None:
    fingerprint, group, digest = place
    data, sealed = path.read_bytes(), findings.keys is not None
    stored = size + SEAL_BYTES * sealed
    length = -(-(stored + 4 + _TAIL.size + 16 * sealed + 4 + 20) // PAGE) * PAGE
    if len(data) != length:
        findings.wrong.append(f"{path}: {len(data)} bytes instead of {length}")
        return
    payload, rest = data[:stored], data[stored:]
    tail: dict[str, Any] = dict(zip(_TAIL_FIELDS, _TAIL.unpack_from(rest, 4), strict=True))
    index = struct.pack("<QQ", 0, stored + 4)
    expected = {"magic": b"KVBLOCK\n", "version": 1, "flags": int(sealed), "group": group,
                "digest_bytes": len(digest), "payload_bytes": stored, "fingerprint": fingerprint,
                "digest": digest.ljust(64, b"\0")}  # fmt: skip
    wrong = [name for name, value in expected.items() if tail[name] != value]
    wrong += ["payload checksum"] * (struct.unpack_from("<I", rest)[0] != crc(payload))
    wrong += ["tail checksum"] * (struct.unpack_from("<I", rest, len(rest) - 24)[0] != crc(rest[:-24]))
    wrong += ["shard index"] * (rest[-20:] != index + struct.pack("<I", crc(index)))
    wrong += ["id of the data key"] * (sealed and rest[4 + _TAIL.size :][:16] != payload[16:32])
    wrong += check_payload(payload, place, size, findings)
    if wrong:
        findings.wrong.append(f"{path}: {', '.join(wrong)}")
    findings.blocks[address(*place)] = path.stat().st_blocks * 512
    findings.generations[address(*place)] = tail["generation"]


# The catalogue, of both local tiers

_META = struct.Struct("<HHIQQQQq")
_TOTALS = ("capacity", "blocks", "used", "reserved", "overhead", "generation", "intent", "pinned")
_DATABASES = (b"meta", b"age", b"intents", b"namespaces", b"info")


@dataclass
class Books:
    """A catalogue's entries, as it has them. `sizes` and `generations` by address, `intents` by lease and number."""

    sizes: dict[bytes, int]
    generations: dict[bytes, int]
    intents: dict[tuple[bytes, int], int]
    totals: dict[str, int]
    wrong: list[str]
    seal: bytes | None = None


def read_books(directory: Path) -> Books:
    """The catalogue in the LMDB environment `directory`, read past kvstore; safe beside live users."""
    return _books(_tables(directory, *_DATABASES))


def _seal_problems(books: Books, keys: Keys | None) -> list[str]:
    if not books.generations or books.seal == (keys.keyring if keys else None):
        return []
    return [f"the catalogue says that blocks are sealed with {books.seal!r}"]


def _tables(directory: Path, *names: bytes) -> dict[bytes, dict[bytes, bytes]]:
    with (
        lmdb.open(str(directory), readonly=True, max_dbs=16, create=False, map_size=MAP_SIZE) as environment,
        environment.begin() as txn,
    ):
        return {name: dict(_table(environment, txn, name)) for name in names}


def _table(environment: lmdb.Environment, txn: lmdb.Transaction, name: bytes) -> Iterator[tuple[bytes, bytes]]:
    try:
        handle = environment.open_db(name, txn, create=False)
    except lmdb.NotFoundError:
        return
    with txn.cursor(handle) as cursor:
        yield from cursor


def _books(tables: dict[bytes, dict[bytes, bytes]]) -> Books:
    meta = {key: _META.unpack_from(value) for key, value in tables[b"meta"].items()}
    totals = dict(zip(_TOTALS, struct.unpack("<8Q", tables[b"info"][b"totals"]), strict=True))
    books = Books(
        sizes={key: fields[3] for key, fields in meta.items()},
        generations={key: fields[4] for key, fields in meta.items()},
        intents={
            (key[:16], struct.unpack(">Q", key[16:])[0]): struct.unpack_from("<Q", value)[0]
            for key, value in tables[b"intents"].items()
        },
        totals=totals,
        wrong=[],
        seal=tables[b"info"].get(b"seal"),
    )
    pinned = {key for key, value in tables[b"meta"].items() if _is_pinned(value)}
    ages = {
        struct.pack(">Q", fields[6]) + key: struct.pack("<QQ", fields[3], fields[4])
        for key, fields in meta.items()
        if key not in pinned
    }
    expected = {"blocks": len(meta), "used": sum(books.sizes.values()), "reserved": sum(books.intents.values()),
                "pinned": sum(books.sizes[key] for key in pinned)}  # fmt: skip
    books.wrong += [
        f"{name} is {totals[name]}, the sum is {value}" for name, value in expected.items() if totals[name] != value
    ]
    books.wrong += ["`age` does not mirror `meta`"] * (ages != tables[b"age"])
    return books


def _is_pinned(value: bytes) -> bool:
    """Whether one of the marks at the end of a `meta` record is a pin."""
    place, pinned = _META.size + _META.unpack_from(value)[1], False
    while place < len(value):
        flags, label, tenant = value[place : place + 3]
        pinned |= bool(flags & 1)
        place += 3 + label + tenant
    return pinned


def check_file_tier(root: Path, settled: bool, keys: Keys | None = None, *, catalogue: Path) -> Verdict:
    """A `file://` tier of which nobody is a user; `settled`: its last user closed it, so the books must close."""
    findings, books = check_blocks(root, keys), read_books(catalogue)
    wrong = findings.wrong + books.wrong + _seal_problems(books, keys)
    if settled:
        wrong += _unsettled(books, findings.blocks)
        wrong += ["generations differ"] * (findings.generations != books.generations)
        wrong += [f"left over: {name}" for name in findings.strangers]
    return Verdict(len(findings.blocks), sum(findings.blocks.values()), wrong, findings.noise)


# lmdb://

_HEADER = struct.Struct("<8sHHHH16s64sQQ8xI")
_HEADER_FIELDS = ("magic", "version", "group", "digest_bytes", "flags", "fingerprint", "digest", "payload_bytes",
                  "created", "payload_checksum")  # fmt: skip
_HEADER_BYTES = 128


def check_lmdb_tier(root: Path, settled: bool, keys: Keys | None = None) -> Verdict:
    """An `lmdb://` tier of which nobody is a user. Its books must close at any time: there are no steps in between."""
    del settled
    tables = _tables(root, *_DATABASES, b"blocks")
    books, findings = _books(tables), Findings(keys)
    wrong = books.wrong + _seal_problems(books, keys)
    spaces = {fingerprint: json.loads(manifest) for fingerprint, manifest in tables[b"namespaces"].items()}
    occupied: dict[bytes, int] = {}
    of = {struct.pack(">Q", generation): place for place, generation in books.generations.items()}
    for number, value in tables[b"blocks"].items():
        place = of.get(number)
        if place is None:
            wrong.append(f"no entry leads to the value {number.hex()}")
            continue
        layout = spaces[place[:16]]["layouts"][struct.unpack(">H", place[16:18])[0]]
        problems = _entry_problems(place, value, _layout_bytes(layout), findings)
        if problems:
            wrong.append(f"{place.hex()}: {', '.join(problems)}")
        occupied[place] = -(-(16 + len(value)) // PAGE) * PAGE
    return Verdict(len(occupied), sum(occupied.values()), wrong + _unsettled(books, occupied), findings.noise)


def _entry_problems(place: bytes, value: bytes, size: int, findings: Findings) -> list[str]:
    fingerprint, (group,), digest = place[:16], struct.unpack(">H", place[16:18]), place[18:]
    header, payload = value[:_HEADER_BYTES], value[_HEADER_BYTES:]
    if len(header) < _HEADER_BYTES:
        return ["too short"]
    fields: dict[str, Any] = dict(zip(_HEADER_FIELDS, _HEADER.unpack_from(header), strict=True))
    sealed = findings.keys is not None
    expected = {"magic": b"kvblock\0", "version": 1, "group": group, "digest_bytes": len(digest),
                "flags": int(sealed), "fingerprint": fingerprint, "digest": digest.ljust(64, b"\0"),
                "payload_bytes": size + SEAL_BYTES * sealed, "payload_checksum": crc(payload)}  # fmt: skip
    problems = [name for name, right in expected.items() if fields[name] != right]
    problems += ["header checksum"] * (struct.unpack_from("<I", header, _HEADER.size)[0] != crc(header[: _HEADER.size]))
    return problems + check_payload(payload, (fingerprint, group, digest), size, findings)


# Both


def _unsettled(books: Books, blocks: dict[bytes, int]) -> list[str]:
    """What the books say that is not so."""
    wrong = [f"{len(books.intents)} intents are left"] * bool(books.intents)
    for place in books.sizes.keys() | blocks.keys():
        if books.sizes.get(place) != blocks.get(place):
            there, said = blocks.get(place), books.sizes.get(place)
            wrong.append(f"{place.hex()} occupies {there} bytes and is booked with {said}")
    return wrong
