"""What purges leave behind, said in the same words by every tier on a local disk."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvstore.types import Leftover, Residue

if TYPE_CHECKING:
    from kvstore.catalog import Catalog

__all__ = ["beneath", "is_copy_on_write", "leftovers"]

TOMBSTONE_BYTES = 140
"""What one occupies in a catalogue, about."""

_COPY_ON_WRITE = re.compile(r"btrfs|zfs|bcachefs|nilfs2|f2fs|apfs", re.I)
_IN_MEMORY = re.compile(r"tmpfs|ramfs", re.I)


def is_copy_on_write(kind: str) -> bool:
    """Whether a file system of that type writes what is overwritten to another place, and leaves the old one."""
    return _COPY_ON_WRITE.fullmatch(kind) is not None


def beneath(kind: str, nbytes: int | None) -> list[Residue]:
    """What is left of up to `nbytes` overwritten bytes in a file system of that type, and on the device below it."""
    if is_copy_on_write(kind):
        what = f"what was overwritten: {kind} writes elsewhere, and keeps the old bytes until their place is used again"
        return [Residue(what, nbytes, "delete snapshots, then fstrim; or have the tier encrypted")]
    if _IN_MEMORY.fullmatch(kind):
        return [Residue("what the machine has swapped out", None, "swapoff; encrypted swap")]
    what = "copies below the file system: remapped cells of an SSD, snapshots of a volume, backups, a journal of data"
    return [Residue(what, None, "delete snapshots and backups; have the disk or the tier encrypted")]


def leftovers(catalog: Catalog, *, remove: bool) -> list[Leftover]:
    """Tombstones of a catalogue that have ended, for `BlockStore.leftovers`."""
    ended = catalog.ended_tombstones(remove=remove)
    return [Leftover(f"{ended} tombstones that have ended", ended * TOMBSTONE_BYTES, 0.0)] if ended else []
