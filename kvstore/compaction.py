"""An LMDB environment made smaller: its data file keeps the size of its greatest day, however much of it is free.

Who is alone in a tier may write what is alive to a new file and put that in place of the old one. Both are there for a
while, and the tier is to occupy no more than it may at any moment. So the file system takes back the free pages of the
old one first (a hole costs nothing): where at least half of a file is free, the two together are no more than it was.

A kill, wherever, leaves the old file or the new one, each of them whole. The draft is a name that `kvstore.presence`
sweeps up.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import lmdb

from kvstore.errors import StoreDamagedError
from kvstore.files import DRAFT, permit, sync_folder
from kvstore.lmdb_files import PAGE
from kvstore.lmdb_free import give_back_free_pages

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore.environment import Environment

__all__ = ["COMPACTED", "compact", "is_worthwhile"]

COMPACTED = f"{DRAFT}data.mdb"
"""The name of the new file until it is complete; in the folder that `Presence` keeps its own in."""

LEAST_BYTES, MOST_BYTES = 128 << 10, 1 << 20
"""A gain of less is none, under a capacity of 8 MiB or less; of 64 MiB or more, or none."""

_log = logging.getLogger("kvstore.catalogue")


def is_worthwhile(environment: Environment, capacity: int | None) -> bool:
    """Whether more than half of the file is free, and so much that it matters beside the capacity. Soon said."""
    with environment.read() as txn:
        live = environment.live_pages(txn)
    pages = environment.pages()
    least = MOST_BYTES if capacity is None else min(max(capacity // 64, LEAST_BYTES), MOST_BYTES)
    # The list of free pages needs some itself, and so does a file system for one of many pieces.
    return pages - 2 * live - pages // 128 >= least // PAGE


def compact(environment: Environment, draft: Path, has_room: Callable[[int], bool], *, sync: bool) -> bool:
    """Put a file without free pages in place of the environment's, which is closed then; whether that was done.

    For who has the tier alone, under the gate. `draft` is on the same file system, `has_room` says whether there may
    be so many bytes more than there are now, those of the free pages not counted any more. Where it was not done,
    because of that, for a full disk, or because a thread of this process is still inside, it is open as before.
    `sync`: the new file is on disk before the old one goes; for who would lose all of it to a power loss. Else it is
    with the next `Environment.sync`, and others who wait at the gate do not wait for the device.
    """
    if environment.is_shared:
        return False
    folder = environment.directory
    with suppress(OSError, StoreDamagedError):  # it takes more room then, and may have that
        _ripen(environment)
        give_back_free_pages(environment)
    with environment.read() as txn:
        nbytes = environment.live_pages(txn) * PAGE
    if not has_room(nbytes):
        return False
    try:
        _write(environment, draft, sync=sync)
    except (OSError, lmdb.Error) as error:
        _log.warning("%s: its data file could not be made smaller: %s", folder, error)
        with suppress(OSError):
            draft.unlink()
        return False
    if not environment.close():
        draft.unlink()
        return False
    # In this order: with the old lock file LMDB could take the old one's last transaction for the new one's.
    (folder / "lock.mdb").unlink(missing_ok=True)
    draft.rename(folder / "data.mdb")
    if sync:
        sync_folder(folder)
    return True


def _ripen(environment: Environment) -> None:
    """Have LMDB hand out what was just freed."""
    for _ in range(2):
        with environment.write() as txn:
            info = environment.databases["info"]
            totals = txn.get(b"totals", db=info)
            if totals is not None:
                txn.put(b"totals", bytes(totals), db=info)


def _write(environment: Environment, draft: Path, *, sync: bool) -> None:
    """The new file at `draft`, open to whom the old one is."""
    old = (environment.directory / "data.mdb").stat()
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_gid != old.st_gid:
            os.fchown(descriptor, -1, old.st_gid)
        permit(descriptor, old.st_mode & 0o777)
        environment.write_compacted(descriptor)
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
