"""A purge of `file://` blocks: out of the catalogue and buried, out of the tree, overwritten, and only then unlinked.

As a removal (`deleting`), with two steps more. The file is renamed to a draft of the intent: no name in the tree stands
for a block that is half overwritten; and the intent says that what it names is to be overwritten, so that
whoever comes after a kill does that, too. Zeros reach the device before the file goes: a truncated file's are dropped.
"""

# ruff: noqa: PTH104 - plain strings: a Path costs more than the system call it is made for

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from kvstore.environment import filesystem_of
from kvstore.errors import TierUnavailable
from kvstore.residues import beneath
from kvstore.types import Residue
from kvstore_zarr.deleting import once
from kvstore_zarr.intents import Undertaking, reclaim
from kvstore_zarr.removal import Patience, erase, in_batches, overwrite
from kvstore_zarr.tier import PURGE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_zarr.tier import LocalTier

__all__ = ["finish_purge", "purge"]

OTHERS_PATIENCE_S = 1.0
"""How long the end of a purge waits for what another process is just overwriting."""


def purge(tier: LocalTier, addresses: Sequence[bytes], until: int, *, overwriting: bool) -> list[bool]:
    """Take blocks away and bury them until then (0: do not); True for each that was there."""
    removed, patience = set[bytes](), Patience()
    for some in in_batches(addresses):
        removed |= _purge(tier, some, until, patience, overwriting=overwriting)
    return once(addresses, removed)


def _purge(tier: LocalTier, addresses: list[bytes], until: int, patience: Patience, *, overwriting: bool) -> set[bytes]:
    drafts: list[str] = []
    with Undertaking(tier) as task:
        with tier.names.hold(addresses):
            paths = {address: path for address in addresses if (path := tier.path(address)) is not None}
            with task.recording() as change:
                if until:
                    change.tombs.bury(addresses, until)
                # Where a block stands is not known: its entry stays, and is said to be left.
                gone = change.discard(paths)
                # A file without an entry is of nobody, and goes as well.
                intent = task.begin(change, sum(entry.size for entry in gone), paths, purge=True)
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
            erase(draft, patience)
        with tier.catalog.write() as change:
            task.end(change)
            tier.account(change)
    return {entry.address for entry in gone}


def finish_purge(tier: LocalTier, advance: Callable[[int], object], *, overwriting: bool) -> list[Residue]:
    """What is left of the blocks that this store has purged. Raises `TierUnavailable` while some of them, or of those
    that an earlier purge took away, are on the disk still.
    """
    reclaim(tier)
    kind, nbytes = filesystem_of(tier.root), tier.purged_bytes
    tier.purged_bytes = 0
    advance(nbytes)
    _wait_for_the_rest(tier)
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


def _wait_for_the_rest(tier: LocalTier) -> None:
    deadline = time.monotonic() + OTHERS_PATIENCE_S
    while True:
        with tier.catalog.read() as snapshot:
            kept = [intent.reserved for intent in snapshot.intents() if intent.payload.startswith(PURGE)]
        if not kept:
            return
        if time.monotonic() > deadline:
            raise TierUnavailable(
                f"{tier.root}: {sum(kept)} bytes of purged blocks could not be removed, and are on the disk: look at"
                " the log and at the device, then purge again"
            )
        time.sleep(0.01)
