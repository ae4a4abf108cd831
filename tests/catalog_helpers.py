"""What tests of the catalogue share: one of a folder, entries by number, and whether its books close."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore import BlockKey, BlockLayout, Namespace
from kvstore.catalog import DATABASES, Catalog, Entry, Snapshot, Victim, address_of
from kvstore.environment import Environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPACE = Namespace("model", "revision", (BlockLayout.opaque(4096), BlockLayout.opaque(4096)), block_tokens=16)
OTHER = replace(SPACE, revision="another")
LEASE = bytes(range(16))


@contextmanager
def catalog_at(directory: Path, capacity: int | None = None, *, alone: bool = True) -> Iterator[Catalog]:
    environment = Environment.open(directory, DATABASES)
    try:
        catalog = Catalog(environment)
        catalog.prepare(capacity, alone=alone)
        yield catalog
    finally:
        environment.close()


def entry(number: int, size: int = 4096, last_used: int | None = None, space: Namespace = SPACE) -> Entry:
    address = address_of(space, BlockKey(number.to_bytes(32, "big"), number % 2))
    return Entry(address, size, 1000 + number, 1000 + number if last_used is None else last_used)


def ages(snapshot: Snapshot) -> list[bytes]:
    return [victim.address for victim in snapshot.oldest()]


def check_books(snapshot: Snapshot) -> None:
    """Totals are the sums, and `age` mirrors `meta`."""
    entries = [found for space in (SPACE, OTHER) for found in snapshot.scan(space.fingerprint)]
    totals = snapshot.totals()
    assert (totals.blocks, totals.used) == (len(entries), sum(found.size for found in entries))
    assert totals.reserved == sum(intent.reserved for intent in snapshot.intents())
    ordered = sorted(entries, key=lambda found: (found.last_used, found.address))
    victims = sorted(snapshot.oldest(), key=lambda victim: (victim.last_used, victim.address))
    assert victims == [Victim(e.address, e.last_used, e.size, e.generation) for e in ordered]
