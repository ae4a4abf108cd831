"""The catalogue brought up to date with the tree, while the tier is in use: for files that came or went another way.

A copy of a tree (`cp`, `rsync`, `aws s3 sync`, from any other tier of this format) brings blocks of which the catalogue
knows nothing; what removes files leaves entries of which nothing is left. Each block is looked at under its name's
lock, so that puts and evictions meanwhile are none the wiser. What is no whole block is left as it is: a copy may be
under way.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from kvstore.catalog import address_of
from kvstore_zarr.metadata import namespaces_in
from kvstore_zarr.put import make_room
from kvstore_zarr.rebuild import block_files, publish, read_entry
from kvstore_zarr.removal import erase, inode_of, remove

if TYPE_CHECKING:
    from kvstore.types import BlockKey
    from kvstore_zarr.metadata import NamespaceTree
    from kvstore_zarr.tier import LocalTier

__all__ = ["Reindexed", "reindex"]

FILES_AT_ONCE = 256
"""Names locked at a time: a put of one of them waits for so many reads of a page."""


@dataclass(frozen=True, slots=True)
class Reindexed:
    """What a reindexing found: blocks `added` to the catalogue, entries `removed` for want of a file, and files that
    have the name of a block and are none (`unreadable`), of which some were removed (`erased`).
    """

    added: int = 0
    removed: int = 0
    unreadable: int = 0
    erased: int = 0

    def __add__(self, other: Reindexed) -> Reindexed:
        return Reindexed(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def reindex(tier: LocalTier, *, unreadable_for_s: float = math.inf) -> Reindexed:
    """Make the catalogue know the files, and forget what is gone; then evict down to the capacity, if there is one.

    A file that is no whole block is removed once nobody has written it for `unreadable_for_s`.
    """
    found = Reindexed()
    for tree in namespaces_in(tier.root, tier.seal)[0]:
        if tier.is_aside(tree.namespace.fingerprint):
            continue
        with tier.catalog.write() as change:
            change.add_namespace(tree.namespace)
        found += Reindexed(removed=_forget(tier, tree))
        batch: dict[bytes, tuple[BlockKey, str]] = {}
        for key, path in block_files(tier.root, tree):
            batch[address_of(tree.namespace, key)] = key, path
            if len(batch) == FILES_AT_ONCE:
                found += _add(tier, tree, batch, unreadable_for_s)
                batch = {}
        found += _add(tier, tree, batch, unreadable_for_s)
    measured = tier.folders.measure_all()
    with tier.catalog.write() as change:
        tier.folders.record(change.txn, measured)
        tier.account(change)
    make_room(tier)
    return found


def _forget(tier: LocalTier, tree: NamespaceTree) -> int:
    """Take out the entries whose files are gone."""
    with tier.catalog.read() as snapshot:
        known = [entry.address for entry in snapshot.scan(tree.namespace.fingerprint)]
    gone = [address for address in known if (path := tier.path(address)) is not None and inode_of(path) is None]
    return sum(remove(tier, gone, seen=dict.fromkeys(gone))) if gone else 0


def _add(
    tier: LocalTier, tree: NamespaceTree, files: dict[bytes, tuple[BlockKey, str]], unreadable_for_s: float
) -> Reindexed:
    """Make entries of those files that are blocks."""
    with tier.catalog.read() as snapshot:
        present = snapshot.contains(list(files))
    unknown = [address for address, known in zip(files, present, strict=True) if not known]
    if not unknown:
        return Reindexed()
    with tier.names.hold(unknown):
        there = [files[address] for address in unknown if inode_of(files[address][1]) is not None]
        read = [(path, read_entry(tree, key, path)) for key, path in there]
        entries = [entry for _, entry in read if entry is not None]
        bad = [path for path, entry in read if entry is None]
        old = [path for path in bad if time.time() - os.lstat(path).st_mtime > unreadable_for_s]
        for path in old:
            erase(path)
        return Reindexed(publish(tier, entries), 0, len(bad), len(old))
