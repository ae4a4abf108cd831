"""The catalogue brought up to date with the tree, while the tier is in use: for files that came or went another way.

A copy of a tree (`cp`, `rsync`, `aws s3 sync`, from any other tier of this format) brings blocks of which the catalogue
knows nothing; what removes files leaves entries of which nothing is left. Each block is looked at under its name's
lock, so that puts and evictions meanwhile are none the wiser. What is no whole block is left as it is: a copy may be
under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.catalog import address_of
from kvstore_zarr.metadata import namespaces_in
from kvstore_zarr.put import make_room
from kvstore_zarr.rebuild import block_files, publish, read_entry
from kvstore_zarr.removal import inode_of, remove

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
    have the name of a block and are none (`unreadable`).
    """

    added: int = 0
    removed: int = 0
    unreadable: int = 0


def reindex(tier: LocalTier) -> Reindexed:
    """Make the catalogue know the files, and forget what is gone; then evict down to the capacity, if there is one."""
    added = removed = unreadable = 0
    for tree in namespaces_in(tier.root)[0]:
        if tier.is_aside(tree.namespace.fingerprint):
            continue
        with tier.catalog.write() as change:
            change.add_namespace(tree.namespace)
        removed += _forget(tier, tree)
        batch: dict[bytes, tuple[BlockKey, str]] = {}
        for key, path in block_files(tier.root, tree):
            batch[address_of(tree.namespace, key)] = key, path
            if len(batch) == FILES_AT_ONCE:
                new, bad = _add(tier, tree, batch)
                added, unreadable, batch = added + new, unreadable + bad, {}
        new, bad = _add(tier, tree, batch)
        added, unreadable = added + new, unreadable + bad
    measured = tier.folders.measure_all()
    with tier.catalog.write() as change:
        tier.folders.record(change.txn, measured)
        tier.account(change)
    make_room(tier)
    return Reindexed(added, removed, unreadable)


def _forget(tier: LocalTier, tree: NamespaceTree) -> int:
    """Take out the entries whose files are gone."""
    with tier.catalog.read() as snapshot:
        known = [entry.address for entry in snapshot.scan(tree.namespace.fingerprint)]
    gone = [address for address in known if (path := tier.path(address)) is not None and inode_of(path) is None]
    return sum(remove(tier, gone, seen=dict.fromkeys(gone))) if gone else 0


def _add(tier: LocalTier, tree: NamespaceTree, files: dict[bytes, tuple[BlockKey, str]]) -> tuple[int, int]:
    """How many of the files became entries, and how many are no blocks."""
    with tier.catalog.read() as snapshot:
        present = snapshot.contains(list(files))
    unknown = [address for address, there in zip(files, present, strict=True) if not there]
    if not unknown:
        return 0, 0
    with tier.names.hold(unknown):
        read = [read_entry(tree, *files[address]) for address in unknown if inode_of(files[address][1]) is not None]
        entries = [entry for entry in read if entry is not None]
        return publish(tier, entries), len(read) - len(entries)
