"""The catalogue made anew from the tree: after a power loss, a damaged catalogue, or for blocks that came without one.

Each block's tail says what it is. What cannot be a whole block (a wrong size, holes, a tail that does not check or
belongs elsewhere) is removed; payload checksums are left to the reads. Files that are not ours are left, and counted;
so are blocks of a later kvstore.
What was said of blocks (`kvstore.marks`), and what was purged lately, stands in the catalogue alone: it is taken over,
from a damaged one as far as that can be read.
"""

from __future__ import annotations

import logging
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvstore.catalog import Entry
from kvstore.lmdb_files import readable
from kvstore.lmdb_pages import PageError
from kvstore.tombs import tombs_in
from kvstore_zarr.metadata import namespaces_in
from kvstore_zarr.removal import erase, overwrite
from kvstore_zarr.tails import TailReader, block_files, block_folders
from kvstore_zarr.tier import DRAFTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstore.catalog import Change
    from kvstore.marks import Mark
    from kvstore_zarr.metadata import NamespaceTree
    from kvstore_zarr.tier import LocalTier

__all__ = ["Said", "publish", "rebuild", "said_in"]

ENTRIES_AT_ONCE = 4096
"""Entries published per transaction, a folder more or less."""
TOLD_EVERY_S = 5.0

_log = logging.getLogger("kvstore.file")


@dataclass(frozen=True, slots=True)
class Said:
    """What no file says, by address: marks, and tombstones with their ends (ns since the epoch)."""

    marks: dict[bytes, tuple[Mark, ...]]
    tombs: dict[bytes, int]


def said_in(catalogue: Path) -> Said:
    """What stands in a catalogue that LMDB must not open, as far as sound pages lead to it."""
    with (catalogue / "data.mdb").open("rb") as file:
        table = readable(file.fileno())
        found = Said({}, tombs_in(table("tombs")))
        for address, load in table("meta").items():
            with suppress(PageError, OSError, ValueError, struct.error):
                entry = Entry.unpacked(address, load())
                if entry.marks:
                    found.marks[address] = entry.marks
    return found


def rebuild(tier: LocalTier, said: Said | None = None) -> None:
    """Fill the tier's catalogue, of which only marks and tombstones count, from its files. The caller is alone in the
    tier. `said` counts instead, where the catalogue is a new one.
    """
    for draft in (tier.root / DRAFTS).iterdir():
        erase(str(draft))
    with tier.catalog.write() as change:
        marks = change.all_marks() if said is None else said.marks
        change.clear()
        change.tombs.bury_again({} if said is None else said.tombs)
        tier.folders.forget(change.txn)
    told = _Told(tier)
    with TailReader() as reader:
        for tree in namespaces_in(tier.root, tier.seal)[0]:
            with tier.catalog.write() as change:
                change.add_namespace(tree.namespace)
            for batch in _batches(tier, tree, reader):
                publish(tier, [_marked(entry, marks) for entry in batch])
                told.more(len(batch))
    measured = tier.folders.measure_all()
    with tier.catalog.write() as change:
        tier.folders.record(change.txn, measured)
        tier.account(change)


def _marked(entry: Entry, marks: dict[bytes, tuple[Mark, ...]]) -> Entry:
    said = marks.get(entry.address)
    return replace(entry, marks=said) if said else entry


def _batches(tier: LocalTier, tree: NamespaceTree, reader: TailReader) -> Iterator[list[Entry]]:
    """What the files say of their blocks, some folders at a time; a file that is no block goes."""
    batch: list[Entry] = []
    for group, folder in block_folders(tree):
        files, drafts = block_files(tier.root, tree, group, folder)
        for draft in drafts:
            erase(draft)
        for tail in reader.read(tree, list(files.values())):
            if tail.entry is not None:
                batch.append(tail.entry)
            elif tail.bad:
                erase(tail.file.path)
        if len(batch) >= ENTRIES_AT_ONCE:
            yield batch
            batch = []
    yield batch


@dataclass(slots=True)
class _Told:
    """Says now and then how far it is, so that nobody takes an opening that lasts for one that hangs."""

    tier: LocalTier
    blocks: int = 0
    when: float = field(default_factory=time.monotonic)

    def more(self, blocks: int) -> None:
        self.blocks += blocks
        if time.monotonic() - self.when > TOLD_EVERY_S:
            self.when = time.monotonic()
            _log.warning("%s: its catalogue is made anew: %d blocks so far", self.tier.root, self.blocks)


def publish(tier: LocalTier, entries: Sequence[Entry]) -> int:
    """Record blocks that are in place already; how many were not known. Those that were purged lately go."""
    with tier.catalog.write() as change:
        new = sum(change.publish(entries))
        _skip_generations(change, max((entry.generation for entry in entries), default=0))
        buried = change.tombs.buried([entry.address for entry in entries])
    for address in buried:
        path = tier.path(address)
        if path is not None:
            overwrite(path)
            erase(path)
    return new


def _skip_generations(change: Change, last: int) -> None:
    """See that no generation up to `last` is given out again."""
    behind = last + 1 - change.totals().next_generation
    if behind > 0:
        change.generations(behind)
