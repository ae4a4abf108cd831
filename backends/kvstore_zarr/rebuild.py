"""The catalogue made anew from the tree: after a power loss, a damaged catalogue, or for blocks that came without one.

Each block's tail says what it is. What cannot be a whole block (a wrong size, holes, a tail that does not check or
belongs elsewhere) is removed; payload checksums are left to the reads. Files that are not ours are left, and counted.
What was said of blocks (`kvstore.marks`) stands in the catalogue alone: it is taken over from one that can be read.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvstore.catalog import Entry, address_of
from kvstore.files import NotAFileError, open_file
from kvstore.lmdb_files import readable
from kvstore.lmdb_pages import PageError
from kvstore_zarr.metadata import namespaces_in
from kvstore_zarr.removal import erase, overwrite
from kvstore_zarr.tier import DRAFTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstore.catalog import Change
    from kvstore.marks import Mark
    from kvstore.types import BlockKey
    from kvstore_zarr.metadata import NamespaceTree
    from kvstore_zarr.tier import LocalTier

__all__ = ["Marks", "block_files", "marks_in", "publish", "read_entry", "rebuild"]

Marks: TypeAlias = "dict[bytes, tuple[Mark, ...]]"
"""By address."""

ENTRIES_AT_ONCE = 4096
"""Entries published per transaction."""


def marks_in(catalogue: Path) -> Marks:
    """The marks in a catalogue that LMDB must not open, as far as sound pages lead to them."""
    found: Marks = {}
    with (catalogue / "data.mdb").open("rb") as file:
        for address, load in readable(file.fileno())("meta").items():
            with suppress(PageError, OSError, ValueError, struct.error):
                entry = Entry.unpacked(address, load())
                if entry.marks:
                    found[address] = entry.marks
    return found


def rebuild(tier: LocalTier, marks: Marks | None = None) -> None:
    """Fill the tier's catalogue, of which only the marks count, from its files. The caller is alone in the tier.

    `marks` count instead, where the catalogue is a new one.
    """
    for draft in (tier.root / DRAFTS).iterdir():
        erase(str(draft))
    with tier.catalog.write() as change:
        marks = change.all_marks() if marks is None else marks
        change.clear()
        tier.folders.forget(change.txn)
    for tree in namespaces_in(tier.root, tier.seal)[0]:
        with tier.catalog.write() as change:
            change.add_namespace(tree.namespace)
        batch: list[Entry] = []
        for entry in _entries(tier.root, tree):
            batch.append(replace(entry, marks=marks.get(entry.address, ())))
            if len(batch) == ENTRIES_AT_ONCE:
                publish(tier, batch)
                batch = []
        publish(tier, batch)
    measured = tier.folders.measure_all()
    with tier.catalog.write() as change:
        tier.folders.record(change.txn, measured)
        tier.account(change)


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


def _entries(root: Path, tree: NamespaceTree) -> Iterator[Entry]:
    for key, path in block_files(root, tree):
        entry = read_entry(tree, key, path)
        if entry is None:
            erase(path)
        else:
            yield entry


def block_files(root: Path, tree: NamespaceTree) -> Iterator[tuple[BlockKey, str]]:
    """The keys and paths of all files that have the name of a block."""
    for group in range(len(tree.frames)):
        array = root / tree.group_folder(group)
        for folder in sorted(array.iterdir()) if array.is_dir() else ():
            for file in os.scandir(folder) if folder.is_dir() else ():
                try:
                    yield tree.key(group, folder.name, file.name), file.path
                except (ValueError, OverflowError):
                    continue


def read_entry(tree: NamespaceTree, key: BlockKey, path: str) -> Entry | None:
    """What the file says of its block; None if it cannot be a whole block of that key."""
    frame = tree.frames[key.group]
    try:
        fd = open_file(path, os.O_RDONLY)
    except NotAFileError:
        return None
    try:
        status = os.fstat(fd)
        occupied = status.st_blocks * 512
        if status.st_size != frame.file_bytes or occupied < frame.file_bytes:
            return None
        closing = np.frombuffer(os.pread(fd, frame.closing, frame.whole), dtype=np.uint8)
    finally:
        os.close(fd)
    facts = frame.facts(closing)
    if facts is None or facts.key != key or facts.fingerprint != tree.namespace.fingerprint:
        return None
    return Entry(
        address_of(tree.namespace, key), occupied, facts.created, facts.created, facts.generation,
        position=facts.position, parent=facts.parent,
    )  # fmt: skip
