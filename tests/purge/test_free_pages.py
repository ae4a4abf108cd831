"""LMDB's free pages keep what was deleted; a purge overwrites them, those alone, and says which it could not."""

from __future__ import annotations

import errno
import os
import struct
from typing import TYPE_CHECKING

import lmdb.verify
import pytest
from purge_helpers import found

import kvstore
from kvstore import BlockLayout, GetOutcome, Namespace
from kvstore.environment import PAGE, Environment
from kvstore.errors import StoreDamagedError, TierUnavailable
from kvstore.lmdb_free import overwrite_free_pages
from kvstore.testing.supply import SPACE, content, get, keys, writes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.abc import BlockStore

HIT = GetOutcome.HIT


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def store(tier: Path) -> Iterator[BlockStore]:
    with kvstore.open_store(f"lmdb://{tier}") as store:
        store.put_many(SPACE, writes(range(40)))
        yield store


def test_what_was_purged_is_nowhere_in_the_file_and_the_rest_is_where_it_was(store: BlockStore, tier: Path) -> None:
    store.delete_many(SPACE, keys(range(5)))
    store.purge_many(SPACE, keys(range(5, 20)))
    assert found(tier, range(20))  # a removal alone leaves nearly all of it
    told: list[int] = []
    store.finish_purge(advance=told.append)
    assert 20 * SPACE.block_bytes() <= sum(told) <= 24 * SPACE.block_bytes()
    assert found(tier, range(20)) == set()
    assert get(store, range(20, 40)) == [HIT] * 20
    assert store.put_many(SPACE, writes(range(50, 60))) == [kvstore.PutOutcome.STORED] * 10
    assert get(store, range(50, 60)) == [HIT] * 10
    store.close()
    assert lmdb.verify.verify(str(tier)) == []


def test_a_purge_can_leave_the_bytes_and_says_so(store: BlockStore, tier: Path) -> None:
    store.purge_many(SPACE, keys(range(20)), overwrite=False)
    remains = store.finish_purge(overwrite=False)
    assert found(tier, range(20))
    assert any("free pages" in residue.what for residue in remains)


@pytest.mark.parametrize("scheme", ["lmdb", "file"])
def test_what_a_purge_removed_is_on_disk_when_it_ends_bytes_or_no_bytes(
    tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kvstore.open_store(f"{scheme}://{tmp_path}/kv") as store:
        store.put_many(SPACE, writes(range(3)))
        for overwrite in (True, False):
            store.purge_many(SPACE, keys([int(overwrite)]), overwrite=overwrite)
            with monkeypatch.context() as patch:
                patch.setattr(Environment, "sync", _no_device)
                with pytest.raises(TierUnavailable):
                    store.finish_purge(overwrite=overwrite)


def _no_device(_: Environment) -> None:
    raise OSError(errno.EIO, "no device")


@pytest.mark.parametrize(("nbytes", "is_said"), [(512, True), (3952, True), (3953, False)])
def test_small_blocks_lie_beside_others_and_what_is_left_of_them_is_said(
    tier: Path, store: BlockStore, nbytes: int, is_said: bool
) -> None:
    space = Namespace("small", "revision-1", (BlockLayout.opaque(nbytes),), block_tokens=1)
    for start in range(100, 200, 10):
        store.put_many(space, writes(range(start, start + 10), space))
    store.purge_many(space, keys(range(100, 160)))
    remains = store.finish_purge()
    data = (tier / "data.mdb").read_bytes()
    legible = [number for number in range(100, 160) if content(number, nbytes)[:32].tobytes() in data]
    said = [residue.what for residue in remains if "beside others" in residue.what]
    assert bool(said) is is_said
    assert not legible or is_said
    assert not any("beside others" in residue.what for residue in store.finish_purge())


def test_pages_that_a_reader_still_sees_are_left_and_said(
    store: BlockStore, tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_lmdb.purge.PATIENCE_S", 0.3)
    scan = kvstore.open_store(f"lmdb://{tier}")
    environment = scan._tier.environment  # type: ignore[attr-defined]
    with environment.read() as txn:
        size = txn.stat(environment.databases["blocks"])["entries"]
        store.purge_many(SPACE, keys(range(20)))
        told: list[int] = []
        remains = store.finish_purge(advance=told.append)
        assert sum(told) <= (tier / "data.mdb").stat().st_size  # each page once, however often it was tried
        held = next(residue for residue in remains if "reader" in residue.what)
        assert held.nbytes is not None
        assert 20 * SPACE.block_bytes() <= held.nbytes <= 26 * SPACE.block_bytes()
        assert len(found(tier, range(20))) == 20
        assert txn.stat(environment.databases["blocks"])["entries"] == size
    assert not any("reader" in residue.what for residue in store.finish_purge())
    assert found(tier, range(20)) == set()
    scan.close()


def test_what_lies_behind_the_last_page_in_use_is_overwritten(store: BlockStore, tier: Path) -> None:
    """What a killed writer leaves there: pages whose commit never came."""
    with (tier / "data.mdb").open("ab") as file:
        file.write(b"left behind by a kill" * 1000)
    store.finish_purge()
    assert b"left behind by a kill" not in (tier / "data.mdb").read_bytes()
    assert get(store, range(40)) == [HIT] * 40


@pytest.mark.parametrize("damage", ["count", "number", "twice", "huge", "key size", "value size"])
def test_a_list_that_does_not_add_up_is_not_believed(tmp_path: Path, damage: str) -> None:
    environment = Environment.open(tmp_path, ["blocks"])
    blocks = environment.databases["blocks"]
    with environment.write() as txn:
        for number in range(64):
            txn.put(b"%d" % number, os.urandom(3 * PAGE), db=blocks)
    for number in range(0, 64, 2):
        with environment.write() as txn:
            txn.delete(b"%d" % number, db=blocks)
    path = tmp_path / "data.mdb"
    before = path.read_bytes()
    place, count, pages = _a_free_record(before)
    if damage == "count":
        changed = struct.pack("=Q", count - 1)
    elif damage == "number":
        changed = struct.pack("=QQ", count, len(before) // PAGE + 7)
    elif damage == "huge":
        changed = struct.pack("=Q", 1 << 62)
    elif damage == "key size":
        place, changed = place - 10, struct.pack("=H", 4)
    elif damage == "value size":
        place, changed = place - 16, struct.pack("=H", 4)
    else:
        changed = struct.pack("=QQ", count, pages[1])
    with path.open("r+b") as file:
        file.seek(place)
        file.write(changed)
    told = path.read_bytes()
    with pytest.raises(StoreDamagedError):
        overwrite_free_pages(environment, lambda _: None, freed_until=environment.last_transaction())
    assert path.read_bytes() == told
    environment.close()


def _a_free_record(data: bytes) -> tuple[int, int, list[int]]:
    """Where a record of several free pages stands in the file, how many and which: the free tree is one leaf here."""
    metas = [struct.unpack_from("=IIQQ48s48sQQ", data, page * PAGE + 16) for page in (0, 1)]
    root = struct.unpack("=IHHQQQQQ", max(metas, key=lambda meta: int(meta[7]))[4])[7]
    lower = struct.unpack_from("=H", data, root * PAGE + 12)[0]
    for slot in range((lower - 16) // 2):
        at = root * PAGE + struct.unpack_from("=H", data, root * PAGE + 16 + 2 * slot)[0]
        place = at + 8 + struct.unpack_from("=H", data, at + 6)[0]
        (count,) = struct.unpack_from("=Q", data, place)
        if count > 2:
            return place, count, list(struct.unpack_from(f"={count}Q", data, place + 8))
    raise AssertionError("no such record")
