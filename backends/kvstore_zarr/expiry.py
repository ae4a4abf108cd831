"""Expired blocks of a `file://` tier: taken back a few at a time, before a put, by the same steps as an eviction.

Nothing here is needed for room under a capacity: the blocks that expire are those that an eviction would take first.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvstore.catalog import address_of
from kvstore_zarr import eviction
from kvstore_zarr.put import PutJob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.catalog import Victim
    from kvstore.namespace import Namespace
    from kvstore.retention import Allowance
    from kvstore.types import BlockKey
    from kvstore_zarr.descriptors import Share
    from kvstore_zarr.eviction import Held
    from kvstore_zarr.tier import LocalTier

__all__ = ["take_back", "take_out"]

AT_ONCE = 64
"""Blocks taken out in one transaction."""


def take_back(tier: LocalTier, allowance: Allowance, namespace: Namespace, about_to_be_put: Sequence[BlockKey]) -> None:
    """Remove some of what has expired, and what of it is about to be stored anew; set right what is ahead of time.

    On a full disk nothing happens: what is evicted there makes room, too.
    """
    if not tier.catalog.retention:
        return
    with tier.catalog.read() as snapshot:
        victims = snapshot.expired_of([address_of(namespace, key) for key in about_to_be_put])
        victims += snapshot.expired(allowance.take(len(about_to_be_put)))
        ahead = snapshot.ahead(AT_ONCE)
    take_out(tier, victims)
    if ahead:
        with suppress(OSError), tier.catalog.write() as change:
            change.redate(ahead)


def take_out(tier: LocalTier, victims: Sequence[Victim]) -> set[bytes]:
    """Remove blocks that are still as they were read; the addresses of those that nobody is reading, hence removed."""
    gone: set[bytes] = set()
    waiting = list(victims)
    while waiting:
        job = _RemovalJob(tier, waiting[:AT_ONCE])
        job.run()
        gone |= job.gone
        waiting = waiting[job.looked_at :]
    return gone


class _RemovalJob(PutJob):
    """A put of nothing, that evicts these blocks if it can."""

    def __init__(self, tier: LocalTier, victims: Sequence[Victim]) -> None:
        super().__init__(tier, None, [])
        self._victims = victims
        self.gone: set[bytes] = set()
        self.looked_at = 0

    def _plan(self, share: Share) -> list[Held]:
        self.looked_at = share.grant(len(self._victims))
        return eviction.hold(self._tier, self._victims[: self.looked_at], share)

    def _reserve(self, held: Sequence[Held]) -> tuple[list[Any], list[Held]]:
        admitted, taken = super()._reserve(held)
        self.gone = {one.victim.address for one in taken}
        return admitted, taken
