"""Blocks taken away on request, or because they are damaged; and what is left of namespaces that were dropped.

The order, so that a kill leaks nothing and no late removal hits a newer copy: under the name's lock, the entry goes in
the transaction that records an intent, and the file is unlinked; then, the name let go, its space is freed; then the
intent goes. Evictions are part of a put (`eviction`).
"""

# ruff: noqa: PTH106, PTH108 - plain strings: a Path costs more than the system call it is made for

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from kvstore_zarr.intents import Undertaking
from kvstore_zarr.metadata import METADATA_NAME, Kind
from kvstore_zarr.removal import Patience, cut, in_batches, inode_of, take_off

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.catalog import Snapshot
    from kvstore_zarr.tier import LocalTier

__all__ = ["dropped_and_empty", "has_files", "once", "remove", "remove_dropped"]


def remove(
    tier: LocalTier,
    addresses: Sequence[bytes],
    *,
    seen: Mapping[bytes, int | None] | None = None,
    generation: int | None = None,
) -> list[bool]:
    """Take blocks out of the catalogue and off the disk; True for each that had an entry.

    `seen`: only if that inode (None: no file at all) still stands under the block's name; `generation`: only if it is
    that copy, as the number of an inode is given to another file once nobody has the first one open.
    """
    removed, patience = set[bytes](), Patience()
    for some in in_batches(addresses):
        removed |= _remove(tier, some, seen, generation, patience)
    return once(addresses, removed)


def once(addresses: Sequence[bytes], removed: set[bytes]) -> list[bool]:
    """For each address whether it was removed; of equal ones the first was."""
    first = dict.fromkeys(addresses)
    return [address in removed and first.pop(address, 0) is None for address in addresses]


def _remove(
    tier: LocalTier,
    addresses: list[bytes],
    seen: Mapping[bytes, int | None] | None,
    generation: int | None,
    patience: Patience,
) -> set[bytes]:
    with Undertaking(tier) as task:
        with ExitStack() as cuts, tier.names.hold(addresses):  # cut once the names are let go
            paths = {address: path for address in addresses if (path := tier.path(address)) is not None}
            if seen is not None:
                paths = {address: path for address, path in paths.items() if inode_of(path) == seen[address]}
            with task.recording() as change:
                gone = change.discard(paths, generation)
                if gone:
                    task.begin(change, sum(entry.size for entry in gone), [entry.address for entry in gone])
            for entry in gone:
                cuts.callback(cut, take_off(paths[entry.address]), patience)
        if gone:
            with tier.catalog.write() as change:
                task.end(change)
    return {entry.address for entry in gone}


def dropped_and_empty(tier: LocalTier, snapshot: Snapshot) -> list[bytes]:
    """Those of the dropped namespaces into which nothing was put since."""
    return [fingerprint for fingerprint in tier.dropped if next(snapshot.scan(fingerprint), None) is None]


def has_files(tier: LocalTier, name: str) -> bool:
    """Whether blocks stand in a namespace's folder, known to the catalogue or not: its manifest has to stay, or nobody
    would find them again.
    """
    top = f"{tier.root}/{name}"
    below = ((folder[len(top) + 1 :], files) for folder, _, files in os.walk(top))
    return any(Kind.of(f"{folder}/{file}") is Kind.BLOCK for folder, files in below for file in files)


def remove_dropped(tier: LocalTier) -> None:
    """Take away what is left of dropped namespaces: documents and folders. For the last one, as it closes the tier: a
    process that has it open relies on the folders that it made.
    """
    with tier.catalog.read() as snapshot:
        empty = dropped_and_empty(tier, snapshot)
    gone = [fingerprint for fingerprint in empty if not has_files(tier, fingerprint.hex())]
    for fingerprint in gone:
        for path, _, files in os.walk(f"{tier.root}/{fingerprint.hex()}", topdown=False):
            if METADATA_NAME in files:
                os.unlink(f"{path}/{METADATA_NAME}")
            with suppress(OSError):  # somebody's file is in it
                os.rmdir(path)
    with tier.catalog.write() as change:
        for fingerprint in gone:
            change.drop_namespace(fingerprint)
            tier.folders.drop(change.txn, fingerprint.hex())
