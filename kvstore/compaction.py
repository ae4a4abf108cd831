"""An LMDB environment made smaller: its data file keeps the size of its greatest day, however much of it is free.

Who is alone in a tier may write what is alive to a new file and put that in place of the old one. Both are there for a
while, and the tier is to occupy no more than it may at any moment. So the file system takes back the free pages of the
old one first (a hole costs nothing): where at least half of a file is free, the two together are no more than it was.

A kill, wherever, leaves the old file or the new one, each of them whole. The draft's name is one that is swept up
(`kvstore.files.sweep_drafts`).
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kvstore.errors import StoreDamagedError
from kvstore.files import DRAFT, permit, sync_folder
from kvstore.lmdb_files import PAGE
from kvstore.lmdb_free import give_back_free_pages, ripen

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from kvstore.environment import Environment

__all__ = ["COMPACTED", "check_replaceable", "compact", "is_worthwhile"]

COMPACTED = f"{DRAFT}data.mdb"
"""The name of the new file until it is complete; beside the old one, wherever that is."""

LEAST_BYTES, MOST_BYTES = 128 << 10, 1 << 20
"""A gain of less is none, under a capacity of 8 MiB or less; of 64 MiB or more, or none."""


def is_worthwhile(environment: Environment, capacity: int | None) -> bool:
    """Whether more than half of the file is free, and so much that it matters beside the capacity. Soon said."""
    with environment.read() as txn:
        live = environment.live_pages(txn)
    pages = environment.pages()
    least = MOST_BYTES if capacity is None else min(max(capacity // 64, LEAST_BYTES), MOST_BYTES)
    # The list of free pages needs some itself, and so does a file system for one of many pieces.
    return pages - 2 * live - pages // 128 >= least // PAGE


def compact(environment: Environment, has_room: Callable[[int], bool], failed: Callable[[OSError], object]) -> bool:
    """Put a file without free pages in place of the environment's; whether the environment is closed now, and is to be
    opened again: as a rule that was done then, and otherwise not.

    For who has the tier alone, under the gate. `has_room` says whether there may be so many bytes more than there are
    now, those of the free pages not counted any more. `failed` is told what else kept it from being done; the old file
    is in place then, or the new one.
    """
    folder, draft = environment.directory, environment.directory / COMPACTED
    if environment.is_shared:
        failed(_busy(folder))
        return False
    with suppress(OSError, StoreDamagedError):  # it takes more room then, and may have that
        ripen(environment)
        give_back_free_pages(environment)
    with environment.read() as txn:
        nbytes = environment.live_pages(txn) * PAGE
    if not has_room(nbytes):
        return False
    with _removed_if_left(draft):
        try:
            _write(environment, draft)
        except OSError as error:
            failed(error)
            return False
        if not environment.close():
            failed(_busy(folder))
            return True
        try:
            # In this order: with the old lock file LMDB could take the old one's last transaction for the new one's.
            (folder / "lock.mdb").unlink(missing_ok=True)
            draft.rename(folder / "data.mdb")
            sync_folder(folder)
        except OSError as error:
            failed(error)
    return True


def check_replaceable(folder: Path) -> None:
    """Raise OSError where this user could not `compact` there, whatever there is room for."""
    draft = folder / COMPACTED
    with _removed_if_left(draft):
        os.close(_new_file(draft, folder / "data.mdb"))


@contextmanager
def _removed_if_left(draft: Path) -> Generator[None]:
    try:
        yield
    finally:
        with suppress(OSError):
            draft.unlink()


def _busy(folder: Path) -> OSError:
    return OSError(errno.EBUSY, "a call of this process that is in it has not ended", str(folder))


def _write(environment: Environment, draft: Path) -> None:
    """The new file at `draft`, on disk, open to whom the old one is."""
    descriptor = _new_file(draft, environment.directory / "data.mdb")
    try:
        environment.write_compacted(descriptor)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _new_file(path: Path, old: Path) -> int:
    """A descriptor of a new, empty file that is open to whom the old one is."""
    was = old.stat()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(descriptor).st_gid != was.st_gid:
            try:
                os.fchown(descriptor, -1, was.st_gid)
            except PermissionError:  # not a group of ours
                if was.st_mode >> 3 & 0o7 != was.st_mode & 0o7:
                    raise  # and it is no matter only where a group may what everybody may
        permit(descriptor, was.st_mode & 0o777)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
