"""The books of an `lmdb://` tier held against its entries, while it is in use: how `kvstore verify --repair` begins.

Both stand in one environment and change in one transaction, so they differ only where a page was lost or written behind
the tier's back.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from kvstore.catalog import Entry
from kvstore.records import generation_of
from kvstore.repairing import Repaired
from kvstore_lmdb.entry import HEADER_BYTES, identified, is_later, is_left_alone, place_of, stored_bytes
from kvstore_lmdb.opening import BLOCKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import lmdb

    from kvstore_lmdb.opening import Tier

__all__ = ["is_of_later_version", "repair"]

_AT_ONCE = 1000
"""Entries compared in one read transaction."""


def repair(tier: Tier) -> list[Repaired]:
    """Take out entries without bytes, book bytes without an entry, remove bytes that are no block; what that was."""
    lost = sum(_take_out_lost(tier, addresses) for addresses in _pages(tier, "meta", _without_value))
    nameless: set[bytes] = set()
    done: list[bool | None] = []
    for places in _pages(tier, BLOCKS, partial(_not_booked, nameless)):
        done += [_book(tier, place) for place in places]
    done += [_book(tier, place) for place in _of_no_entry(tier, nameless)]
    repaired = (
        Repaired("blocks whose bytes were gone taken out of the catalogue", lost),
        Repaired("blocks that the catalogue did not know added to it", done.count(True)),
        Repaired("entries removed that were no blocks", done.count(False)),
    )
    return [one for one in repaired if one.count]


def is_of_later_version(tier: Tier, address: bytes) -> bool:
    """Whether what stands under an address is a later kvstore's; of a block that is neither damaged nor one for us."""
    with tier.environment.read() as txn:
        _, value = tier.value(txn, address)
        return value is not None and is_later(value, address)


def _pages(
    tier: Tier, name: str, find: Callable[[Tier, lmdb.Transaction[memoryview], bytes, memoryview], bytes | None]
) -> Iterator[list[bytes]]:
    """What `find` gives for the items of a database, some of them in a read transaction."""
    after = b""
    while True:
        with tier.environment.read() as txn:
            batch = list(islice(_items(txn, tier.environment.databases[name], after), _AT_ONCE))
            found = [one for key, value in batch if (one := find(tier, txn, key, value)) is not None]
        if not batch:
            return
        yield found
        after = batch[-1][0]


def _items(txn: lmdb.Transaction[memoryview], database: object, after: bytes) -> Iterator[tuple[bytes, memoryview]]:
    cursor = txn.cursor(database)  # type: ignore[arg-type]
    for key, value in cursor.iternext() if cursor.set_range(after or b"\0") else ():
        if bytes(key) != after:
            yield bytes(key), value


def _without_value(tier: Tier, txn: lmdb.Transaction[memoryview], address: bytes, entry: memoryview) -> bytes | None:
    """The address of an entry that leads to nothing."""
    value = txn.get(place_of(generation_of(entry)), db=tier.environment.databases[BLOCKS])
    return address if value is None else None


def _not_booked(
    nameless: set[bytes], tier: Tier, txn: lmdb.Transaction[memoryview], place: bytes, value: memoryview
) -> bytes | None:
    """The place of a value to which its block's entry does not lead. One that does not say whose it is: `nameless`, but
    for what a later kvstore wrote.
    """
    whose = identified(value)
    if whose is None:
        if not is_left_alone(value):
            nameless.add(place)
        return None
    return None if _leads_to(tier, txn, whose[0], place) else place


def _leads_to(tier: Tier, txn: lmdb.Transaction[memoryview], address: bytes, place: bytes) -> bool:
    entry = txn.get(address, db=tier.environment.databases["meta"])
    return entry is not None and place_of(generation_of(entry)) == place


def _take_out_lost(tier: Tier, addresses: Sequence[bytes]) -> int:
    if not addresses:
        return 0
    with tier.catalog.write() as change:
        return len(change.discard(address for address in addresses if tier.value(change.txn, address)[1] is None))


def _of_no_entry(tier: Tier, places: set[bytes]) -> list[bytes]:
    """Those of the places to which no entry leads. Reads every entry, if there are any places."""
    if not places:
        return []
    for booked in _pages(tier, "meta", lambda _tier, _txn, _address, entry: place_of(generation_of(entry))):
        places.difference_update(booked)
    return sorted(places)


def _book(tier: Tier, place: bytes) -> bool | None:
    """Enter a block that the catalogue does not know, under a number of its own, or remove what is none; None where
    others did so meanwhile.
    """
    blocks = tier.environment.databases[BLOCKS]
    with tier.catalog.write() as change:
        found = change.txn.get(place, db=blocks)
        if found is None:
            return None
        value, whose = bytes(found), identified(found)
        if whose is not None and _leads_to(tier, change.txn, whose[0], place):
            return None
        change.txn.delete(place, db=blocks)
        if whose is None or change.contains([whose[0]])[0] or change.tombs.buried([whose[0]]):
            return False
        address, created = whose
        entry = Entry(address, stored_bytes(len(value) - HEADER_BYTES), created, created, change.generations(1))
        change.txn.put(place_of(entry.generation), value, db=blocks)
        return change.publish([entry])[0]
