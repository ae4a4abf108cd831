"""Whose capacity and format a catalogue has: who may open it, and what its bytes are."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import lmdb
import pytest
from catalog_helpers import LEASE, SPACE, catalog_at, entry

from kvstore import Namespace
from kvstore.catalog import DATABASES, NO_CAPACITY, stored_capacity
from kvstore.errors import (
    CapacityMismatchError,
    NewerFormatError,
    NotAStoreError,
    StoreClosedError,
)

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from pathlib import Path


def test_the_first_user_decides_on_the_cap_and_others_accept_it_or_are_refused(tmp_path: Path) -> None:
    assert stored_capacity(tmp_path) is None
    with catalog_at(tmp_path, 1 << 20) as catalog:
        assert catalog.prepare(None, alone=False) == 1 << 20
        assert catalog.prepare(1 << 20, alone=False) == 1 << 20
        with pytest.raises(CapacityMismatchError, match=r"1048576.*2097152.*close the tier"):
            catalog.prepare(2 << 20, alone=False)
    assert stored_capacity(tmp_path) == 1 << 20
    with catalog_at(tmp_path) as catalog:
        assert catalog.prepare(None, alone=True) == 1 << 20
        assert catalog.prepare(2 << 20, alone=True) == 2 << 20


def test_a_tier_without_a_cap_says_so(tmp_path: Path) -> None:
    with catalog_at(tmp_path) as catalog:
        with pytest.raises(CapacityMismatchError, match="none"):
            catalog.prepare(1 << 20, alone=False)
        with catalog.read() as snapshot:
            assert snapshot.totals().room is None
    assert stored_capacity(tmp_path) == NO_CAPACITY


def test_a_newer_format_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with catalog_at(tmp_path) as catalog, catalog.environment.write() as txn:
        txn.put(b"format", struct.pack("<I", 2), db=catalog.environment.databases["info"])
    before = (tmp_path / "data.mdb").read_bytes()
    with pytest.raises(NewerFormatError, match=r"format 2.*upgrade"):
        stored_capacity(tmp_path)
    with pytest.raises(NewerFormatError), catalog_at(tmp_path):
        pass
    assert (tmp_path / "data.mdb").read_bytes()[8192:] == before[8192:]


def make_foreign(directory: Path) -> None:
    with lmdb.open(str(directory), max_dbs=2) as environment, environment.begin(write=True) as txn:
        txn.put(b"mine", b"not yours")


def test_an_environment_of_something_else_is_no_catalogue(tmp_path: Path, stranger: Executor) -> None:
    stranger.submit(make_foreign, tmp_path).result()
    with pytest.raises(NotAStoreError, match="did not write"):
        stored_capacity(tmp_path)


def raw_tables(directory: Path) -> dict[str, dict[bytes, bytes]]:
    with lmdb.open(str(directory), max_dbs=8, readonly=True) as environment:
        tables: dict[str, dict[bytes, bytes]] = {}
        for name in DATABASES:
            table = environment.open_db(name.encode(), create=False)
            with environment.begin(db=table) as txn:
                tables[name] = dict(txn.cursor())
    return tables


def test_the_bytes_are_those_of_format_1(tmp_path: Path, stranger: Executor) -> None:
    """Written out by hand: whoever changes a byte has to change the version."""
    parent = bytes(range(32))
    with catalog_at(tmp_path, 77_000) as catalog, catalog.write() as change:
        change.add_namespace(SPACE)
        change.generations(4)
        change.publish([replace(entry(5), size=69632, generation=2, hits=3, position=9, parent=parent, flags=1)])
        change.reserve(LEASE, 300, b"payload")
        change.set_overhead(11)
    tables = stranger.submit(raw_tables, tmp_path).result()
    address = SPACE.fingerprint + b"\0\1" + (5).to_bytes(32, "big")
    meta = "0100 2000 03000000 0010010000000000 0200000000000000 ed03000000000000 ed03000000000000 0900000000000000"
    assert tables["meta"] == {address: bytes.fromhex(meta) + parent}
    age = bytes.fromhex("00000000000003ed")
    assert tables["age"] == {age + address: bytes.fromhex("0010010000000000 0200000000000000")}
    assert tables["intents"] == {LEASE + bytes(8): bytes.fromhex("2c01000000000000") + b"payload"}
    totals = struct.pack("<8Q", 77_000, 1, 69632, 300, 11, 5, 1, 0)
    assert tables["info"] == {b"format": b"\1\0\0\0", b"totals": totals}
    (manifest,) = tables["namespaces"].values()
    assert Namespace.from_manifest(json.loads(manifest)) == SPACE
    assert list(tables["namespaces"]) == [SPACE.fingerprint]


def test_a_closed_environment_says_so(tmp_path: Path) -> None:
    with catalog_at(tmp_path) as catalog:
        pass
    with pytest.raises(StoreClosedError), catalog.read():
        pass
