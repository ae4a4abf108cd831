"""What `kvstore doctor` says of a `file://` tier's place: what every local tier needs, and how its bytes can move."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvstore.doctor import Finding, LocalPlace, ok, problem, warning
from kvstore.doctor.process import address_space, open_files
from kvstore.environment import MAP_SIZE
from kvstore.url import IO, TierURL
from kvstore_zarr.device import aligned_empty, probe_direct_read
from kvstore_zarr.format import PAGE
from kvstore_zarr.tier import CATALOGUE, INNER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.types import Usage

__all__ = ["diagnose"]

_SMALLEST = 512


def diagnose(url: TierURL, usage: Usage | None) -> Iterator[Finding]:
    """For `LocalZarrStore.diagnose`."""
    place = LocalPlace.of(url, inner=INNER)
    yield from place.location()
    if not place.is_usable:
        return
    yield from place.filesystem()
    yield from _direct_io(place)
    yield from place.space(usage, file_per_block=True)
    yield from place.users()
    yield from place.clock()
    yield from address_space(MAP_SIZE)  # of its catalogue
    yield from open_files()


def _direct_io(place: LocalPlace) -> Iterator[Finding]:
    """Whether O_DIRECT works, by moving bytes: in a file without a name, else by reading the tier's catalogue."""
    asked = place.url.option(IO)
    if asked == "buffered":
        yield ok("O_DIRECT", "not used: io=buffered was asked for")
        return
    sample = place.path / CATALOGUE / "data.mdb"
    reason, unit = _refusal(place)
    if reason is None and unit is None and sample.exists():
        reason = probe_direct_read(sample)
    elif reason is None and unit is None:
        yield warning(
            "O_DIRECT", "not tried: this file system makes no nameless files", "run the doctor again with --write"
        )
        return
    if reason is None:
        smaller = "" if unit in (None, PAGE) else f" (the device takes {unit}, too)"
        yield ok("O_DIRECT", f"works, in multiples of {PAGE} bytes{smaller}")
    else:
        grade = problem if asked == "direct" else warning
        yield grade("O_DIRECT", f"{reason}; bytes go through the page cache", "use a folder on ext4 or xfs")


def _refusal(place: LocalPlace) -> tuple[str | None, int | None]:
    """Why blocks cannot move directly, and the smallest transfer that can; both None where it could not be tried."""
    with place.nameless() as plain:
        if plain is None:
            return None, None
    with place.nameless(os.O_DIRECT) as descriptor:
        if descriptor is None:
            return "the file system refuses O_DIRECT", None
        works = [nbytes for nbytes in (PAGE, _SMALLEST) if _moves(descriptor, nbytes)]
    if PAGE not in works:
        return f"the file system refuses O_DIRECT transfers of {PAGE} bytes", None
    return None, min(works)


def _moves(descriptor: int, nbytes: int) -> bool:
    """Whether so many bytes go out and come back, from an address that is a multiple of a page."""
    memory = aligned_empty(nbytes)
    memory[:] = 0x5A
    try:
        written = os.pwritev(descriptor, [memory.data], 0)
        memory[:] = 0
        return (written, os.preadv(descriptor, [memory.data], 0)) == (nbytes, nbytes) and bool((memory == 0x5A).all())
    except OSError:
        return False
