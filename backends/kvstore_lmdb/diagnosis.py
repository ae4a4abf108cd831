"""What `kvstore doctor` says of an `lmdb://` tier's place: what every local tier needs, and room for LMDB's map."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.doctor import Finding, LocalPlace
from kvstore.doctor.process import address_space, open_files
from kvstore.url import CAPACITY, TierURL
from kvstore_lmdb.space import Space

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.types import Usage

__all__ = ["diagnose"]


def diagnose(url: TierURL, usage: Usage | None) -> Iterator[Finding]:
    """For `LMDBStore.diagnose`."""
    place = LocalPlace.of(url)
    yield from place.location()
    if not place.is_usable:
        return
    yield from place.filesystem()
    yield from place.space(usage)
    yield from place.users()
    yield from place.clock()
    wanted = url.option(CAPACITY)
    capacity = wanted.resolve(place.standing) if wanted else usage.capacity if usage else None
    yield from address_space(Space(capacity).map_size)
    yield from open_files()
