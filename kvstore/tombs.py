"""Tombstones in the catalogue of a local tier: which blocks were purged a short while ago, and are refused until when.

An engine that still has a purged block in its memory would cascade it right back. So a purge takes a block out and
buries its address in one transaction, and whoever publishes looks here in the transaction of the publishing. Where
there are none, which is nearly always, that costs one question for the number of entries.

In the database `tombs` (`kvstore.records`) each tombstone stands twice: by address, and by when it ends, so that those
that have ended are found at the front.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Generic, TypeVar

from kvstore.lmdb_pages import PageError
from kvstore.retention import now_ns

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import lmdb
    from lmdb import _Database as Database  # pyright: ignore[reportPrivateUsage]

    from kvstore.lmdb_files import Entries

__all__ = ["MOST_REFUSED_S", "MOST_TOMBSTONES", "Remembered", "Tombs", "refused_until", "tombs_in"]

K = TypeVar("K", bound=Hashable)

MOST_TOMBSTONES = 200_000
"""In one tier; some 140 bytes each, so 28 MB of catalogue at most."""

MOST_REFUSED_S = 7 * 86400.0
"""No tombstone lasts longer; one that seems to was laid by a clock that was wrong, and counts for nothing."""

_UNTIL, _ORDER = struct.Struct("<Q"), struct.Struct(">Q")


def refused_until(seconds: float) -> int:
    """When a tombstone ends that is laid now for so many seconds, in ns since the epoch; 0 for none.

    Raises `ValueError` where that is less than nothing, or more than `MOST_REFUSED_S`.
    """
    if not 0 <= seconds <= MOST_REFUSED_S:
        raise ValueError(f"blocks can be refused for 0 to {MOST_REFUSED_S:.0f} seconds, not {seconds}")
    return now_ns() + int(seconds * 1e9) if seconds else 0


def tombs_in(records: Entries) -> dict[bytes, int]:
    """Addresses that are not to be stored now, and until when (ns since the epoch), as far as a damaged database says
    so (`kvstore.lmdb_files.readable`): either of a tombstone's two records will do.
    """
    found: dict[bytes, int] = {}
    now = now_ns()
    for key, load in records.items():
        with suppress(PageError, OSError, struct.error):
            by_end = key[:1] == b"U"
            until = int(_ORDER.unpack_from(key, 1)[0] if by_end else _UNTIL.unpack(load())[0])
            address = key[1 + _ORDER.size :] if by_end else key[1:]
            if now < until <= now + int(MOST_REFUSED_S * 1e9):
                found[address] = max(until, found.get(address, 0))
    return found


class Tombs:
    """The tombstones within one transaction. False where there are none."""

    def __init__(self, txn: lmdb.Transaction[memoryview], database: Database | None) -> None:
        """`database` is None where the tier was opened to be read and has none."""
        self._txn = txn
        self._database = database

    def __bool__(self) -> bool:
        return self._entries() > 0

    def _entries(self) -> int:
        return 0 if self._database is None else int(self._txn.stat(self._database)["entries"])

    def buried(self, addresses: Sequence[bytes]) -> set[bytes]:
        """Those of the addresses that are not to be stored now."""
        if not self:
            return set()
        now = now_ns()
        latest = now + int(MOST_REFUSED_S * 1e9)
        found = self._txn.cursor(self._database).getmulti([b"A" + address for address in addresses])
        return {bytes(key[1:]) for key, until in found if now < _UNTIL.unpack(until)[0] <= latest}

    def ended(self) -> int:
        """How many have, and are there to be collected."""
        return len(self._ended(MOST_TOMBSTONES))

    def bury(self, addresses: Iterable[bytes], until: int) -> int:
        """Lay a tombstone that ends at `until` (ns since the epoch) on each address; how many could be laid, under
        `MOST_TOMBSTONES`. A later end takes the place of an earlier one.
        """
        self.collect(MOST_TOMBSTONES)
        room = MOST_TOMBSTONES - self._entries() // 2
        laid = 0
        for address in dict.fromkeys(addresses):
            before = self._txn.get(b"A" + address, db=self._database)
            if before is None:
                if room <= 0:
                    continue
                room -= 1
            elif (ends := _UNTIL.unpack(before)[0]) < until:
                self._txn.delete(_by_end(ends, address), db=self._database)
            else:
                laid += 1
                continue
            self._txn.put(b"A" + address, _UNTIL.pack(until), db=self._database)
            self._txn.put(_by_end(until, address), b"", db=self._database)
            laid += 1
        return laid

    def bury_again(self, tombs: Mapping[bytes, int]) -> None:
        """Lay tombstones that were laid before: addresses, and when each ends."""
        latest_first = sorted(tombs, key=lambda address: -tombs[address])
        for until, addresses in groupby(latest_first, key=lambda address: tombs[address]):
            self.bury(addresses, until)

    def collect(self, most: int) -> int:
        """Take away tombstones that have ended, at most `most`; how many."""
        ended = self._ended(most)
        for key in ended:
            self._txn.delete(key, db=self._database)
            self._txn.delete(b"A" + key[1 + _ORDER.size :], db=self._database)
        return len(ended)

    def _ended(self, most: int) -> list[bytes]:
        if not self:
            return []
        now, found = now_ns(), list[bytes]()
        cursor = self._txn.cursor(self._database)
        for key in cursor.iternext(values=False) if cursor.set_range(b"U") else ():
            if len(found) == most or _ORDER.unpack_from(key, 1)[0] > now:
                break
            found.append(bytes(key))
        return found


def _by_end(until: int, address: bytes) -> bytes:
    return b"U" + _ORDER.pack(until) + address


class Remembered(Generic[K]):
    """Tombstones that a process keeps in its memory. The caller sees to it that one thread at a time changes them."""

    def __init__(self) -> None:
        self._until: dict[K, int] = {}

    def __bool__(self) -> bool:
        return bool(self._until)

    def __contains__(self, name: K) -> bool:
        until = self._until.get(name)
        return until is not None and now_ns() < until <= now_ns() + int(MOST_REFUSED_S * 1e9)

    def add(self, names: Iterable[K], until: int) -> int:
        """Refuse them until then (ns since the epoch); how many could be added, under `MOST_TOMBSTONES`."""
        now = now_ns()
        if until <= now:
            return 0
        self._until = {name: ends for name, ends in self._until.items() if ends > now}
        added = 0
        for name in dict.fromkeys(names):
            if name in self._until or len(self._until) < MOST_TOMBSTONES:
                self._until[name] = max(until, self._until.get(name, 0))
                added += 1
        return added
