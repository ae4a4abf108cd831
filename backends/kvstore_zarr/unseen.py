"""What stands in a `file://` tier's folders and in no listing: for whoever says that all of it is copied, or gone.

A namespace that is set aside, or whose manifest neither its folder nor the catalogue has, is counted by the names in
its folder; of the others each name is held against the catalogue. What goes is what has our names, and nothing else.
"""

# ruff: noqa: PTH106, PTH108, PTH112, PTH208 - plain strings: there may be millions

from __future__ import annotations

import os
import time
from contextlib import ExitStack, nullcontext, suppress
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from kvstore.catalog import address_of
from kvstore.errors import StoreOpenError
from kvstore.namespace import is_namespace_name
from kvstore.types import BlockKey, Unseen
from kvstore_zarr.metadata import METADATA_NAME, Kind, read_namespace
from kvstore_zarr.removal import AT_ONCE, Patience, cut, take_off_for_good
from kvstore_zarr.tails import block_files, block_folders, is_foreign

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from kvstore_zarr.metadata import NamespaceTree
    from kvstore_zarr.tails import BlockFile
    from kvstore_zarr.tier import LocalTier

__all__ = ["namespace_folders", "purge_unseen", "unseen"]

T = TypeVar("T")

PUBLISHED_WITHIN_S = 0.2
"""A put gives its files their names, and enters them in its next transaction: who only reads waits that long."""


def unseen(tier: LocalTier) -> list[Unseen]:
    """See `BlockStore.unseen`."""
    found: list[Unseen] = []
    for name, tree in namespace_folders(tier):
        if tree is None:
            found += _whole(tier, name)
            continue
        files = _unknown(tier, tree)
        for later in (False, True):
            some = [file for file in files if is_foreign(file.path) is later]
            if some:
                found.append(_beside(name, some, later=later))
    return found


def purge_unseen(tier: LocalTier, names: Collection[str], until: int, *, overwriting: bool) -> list[Unseen]:
    """See `BlockStore.purge_unseen`."""
    gone: list[Unseen] = []
    for name, tree in namespace_folders(tier):
        if name not in names:
            continue
        if tree is not None:
            gone += _purge_beside(tier, tree, until, overwriting=overwriting)
        elif name not in tier.aside or name in tier.damaged:
            gone += _purge_whole(tier, name, until, overwriting=overwriting)
    return gone


def namespace_folders(tier: LocalTier) -> Iterator[tuple[str, NamespaceTree | None]]:
    """Each folder that has the name of a namespace, with its tree; None where nobody knows how to read it."""
    with tier.catalog.read() as snapshot:
        known = {space.name: space for space in snapshot.namespaces()}
    for name in sorted(os.listdir(tier.root)):
        if not is_namespace_name(name) or not os.path.isdir(f"{tier.root}/{name}"):
            continue
        tree = None
        if name not in tier.aside:
            try:
                tree = read_namespace(tier.root / name, tier.seal)
            except StoreOpenError as error:
                tier.set_aside(name, error)
        if tree is None and name in known and name not in tier.aside:
            tree = tier.tree(known[name])
        yield name, tree


def _ours(tier: LocalTier, name: str, *kinds: Kind) -> Iterator[str]:
    """The paths of files of these kinds in a namespace's folder."""
    top = f"{tier.root}/{name}"
    for folder, _, files in os.walk(top):
        below = folder[len(top) + 1 :]
        yield from (f"{folder}/{file}" for file in files if Kind.of(f"{below}/{file}".lstrip("/")) in kinds)


def _whole(tier: LocalTier, name: str) -> list[Unseen]:
    sizes = [_size(path) for path in _ours(tier, name, Kind.BLOCK, Kind.DRAFT)]
    why = tier.aside.get(name)
    if why is None and not sizes:
        return []
    why = why or (
        f"namespace {name} has no manifest, in its folder ({tier.root / name / METADATA_NAME}) or in the catalogue:"
        " what is in it is found when an engine has stored into it and kvstore reindex was run; kvstore purge --all"
        " removes it, and so does removing the folder"
    )
    return [Unseen(name, why, len(sizes), sum(sizes), later=name in tier.aside and name not in tier.damaged)]


def _unknown(tier: LocalTier, tree: NamespaceTree) -> list[BlockFile]:
    """The files that have the names of blocks and no entry in the catalogue."""
    found: list[BlockFile] = []
    for group, folder in block_folders(tree):
        files, _ = block_files(tier.root, tree, group, folder)
        if not files:
            continue
        prefix = address_of(tree.namespace, BlockKey(bytes.fromhex(folder), group))
        with tier.catalog.read() as snapshot:
            known = set(snapshot.addresses(prefix))
        found += [file for address, file in files.items() if address not in known]
    if found and tier.readonly:
        time.sleep(PUBLISHED_WITHIN_S)
    return [file for some in _batches(found) for file in _still_unknown(tier, some)]


def _still_unknown(tier: LocalTier, files: list[BlockFile]) -> list[BlockFile]:
    """Those of the files that are not just being stored: a put has their names locked, which who only reads cannot."""
    addresses = [file.address for file in files]
    with nullcontext() if tier.readonly else tier.names.hold(addresses), tier.catalog.read() as snapshot:
        known = snapshot.contains(addresses)
        return [
            file for file, is_known in zip(files, known, strict=True) if not is_known and os.path.lexists(file.path)
        ]


def _beside(name: str, files: list[BlockFile], *, later: bool) -> Unseen:
    how = (
        "are of a later kvstore: it has to see to them"
        if later
        else "are not in the catalogue: kvstore reindex makes it know those that are whole, kvstore verify --repair"
        " removes the others, kvstore purge --all both"
    )
    why = f"namespace {name}: {len(files)} files that have the names of blocks {how}"
    return Unseen(name, why, len(files), sum(_size(file.path) for file in files), later=later, whole=False)


def _purge_beside(tier: LocalTier, tree: NamespaceTree, until: int, *, overwriting: bool) -> list[Unseen]:
    """Buried and gone under the names' locks: a put that waits for one finds the tombstone."""
    blocks, nbytes, patience = 0, 0, Patience()
    for some in _batches(_unknown(tier, tree)):
        files = {file.address: file for file in some if not is_foreign(file.path)}
        with ExitStack() as cuts, tier.names.hold(files):  # cut once the names are let go
            with tier.catalog.read() as snapshot:
                known = snapshot.contains(list(files))
            going = [address for address, is_known in zip(files, known, strict=True) if not is_known]
            if until and going:
                with tier.catalog.write() as change:
                    change.tombs.bury(going, until)
            for address in going:
                path = files[address].path
                nbytes += _size(path)
                blocks += 1
                cuts.callback(cut, take_off_for_good(tier, path, overwriting=overwriting), patience)
    name = tree.namespace.name
    return [Unseen(name, f"namespace {name}: not in the catalogue", blocks, nbytes, whole=False)] if blocks else []


def _purge_whole(tier: LocalTier, name: str, until: int, *, overwriting: bool) -> list[Unseen]:
    """Entries first, so that nobody looks for a file that is gone; then blocks, documents, folders."""
    fingerprint = bytes.fromhex(name)
    with tier.catalog.read() as snapshot:
        addresses = [entry.address for entry in snapshot.scan(fingerprint)]
    for some in _batches(addresses):
        with tier.catalog.write() as change:
            if until:
                change.tombs.bury(some, until)
            change.discard(some)
    sizes, patience = list[int](), Patience()
    for path in list(_ours(tier, name, Kind.BLOCK, Kind.DRAFT)):
        sizes.append(_size(path))
        cut(take_off_for_good(tier, path, overwriting=overwriting), patience)
    for path in list(_ours(tier, name, Kind.DOCUMENT)):
        with suppress(FileNotFoundError):
            os.unlink(path)
    for folder, _, _ in os.walk(f"{tier.root}/{name}", topdown=False):
        with suppress(OSError):  # somebody's file is in it
            os.rmdir(folder)
    why = tier.aside.get(name, f"namespace {name}: it had no manifest")
    tier.aside_bytes = max(0, tier.aside_bytes - sum(sizes))
    tier.serve_again(name)
    with tier.catalog.write() as change:
        change.drop_namespace(fingerprint)
        tier.folders.drop(change.txn, name)
        tier.account(change)
    return [Unseen(name, why, len(sizes), sum(sizes))]


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while some := list(islice(rest, AT_ONCE)):
        yield some


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except (FileNotFoundError, NotADirectoryError):
        return 0
