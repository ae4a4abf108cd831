"""What a tier of another format version is told, and what becomes of single blocks of a later one (docs/formats.md)."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from typing import TYPE_CHECKING

import pytest
from golden_contents import BLOCKS, LATER_S, SEALED, SPACES, GoldenBlock, at
from golden_tiers import ValueStore, got, opened

from kvstore import BlockRead, BlockStore, GetOutcome, PutOutcome
from kvstore.archive import open_archive
from kvstore.environment import Environment
from kvstore.errors import KeyringError, NewerFormatError, NotAStoreError, OlderFormatError, StoreOpenError
from kvstore.integrity import crc32c
from kvstore.records import address_of, generation_of
from kvstore.sealing import SEAL_BYTES
from kvstore.url import TierURL
from kvstore.values import name_of
from kvstore_lmdb import LMDBStore
from kvstore_lmdb.entry import place_of
from kvstore_zarr import LocalZarrStore
from kvstore_zarr.metadata import NamespaceTree
from kvstore_zarr.reindex import reindex

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HIT, MISS, CORRUPT = GetOutcome.HIT, GetOutcome.MISS, GetOutcome.CORRUPT
ONE, OTHER = SEALED[3], SEALED[4]
"""Of group 1, so that there is a rest behind whole pages."""
PLAIN, ENCRYPTED = ("file", "objects", "lmdb", "values"), ("file-sealed", "lmdb-sealed", "values-sealed")
VERSION, FLAGS = 2, 0x02


def edited(
    name: str, data: bytes, block: GoldenBlock, *, version: int = 1, flags: int = 0, spare: bytes = b""
) -> bytes:
    """A stored block that says another version, more flags, or something in what are zeros, under sound checksums."""
    changed = bytearray(data)
    if name.startswith(("file", "objects")):
        start = struct.unpack("<Q", data[-12:-4])[0]  # of the tail: behind payload and checksum
        at_version, at_flags, at_spare = start + 8, start + 10, start + 208
    else:
        start, at_version, at_spare = 0, 8, 112
        at_flags = 14 if name.startswith("lmdb") else 10
    struct.pack_into("<H", changed, at_version, version)
    struct.pack_into("<H", changed, at_flags, flags | struct.unpack_from("<H", data, at_flags)[0])
    changed[at_spare : at_spare + len(spare)] = spare
    if name.startswith(("file", "objects")):
        struct.pack_into("<I", changed, len(data) - 24, crc32c(bytes(changed[start - 4 : -24])))
    else:
        before = address_of(block.namespace, block.key) if name.startswith("values") else b""
        struct.pack_into("<I", changed, 124, crc32c(before + bytes(changed[:124])))
    return bytes(changed)


def edited_seal(name: str, data: bytes, block: GoldenBlock, *, version: int) -> bytes:
    """A stored block in which a later kvstore sealed what it holds, under sound checksums."""
    changed = bytearray(data)
    start = 0 if name.startswith(("file", "objects")) else 128
    struct.pack_into("<H", changed, start + 8, version)
    size = block.content.nbytes + SEAL_BYTES
    checksum = struct.pack("<I", crc32c(bytes(changed[start : start + size])))
    at_checksum = size if start == 0 else 120
    changed[at_checksum : at_checksum + 4] = checksum
    return edited(name, bytes(changed), block)


def path_of(root: Path, name: str, block: GoldenBlock) -> Path:
    return root / name / NamespaceTree(block.namespace).block(block.key)


def stored(
    name: str, root: Path, store: BlockStore, block: GoldenBlock, edit: Callable[[bytes], bytes] | None
) -> bytes:
    """The bytes of a block as they are in the tier; `edit` changes them first."""
    if isinstance(store, ValueStore):
        value = store.values[name_of(block.namespace, block.key)]
        if edit is not None:
            store.values[name_of(block.namespace, block.key)] = edit(value)
        return store.values[name_of(block.namespace, block.key)]
    if name.startswith("lmdb"):
        environment: Environment = store._tier.environment  # type: ignore[attr-defined]
        blocks, meta = environment.databases["blocks"], environment.databases["meta"]
        with environment.write() as txn:
            entry = txn.get(address_of(block.namespace, block.key), db=meta)
            assert entry is not None
            place = place_of(generation_of(entry))
            value = bytes(txn.get(place, db=blocks) or b"")
            if edit is not None:
                txn.put(place, value := edit(value), db=blocks)
        return value
    path = path_of(root, name, block)
    if edit is not None:
        path.write_bytes(edit(path.read_bytes()))
    return path.read_bytes()


@pytest.mark.parametrize("name", [*PLAIN, *ENCRYPTED])
@pytest.mark.parametrize("says", [{"version": VERSION}, {"flags": FLAGS}], ids=["version", "flag"])
def test_a_block_of_a_later_version_is_a_miss_and_stays(name: str, says: dict[str, int], copied: Path) -> None:
    with at(LATER_S), opened(name, copied) as store:
        later = stored(name, copied, store, ONE, lambda data: edited(name, data, ONE, **says))
        assert got(store, [ONE, OTHER]) == [MISS, HIT]
        assert got(store, [ONE]) == [MISS]
        assert stored(name, copied, store, ONE, None) == later
        assert store.put_many(ONE.namespace, [ONE.write]) == [PutOutcome.EXISTS]
        assert store.delete_many(ONE.namespace, [ONE.key]) == [True]
        assert store.put_many(ONE.namespace, [ONE.write]) == [PutOutcome.STORED]
        assert got(store, [ONE]) == [HIT]


@pytest.mark.parametrize(("name", "where"), [*((name, "block") for name in PLAIN), *((n, "seal") for n in ENCRYPTED)])
def test_who_verifies_can_tell_a_later_versions_block_from_one_that_is_gone(
    name: str, where: str, copied: Path
) -> None:
    edit = edited if where == "block" else edited_seal
    with at(LATER_S), opened(name, copied) as store:
        stored(name, copied, store, ONE, lambda data: edit(name, data, ONE, version=VERSION))
        keys = [ONE.key, OTHER.key]
        reads = [BlockRead(key, bytearray(ONE.namespace.block_bytes(key.group))) for key in keys]
        assert store.check_many(ONE.namespace, reads) == [MISS, HIT]
        assert store.of_later_version(ONE.namespace, keys) == [True, False]
        assert store.delete_many(ONE.namespace, [ONE.key]) == [True]
        assert store.of_later_version(ONE.namespace, keys) == [False, False]


@pytest.mark.parametrize("name", [*PLAIN, *ENCRYPTED])
@pytest.mark.parametrize("says", [{"flags": 0x0200}, {"spare": b"more"}], ids=["flag", "spare bytes"])
def test_what_may_be_passed_over_is(name: str, says: dict[str, object], copied: Path) -> None:
    with at(LATER_S), opened(name, copied) as store:
        stored(name, copied, store, ONE, lambda data: edited(name, data, ONE, **says))  # type: ignore[arg-type]
        assert got(store, [ONE]) == [HIT]


@pytest.mark.parametrize("name", PLAIN)
def test_one_from_before_the_first_version_is_damage(name: str, copied: Path) -> None:
    with at(LATER_S), opened(name, copied) as store:
        stored(name, copied, store, ONE, lambda data: edited(name, data, ONE, version=0))
        assert got(store, [ONE]) == [CORRUPT]
        assert store.put_many(ONE.namespace, [ONE.write]) == [PutOutcome.STORED]


@pytest.mark.parametrize("name", PLAIN)
def test_what_only_says_that_it_is_later_is_damage(name: str, copied: Path) -> None:
    """A flipped bit must not be left standing for ever."""

    def flip(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[struct.unpack("<Q", data[-12:-4])[0] + 8 if name in ("file", "objects") else 8] ^= 2
        return bytes(changed)

    with at(LATER_S), opened(name, copied) as store:
        stored(name, copied, store, ONE, flip)
        assert got(store, [ONE]) == [CORRUPT]


@pytest.mark.parametrize("name", ["file", "objects"])
def test_one_of_another_size_is_left_alone(name: str, copied: Path) -> None:
    """As if its payload were compressed: the index at the end says where the tail begins."""
    path, payload = path_of(copied, name, ONE), b"short"
    tail = bytearray(path.read_bytes()[ONE.content.nbytes + 4 : -24])
    struct.pack_into("<H", tail, 8, VERSION)
    rest = struct.pack("<I", crc32c(payload)) + bytes(tail)
    rest = rest.ljust(4096 - len(payload) - 24, b"\0")[: 4096 - len(payload) - 24]
    index = struct.pack("<QQ", 0, len(payload) + 4)
    whole = payload + rest + struct.pack("<I", crc32c(rest)) + index + struct.pack("<I", crc32c(index))
    path.write_bytes(whole)
    with at(LATER_S), opened(name, copied) as store:
        assert got(store, [ONE, OTHER]) == [MISS, HIT]
    assert path.read_bytes() == whole


def test_neither_rebuild_nor_reindex_nor_repair_takes_it_away(copied: Path) -> None:
    path = path_of(copied, "file", ONE)
    later = edited("file", path.read_bytes(), ONE, version=VERSION)
    path.write_bytes(later)
    shutil.rmtree(copied / "file" / ".kvstore")
    with at(LATER_S), opened("file", copied) as store:
        assert isinstance(store, LocalZarrStore)
        assert store.contains_many(ONE.namespace, [ONE.key, OTHER.key]) == [False, True]
        found = reindex(store._tier, unreadable_for_s=-1e9)
        assert (found.unreadable, found.erased) == (0, 0)
        store.repair()
        assert path.read_bytes() == later
        assert got(store, [ONE]) == [MISS]
        assert store.put_many(ONE.namespace, [ONE.write]) == [PutOutcome.STORED], "in its place"
        assert got(store, [ONE]) == [HIT]


def test_repair_leaves_the_bytes_of_a_later_version_that_no_entry_leads_to(copied: Path) -> None:
    with at(LATER_S), opened("lmdb", copied) as store:
        environment: Environment = store._tier.environment  # type: ignore[attr-defined]
        later = stored("lmdb", copied, store, ONE, lambda data: edited("lmdb", data, ONE, version=VERSION))
        with environment.write() as txn:
            entry = txn.pop(address_of(ONE.namespace, ONE.key), db=environment.databases["meta"])
        place = place_of(generation_of(entry))
        store.repair()
        with environment.read() as txn:
            assert bytes(txn.get(place, db=environment.databases["blocks"]) or b"") == later


# Whole tiers


def say_format(root: Path, name: str, version: int) -> None:
    """The tier, below a copy, says that it is of that version."""
    place = root / name
    if name == "values":
        path = root / "values.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": str(version).encode().hex()}))
    elif name == "lmdb":
        catalogue_says(place, version)
    else:
        for document in place.glob("*/zarr.json"):
            describe_as(document, version)


def describe_as(document: Path, version: int) -> None:
    """The manifest is another version's, which takes fingerprints in another way: what it describes is not what version
    1 names so.
    """
    text = document.read_text().replace('"format": 1', f'"format": {version}')
    document.write_text(text.replace('"model": "', f'"model": "of version {version}: '))


def catalogue_says(directory: Path, version: int) -> None:
    environment = Environment.open(directory, ["info", "blocks"])
    with environment.write() as txn:
        txn.put(b"format", version.to_bytes(4, "little"), db=environment.databases["info"])
    environment.close()


@pytest.mark.parametrize("readonly", [True, False], ids=["readonly", "writable"])
@pytest.mark.parametrize("name", PLAIN)
def test_a_tier_from_before_the_first_version_says_that_it_is_to_go(name: str, copied: Path, *, readonly: bool) -> None:
    say_format(copied, name, 0)
    with pytest.raises(StoreOpenError, match=r"format 0.*(remove).*cache"):
        opened(name, copied, readonly=readonly)
    if name != "objects":
        with pytest.raises(OlderFormatError):
            opened(name, copied, readonly=readonly)


@pytest.mark.parametrize("readonly", [True, False], ids=["readonly", "writable"])
@pytest.mark.parametrize("name", PLAIN)
def test_a_tier_of_a_later_version_says_what_to_upgrade(name: str, copied: Path, *, readonly: bool) -> None:
    say_format(copied, name, VERSION)
    with pytest.raises(StoreOpenError, match=r"format 2.*upgrade.*number was damaged: remove"):
        opened(name, copied, readonly=readonly)


@pytest.mark.parametrize("said", ["", "1 ", "one", "1.0"])
def test_values_that_say_no_version_are_damaged_and_not_of_a_later_one(said: str, copied: Path) -> None:
    path = copied / "values.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": said.encode().hex()}))
    with pytest.raises(NotAStoreError, match="damaged; remove all its values"):
        opened("values", copied)


@pytest.mark.parametrize(
    ("sound", "damaged"),
    [
        *(('"format": 1', f'"format": {said}') for said in ("0", "3", "null", "1.0", "true")),
        ('"format": 1', '"fgrmat": 1'),
        ('"fingerprint": "', '"fingerprint": "x'),
    ],
)
@pytest.mark.parametrize(("name", "every"), [("file", True), ("file", False), ("objects", True)])
def test_a_manifest_whose_name_proves_it_is_version_1_whatever_it_says(
    name: str, sound: str, damaged: str, copied: Path, every: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One flipped digit is not to close a tier: a later version's manifest would have another name."""
    space = ONE.namespace
    before = {
        path: path.read_text()
        for path in (copied / name).glob("*/zarr.json")
        if every or path.parent.name == space.name
    }
    for path, text in before.items():
        path.write_text(text.replace(sound, damaged))
        assert path.read_text() != text
    for readonly in (True, False):
        with at(LATER_S), opened(name, copied, readonly=readonly) as store:
            assert len(store.namespaces()) == len(SPACES)
            assert got(store, SEALED) == [HIT] * len(SEALED)
            assert "is damaged" in caplog.text
            if name == "file" and not readonly:
                assert {one.what: one.count for one in store.repair()}.popitem()[1] == len(before)
                assert {path: path.read_text() for path in before} == before


@pytest.mark.parametrize("name", ["file", "objects"])
@pytest.mark.parametrize("version", [0, VERSION])
def test_a_namespace_of_another_version_is_left_alone_beside_ours(name: str, version: int, copied: Path) -> None:
    """Two versions of kvstore on one bucket, during an upgrade."""
    space = SPACES["bf16"]
    theirs = [block for block in BLOCKS if block.namespace == space]
    document = copied / name / space.name / "zarr.json"
    describe_as(document, version)
    before = {path: path.read_bytes() for path in (copied / name / space.name).rglob("*") if path.is_file()}
    with at(LATER_S), opened(name, copied) as store:
        assert f"format {version}" in " ".join(store.capabilities.notes)
        assert space not in store.namespaces()
        assert len(store.namespaces()) == len(SPACES) - 1
        assert got(store, theirs) == [MISS] * len(theirs)
        assert store.put_many(space, [block.write for block in theirs]) == [PutOutcome.FAILED] * len(theirs)
        assert got(store, SEALED) == [HIT] * len(SEALED)
    assert {path: path.read_bytes() for path in before} == before


def test_a_catalogue_of_an_earlier_version_is_made_anew_and_one_of_a_later_is_refused(copied: Path) -> None:
    catalogue = copied / "file" / ".kvstore" / "catalogue"
    catalogue_says(catalogue, 0)
    with pytest.raises(OlderFormatError):
        opened("file", copied, readonly=True)
    with at(LATER_S), opened("file", copied) as store:
        assert got(store, SEALED) == [HIT] * len(SEALED)
        assert [info.marks for info in store.scan(SPACES["groups"]) if info.marks], "marks are taken over"
        assert "made anew" in " ".join(store.capabilities.notes)
    catalogue_says(catalogue, VERSION)
    with pytest.raises(NewerFormatError, match="upgrade"):
        opened("file", copied)


@pytest.mark.parametrize(("version", "error"), [(0, OlderFormatError), (VERSION, NewerFormatError)])
def test_an_archive_of_another_version(version: int, error: type[Exception], copied: Path) -> None:
    path = copied / "archive" / "kvstore-archive.json"
    document = json.loads(path.read_text())
    document["kvstore_archive"]["format"] = version
    del document["sha256"]
    plain = json.dumps(document, indent=1) + "\n"
    document["sha256"] = hashlib.sha256(plain.encode()).hexdigest()
    path.write_text(json.dumps(document, indent=1) + "\n")
    with pytest.raises(error, match=f"format {version}"):
        open_archive(f"file://{copied}/archive")


def test_a_keyring_of_a_later_version(copied: Path) -> None:
    path = copied / "keyring.json"
    path.write_text(path.read_text().replace('"kvstore_keyring": 1', '"kvstore_keyring": 2'))
    with pytest.raises(KeyringError, match=r"version 2.*upgrade.*damaged: restore"):
        opened("file-sealed", copied)


def test_entries_of_documents_that_are_not_known_are_ignored(copied: Path) -> None:
    for path in (copied / "file").glob("*/zarr.json"):
        document = json.loads(path.read_text())
        document["attributes"]["kvstore"]["written_by"] = {"more": [1]}
        path.write_text(json.dumps(document))
    with at(LATER_S), opened("file", copied) as store:
        assert len(store.namespaces()) == len(SPACES)


def test_a_damaged_environment_of_a_later_version_is_not_saved_by_ours(copied: Path) -> None:
    catalogue_says(copied / "lmdb", VERSION)
    path = copied / "lmdb" / "data.mdb"
    data = bytearray(path.read_bytes())
    for start in range(0, len(data), 4096):
        if struct.unpack_from("<H", data, start + 10)[0] == 4:  # where a large value begins
            data[start : start + 16] = bytes(16)
    path.write_bytes(data)
    with pytest.raises(NewerFormatError, match="upgrade"):
        LMDBStore.salvage(TierURL.parse(f"lmdb://{copied}/lmdb").validated(LMDBStore.options))
    assert path.read_bytes() == data
