"""The catalogue inside a write transaction: reserve, publish, evict, mark, and the sums that follow by themselves.

`kvstore.catalog.Catalog.write` makes one and finishes it; the backends compose its methods.
"""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.errors import InvalidBlockError
from kvstore.marking import marked, unmarked
from kvstore.records import (
    Entry,
    Intent,
    Totals,
    Victim,
    used,
)
from kvstore.retention import now_ns
from kvstore.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import lmdb

    from kvstore.catalog import Catalog
    from kvstore.marks import Mark, MarkOutcome
    from kvstore.namespace import Namespace

__all__ = ["SETTLED_ALONG", "Change"]

SETTLED_ALONG = 32
"""Notes settled at the end of a write transaction that somebody wanted anyway (4 LMDB calls each)."""


class Change(Snapshot):
    """The catalogue inside a write transaction: what is changed here appears at once for everybody, or not at all.

    Nothing is taken from a plan on trust: each method checks again what it relies on. The totals follow by
    themselves.
    """

    def __init__(self, txn: lmdb.Transaction[memoryview], catalog: Catalog) -> None:
        """For `Catalog.write`."""
        super().__init__(txn, catalog)
        self._before = self._totals = super().totals()
        self._added: dict[str, int] = {}

    def totals(self) -> Totals:
        """The sums, with what was changed so far."""
        if self._added:
            now = {name: getattr(self._totals, name) + added for name, added in self._added.items()}
            self._totals = replace(self._totals, **now)
            self._added.clear()
        return self._totals

    def publish(self, entries: Sequence[Entry]) -> list[bool]:
        """Record blocks. False where the address has an entry already, which is left alone (the race was lost), or is
        buried (`buried` says which).

        Of equal addresses within `entries` the first wins.
        """
        taken = {
            bytes(key)
            for key in self.txn.cursor(self._meta).getmulti([entry.address for entry in entries], values=False)
        }
        if self.tombs:
            taken |= self.tombs.buried([entry.address for entry in entries])
            self.tombs.collect(SETTLED_ALONG)
        fresh: list[Entry] = []
        won: list[bool] = []
        for entry in entries:
            won.append(entry.address not in taken)
            if won[-1]:
                taken.add(entry.address)
                fresh.append(entry)
        self._put(fresh)
        self._index(fresh)
        self._account(fresh)
        return won

    def evict(self, victims: Iterable[Victim]) -> list[Victim]:
        """Take out each victim that nobody used, pinned, removed or replaced since it was read; returns those taken
        out.
        """
        gone = [victim for victim in victims if self.txn.delete(victim.name, db=self._age)]
        self._unindex(self.find([victim.address for victim in gone]))
        for victim in gone:
            self.txn.delete(victim.address, db=self._meta)
        self._add(blocks=-len(gone), used=-sum(victim.size for victim in gone))
        return gone

    def discard(self, addresses: Iterable[bytes], generation: int | None = None) -> list[Entry]:
        """Take out blocks however young (only a given `generation`, if given); returns the entries taken out."""
        gone: list[Entry] = []
        for address in addresses:
            value = self.txn.get(address, db=self._meta)
            entry = Entry.unpacked(address, value) if value is not None else None
            if entry is not None and generation in (None, entry.generation):
                self.txn.delete(entry.age()[0], db=self._age)
                self.txn.delete(address, db=self._meta)
                gone.append(entry)
        self._unindex(gone)
        self._account(gone, -1)
        return gone

    def resize(self, address: bytes, generation: int, size: int) -> None:
        """Say what a block of that generation occupies now; nothing happens where there is none."""
        (entry,) = self.find([address])
        if entry is not None and entry.generation == generation:
            self._change([(entry, replace(entry, size=size))])

    def mark(self, addresses: Sequence[bytes], mark: Mark) -> list[MarkOutcome]:
        """Add a mark to each block, as far as it may be pinned."""
        outcomes, changed = marked(self.find(addresses), mark, self.totals().pinnable)
        self._change(changed)
        return outcomes

    def unmark(self, addresses: Sequence[bytes], mark: Mark) -> list[bool]:
        """Take back what `mark` stands for; True for each block that had some of it."""
        outcomes, changed = unmarked(self.find(addresses), mark)
        self._change(changed)
        return outcomes

    def generations(self, count: int) -> int:
        """`count` new generation numbers, never given out before; the first of them (>= 1)."""
        first = self.totals().next_generation
        self._add(next_generation=count)
        return first

    def reserve(self, lease: bytes, reserved: int, payload: bytes) -> Intent:
        """Record an intent and count its bytes as reserved; whether they fit (`totals().room`) the caller checks."""
        intent = Intent(lease, self.totals().next_intent, reserved, payload)
        self.txn.put(intent.name, intent.packed(), db=self._intents)
        self._add(reserved=reserved, next_intent=1)
        return intent

    def amend(self, intent: Intent, reserved: int, payload: bytes) -> Intent:
        """Replace an intent by one with the same number and other contents."""
        self.release(intent)
        amended = replace(intent, reserved=reserved, payload=payload)
        self.txn.put(amended.name, amended.packed(), db=self._intents)
        self._add(reserved=reserved)
        return amended

    def release(self, intent: Intent) -> None:
        """Drop an intent and its reservation. One that is gone already is no error and changes nothing."""
        value = self.txn.get(intent.name, db=self._intents)
        if value is not None:
            reserved = Intent.unpacked(intent.name, value).reserved
            self.txn.delete(intent.name, db=self._intents)
            self._add(reserved=-reserved)

    def restore_capacity(self, before: Totals) -> None:
        """Let the cap, and what is kept aside under it, be what they were: for who has the tier alone."""
        self._totals = replace(self.totals(), capacity=before.capacity, overhead=before.overhead)

    def set_overhead(self, nbytes: int) -> None:
        """Say how much is kept aside for what is neither `used` nor `reserved` (directories, the catalogue itself)."""
        self._totals = replace(self.totals(), overhead=nbytes)

    def add_namespace(self, namespace: Namespace) -> None:
        """Record the manifest, unless it is there and sound."""
        manifest = json.dumps(namespace.to_manifest(), sort_keys=True, separators=(",", ":")).encode("ascii")
        known = self.txn.get(namespace.fingerprint, db=self._namespaces)
        if known is None or bytes(known) != manifest:
            self.txn.put(namespace.fingerprint, manifest, db=self._namespaces)

    def names(self, fingerprint: bytes) -> bool:
        """Whether a manifest of the namespace is recorded, sound or not."""
        return self.txn.get(fingerprint, db=self._namespaces) is not None

    def use(self, notes: Iterable[tuple[bytes, int, int]]) -> None:
        """Make blocks younger: (address, last used, hits to add) each; unknown ones are passed over."""
        noted = {address: (last_used, hits) for address, last_used, hits in notes}
        records: list[tuple[bytes, bytearray]] = []
        ages: list[tuple[bytes, bytes]] = []
        found = self.txn.cursor(self._meta).getmulti(sorted(noted))
        known = [(bytes(key), bytearray(value)) for key, value in found]  # views, good until something is written
        for address, record in known:
            before, after = used(address, record, *noted[address])
            records.append((address, record))
            if self.txn.delete(before, db=self._age):  # a pinned block has no place there
                ages.append(after)
        if records:
            self.txn.cursor(self._meta).putmulti(records)
            self.txn.cursor(self._age).putmulti(ages)

    def redate(self, victims: Iterable[Victim]) -> None:
        """Set the times of blocks that are ahead of the clock (`Snapshot.ahead`) to now."""
        now = now_ns()
        ahead = [victim for victim in victims if self.txn.delete(victim.name, db=self._age)]
        entries = filter(None, self.find([victim.address for victim in ahead]))
        self._put([replace(entry, last_used=now, created=min(entry.created, now)) for entry in entries])

    def drop_namespace(self, fingerprint: bytes) -> bool:
        """Forget a namespace's manifest, unless it has blocks; whether it is forgotten."""
        if next(self.scan(fingerprint), None) is not None:
            return False
        self.txn.delete(fingerprint, db=self._namespaces)
        return True

    def clear(self) -> None:
        """Forget every block and intent and zero the sums; format, cap, namespaces, tombstones and counters stay."""
        for database in (self._meta, self._age, self._marks, self._intents):
            self.txn.drop(database, delete=False)
        self._totals = replace(self.totals(), blocks=0, used=0, reserved=0, pinned=0)

    def finish(self) -> None:
        """Write the totals if they changed. `Catalog.write` calls it."""
        totals = self.totals()
        if totals != self._before:
            self.txn.put(b"totals", totals.packed(), db=self._info)

    def _put(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        try:
            records = [(entry.address, entry.packed()) for entry in entries]
            ages = [entry.age() for entry in entries if not entry.pinned]
        except struct.error as error:  # `Environment.write` takes that for a record that is damaged
            raise InvalidBlockError(f"what is to be recorded of a block does not fit its record: {error}") from error
        self.txn.cursor(self._meta).putmulti(records)
        self.txn.cursor(self._age).putmulti(ages)

    def _change(self, changed: Sequence[tuple[Entry, Entry]]) -> None:
        """Put an entry's marks in place of what they were."""
        before, after = [old for old, _ in changed], [new for _, new in changed]
        self._unindex(before)
        self._account(before, -1)
        for entry in after:
            if entry.pinned:
                self.txn.delete(entry.age()[0], db=self._age)
        self._put(after)
        self._index(after)
        self._account(after)

    def _index(self, entries: Iterable[Entry]) -> None:
        keys = [key for entry in entries if entry.marks for key in entry.index()]
        if keys:
            self.txn.cursor(self._marks).putmulti([(key, b"") for key in keys])

    def _unindex(self, entries: Iterable[Entry | None]) -> None:
        for entry in entries:
            if entry is not None and entry.marks:
                for key in entry.index():
                    self.txn.delete(key, db=self._marks)

    def _account(self, entries: Sequence[Entry], sign: int = 1) -> None:
        """Count entries in, or out (`sign=-1`)."""
        used, pinned = sum(entry.size for entry in entries), sum(entry.size for entry in entries if entry.pinned)
        self._add(blocks=sign * len(entries), used=sign * used, pinned=sign * pinned)

    def _add(self, **differences: int) -> None:
        for name, difference in differences.items():
            self._added[name] = self._added.get(name, 0) + difference
