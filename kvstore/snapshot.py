"""The catalogue as of one moment: what any process may ask of it without waiting for anybody.

`kvstore.catalog` opens snapshots; its `Change` is one that can be changed.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.errors import StoreDamagedError
from kvstore.namespace import Namespace
from kvstore.records import Entry, Intent, Totals, Victim, mark_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import lmdb

    from kvstore.catalog import Catalog
    from kvstore.marks import Mark

__all__ = ["Snapshot"]


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
        """Whether each address has an entry. The cheapest question."""
        found = {bytes(key) for key in self.txn.cursor(self._meta).getmulti(addresses, values=False)}
        return [address in found for address in addresses]

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

    def _manifests(self) -> Iterator[tuple[bytes, Namespace | None]]:
        for key, value in self.txn.cursor(self._namespaces).iternext():
            fingerprint, namespace = bytes(key), None
            with suppress(AttributeError, KeyError, TypeError, ValueError):
                namespace = Namespace.from_manifest(json.loads(bytes(value)))
            yield fingerprint, namespace if namespace and namespace.fingerprint == fingerprint else None


def _has(entry: Entry, mark: Mark) -> bool:
    return any(mark.names(one) for one in entry.marks)
