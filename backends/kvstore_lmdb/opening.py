"""Opening an LMDB tier's directory: is it one, is it sound, whose cap holds; then it is open and within the cap."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import lmdb

from kvstore.catalog import DATABASES, SETTLE_DUE_UNREAD, Catalog, stored_capacity
from kvstore.compaction import check_replaceable, compact
from kvstore.environment import PAGE, Environment, check_filesystem, damage
from kvstore.errors import (
    NotAStoreError,
    StoreAccessError,
    StoreDamagedError,
    StoreFullError,
    StoreNotFoundError,
    StoreOpenError,
)
from kvstore.files import is_draft_of, make_folder
from kvstore.lmdb_free import ripen
from kvstore.nesting import check_in_none
from kvstore.presence import Presence, State, explained, is_presence_file, mode_of
from kvstore.records import Totals, generation_of
from kvstore.retention import Retention
from kvstore.sealing import PLAIN, check_options, open_sealer, record_seal, recorded_seals
from kvstore.url import CAPACITY, DURABILITY, MODE, READONLY, TierURL, kept_free, local_path
from kvstore_lmdb.entry import place_of
from kvstore_lmdb.space import SMALLEST_CAPACITY, Space

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.catalog import Victim
    from kvstore.sealing import Sealer

__all__ = ["BLOCKS", "NAMES", "Tier", "evict", "open_tier", "take_out", "tree_bytes"]

BLOCKS = "blocks"
"""The named database with the blocks' bytes, beside the catalogue's."""

NAMES = (BLOCKS, *DATABASES)
_FILES = ("data.mdb", "lock.mdb")
_UNCHANGED = "nothing was changed"
_log = logging.getLogger("kvstore.lmdb")


@dataclass(frozen=True, slots=True)
class Tier:
    """What an open store holds of its directory."""

    directory: Path
    presence: Presence
    environment: Environment
    catalog: Catalog
    space: Space
    sealer: Sealer | None
    """What its blocks are sealed with."""
    mode: int
    notes: tuple[str, ...]
    """What an operator should know of how it was found."""

    def value(self, txn: lmdb.Transaction[memoryview], address: bytes) -> tuple[bool, memoryview | None]:
        """Whether the catalogue knows a block, and the value that it says is the block's, if that is there."""
        known = txn.get(address, db=self.environment.databases["meta"])
        if known is None:
            return False, None
        return True, txn.get(place_of(generation_of(known)), db=self.environment.databases[BLOCKS])

    def current_space(self) -> Space:
        """The space as the disk leaves it now."""
        return self.space.on_disk(self.environment.attainable_bytes(self.space.keep_free))


def open_tier(url: TierURL) -> Tier:
    """Open the tier that `url` names. Raises a `StoreOpenError`; then nothing stays open."""
    directory, readonly = local_path(url), url.option(READONLY)
    wanted = _wanted_capacity(url, directory)
    check_options(url)
    with explained(directory):
        mode = url.option(MODE) if MODE.name in url.raw_options else mode_of(directory / "gate")
        _make_directory(directory, readonly=readonly, mode=mode)
        check_filesystem(directory)
    with Presence.opening(directory, readonly=readonly, mode=mode) as presence:
        notes = _repair(presence)
        for _ in () if readonly else presence.dead():
            pass  # what they left undone LMDB has undone; only their leases are to go
        stored = stored_capacity(directory)
        if stored is None and readonly:
            raise StoreNotFoundError(
                f"{directory} has no finished tier in it: check the path; a read-only opening makes none"
            )
        agreed = wanted if stored is None or (wanted and presence.alone and not readonly) else stored
        space = Space(agreed or None, keep_free=kept_free(url, directory))
        if presence.alone and not readonly:
            _shrink(presence, space, mode)
        environment = _open_environment(url, directory, space.map_size, mode)
        sealer = None
        try:
            catalog = Catalog(environment, Retention.of(url))
            if not (space.evicts or catalog.retention):
                catalog.settle_due = SETTLE_DUE_UNREAD
            catalog.prepare(wanted, alone=presence.alone)
            sealer = open_sealer(url, recorded_seals(environment))
            record_seal(environment, PLAIN if sealer is None else sealer.id, alone=presence.alone)
            if presence.alone and not readonly:
                _evict_down(catalog, space)
            notes += _unreadable(catalog)
        except BaseException:
            environment.close()
            if sealer is not None:
                sealer.close()
            raise
    return Tier(directory, presence, environment, catalog, space, sealer, mode, notes)


def evict(catalog: Catalog, space: Space, *, room: int, most: int) -> int:
    """Evict least recently used blocks for `room` bytes to be free, in one transaction of little more than `most`.

    Bytes freed: 0 where there is room already, or no block left.
    """
    with catalog.read() as snapshot:
        totals = snapshot.totals()
        free = space.room(totals, tree_bytes(catalog, snapshot.txn))
        victims: list[Victim] = []
        freed = 0
        for victim in snapshot.oldest() if space.evicts and free is not None and free < room else ():
            victims.append(victim)
            freed += victim.size
            if freed >= most or (free is not None and free + freed >= room):
                break
    if not victims:
        return 0
    take_out(catalog, space, victims)
    return freed


def take_out(catalog: Catalog, space: Space, victims: Sequence[Victim]) -> set[bytes]:
    """Remove blocks that are still as they were read, in one transaction; the addresses of those removed."""
    blocks = catalog.environment.databases[BLOCKS]
    with catalog.write() as change:
        gone = change.evict(victims)
        for victim in gone:
            change.txn.delete(place_of(victim.generation), db=blocks)
        change.set_overhead(space.overhead(tree_bytes(catalog, change.txn)))
    return {victim.address for victim in gone}


def tree_bytes(catalog: Catalog, txn: lmdb.Transaction[memoryview]) -> int:
    """What LMDB's trees of the larger databases occupy, the blocks' own pages not counted."""
    pages = 0
    for name in (BLOCKS, "meta", "age", "marks", "tombs"):
        stat = txn.stat(catalog.environment.databases[name])
        pages += stat["branch_pages"] + stat["leaf_pages"] + (0 if name == BLOCKS else stat["overflow_pages"])
    return pages * PAGE


def _wanted_capacity(url: TierURL, directory: Path) -> int | None:
    option = url.option(CAPACITY)
    if option is None:
        return None
    with explained(directory):
        capacity = option.resolve(next(path for path in (directory, *directory.parents) if path.exists()))
    if capacity < SMALLEST_CAPACITY:
        raise StoreFullError(
            f"{directory}: capacity={capacity} is too small for a tier: give {SMALLEST_CAPACITY} or more"
        )
    return capacity


def _make_directory(directory: Path, *, readonly: bool, mode: int) -> None:
    if directory.is_symlink() and not directory.exists():
        raise NotAStoreError(f"{directory} is a dangling symlink to {directory.readlink()}: make what it points to")
    if not (readonly or (directory.is_dir() and any(directory.iterdir()))):
        check_in_none(directory, f"lmdb://{directory}")
    if not directory.exists():
        if readonly:
            raise StoreNotFoundError(f"{directory} does not exist, and read-only creates nothing")
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            make_folder(directory, mode)
        except (NotADirectoryError, FileExistsError) as error:
            raise NotAStoreError(f"{directory}: a part of this path is a file") from error
    if not directory.is_dir():
        raise NotAStoreError(f"{directory} is a file; an LMDB tier is a directory with data.mdb in it")
    names = {path.name for path in directory.iterdir() if not is_draft_of(directory / "gate", path.name)}
    names.discard("lost+found")
    foreign = sorted(name for name in names if name not in _FILES and not is_presence_file(name))
    if foreign or (names and "gate" not in names):
        found = ", ".join(foreign[:3] or sorted(names))
        raise NotAStoreError(f"{directory} holds something other than an LMDB tier ({found}): name another directory")
    if readonly and "data.mdb" not in names:
        raise StoreNotFoundError(f"{directory} has no tier in it: check the path; a read-only opening makes none")


def _repair(presence: Presence) -> tuple[str, ...]:
    """Make sure that LMDB may open what is there; what was found wrong.

    Only who is alone may look closely. After an unclean close and another boot the whole file is checked: commits are
    not synced one by one. An unsound file says nothing that could be trusted: its trees may lead to blocks that were
    deleted, and a cache loses only time. So the tier starts empty then.
    """
    directory, missing = presence.directory, presence.found is State.MISSING
    unsure = missing or presence.found in (State.SUSPECT, State.REBUILDING)
    untouched = presence.untouched(directory / "data.mdb")
    problem = damage(directory, thorough=unsure and presence.alone, trees=presence.alone, untouched=untouched)
    if problem is None:
        return ()
    if presence.readonly or not presence.alone:
        raise StoreDamagedError(
            f"{problem}. Close the tier everywhere and run kvstore verify --repair: it saves the blocks that can be"
            " trusted, where they are not encrypted. An opening by a writer before that has it started anew, empty"
        )
    note = f"{problem}; the tier was started anew, empty: its blocks have to be computed again"
    _log.warning(note)
    presence.mark(State.REBUILDING)
    for name in _FILES:
        (directory / name).unlink(missing_ok=True)
    return (note,)


def _open_environment(url: TierURL, directory: Path, map_size: int, mode: int) -> Environment:
    return Environment.open(
        directory,
        NAMES,
        readonly=url.option(READONLY),
        sync=url.option(DURABILITY) == "fsync",
        readahead=True,
        mode=mode,
        map_size=map_size,
        remedy=f"Remove the tier ({directory}): its blocks have to be computed again",
    )


def _shrink(presence: Presence, space: Space, mode: int) -> None:
    """Where the cap was lowered below the data file: evict, and write what is left to a new, smaller file.

    Only for who is alone. The old file stays until the new one is complete, and what is alive is there twice then.
    """
    path = presence.directory / "data.mdb"
    if not path.exists() or path.stat().st_size <= space.map_size:
        return
    changed = _UNCHANGED
    try:
        check_replaceable(presence.directory)  # before a block goes for it
        failure, changed = _shrunk(presence.directory, space, mode)
    except StoreOpenError:
        raise
    except OSError as error:
        failure = error
    if failure is None:
        return
    full = failure.errno in (errno.ENOSPC, errno.EDQUOT)
    kind, remedy = (StoreFullError, "make room on its disk") if full else (StoreAccessError, "see to that")
    raise kind(
        f"{presence.directory}: its data file is larger than capacity={space.capacity} and could not be written anew,"
        f" which takes as much space as it is to have: {failure}: {remedy}, or leave the capacity as it is; {changed}"
    ) from failure


def _shrunk(directory: Path, space: Space, mode: int) -> tuple[OSError | None, str]:
    """What kept it from being done, if anything, and what was changed for it then."""
    failures: list[OSError] = []
    environment = Environment.open(directory, NAMES, readahead=True, mode=mode)
    try:
        catalog = Catalog(environment)
        with catalog.read() as snapshot:
            before, live = snapshot.totals(), environment.live_pages(snapshot.txn) * PAGE
        copy = min(live, space.map_size - space.map_size // 50)
        lacking = 2 * copy - environment.attainable_bytes()
        if lacking > 0:
            why = f"{os.strerror(errno.ENOSPC)} ({lacking} bytes too few)"
            return OSError(errno.ENOSPC, why, str(directory / "data.mdb")), _UNCHANGED
        catalog.prepare(space.capacity, alone=True)
        if not _evict_patiently(catalog, space):
            failures.append(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory / "data.mdb")))
        elif compact(environment, lambda _: True, failures.append):
            return next(iter(failures), None), "the lower capacity holds"
        return failures[0], _put_back(catalog, before)
    finally:
        environment.close()


def _evict_patiently(catalog: Catalog, space: Space) -> bool:
    """Evict for the lower cap, a block at a time where a full disk has no pages for more; whether that was done."""
    for most in (space.chunk, 1, 1, space.chunk, space.chunk):
        if _evict_down(catalog, space, most=most):
            return True
        ripen(catalog.environment)
    return False


def _put_back(catalog: Catalog, before: Totals) -> str:
    """Let the cap be what it was before; what that says of the tier."""
    kept = "could not be put back, so the lower one holds"
    with suppress(OSError, lmdb.Error), catalog.write() as change:
        change.restore_capacity(before)
        kept = "is as it was"
    with catalog.read() as snapshot:
        after = snapshot.totals()
    if (after.blocks, after.capacity) == (before.blocks, before.capacity):
        return _UNCHANGED
    return f"{before.blocks - after.blocks} blocks went for it, and the capacity {kept}"


def _unreadable(catalog: Catalog) -> tuple[str, ...]:
    with catalog.read() as snapshot:
        notes = tuple(
            f"{catalog.environment.directory}: the manifest of namespace {fingerprint.hex()} cannot be read: its"
            f" {sum(1 for _ in snapshot.scan(fingerprint))} blocks are not listed, but served to who names it; the next"
            " put into it writes the manifest anew"
            for fingerprint in snapshot.unreadable()
        )
    for note in notes:
        _log.warning(note)
    return notes


def _evict_down(catalog: Catalog, space: Space, *, most: int | None = None) -> bool:
    """Say what is kept aside, and evict until the rest is under the cap, `most` bytes in a transaction; whether that
    was done. On a full disk puts will do so as they can.
    """
    try:
        with catalog.write() as change:
            change.set_overhead(space.overhead(tree_bytes(catalog, change.txn)))
        while evict(catalog, space, room=0, most=space.chunk if most is None else most):
            pass
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _log.warning("%s: its disk is full: %s", catalog.environment.directory, error)
        return False
    return True
