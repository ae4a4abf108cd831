"""Opening and closing a `file://` tier: is it ours, who else is here, what did the last one leave, is it over its cap.

Nothing is made or changed before the location is known to be a tier, or empty.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

import lmdb

from kvstore.catalog import DATABASES, Catalog
from kvstore.environment import Environment, check_filesystem, damage
from kvstore.errors import (
    NotAStoreError,
    OlderFormatError,
    StoreDamagedError,
    StoreFullError,
    StoreNotFoundError,
    StoreOpenError,
    StoreSealedError,
)
from kvstore.files import is_draft_of, make_folder, sweep_drafts
from kvstore.growth import Growth
from kvstore.namespace import FINGERPRINT_BYTES
from kvstore.nesting import check_in_none
from kvstore.presence import Presence, State, explained, mode_of
from kvstore.retention import Retention
from kvstore.sealing import PLAIN, open_sealer, record_seal
from kvstore.url import CAPACITY, DURABILITY, IO, MODE, READONLY, TierURL, kept_free, local_path
from kvstore_zarr.deleting import remove_dropped
from kvstore_zarr.device import BlockDevice
from kvstore_zarr.folders import FOLDERS_DATABASE, Folders, occupied
from kvstore_zarr.intents import reclaim
from kvstore_zarr.metadata import namespaces_in, read_namespace
from kvstore_zarr.names import NameLocks
from kvstore_zarr.rebuild import rebuild, said_in
from kvstore_zarr.tier import CATALOGUE, DRAFTS, INNER, LocalTier
from kvstore_zarr.trimming import trim

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from kvstore.sealing import Sealer
    from kvstore_zarr.rebuild import Said

__all__ = ["close_tier", "open_tier"]

LEAST_CAPACITY = 1 << 20
"""A tier's own records take about 400 KiB before the first block."""


_REMEDY = (
    "Open the tier alone and without readonly=true, or remove {catalogue} while nobody uses it: no block is lost, the"
    " next opening finds them again"
)


def open_tier(url: TierURL) -> tuple[LocalTier, str | None]:
    """The tier at `url`, made where nothing is, and why its I/O is not direct, if so. Raises a `StoreOpenError`."""
    root = local_path(url)
    with _explaining(root), ExitStack() as undo:
        sealer = _check_location(root, url)
        if sealer is not None:
            undo.callback(sealer.close)
        check_filesystem(root)
        mode = url.option(MODE) if MODE.name in url.raw_options else mode_of(root / INNER)
        if not url.option(READONLY):
            root.parent.mkdir(parents=True, exist_ok=True)
            for folder in (root, root / INNER, root / CATALOGUE, root / DRAFTS):
                make_folder(folder, mode)
        with Presence.opening(root / INNER, readonly=url.option(READONLY), mode=mode) as presence:
            if presence.alone and not presence.readonly:
                sweep_drafts(root / CATALOGUE)
            try:
                must_rebuild = _must_rebuild(root / CATALOGUE, presence)
                tier, reason = _open_parts(url, root, presence, mode, sealer, must_rebuild=must_rebuild)
            except (StoreDamagedError, OlderFormatError) as error:  # of the catalogue: the blocks' was looked at before
                if presence.readonly or not presence.alone:
                    raise
                said = _discard_catalogue(root / CATALOGUE, presence)
                tier, reason = _open_parts(url, root, presence, mode, sealer, must_rebuild=True, said=said)
                tier.remark(f"its catalogue was made anew from the blocks ({error})")
        undo.pop_all()
    return tier, reason


def close_tier(tier: LocalTier) -> None:
    """Settle what is noted and leave; the last one out brings the catalogue to disk. Raises OSError or `lmdb.Error`
    where that cannot be; nothing is held then all the same.
    """
    try:
        with tier.presence.closing() as last:
            if not tier.readonly:
                with suppress(OSError, lmdb.Error):  # a full disk: what stays unsettled is done by the next one to open
                    tier.catalog.settle()
                    reclaim(tier)
                    if last and tier.dropped:
                        remove_dropped(tier)
            tier.catalog.close(tier.presence, last=last)
    finally:
        tier.environment.close()
        if tier.sealer is not None:
            tier.sealer.close()


def _check_location(root: Path, url: TierURL) -> Sealer | None:
    """What seals its blocks, once it is sure that the tier can be here. Raises a `StoreOpenError`."""
    readonly, capacity = url.option(READONLY), url.option(CAPACITY)
    try:
        names = sorted(entry.name for entry in root.iterdir())
    except FileNotFoundError:
        names = []
        if root.is_symlink():
            raise NotAStoreError(f"{root} is a dangling symlink to {root.readlink()}: make what it points to") from None
    except NotADirectoryError:
        raise NotAStoreError(f"{root} is not a directory: a file:// tier is one; choose another path") from None
    known = INNER in names and (root / INNER).is_dir()
    if not known:
        for name in names:
            passed_over = name == "lost+found" or is_draft_of(root / INNER, name)
            if not passed_over and read_namespace(root / name) is None:
                raise NotAStoreError(
                    f"{root} is no tier, and {name!r} in it is not kvstore's: choose an empty or a new directory"
                )
        if readonly:
            lacks = (
                "has blocks in it, and no catalogue: open it once without readonly=true"
                if names
                else ("has no tier in it: check the path; a read-only opening makes none")
            )
            raise StoreNotFoundError(f"{root} {lacks}")
    if not (known or names):
        check_in_none(root, str(url))
    trees = namespaces_in(root)[0] if names else []  # a later format is an error before anything is touched
    there = next(path for path in (root / DRAFTS, root, *root.parents) if path.is_dir())
    wanted = LEAST_CAPACITY if capacity is None else capacity.resolve(there)
    if wanted < LEAST_CAPACITY:
        raise StoreFullError(
            f"{root}: capacity={wanted} is too small for even an empty tier: give at least {LEAST_CAPACITY}"
        )
    if url.option(IO) == "direct" and not readonly:
        BlockDevice.choose("direct", there, sample=root / CATALOGUE / "data.mdb", readonly=False)
    try:
        return open_sealer(url, {tree.seal for tree in trees})
    except StoreSealedError:
        sound = [tree for tree in trees if not tree.is_contradicted(root)]
        if len(sound) == len(trees):
            raise
    return open_sealer(url, {tree.seal for tree in sound}, readonly=True)  # a damaged manifest is set aside later


def _open_parts(
    url: TierURL,
    root: Path,
    presence: Presence,
    mode: int,
    sealer: Sealer | None,
    *,
    must_rebuild: bool,
    said: Said | None = None,
    may_compact: bool = True,
) -> tuple[LocalTier, str | None]:
    readonly = url.option(READONLY)
    with ExitStack() as undo:
        names = (*DATABASES, FOLDERS_DATABASE)
        environment = Environment.open(
            root / CATALOGUE, names, readonly=readonly, mode=mode, remedy=_REMEDY.format(catalogue=root / CATALOGUE)
        )
        undo.callback(environment.close)
        tier, reason = _assembled(url, root, environment, presence, mode, sealer)
        for name, error in namespaces_in(root, tier.seal)[1].items():
            tier.set_aside(name, error)
        anew = not readonly and _bring_in_order(tier, must_rebuild=must_rebuild, said=said, may_compact=may_compact)
        if not anew:
            undo.pop_all()
            return tier, reason
    again, reason = _open_parts(url, root, presence, mode, sealer, must_rebuild=False, may_compact=False)
    again.remarks[:0] = tier.remarks
    return again, reason


def _assembled(
    url: TierURL, root: Path, environment: Environment, presence: Presence, mode: int, sealer: Sealer | None
) -> tuple[LocalTier, str | None]:
    """The parts of the tier around its open catalogue, as the URL's options say."""
    readonly, durable = url.option(READONLY), url.option(DURABILITY) == "fsync"
    catalog = Catalog(environment, Retention.of(url))
    wanted = url.option(CAPACITY)
    capacity = catalog.prepare(wanted.resolve(root) if wanted else None, alone=presence.alone)
    catalog.growth = Growth(environment, capacity)
    record_seal(environment, PLAIN if sealer is None else sealer.id, alone=presence.alone)
    sample = root / CATALOGUE / "data.mdb"
    device, reason = BlockDevice.choose(url.option(IO), root / DRAFTS, sample=sample, readonly=readonly)
    tier = LocalTier(
        root=root,
        device=device,
        environment=environment,
        lock_bytes=occupied(root / CATALOGUE / "lock.mdb"),
        catalog=catalog,
        presence=presence,
        folders=Folders(root, root / DRAFTS, environment, mode, durable=durable),
        names=NameLocks(root / INNER / "names", mode),
        capacity=capacity,
        slack=_slack(capacity, buffered=not device.direct),
        keep_free=kept_free(url, root),
        mode=mode,
        durable=durable,
        readonly=readonly,
        sealer=sealer,
    )
    return tier, reason


def _slack(capacity: int | None, *, buffered: bool) -> int:
    """What stays free under a capacity for what is not measured at each step.

    At most 1 MiB for the catalogue's growth between two looks at it. Buffered, a fragmented file gets the page for its
    extents only when it is written back, after its size was taken: about one page in 340.
    """
    if capacity is None:
        return 0
    return min(max(capacity // 16, 128 << 10), 1 << 20) + (capacity // 4096 if buffered else 0)


def _must_rebuild(catalogue: Path, presence: Presence) -> bool:
    """Whether there is no catalogue to be trusted. Raises for one that must not even be opened. Under the gate."""
    suspect = presence.alone and presence.found not in (State.CLEAN, State.DIRTY)
    untouched = presence.untouched(catalogue / "data.mdb")
    problem = damage(catalogue, thorough=suspect, trees=presence.alone, untouched=untouched)
    if problem is not None:
        raise StoreDamagedError(
            f"{problem}: open the tier alone and without readonly=true, and it is rebuilt. No block is lost"
        )
    return presence.alone and not presence.readonly and (suspect or not (catalogue / "data.mdb").exists())


def _discard_catalogue(catalogue: Path, presence: Presence) -> Said:
    """Take it away, but for what was said of blocks and which were purged, as far as that can be read."""
    presence.mark(State.REBUILDING)
    said = said_in(catalogue)
    for name in ("data.mdb", "lock.mdb"):
        (catalogue / name).unlink(missing_ok=True)
    return said


def _bring_in_order(tier: LocalTier, *, must_rebuild: bool, said: Said | None, may_compact: bool) -> bool:
    """Whether its catalogue was closed for a smaller file, and is to be opened again."""
    if must_rebuild:
        tier.presence.mark(State.REBUILDING)
        rebuild(tier, said)
    _measure_aside(tier)
    try:
        reclaim(tier, alone=tier.presence.alone)
        with tier.catalog.write() as change:
            tier.account(change)
        return tier.presence.alone and trim(tier, may_compact=may_compact)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        tier.remark(f"its disk is full ({error}): blocks are read and evicted, what was left undone stays so for now")
        return False


def _measure_aside(tier: LocalTier) -> None:
    """Count the files of namespaces that cannot be served, but for those that the catalogue counts as blocks."""
    for name in tier.aside:
        files = [f"{path}/{file}" for path, _, found in os.walk(tier.root / name) for file in found]
        tier.aside_bytes += sum(map(occupied, files))
        if len(name) == 2 * FINGERPRINT_BYTES:
            with tier.catalog.read() as snapshot, suppress(ValueError):
                known = sum(entry.size for entry in snapshot.scan(bytes.fromhex(name)))
                tier.aside_bytes = max(0, tier.aside_bytes - known)


@contextmanager
def _explaining(root: Path) -> Generator[None]:
    """Turn what the operating system says into an error of ours that says what to do about it."""
    try:
        with explained(root):
            yield
    except StoreOpenError as error:
        if isinstance(error.__cause__, FileExistsError | NotADirectoryError):
            place = error.__cause__.filename
            raise NotAStoreError(f"{root}: {place} is not a directory: choose another path") from error.__cause__
        raise
