"""The catalogue as of one moment: what any process may ask of it without waiting for anybody.

`kvstore.catalog` opens snapshots; its `Change` is one that can be changed.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from kvstore.errors import StoreDamagedError
from kvstore.namespace import FINGERPRINT_BYTES, MAX_DIGEST_BYTES, Namespace
from kvstore.records import Entry, Intent, Totals, Victim, mark_prefix, times_of
from kvstore.retention import AHEAD_S, CREDIBLE_NS, now_ns
from kvstore.tombs import Tombs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import lmdb

    from kvstore.catalog import Catalog
    from kvstore.marks import Mark
    from kvstore.types import BlockInfo

__all__ = ["Snapshot"]

LOOKED_AT = 8
"""Entries looked at for each expired block that may be taken back: some were used since, or are young."""


class Snapshot:
    """The catalogue as of one moment, in a read transaction. For one thread; use it within its `with` and briefly."""

    def __init__(self, txn: lmdb.Transaction[memoryview], catalog: Catalog) -> None:
        """For `Catalog.read` and `Catalog.write`."""
        self.txn = txn
        self._catalog = catalog
        databases = catalog.environment.databases
        self._meta, self._age, self._info = databases["meta"], databases["age"], databases["info"]
        self._intents, self._namespaces = databases["intents"], databases["namespaces"]
        self._marks = databases["marks"]
        self.tombs = Tombs(txn, databases.get("tombs"))
        """Which blocks were purged a short while ago."""

    def totals(self) -> Totals:
        """The sums; O(1)."""
        value = self.txn.get(b"totals", db=self._info)
        if value is None:
            raise StoreDamagedError(f"{self._catalog.environment.directory}: the catalogue has no totals")
        return Totals.unpacked(value)

    def find(self, addresses: Sequence[bytes]) -> list[Entry | None]:
        """The entry of each address, None where there is none."""
        found = {
            (address := bytes(key)): Entry.unpacked(address, value)
            for key, value in self.txn.cursor(self._meta).getmulti(addresses)
        }
        return [found.get(address) for address in addresses]

    def contains(self, addresses: Sequence[bytes]) -> list[bool]:
        """Whether each address has an entry. The cheapest question: one step of a cursor each, and no object."""
        return list(map(self.txn.cursor(self._meta).set_key, addresses))

    def alive(self, addresses: Sequence[bytes]) -> list[bool]:
        """Whether each address has an entry that has not expired."""
        if not self._catalog.retention:
            return self.contains(addresses)
        cutoff, retention = self._catalog.retention.cutoff(), self._catalog.retention
        values = map(self.txn.cursor(self._meta).get, addresses)
        return [
            value is not None
            and (not retention.has_expired(*times_of(value), cutoff) or not self._expired_as_noted(address, cutoff))
            for address, value in zip(addresses, values, strict=True)
        ]

    def _expired_as_noted(self, address: bytes, cutoff: int) -> bool:
        (entry,) = self.find([address])
        return entry is None or self._has_expired(entry, cutoff)

    def expired_of(self, addresses: Sequence[bytes]) -> list[Victim]:
        """Those of the blocks that have expired."""
        if not self._catalog.retention:
            return []
        cutoff = self._catalog.retention.cutoff()
        return [
            Victim.of(entry) for entry in self.find(addresses) if entry is not None and self._has_expired(entry, cutoff)
        ]

    def as_they_were(self, addresses: Sequence[bytes], infos: Sequence[BlockInfo]) -> list[Victim]:
        """Those of the blocks that are as a scan said: not pinned, not used, not stored anew since."""
        found = zip(self.find(addresses), infos, strict=True)
        known = ((entry, info) for entry, info in found if entry is not None and not entry.pinned)
        return [
            Victim.of(entry)
            for entry, info in known
            if (entry.created / 1e9, entry.last_used / 1e9) == (info.created, info.last_used)
            and self._catalog.noted(entry.address) <= entry.last_used
        ]

    def expired(self, most: int) -> list[Victim]:
        """Blocks that have expired, at most `most`. By last use: those used longest ago, from the front of `age`. Since
        they were stored: those found in a few entries from where this process looked last, once around and again.
        """
        retention = self._catalog.retention
        if not retention or most < 1:
            return []
        cutoff = retention.cutoff()
        if retention.from_stored:
            return self._found_on_patrol(cutoff, most)
        front = islice(self.txn.cursor(self._age).iternext(), LOOKED_AT * most)
        victims = takewhile(lambda victim: victim.last_used <= cutoff, (Victim.unpacked(*item) for item in front))
        return list(islice((one for one in victims if self._catalog.noted(one.address) <= cutoff), most))

    def _has_expired(self, entry: Entry, cutoff: int) -> bool:
        last_used = max(entry.last_used, self._catalog.noted(entry.address))
        return self._catalog.retention.has_expired(entry.created, last_used, cutoff) and not entry.pinned

    def _found_on_patrol(self, cutoff: int, most: int) -> list[Victim]:
        found: list[Victim] = []
        cursor, after = self.txn.cursor(self._meta), self._catalog.patrolled
        self._catalog.patrolled = b""
        for number, (key, value) in enumerate(cursor.iternext() if cursor.set_range(after or b"\0") else ()):
            address = bytes(key)
            if number == LOOKED_AT * most or len(found) == most:
                self._catalog.patrolled = address
                break
            entry = Entry.unpacked(address, value)
            if self._has_expired(entry, cutoff):
                found.append(Victim.of(entry))
        return found

    def ahead(self, most: int) -> list[Victim]:
        """Blocks that were used in what is the future here, at most `most`: somebody's clock was wrong.

        None where ours may be the one: where nothing at all was used in the past, or where it is earlier than possible.
        """
        now = now_ns()
        cursor = self.txn.cursor(self._age)
        if now < CREDIBLE_NS or not cursor.first() or Victim.unpacked(*cursor.item()).last_used > now:
            return []
        late = now + int(AHEAD_S * 1e9)
        newest = (Victim.unpacked(*item) for item in islice(self.txn.cursor(self._age).iterprev(), most))
        return list(takewhile(lambda victim: victim.last_used > late, newest))

    def oldest(self) -> Iterator[Victim]:
        """All blocks but the pinned, least recently used first; what this process used since (`Catalog.note`) comes at
        the end.
        """
        young: list[Victim] = []
        for key, value in self.txn.cursor(self._age).iternext():
            victim = Victim.unpacked(key, value)
            if self._catalog.noted(victim.address):
                young.append(victim)
            else:
                yield victim
        yield from sorted(young, key=lambda victim: self._catalog.noted(victim.address))

    def addresses(self, prefix: bytes) -> Iterator[bytes]:
        """Every address that begins with `prefix` (a fingerprint and more), in order."""
        cursor = self.txn.cursor(self._meta)
        keys = cursor.iternext(values=False) if cursor.set_range(prefix) else iter(())
        return takewhile(lambda address: address.startswith(prefix), (bytes(key) for key in keys))

    def scan(self, fingerprint: bytes, after: bytes = b"") -> Iterator[Entry]:
        """Every entry of one namespace in address order, from the first one behind the address `after`."""
        cursor = self.txn.cursor(self._meta)
        if cursor.set_range(max(fingerprint, after)):
            for key, value in cursor.iternext():
                address = bytes(key)
                if not address.startswith(fingerprint):
                    return
                if address != after:
                    yield Entry.unpacked(address, value)

    def scan_marked(self, fingerprint: bytes, mark: Mark, after: bytes = b"") -> Iterator[Entry]:
        """`scan`, of the entries alone that have a mark which `mark` stands for."""
        if not (mark.label or mark.tenant):
            yield from (entry for entry in self.scan(fingerprint, after) if _has(entry, mark))
            return
        prefix = mark_prefix(label=mark.label) if mark.label else mark_prefix(tenant=mark.tenant)
        cursor = self.txn.cursor(self._marks)
        for key in cursor.iternext(values=False) if cursor.set_range(prefix + max(fingerprint, after)) else ():
            if not bytes(key).startswith(prefix + fingerprint):
                return
            (entry,) = self.find([bytes(key[len(prefix) :])])
            if entry is not None and entry.address != after and _has(entry, mark):
                yield entry

    def all_marks(self) -> dict[bytes, tuple[Mark, ...]]:
        """The marks of every block that has some, over all namespaces. Reads every entry."""
        entries = (Entry.unpacked(bytes(key), value) for key, value in self.txn.cursor(self._meta))
        return {entry.address: entry.marks for entry in entries if entry.marks}

    def intents(self, lease: bytes = b"") -> list[Intent]:
        """The intents of one lease, or of all."""
        found: list[Intent] = []
        cursor = self.txn.cursor(self._intents)
        for key, value in cursor.iternext() if cursor.set_range(lease or b"\0") else ():
            intent = Intent.unpacked(key, value)
            if lease and intent.lease != lease:
                break
            found.append(intent)
        return found

    def namespaces(self) -> list[Namespace]:
        """Those whose manifests were recorded. One that cannot be read is passed over (see `unreadable`)."""
        return [namespace for _, namespace in self._manifests() if namespace is not None]

    def unreadable(self) -> list[bytes]:
        """The fingerprints whose recorded manifests cannot be read, or are another namespace's."""
        return [fingerprint for fingerprint, namespace in self._manifests() if namespace is None]

    def nameless(self) -> list[bytes]:
        """The fingerprints of which there are entries, and no manifest that can be read. A step for each namespace."""
        named = {fingerprint for fingerprint, namespace in self._manifests() if namespace is not None}
        found: list[bytes] = []
        cursor = self.txn.cursor(self._meta)
        there = cursor.first()
        while there:
            fingerprint = bytes(cursor.key())[:FINGERPRINT_BYTES]
            if fingerprint not in named:
                found.append(fingerprint)
            there = cursor.set_range(fingerprint + b"\xff" * (2 + MAX_DIGEST_BYTES))
        return found

    def _manifests(self) -> Iterator[tuple[bytes, Namespace | None]]:
        for key, value in self.txn.cursor(self._namespaces).iternext():
            fingerprint, namespace = bytes(key), None
            with suppress(ValueError):
                namespace = Namespace.from_json(bytes(value))
            yield fingerprint, namespace if namespace and namespace.fingerprint == fingerprint else None


def _has(entry: Entry, mark: Mark) -> bool:
    return any(mark.names(one) for one in entry.marks)
