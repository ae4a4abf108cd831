"""The golden fixtures of format version 1: today's kvstore reads them, and writes the same bytes.

They were made by the kvstore that introduced the version (`make.py`) and are what users have on their devices. No test
here is mended by making them anew.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb
import numpy as np
import pytest
from golden_contents import (
    BLOCKS,
    LATER_S,
    MARK,
    MARKED,
    OPERATOR_KEY,
    PURGED,
    PURGED_S,
    REFUSED_S,
    SEALED,
    SPACES,
    T0,
    TENANT,
    USED,
    USED_S,
    GoldenBlock,
    at,
    left,
    pattern,
)
from golden_tiers import GOLDEN, ValueStore, got, opened
from make import make

from kvstore import (
    BlockKey,
    BlockRead,
    BlockStore,
    BlockWrite,
    GetOutcome,
    KeyExtras,
    Media,
    Namespace,
    PutOutcome,
    chain_digests,
    open_store,
)
from kvstore.archive import open_archive, restore
from kvstore.sealing.document import Document
from kvstore_lmdb.space import SMALLEST_CAPACITY
from kvstore_zarr.format import DigestWords
from kvstore_zarr.metadata import NamespaceTree
from kvstore_zarr.opening import LEAST_CAPACITY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore import BlockInfo

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
STOCK_READER = Path(__file__).parents[1] / "stock_zarr" / "read_block.py"
CHANGED = "the format changed: a new version needs new fixtures beside these, which stay"

LOCAL = ("file", "lmdb")
PLAIN = (*LOCAL, "objects", "values")
ENCRYPTED = ("file-sealed", "lmdb-sealed", "values-sealed")

pytestmark = pytest.mark.skipif(
    sys.byteorder != "little", reason="LMDB environments are of machines of their byte order"
)


def scanned(store: BlockStore) -> dict[tuple[str, BlockKey], BlockInfo]:
    return {(space.name, info.key): info for space in store.namespaces() for info in store.scan(space)}


@pytest.mark.parametrize("readonly", [True, False], ids=["readonly", "writable"])
@pytest.mark.parametrize("name", [*PLAIN, *ENCRYPTED])
def test_every_block_is_read_as_it_was_written(name: str, copied: Path, *, readonly: bool) -> None:
    blocks = SEALED if name in ENCRYPTED else BLOCKS
    with at(LATER_S), opened(name, copied, readonly=readonly) as store:
        assert {space.name for space in store.namespaces()} == {block.namespace.name for block in blocks}
        assert set(map(repr, store.namespaces())) == {repr(block.namespace) for block in blocks}
        infos = scanned(store)
        assert got(store, left(blocks)) == [GetOutcome.HIT] * len(left(blocks))
        assert got(store, PURGED) == [GetOutcome.MISS] * len(PURGED)
    assert infos.keys() == {(block.namespace.name, block.key) for block in left(blocks)}
    for block in left(blocks):
        info = infos[block.namespace.name, block.key]
        assert (info.position, info.parent) == (block.position, block.parent)
        assert info.created == block.created / 1e9


@pytest.mark.parametrize("name", LOCAL)
def test_marks_and_uses_are_as_they_were_left(name: str, copied: Path) -> None:
    with at(LATER_S), opened(name, copied) as store:
        infos = scanned(store)
        for block in left(BLOCKS):
            info = infos[block.namespace.name, block.key]
            used = (T0 / 1e9 + USED_S, 1) if block in USED else (block.created / 1e9, 0)
            assert (info.last_used, info.hits) == used
            assert info.marks == ((MARK,) if block in MARKED else ())
        assert [info.key for info in store.scan_marked(SPACES["groups"], MARK)] == [block.key for block in MARKED]


@pytest.mark.parametrize("name", ["file", "file-sealed"])
def test_a_catalogue_that_is_lost_is_made_anew_from_the_blocks(name: str, copied: Path) -> None:
    shutil.rmtree(copied / name / ".kvstore")
    blocks = SEALED if name in ENCRYPTED else left(BLOCKS)
    with at(LATER_S), opened(name, copied) as store:
        assert got(store, blocks) == [GetOutcome.HIT] * len(blocks)
        assert {info.created for info in scanned(store).values()} == {block.created / 1e9 for block in blocks}


@pytest.mark.parametrize("name", PLAIN)
def test_a_tier_is_gone_on_with(name: str, copied: Path) -> None:
    again = [block.write for block in PURGED]
    new = GoldenBlock(77, "bf16", BlockKey(b"n" * 16), 3, BLOCKS[11].key.digest)
    with at(LATER_S), opened(name, copied) as store:
        assert store.put_many(SPACES["plain"], again) == [PutOutcome.REFUSED], "its tombstone is in force"
        assert store.put_many(new.namespace, [new.write, *(block.write for block in USED)]) == [
            PutOutcome.STORED,
            PutOutcome.EXISTS,
        ]
        assert got(store, [new, *left(BLOCKS)]) == [GetOutcome.HIT] * (1 + len(left(BLOCKS)))
        assert store.delete_many(new.namespace, [new.key]) == [True]
    with at(PURGED_S + REFUSED_S + 1):
        later = ValueStore(store.values) if isinstance(store, ValueStore) else opened(name, copied)
        with later as store:
            assert store.put_many(SPACES["plain"], again) == [PutOutcome.STORED]
            assert got(store, [new, *BLOCKS]) == [GetOutcome.MISS] + [GetOutcome.HIT] * len(BLOCKS)


@pytest.mark.parametrize(("name", "capacity"), [("file", LEAST_CAPACITY), ("lmdb", SMALLEST_CAPACITY)])
def test_what_was_used_longest_ago_makes_room_and_pins_stay(name: str, capacity: int, copied: Path) -> None:
    space = SPACES["groups"]
    size = space.block_bytes(1)
    more = [
        BlockWrite(BlockKey(place.to_bytes(32, "big"), 1), pattern(place, size)) for place in range(capacity // size)
    ]
    with at(LATER_S), opened(name, copied, capacity=capacity) as store:
        assert PutOutcome.STORED in store.put_many(space, more)
        assert got(store, [BLOCKS[0]]) == [GetOutcome.MISS]
        assert got(store, MARKED) == [GetOutcome.HIT] * len(MARKED)


# Other readers


def run_page_reader(script: Path, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-I", str(script), *arguments], check=False, capture_output=True, text=True)
    assert done.stderr == ""


def test_the_reader_on_the_page_reads_every_plain_block(copied: Path, tmp_path: Path) -> None:
    if not PAGE.exists():
        pytest.skip("docs/formats.md is not beside the tests")
    (reader,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    driver = """
import hashlib, sys
root = Path(sys.argv[1])
for block in json.loads((root / "blocks.json").read_text()):
    if not block["purged"]:
        place = block["namespace"], block["group"], bytes.fromhex(block["digest"])
        for read, tier in ((read_file_block, "file"), (read_file_block, "objects"), (read_lmdb_block, "lmdb")):
            i = np.arange(block["nbytes"])
            assert read(root / tier, *place) == ((37 * block["number"] + 7 * i + i // 256) % 251).astype("u1").tobytes()
"""
    script = tmp_path / "reader.py"
    script.write_text(reader + driver)
    run_page_reader(script, str(copied))


def array_of(block: GoldenBlock, tier: str = "file") -> Path:
    return GOLDEN / tier / NamespaceTree(block.namespace).folder(block.key)


def test_stock_zarr_reads_a_block(tmp_path: Path) -> None:
    block = SEALED[-1]  # of bytes: among the others are floats that are not equal to themselves
    np.save(tmp_path / "expected.npy", block.content)
    job = {
        "array": str(array_of(block)),
        "index": DigestWords(32).index(block.key.digest),
        "expected": str(tmp_path / "expected.npy"),
    }
    done = subprocess.run(
        [sys.executable, "-I", str(STOCK_READER)], input=json.dumps(job), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (json.loads(done.stdout)["equal"], json.loads(done.stdout)["kvstore"]) == (True, False)


@pytest.mark.parametrize("tier", ["file", "objects"])
def test_tensorstore_reads_every_block(tier: str) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    for block in left(BLOCKS):
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{array_of(block, tier)}/"}}
        array = tensorstore.open(spec, read=True).result()
        index = DigestWords(len(block.key.digest)).index(block.key.digest)
        assert np.asarray(array[index].read().result()).tobytes() == block.content.tobytes()


# Archives


@pytest.mark.parametrize("name", ["archive", "archive-zstd"])
def test_an_archive_is_read_and_restored(name: str, copied: Path) -> None:
    with open_archive(f"file://{copied}/{name}") as archive:
        assert archive.verify().ok
        info = archive.info
        assert (info.label, info.namespace, info.blocks, info.tokens) == (MARK.label, SPACES["groups"], 6, 12)
        assert (info.created, info.keep_until, info.has_token_ids) == (T0 / 1e9 + 900, T0 / 1e9 + 1e6, True)
        for block in SEALED:
            into = np.zeros(block.content.nbytes, np.uint8)
            assert archive.read_many_into([BlockRead(block.key, into)]) == [GetOutcome.HIT]
            assert into.tobytes() == block.content.tobytes()
    with open_store("memory://golden") as store:
        assert restore(f"file://{copied}/{name}", store).complete
        assert got(store, SEALED) == [GetOutcome.HIT] * len(SEALED)


# The same bytes


@pytest.fixture(scope="module")
def made_today(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("golden") / "v1"
    root.mkdir()
    make(root)
    return root


def files_of(root: Path) -> dict[str, bytes]:
    """All but what is of no two makings the same: LMDB's files, and who last had a tier open."""
    found = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    others = re.compile(r"\.mdb$|/\.kvstore/|^lmdb[^/]*/|^archive-zstd/")
    # A tombstones' document is named by chance, behind until when they hold.
    return {
        re.sub(r"(/\.purged/[0-9a-f]+)-[0-9a-f]+$", r"\1", name): path.read_bytes()
        for name, path in found.items()
        if not others.search(name)
    }


def test_what_is_written_today_is_what_was_written_then(made_today: Path) -> None:
    then, today = files_of(GOLDEN), files_of(made_today)
    assert then.keys() == today.keys(), CHANGED
    assert [name for name in then if then[name] != today[name]] == [], CHANGED
    assert sum(map(len, then.values())) > 300_000


def tables(directory: Path, copies: Path) -> dict[str, dict[bytes, bytes]]:
    copy = copies / hashlib.sha256(str(directory).encode()).hexdigest()
    shutil.copytree(directory, copy)
    with lmdb.open(str(copy), readonly=True, lock=False, max_dbs=16) as environment, environment.begin() as txn:
        names = [name for name, _ in txn.cursor()]
        handles = {name: environment.open_db(name, txn, create=False) for name in names}
        return {name.decode(): dict(txn.cursor(handle)) for name, handle in handles.items()}


@pytest.mark.parametrize(
    ("place", "same"),
    [
        ("lmdb", ("blocks", "meta", "age", "marks", "namespaces", "tombs", "intents")),
        ("lmdb-sealed", ("blocks", "meta", "age", "marks", "namespaces", "tombs", "intents")),
        ("file/.kvstore/catalogue", ("marks", "namespaces", "tombs", "intents")),
    ],
)
def test_what_is_written_into_lmdb_is_what_was(
    place: str, same: Sequence[str], made_today: Path, tmp_path: Path
) -> None:
    then, today = tables(GOLDEN / place, tmp_path), tables(made_today / place, tmp_path)
    for name in same:
        assert then[name] == today[name], f"{name}: {CHANGED}"
    kept = (b"format", b"seal")
    assert [then["info"].get(name) for name in kept] == [today["info"].get(name) for name in kept], CHANGED
    assert len(then["info"][b"totals"]) == len(today["info"][b"totals"]), CHANGED


# Vectors


def known_chains() -> Iterator[tuple[list[bytes], list[bytes]]]:
    for one in json.loads((GOLDEN / "vectors.json").read_text())["digests"]:
        media = tuple(Media(offset, bytes.fromhex(content), kind) for offset, content, kind in one["media"])
        extras = KeyExtras(one["model"], one["adapter"], one["salt"], media)
        chain = chain_digests(one["tokens"], one["block_tokens"], extras, digest_bytes=one["digest_bytes"])
        yield chain, list(map(bytes.fromhex, one["digests"]))


def test_tokens_have_the_digests_that_they_had() -> None:
    chains = list(known_chains())
    assert len(chains) == 3
    for today, then in chains:
        assert today == then, CHANGED


def test_manifests_have_the_fingerprints_that_they_had() -> None:
    for one in json.loads((GOLDEN / "vectors.json").read_text())["fingerprints"]:
        assert Namespace.from_manifest(one["manifest"]).name == one["fingerprint"], CHANGED


def test_the_keyring_says_whose_its_keys_are() -> None:
    ring = Document.unpacked((GOLDEN / "keyring.json").read_bytes(), "golden")
    assert ring.is_wrapped_by(OPERATOR_KEY)
    assert {key.tenant for key in ring.keys} == {"", TENANT}
    assert all(key.unwrapped(ring.id, OPERATOR_KEY) is not None for key in ring.keys)
