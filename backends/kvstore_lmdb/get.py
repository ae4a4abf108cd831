"""A get from LMDB: a few blocks in one read transaction, each copied out and checked while it is in the CPU's cache.

To begin a transaction takes as long as to copy 16 KiB, so that small blocks share one; what is removed while it lasts
cannot be used again, so that it ends after a MiB.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvstore.sealing import Unsealed
from kvstore.types import GetOutcome
from kvstore_lmdb.entry import open_into
from kvstore_lmdb.removal import remove_unless
from kvstore_lmdb.seat import LOADS, Seat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.sealing import Ring
    from kvstore_lmdb.entry import Bytes
    from kvstore_lmdb.opening import Tier

__all__ = ["Wanted", "few", "get_blocks"]

Wanted = tuple[bytes, "Bytes"]
"""An address, and where the block is to go."""

_TOGETHER_BYTES = 1 << 20

_OUTCOMES = {
    Unsealed.GOOD: GetOutcome.HIT,
    Unsealed.DAMAGED: GetOutcome.CORRUPT,
    Unsealed.DESTROYED: GetOutcome.MISS,
    Unsealed.UNKNOWN: GetOutcome.MISS,
    None: GetOutcome.MISS,
}
_KEPT = (Unsealed.GOOD, Unsealed.UNKNOWN)


def get_blocks(tier: Tier, blocks: Sequence[Wanted], *, readonly: bool) -> list[GetOutcome]:
    """Read blocks that were checked; those that are damaged, or whose bytes went behind our back, are taken out."""
    alive = [True] * len(blocks)
    if tier.catalog.retention:
        with tier.catalog.read() as snapshot:
            alive = snapshot.alive([address for address, _ in blocks])
    ring = None if tier.sealer is None else tier.sealer.reading()
    wanted = [one for one, is_alive in zip(blocks, alive, strict=True) if is_alive]
    seat = Seat.of(LOADS, max((into.nbytes for _, into in wanted), default=0))
    outcomes: list[GetOutcome] = []
    for some in few(wanted):
        found, stale = _get_together(tier, some, ring, seat)
        outcomes += found
        for one in () if readonly else stale:
            remove_unless(tier, one[0], partial(_is_kept, wanted=one, ring=ring))
    got = iter(outcomes)
    return [next(got) if is_alive else GetOutcome.MISS for is_alive in alive]


def few(wanted: Sequence[Wanted]) -> list[Sequence[Wanted]]:
    """All of them, in order, as many at a time as are read in one transaction."""
    largest = max((into.nbytes for _, into in wanted), default=0)
    most = max(1, _TOGETHER_BYTES // max(1, largest))
    return [wanted[start : start + most] for start in range(0, len(wanted), most)]


def _get_together(
    tier: Tier, wanted: Sequence[Wanted], ring: Ring | None, seat: Seat
) -> tuple[list[GetOutcome], list[Wanted]]:
    """Read and check; one outcome each, and those of which the books say what is not so: they are to be taken out,
    unless what stands there by then `_is_kept`.
    """
    outcomes: list[GetOutcome] = []
    stale: list[Wanted] = []
    with seat, tier.environment.read() as txn:
        for address, into in wanted:
            booked, value = tier.value(txn, address)
            found = None if value is None else open_into(value, into, address, ring)
            seat.keep()
            outcomes.append(_OUTCOMES[found])
            if booked and found not in _KEPT:
                stale.append((address, into))
    return outcomes, stale


def _is_kept(value: memoryview, wanted: Wanted, ring: Ring | None) -> bool:
    """Whether a value is sound, as far as this process can tell."""
    address, into = wanted
    return open_into(value, into, address, ring) in _KEPT
