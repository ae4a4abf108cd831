"""A purge of `file://` blocks: out of the catalogue and buried, out of the tree, overwritten, and only then unlinked.

As a removal (`removal`), with two steps more. The file is renamed to a draft of the intent, so that no name in the tree
stands for a block that is half overwritten; and the intent says that what it names is to be overwritten, so that
whoever comes after a kill does that, too. Zeros reach the device before the file goes: a truncated file's are dropped.
"""

# ruff: noqa: PTH104 - plain strings: a Path costs more than the system call it is made for

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvstore.environment import filesystem_of
from kvstore.residues import beneath
from kvstore.types import Residue
from kvstore_zarr.removal import erase, overwrite
from kvstore_zarr.tier import PURGE, pack_addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_zarr.tier import LocalTier

__all__ = ["finish_purge", "purge"]

AT_ONCE = 32
"""Blocks taken out in one transaction, under the locks of their names."""


def purge(tier: LocalTier, addresses: Sequence[bytes], until: int, *, overwriting: bool) -> list[bool]:
    """Take blocks away and bury them until then (0: do not); True for each that was there."""
    removed: set[bytes] = set()
    for start in range(0, len(addresses), AT_ONCE):
        removed |= _purge(tier, list(dict.fromkeys(addresses[start : start + AT_ONCE])), until, overwriting=overwriting)
    first = dict.fromkeys(addresses)
    return [address in removed and first.pop(address, 0) is None for address in addresses]


def _purge(tier: LocalTier, addresses: list[bytes], until: int, *, overwriting: bool) -> set[bytes]:
    drafts: list[str] = []
    with tier.names.hold(addresses):
        paths = {address: path for address in addresses if (path := tier.path(address)) is not None}
        with tier.catalog.write() as change:
            if until:
                change.tombs.bury(addresses, until)
            gone = change.discard(paths)  # where a block stands is not known: its entry stays, and is said to be left
            # A file without an entry is of nobody, and goes as well.
            payload = (PURGE if overwriting else b"") + pack_addresses(paths)
            intent = change.reserve(tier.presence.lease, sum(entry.size for entry in gone), payload)
        for number, (address, path) in enumerate(paths.items()):
            draft = tier.draft(intent, number, address)
            try:
                os.rename(path, draft)
            except (FileNotFoundError, NotADirectoryError):
                continue
            drafts.append(draft)
    for draft in drafts:
        if overwriting:
            tier.purged_bytes += overwrite(draft)
        erase(draft)
    with tier.catalog.write() as change:
        change.release(intent)
        tier.account(change)
    return {entry.address for entry in gone}


def finish_purge(tier: LocalTier, advance: Callable[[int], object], *, overwriting: bool) -> list[Residue]:
    """What is left of the blocks that this store has purged."""
    kind, nbytes = filesystem_of(tier.root), tier.purged_bytes
    tier.purged_bytes = 0
    advance(nbytes)
    if not overwriting:
        residues = [Residue("removed blocks in free space of the file system", remedy="fstrim, or fill the disk once")]
    else:
        residues = beneath(kind, nbytes)
        residues.append(
            Residue(
                "blocks that were evicted, expired or deleted before, in free space of the file system",
                None,
                "fstrim, or fill the disk once",
            )
        )
    residues.append(
        Residue("digests, labels and tenants of removed blocks in the catalogue, and digests in its tombstones")
    )
    tier.environment.sync()
    return residues
