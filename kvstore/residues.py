"""What no purge can reach below a file system, said in the same words by every tier that is on one."""

from __future__ import annotations

import re

from kvstore.types import Residue

__all__ = ["beneath", "is_copy_on_write"]

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
