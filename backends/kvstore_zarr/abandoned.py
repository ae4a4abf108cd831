"""Folders of namespaces that nobody can name and that have no blocks: what a creation or a purge left that was killed.

They have no manifest, in them or in the catalogue, and nothing but documents and folders of ours. One in which nothing
changed for a while goes with `BlockStore.leftovers`; with blocks in it, it is `unseen`'s.
"""

# ruff: noqa: PTH106, PTH108 - plain strings, as all that walks the tree

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.retention import now_ns
from kvstore.types import Leftover
from kvstore_zarr.metadata import METADATA_NAME, Kind
from kvstore_zarr.tier import unpack_addresses
from kvstore_zarr.unseen import namespace_folders

if TYPE_CHECKING:
    from kvstore.catalog import Change, Snapshot
    from kvstore_zarr.tier import LocalTier

__all__ = ["abandoned_folders"]

ABANDONED_AFTER_S = 600.0
"""A folder that changed since may be about to get its manifest, and its first block: that takes some milliseconds."""


def abandoned_folders(tier: LocalTier, *, remove: bool) -> list[Leftover]:
    """Those that are there; `remove` takes them away, as far as it is still so."""
    nameless = [name for name, tree in namespace_folders(tier) if tree is None and name not in tier.aside]
    with tier.catalog.read() as snapshot:
        found = {name: one for name in nameless if (one := _abandoned(tier, name, snapshot)) is not None}
    return [one for name, one in found.items() if not remove or _is_removed(tier, name)]


def _abandoned(tier: LocalTier, name: str, snapshot: Snapshot) -> Leftover | None:
    top, nbytes, changed = f"{tier.root}/{name}", 0, 0.0
    for folder, _, files in os.walk(top):
        below = folder[len(top) + 1 :]
        if METADATA_NAME in files and not below:
            return None
        if any(Kind.of(f"{below}/{file}".lstrip("/")) is not Kind.DOCUMENT for file in files):
            return None
        for path in (folder, *(f"{folder}/{file}" for file in files)):
            with suppress(FileNotFoundError):
                status = os.lstat(path)
                nbytes, changed = nbytes + 512 * status.st_blocks, max(changed, status.st_mtime)
    known = next(snapshot.scan(bytes.fromhex(name)), None) is not None
    if known or not changed or changed > now_ns() / 1e9 - ABANDONED_AFTER_S:
        return None
    return Leftover(f"{name}/", nbytes, changed)


def _is_removed(tier: LocalTier, name: str) -> bool:
    """Take the folder away; whether it is gone. Nobody begins to put into it meanwhile, for which he needs the
    transaction; who has begun keeps it. Whoever puts into it later finds no folder, and makes it anew.
    """
    top = f"{tier.root}/{name}"
    with tier.catalog.write() as change:
        if _is_put_into(change, name) or _abandoned(tier, name, change) is None:
            return False
        for folder, _, files in os.walk(top, topdown=False):
            if METADATA_NAME in files:
                with suppress(FileNotFoundError):  # somebody removes the folder by hand
                    os.unlink(f"{folder}/{METADATA_NAME}")
            with suppress(OSError):  # somebody's folder is in it
                os.rmdir(folder)
        if os.path.isdir(top):  # noqa: PTH112
            return False
        tier.folders.drop(change.txn, name)
        tier.account(change)
    return True


def _is_put_into(change: Change, name: str) -> bool:
    """Whether somebody has an intent for it."""
    fingerprint = bytes.fromhex(name)
    addresses = (address for intent in change.intents() for address in unpack_addresses(intent.payload))
    return any(address.startswith(fingerprint) for address in addresses)
