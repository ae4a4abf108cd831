"""That an archive and a tier do not stand in each other: who removes the one would take the other along.

Told from URLs, and where an archive is made, from what stands right above it: a look, and no walk.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import ConfigurationError, KVStoreError
from kvstore.namespace import is_namespace_name
from kvstore.nesting import LOOKED_AT, OF_A_TIER, what_is_above

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.archive.places import ArchivePlace
    from kvstore.objects.client import ObjectClient
    from kvstore.url import TierURL

__all__ = ["check_apart", "check_in_no_tier", "check_tiers_apart"]

_LOCAL = ("file", "lmdb", "local")
_ONE = {"s3a": "s3", "gcs": "gs", "abfs": "az", "ssh": "sftp"}
"""Schemes that are another's second name."""
_FLAT = ("memory", "redis", "rediss", "valkey", "valkeys")
"""Schemes of whose locations none lies within another."""
_DOCUMENT = "zarr.json"
DEEPEST = 3
"""So far above what stands in a namespace's folder that folder may be: its groups, and their folders, come between."""


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


def check_tiers_apart(source: TierURL, target: TierURL) -> None:
    """Raise `ConfigurationError` where two tiers are one, by whichever names, or the one lies within the other."""
    if _kind(source) != _kind(target):
        return
    one, other = _parts(source), _parts(target)
    shorter = min(len(one), len(other))
    if one[:shorter] != other[:shorter] or (source.scheme in _FLAT and len(one) != len(other)):
        return
    if len(one) == len(other):
        raise ConfigurationError(f"source and target are one tier: {source}, {target}")
    raise ConfigurationError(
        f"the tiers {source} and {target}: the one stands within the other, and who removes the one would take the"
        " other along: give each a folder of its own, side by side"
    )


def check_in_no_tier(place: ArchivePlace) -> None:
    """Raise `ConfigurationError` where an archive would come to stand in a tier, as far as what is above it tells."""
    if _is_tier_above(place):
        raise ConfigurationError(
            f"{place} is in the folder of a tier, and who removes the one would take the other along: choose a place"
            " beside it"
        )


def _is_tier_above(place: ArchivePlace) -> bool:
    location = place.url.location.rstrip("/")
    if place.url.scheme in _LOCAL:
        location = os.path.realpath(location)
        found = what_is_above(Path(location))
        return found is not None and found[0] == "a tier"
    above = location.split("/")[:-1]
    named = [end for end in range(len(above), 0, -1)[:DEEPEST] if is_namespace_name(above[end - 1])]
    return _has_namespace(place, above, _beside) or any(
        _has_namespace(place, above[:end], lambda _: [_DOCUMENT]) for end in named
    )


def _has_namespace(place: ArchivePlace, folder: list[str], documents: Callable[[ObjectClient], Iterable[str]]) -> bool:
    """Whether one of the `documents`, by paths in a folder above the place, is a namespace's."""
    if not folder or not folder[-1]:
        return False
    with suppress(KVStoreError, OSError):  # where nothing is, or this user may not look
        client = replace(place, url=replace(place.url, location="/".join(folder))).connected()
        try:
            found = map(client.get, documents(client))
            return any(data is not None and OF_A_TIER in bytes(data) for data in found)
        finally:
            client.close()
    return False


def _beside(client: ObjectClient) -> list[str]:
    names = [name for name in client.folders() if is_namespace_name(name)]
    return [f"{name}/{_DOCUMENT}" for name in names[:LOOKED_AT]]


def _kind(url: TierURL) -> tuple[str, str]:
    """What has to be equal for two locations to be of one file system or store."""
    if url.scheme in _LOCAL:
        return "local", ""
    return _ONE.get(url.scheme, url.scheme), str(url.raw_options.get("endpoint") or "").rstrip("/")


def _parts(url: TierURL) -> list[str]:
    local = url.scheme in _LOCAL
    return [part for part in (os.path.realpath(url.location) if local else url.location).split("/") if part]
