"""That an archive and a tier do not stand in each other: who removes the one would take the other along.

Told from URLs, and where an archive is made, from what stands right above it: a look, and no walk.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import ConfigurationError, KVStoreError

if TYPE_CHECKING:
    from kvstore.archive.places import ArchivePlace
    from kvstore.url import TierURL

__all__ = ["check_apart", "check_in_no_tier"]

_LOCAL = ("file", "lmdb")
_NAMESPACE = re.compile("[0-9a-f]{32}")
_OF_A_TIER = b'"digest_words"'
"""What a namespace's document has, and no other."""
LOOKED_AT = 4
"""Folders that may be namespaces, of which the documents are read."""


def check_apart(place: ArchivePlace, tier: TierURL) -> None:
    """Raise `ConfigurationError` where an archive's place is that of a tier, or the one lies within the other."""
    if _kind(place.url) != _kind(tier):
        return
    one, other = _parts(place.url), _parts(tier)
    shorter = min(len(one), len(other))
    if one[:shorter] != other[:shorter]:
        return
    how = "they are one place" if len(one) == len(other) else "the one stands within the other"
    raise ConfigurationError(
        f"the archive {place} and the tier {tier}: {how}, and who removes the one would take the other along: give each"
        " a folder of its own, side by side"
    )


def check_in_no_tier(place: ArchivePlace) -> None:
    """Raise `ConfigurationError` where an archive would come to stand in a tier, as far as what is above it tells."""
    above = _parts(place.url)[:-1]
    is_within = any(map(_NAMESPACE.fullmatch, above[-3:])) or _is_tier_above(place)
    if is_within:
        raise ConfigurationError(
            f"{place} is in the folder of a tier, and who removes the one would take the other along: choose a place"
            " beside it"
        )


def _is_tier_above(place: ArchivePlace) -> bool:
    location = place.url.location.rstrip("/")
    parent = location.rpartition("/")[0]
    if _kind(place.url)[0] == "local":
        folders = list(Path(os.path.realpath(location)).parents)
        records = [folder / ".kvstore" for folder in folders] + [folder / "data.mdb" for folder in folders]
        if any(map(os.path.exists, records)):
            return True
    if not parent or parent.endswith("/"):
        return False
    with suppress(KVStoreError, OSError):  # where nothing is, or this user may not look
        client = replace(place, url=replace(place.url, location=parent)).connected()
        try:
            names = [name for name in client.folders() if _NAMESPACE.fullmatch(name)][:LOOKED_AT]
            documents = (client.get(f"{name}/zarr.json") for name in names)
            return any(data is not None and _OF_A_TIER in bytes(data) for data in documents)
        finally:
            client.close()
    return False


def _kind(url: TierURL) -> tuple[str, str]:
    """What has to be equal for two locations to be of one file system or store."""
    if url.scheme in _LOCAL:
        return "local", ""
    return url.scheme.replace("s3a", "s3"), str(url.raw_options.get("endpoint") or "").rstrip("/")


def _parts(url: TierURL) -> list[str]:
    local = url.scheme in _LOCAL
    return [part for part in (os.path.realpath(url.location) if local else url.location).split("/") if part]
