"""Removing an archive, or what an interrupted creation left: the manifest first, so that there is no half of one.

What is removed goes by its path: an archive's objects have paths that nothing else has (`is_own`), and whatever else
somebody keeps below its folder stays.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np

from kvstore.archive.document import DRAFT_NAME, MANIFEST_NAME, Manifest
from kvstore.archive.errors import ArchiveDamagedError, ArchiveExistsError, ArchiveHeldError, NoArchiveError
from kvstore.archive.nodes import METADATA_NAME
from kvstore.archive.places import ArchivePlace

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from typing import Any

    from kvstore.objects.client import ObjectClient
    from kvstore.url import TierURL

__all__ = ["check_not_held", "check_nothing_below", "is_own", "paths_below", "remove", "sweep"]

_NODE = r"(?:g\d+(?:_digests|_positions|_checksums)?|tokens)"
_OWN = re.compile(rf"{re.escape(MANIFEST_NAME)}|{re.escape(DRAFT_NAME)}|(?:{_NODE}/)?zarr\.json|{_NODE}/c(?:/\d+)+")
_OWN_FOLDER = re.compile(rf"(?:{_NODE}(?:/c(?:/\d+)*)?)?")


def remove(archive_url: str | Mapping[str, Any] | TierURL, *, force: bool = False) -> None:
    """Remove the archive at the URL, or what is left of one that was never finished.

    Raises `ArchiveHeldError` where it is to be kept for longer, `NoArchiveError` where there is nothing of the kind,
    `ArchiveDamagedError` for one whose manifest cannot be read (it may have been to be kept). `force` removes those as
    well, the second excepted. Raises `ArchiveExistsError` where another archive stands below it. What is of no archive
    stays where it is.
    """
    place = ArchivePlace.of(archive_url)
    with place.client() as client:
        data = client.get(MANIFEST_NAME)
        if data is None and client.get(DRAFT_NAME) is None:
            raise NoArchiveError(f"{place}: there is no archive")
        if data is not None and not force:
            try:
                check_not_held(Manifest.parse(bytes(data), str(place)), str(place))
            except ArchiveHeldError as error:
                raise ArchiveHeldError(f"{error}: --force (force=True) removes it all the same") from None
            except ArchiveDamagedError as error:
                raise ArchiveDamagedError(
                    f"{error}; whether it was to be kept cannot be told: --force (force=True) removes it all the same"
                ) from None
    with place.client(writes=True) as client:
        found = paths_below(client)
        check_nothing_below(found, str(place))
        sweep(client, found, keep=())


def check_not_held(manifest: Manifest, place: str) -> None:
    """Raise `ArchiveHeldError` where the archive is to be kept for longer."""
    if manifest.keep_until is not None and time.time() < manifest.keep_until:
        until = datetime.fromtimestamp(manifest.keep_until, UTC).isoformat(" ", "seconds")
        raise ArchiveHeldError(f"{place}: this archive is to be kept until {until}; nothing was removed")


def paths_below(client: ObjectClient) -> list[str]:
    """The paths of what stands in an archive's folder, whosever it is: one listing."""
    return [entry.path for page in client.list() for entry in page]


def check_nothing_below(paths: Iterable[str], place: str) -> None:
    """Raise `ArchiveExistsError` where another archive, or one in the making, stands below this one."""
    for path in paths:
        folder, _, name = path.rpartition("/")
        if folder and name in (MANIFEST_NAME, DRAFT_NAME):
            raise ArchiveExistsError(
                f"{place}: another archive stands in it, {folder!r}: remove that one first; nothing was removed"
            )


def is_own(path: str) -> bool:
    """Whether an object of that path, relative to an archive's folder, can be a part of the archive."""
    return _OWN.fullmatch(path) is not None


def sweep(client: ObjectClient, paths: Iterable[str], *, keep: Collection[str]) -> None:
    """Remove of `paths` every object of an archive but those in `keep`, and what writers of it that died left; what
    makes it one first, what says whose it was last.
    """
    found = set(filter(is_own, paths))
    left = (entry.path for entry in client.leftovers())
    found |= {path for path in left if _OWN_FOLDER.fullmatch(path.rpartition("/")[0])}
    listed = found - set(keep)
    if MANIFEST_NAME in listed and DRAFT_NAME not in found:
        client.put(DRAFT_NAME, [np.frombuffer(b"{}\n", np.uint8)], new=False)
        listed.add(DRAFT_NAME)
    for path in (MANIFEST_NAME, METADATA_NAME):
        if path in listed:
            client.delete(path)
    client.delete_many(sorted(listed - {MANIFEST_NAME, METADATA_NAME, DRAFT_NAME}))
    if DRAFT_NAME in listed:
        client.delete(DRAFT_NAME)
