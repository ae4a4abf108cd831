"""Into a tier past its store: blocks as the device has them, for tests that damage, move and forge them.

Every function runs in a process of its own (`stranger`), so that it may be used while the store is open: LMDB must not
be opened twice in one process.
"""

from __future__ import annotations

import contextlib
import sqlite3
import struct
from typing import TYPE_CHECKING

import lmdb

from kvstore.environment import MAP_SIZE
from kvstore.values import name_of
from kvstore_zarr.metadata import NamespaceTree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tiers import Tier

    from kvstore import BlockKey, Namespace

Place = tuple["Namespace", "BlockKey"]
"""Where a block stands."""


def read(tier: Tier, place: Place) -> bytes:
    """The block's file, or its entry in `blocks`."""
    if tier.url.startswith("lmdb"):
        with _entries(tier, place) as (txn, table, number):
            return bytes(txn.get(number, db=table))
    if tier.url.startswith("sqlite"):
        with _rows(tier) as rows:
            value: bytes = rows.execute("SELECT value FROM kv WHERE name = ?", (name_of(*place),)).fetchone()[0]
            return value
    return file_of(tier, place).read_bytes()


def put(tier: Tier, place: Place, data: bytes) -> None:
    """Replace or make it, whatever `data` is."""
    if tier.url.startswith("lmdb"):
        with _entries(tier, place) as (txn, table, number):
            txn.put(number, data, db=table)
        return
    if tier.url.startswith("sqlite"):
        with _rows(tier) as rows:
            rows.execute("INSERT OR REPLACE INTO kv VALUES (?, ?)", (name_of(*place), data))
        return
    path = file_of(tier, place)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def remove(tier: Tier, place: Place) -> None:
    """Take it away."""
    if tier.url.startswith("lmdb"):
        with _entries(tier, place) as (txn, table, number):
            assert txn.delete(number, db=table)
        return
    if tier.url.startswith("sqlite"):
        with _rows(tier) as rows:
            assert rows.execute("DELETE FROM kv WHERE name = ?", (name_of(*place),)).rowcount == 1
        return
    file_of(tier, place).unlink()


def set_info(name: bytes, value: bytes, catalogue: Path) -> None:
    """Overwrite one record of `info` in the catalogue."""
    with _environment(catalogue) as environment, environment.begin(write=True) as txn:
        txn.put(name, value, db=environment.open_db(b"info", txn))


def catalogue_of(tier: Tier) -> Path:
    """Where the tier's LMDB environment is."""
    assert tier.path is not None
    return next(tier.path.rglob("data.mdb")).parent


def file_of(tier: Tier, place: Place) -> Path:
    """The file of a block in a `file://` tier, or in one of the README's backend."""
    assert tier.path is not None
    space, key = place
    if tier.url.startswith("dir"):
        return tier.path / name_of(space, key)
    return tier.path / NamespaceTree(space).block(key)


def address(place: Place) -> bytes:
    """The key of a block in the catalogue: fingerprint, group, digest."""
    space, key = place
    return space.fingerprint + struct.pack(">H", key.group) + key.digest


def _number(txn: lmdb.Transaction, environment: lmdb.Environment, place: Place) -> bytes:
    """The key of its bytes: what its entry has as generation; of a block without one, a number that nobody has."""
    entry = txn.get(address(place), db=environment.open_db(b"meta", txn))
    return struct.pack(">Q", 1 << 40) if entry is None else bytes(entry[23:15:-1])


def _environment(directory: Path) -> AbstractContextManager[lmdb.Environment]:
    return lmdb.open(str(directory), map_size=MAP_SIZE, max_dbs=16, create=False)


@contextlib.contextmanager
def _entries(tier: Tier, place: Place) -> Iterator[tuple[lmdb.Transaction, object, bytes]]:
    """The blocks' bytes, and where those of a block stand."""
    assert tier.path is not None
    with _environment(tier.path) as environment, environment.begin(write=True) as txn:
        yield txn, environment.open_db(b"blocks", txn), _number(txn, environment, place)


@contextlib.contextmanager
def _rows(tier: Tier) -> Iterator[sqlite3.Connection]:
    assert tier.path is not None
    with contextlib.closing(sqlite3.connect(tier.path, timeout=30, isolation_level=None)) as connection:
        yield connection
