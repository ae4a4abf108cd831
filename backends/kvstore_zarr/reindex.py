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
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kvstore.catalog import address_of
from kvstore.types import BlockKey
from kvstore_zarr.deleting import remove
from kvstore_zarr.metadata import namespaces_in
from kvstore_zarr.put import make_room
from kvstore_zarr.rebuild import publish
from kvstore_zarr.removal import AT_ONCE, Patience, cut, erase, take_off
from kvstore_zarr.tails import BlockFile, TailReader, block_files, block_folders
from kvstore_zarr.tier import draft_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_zarr.metadata import NamespaceTree
    from kvstore_zarr.tier import LocalTier

__all__ = ["Reindexed", "reindex"]

Progress: TypeAlias = "Callable[[int], object]"


def _silent(blocks: int) -> None:
    del blocks


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


def reindex(
    tier: LocalTier, *, unreadable_for_s: float = math.inf, progress: Progress = _silent, evicting: bool = True
) -> Reindexed:
    """Make the catalogue know the files, and forget what is gone; then, `evicting`, evict down to the capacity, if
    there is one.

    A file that is no whole block is removed once nobody has written it for `unreadable_for_s`. `progress` is told, of
    each folder, how many blocks were compared.
    """
    found, patience = Reindexed(), Patience()
    with TailReader() as reader:
        for tree in namespaces_in(tier.root, tier.seal)[0]:
            if tier.is_aside(tree.namespace.fingerprint):
                continue
            with tier.catalog.write() as change:
                change.add_namespace(tree.namespace)
            for group, folder in block_folders(tree):
                found += _compare(_Folder(tier, tree, reader, patience, group, folder), unreadable_for_s, progress)
    measured = tier.folders.measure_all()
    with tier.catalog.write() as change:
        tier.folders.record(change.txn, measured)
        tier.account(change)
    if evicting:
        make_room(tier)
    return found


@dataclass(frozen=True, slots=True)
class _Folder:
    tier: LocalTier
    tree: NamespaceTree
    reader: TailReader
    patience: Patience
    group: int
    name: str


def _compare(folder: _Folder, unreadable_for_s: float, progress: Progress) -> Reindexed:
    """Bring one folder and what the catalogue knows of it together."""
    tier, tree = folder.tier, folder.tree
    prefix = address_of(tree.namespace, BlockKey(bytes.fromhex(folder.name), folder.group))
    with (
        tier.catalog.read() as snapshot
    ):  # first: what is put from now on is a file that is looked at, and known by then
        known = set(snapshot.addresses(prefix))
    files, drafts = block_files(tier.root, tree, folder.group, folder.name)
    _erase_copied(tier, drafts, folder.patience)
    gone = list(known - files.keys())
    found = Reindexed(removed=sum(remove(tier, gone, seen=dict.fromkeys(gone))) if gone else 0)
    unknown = [address for address in files if address not in known]
    for start in range(0, len(unknown), AT_ONCE):
        some = {address: files[address] for address in unknown[start : start + AT_ONCE]}
        found += _add(folder, some, unreadable_for_s)
    progress(len(known | files.keys()))
    return found


def _erase_copied(tier: LocalTier, drafts: Sequence[str], patience: Patience) -> None:
    """Take away drafts that belong to no put: they came with a copy of a tier that was in use."""
    if not drafts:
        return
    with tier.catalog.read() as snapshot:  # later than the drafts were seen: an intent comes before its drafts
        of_puts = tuple(draft_prefix(intent) for intent in snapshot.intents(b""))
    for draft in drafts:
        if not Path(draft).name.startswith(of_puts):
            erase(draft, patience)


def _add(folder: _Folder, files: dict[bytes, BlockFile], unreadable_for_s: float) -> Reindexed:
    """Make entries of those files that are blocks."""
    tier = folder.tier
    with ExitStack() as cuts, tier.names.hold(files):  # cut once the names are let go
        tails = [tail for tail in folder.reader.read(folder.tree, list(files.values())) if not tail.gone]
        bad = [tail.file.path for tail in tails if tail.bad]
        old = [path for path in bad if time.time() - os.lstat(path).st_mtime > unreadable_for_s]
        for path in old:
            cuts.callback(cut, take_off(path), folder.patience)
        added = publish(tier, [tail.entry for tail in tails if tail.entry is not None])
        return Reindexed(added, 0, len(bad), len(old))
