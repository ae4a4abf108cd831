"""What LMDB's errors mean for a tier, and what to do about them.

Below `kvstore.lmdb_opening` and `kvstore.environment`, which let one error of LMDB's own out: `lmdb.MapFullError`
of `Environment.write`, which backends answer by making room.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import lmdb

from kvstore.errors import StoreAccessError, StoreDamagedError, StoreFullError, StoreOpenError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DAMAGE", "REMEDY", "explained"]

REMEDY = "Remove the directory to start anew"
"""What to do about damage, where the tier says nothing better."""

DAMAGE = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.BadTxnError,
    lmdb.CursorFullError,
    struct.error,
)
"""What LMDB says of a page that cannot be, and `struct` of a record."""


def explained(directory: Path, error: lmdb.Error, remedy: str) -> StoreOpenError:
    """What LMDB's error means for the tier in `directory`, and what to do about it."""
    if isinstance(error, lmdb.LockError):
        return StoreAccessError(
            f"{directory}: LMDB's lock file is held by a process that this one cannot see, as when two containers with"
            " PID namespaces of their own share a directory: give them one PID namespace (docker --pid, Kubernetes"
            " shareProcessNamespace), or a directory each"
        )
    if isinstance(error, lmdb.DiskError | lmdb.MapFullError):
        return StoreFullError(f"{directory}: no room to open the environment ({error}): make room, or raise the cap")
    if isinstance(error, (lmdb.VersionMismatchError, *DAMAGE)):
        return StoreDamagedError(f"{directory} is damaged: {error}. {remedy}")
    if isinstance(error, lmdb.MemoryError):
        return StoreAccessError(
            f"{directory}: no address space for LMDB's map, 16 TiB of it unless the tier has a capacity (no memory is"
            f" taken; {error}): raise `ulimit -v` to unlimited, give the tier a capacity, or open fewer tiers at once"
        )
    return StoreAccessError(f"{directory}: LMDB cannot open it: {error}")
