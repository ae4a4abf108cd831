"""The books of an `lmdb://` tier held against its entries, while it is in use: how `kvstore verify --repair` begins.

Both stand in one environment and change in one transaction, so they differ only where a page was lost or written behind
the tier's back.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from kvstore.catalog import Entry
from kvstore.repairing import Repaired
from kvstore_lmdb.entry import HEADER_BYTES, created_at, stored_bytes
from kvstore_lmdb.opening import BLOCKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import lmdb

    from kvstore_lmdb.opening import Tier

__all__ = ["repair"]

_AT_ONCE = 1000
"""Entries compared in one read transaction."""


def repair(tier: Tier) -> list[Repaired]:
    """Take out entries without bytes, book bytes without an entry, remove bytes that are no block; what that was."""
    lost = added = removed = 0
    after = b""
    while batch := _page(tier, "meta", after):
        after = batch[-1]
        with tier.catalog.read() as snapshot:
            gone = [name for name in batch if snapshot.txn.get(name, db=tier.environment.databases[BLOCKS]) is None]
        if gone:
            with tier.catalog.write() as change:
                lost += len(change.discard(name for name in gone if _value(tier, change.txn, name) is None))
    after = b""
    while batch := _page(tier, BLOCKS, after):
        after = batch[-1]
        with tier.catalog.read() as snapshot:
            known = snapshot.contains(batch)
        for name in (name for name, booked in zip(batch, known, strict=True) if not booked):
            was_added = _book(tier, name)
            added, removed = added + (was_added is True), removed + (was_added is False)
    done = (
        Repaired("blocks whose bytes were gone taken out of the catalogue", lost),
        Repaired("blocks that the catalogue did not know added to it", added),
        Repaired("entries removed that were no blocks", removed),
    )
    return [one for one in done if one.count]


def _page(tier: Tier, name: str, after: bytes) -> list[bytes]:
    """The next names of a database."""
    with tier.environment.read() as txn:
        return list(islice(_names(txn, tier.environment.databases[name], after), _AT_ONCE))


def _names(txn: lmdb.Transaction[memoryview], database: object, after: bytes) -> Iterator[bytes]:
    cursor = txn.cursor(database)  # type: ignore[arg-type]
    for key in cursor.iternext(values=False) if cursor.set_range(after or b"\0") else ():
        if bytes(key) != after:
            yield bytes(key)


def _value(tier: Tier, txn: lmdb.Transaction[memoryview], name: bytes) -> memoryview | None:
    return txn.get(name, db=tier.environment.databases[BLOCKS])


def _book(tier: Tier, name: bytes) -> bool | None:
    """Enter a block that the catalogue does not know, or remove what is none; None where others did so meanwhile."""
    with tier.catalog.write() as change:
        value = _value(tier, change.txn, name)
        if value is None or change.contains([name])[0]:
            return None
        created = created_at(value, name)
        if created is None or change.tombs.buried([name]):
            change.txn.delete(name, db=tier.environment.databases[BLOCKS])
            return False
        return change.publish([Entry(name, stored_bytes(len(value) - HEADER_BYTES), created, created)])[0]
