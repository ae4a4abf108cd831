"""Taking blocks away: on request, when damaged, and what the dead left. Evictions are part of a put (`eviction`).

The order, so that a kill leaks nothing and no late removal hits a newer copy: under the name's lock, the entry goes in
the transaction that records an intent; then the file is unlinked and cut to nothing, in this order, so that no name
stands for less than a whole block and nobody who has it open keeps the space; then the intent goes.
"""

# ruff: noqa: PTH106, PTH108, PTH208 - plain strings: a Path costs more than the system call it is made for

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import lmdb

from kvstore.files import NotAFileError, fill_with_zeros, open_file
from kvstore_zarr.folders import occupied
from kvstore_zarr.metadata import METADATA_NAME, Kind
from kvstore_zarr.tier import DRAFTS, PURGE, draft_prefix, pack_addresses, unpack_addresses

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvstore.catalog import Intent, Snapshot
    from kvstore_zarr.tier import LocalTier

__all__ = [
    "abandon",
    "cut",
    "dropped_and_empty",
    "erase",
    "has_files",
    "inode_of",
    "overwrite",
    "reclaim",
    "reclaim_if_due",
    "release",
    "remove",
    "remove_dropped",
    "settle_intent",
]

_log = logging.getLogger("kvstore.file")
_told: set[str] = set()  # what was logged once

READER_PATIENCE_S = 2.0
"""How long a removal waits for readers of a block before it leaves the last of its space to them."""


def inode_of(path: str) -> int | None:
    """Which file stands at `path`; None if none does."""
    try:
        return os.lstat(path).st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None


class _Forks:
    """Whether this process has ever forked, or is about to."""

    happened = False

    @classmethod
    def note(cls) -> None:
        """Before a fork."""
        cls.happened = True


os.register_at_fork(before=_Forks.note)


def release(fd: int) -> None:
    """Let go of a block file and of the lock on it, also where a child forked meanwhile has it open.

    Closing is enough where no child can: a call less for each block that is read. (A child that executes another
    program at once, as `subprocess` makes them, closes it by doing so.)
    """
    if _Forks.happened:
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def erase(path: str) -> None:
    """Unlink `path`; its space is free on return. Nothing happens if nothing is there.

    What is no regular file goes too, but for a directory that is not empty: somebody's, so it stays and is logged.
    """
    try:
        fd = open_file(path, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return
    except NotAFileError:
        _erase_other(path)
        return
    try:
        unread = _wait_for_readers(fd)
        os.unlink(path)
        if unread:
            os.ftruncate(fd, 0)
    finally:
        release(fd)


def cut(fd: int) -> None:
    """Free the space of an open file that has no name any more, once nobody reads it, and let go of it."""
    try:
        if _wait_for_readers(fd):
            os.ftruncate(fd, 0)
    finally:
        release(fd)


def _wait_for_readers(fd: int) -> bool:
    """Lock a file exclusively; False where somebody reads it for longer than `READER_PATIENCE_S`."""
    deadline = time.monotonic() + READER_PATIENCE_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.001)
        else:
            return True
    return False


def overwrite(path: str) -> int:
    """Write zeros over the bytes of the file `path`, down to the device; how many. 0 where there is no such file."""
    try:
        fd = open_file(path, os.O_WRONLY)
    except (FileNotFoundError, NotADirectoryError, NotAFileError):
        return 0
    try:
        return fill_with_zeros(fd)  # a reader who came before gets zeros for a block, which it tells from one
    finally:
        os.close(fd)


def _erase_other(path: str) -> None:
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            os.rmdir(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            raise
        if path not in _told:
            _told.add(path)
            _log.warning("%s is a directory with something in it where a block should be: move it away", path)


def remove(
    tier: LocalTier, addresses: Sequence[bytes], *, seen: Mapping[bytes, int | None] | None = None
) -> list[bool]:
    """Take blocks out of the catalogue and off the disk; True for each that had an entry.

    `seen`: only if that inode (None: no file at all) still stands under the block's name.
    """
    removed: set[bytes] = set()
    with tier.names.hold(addresses):
        paths = {address: path for address in addresses if (path := tier.path(address)) is not None}
        if seen is not None:
            paths = {address: path for address, path in paths.items() if inode_of(path) == seen[address]}
        with tier.catalog.write() as change:
            gone = change.discard(paths)
            intent = None
            if gone:
                payload = pack_addresses(entry.address for entry in gone)
                intent = change.reserve(tier.presence.lease, sum(entry.size for entry in gone), payload)
        removed.update(entry.address for entry in gone)
        try:
            for address in removed:
                erase(paths[address])
        except OSError:
            _strand(tier, intent)
            raise
    if intent is not None:
        with tier.catalog.write() as change:
            change.release(intent)
    first = dict.fromkeys(addresses)
    return [address in removed and first.pop(address, 0) is None for address in addresses]


def settle_intent(tier: LocalTier, intent: Intent) -> None:
    """Bring what an intent left half-done to its end: nothing of it stays, but what was published. Idempotent.

    A file that cannot be removed keeps its room, and its intent, which is tried again with others that are stranded.
    """
    addresses, purged = unpack_addresses(intent.payload), intent.payload.startswith(PURGE)
    for number, address in enumerate(addresses):
        _erase(tier.draft(intent, number, address), purged=purged)
    for name in os.listdir(f"{tier.root}/{DRAFTS}"):
        if name.startswith(draft_prefix(intent)):  # a document's
            erase(f"{tier.root}/{DRAFTS}/{name}")
    with tier.names.hold(addresses):
        with tier.catalog.read() as snapshot:
            present = snapshot.contains(addresses)
        stuck: dict[bytes, int] = {}
        for address, published in zip(addresses, present, strict=True):
            path = tier.path(address)
            if path is not None and not published and not _is_erased(path, purged=purged):
                stuck[address] = occupied(path)
        measured = tier.folders.measure(_folders(tier, addresses))
        with tier.catalog.write() as change:
            tier.folders.record(change.txn, measured)
            if not stuck:
                change.release(intent)
            elif len(stuck) < len(addresses):  # else it says so already
                payload = (PURGE if purged else b"") + pack_addresses(stuck)
                intent = change.amend(intent, sum(stuck.values()), payload)
    if stuck:
        _strand(tier, intent)


def abandon(tier: LocalTier, intent: Intent) -> None:
    """Undo a job that an error ended; what cannot be undone now is kept for later."""
    try:
        settle_intent(tier, intent)
    except (OSError, lmdb.Error):
        _strand(tier, intent)


def _strand(tier: LocalTier, intent: Intent | None) -> None:
    """Keep an intent that cannot be settled now for later."""
    if intent is not None:
        with tier.lock:
            tier.stranded.append(intent)


def _is_erased(path: str, *, purged: bool) -> bool:
    """Take a file away; False, and said once, where that is not permitted or its device fails."""
    try:
        _erase(path, purged=purged)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EACCES, errno.EIO, errno.EUCLEAN):
            raise
        if path not in _told:
            _told.add(path)
            _log.warning("%s cannot be removed (%s): it keeps its room, and is tried again", path, error.strerror)
        return False
    return True


def _erase(path: str, *, purged: bool) -> None:
    if purged:
        overwrite(path)
    erase(path)


def _folders(tier: LocalTier, addresses: Iterable[bytes]) -> set[str]:
    places = (tier.place(address) for address in addresses)
    return {place[0].folder(place[1]) for place in places if place is not None}


def reclaim(tier: LocalTier, *, alone: bool = False) -> None:
    """Settle the intents of dead processes, and those of our own that could not be settled before.

    `alone`: nobody else has the tier open, so whatever is there and not ours is of the dead.
    """
    tier.environment.check_readers()
    for lease in tier.presence.dead():
        _settle_all(tier, lease)
    if alone:
        _settle_all(tier, b"")
        for name in os.listdir(f"{tier.root}/{DRAFTS}"):
            erase(f"{tier.root}/{DRAFTS}/{name}")
    with tier.lock:
        stranded, tier.stranded = tier.stranded, []
    while stranded:
        try:
            settle_intent(tier, stranded[-1])
            stranded.pop()
        except BaseException:
            with tier.lock:
                tier.stranded += stranded
            raise


def reclaim_if_due(tier: LocalTier, interval: float) -> None:
    """`reclaim`, unless some thread of this process did so in the last `interval` seconds."""
    now = time.monotonic()
    with tier.lock:
        due = now - tier.reclaimed >= interval
        if due:
            tier.reclaimed = now
    if due:
        reclaim(tier)


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


def _settle_all(tier: LocalTier, lease: bytes) -> None:
    with tier.catalog.read() as snapshot:
        intents = snapshot.intents(lease)
    for intent in intents:
        settle_intent(tier, intent)
