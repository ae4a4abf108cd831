"""Blocks out of the environment: on request, for good, because they expired, or because they are damaged.

Each call is one transaction, or one for each `TOGETHER` blocks. Who calls waits for free pages (`Puts.patiently`).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import lmdb

from kvstore_lmdb.entry import place_of
from kvstore_lmdb.opening import BLOCKS, take_out, tree_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.catalog import Change
    from kvstore.retention import Allowance
    from kvstore.types import BlockInfo
    from kvstore_lmdb.opening import Tier

__all__ = ["TOGETHER", "purge_blocks", "remove_as_read", "remove_blocks", "remove_unless", "take_back"]

TOGETHER = 64
"""Removals in one transaction."""


def remove_blocks(tier: Tier, addresses: Sequence[bytes]) -> list[bool]:
    """Remove blocks; True for each that was there."""
    with tier.catalog.write() as change:
        return [_remove(tier, change, address) for address in addresses]


def purge_blocks(tier: Tier, addresses: Sequence[bytes], until: int) -> list[bool]:
    """Remove blocks and bury them until then (ns since the epoch; 0: do not); True for each that was there."""
    with tier.catalog.write() as change:
        if until:
            change.tombs.bury(addresses, until)
        removed = [_remove(tier, change, address) for address in addresses]
        change.set_overhead(tier.space.overhead(tree_bytes(tier.catalog, change.txn)))
    return removed


def remove_as_read(tier: Tier, addresses: Sequence[bytes], infos: Sequence[BlockInfo]) -> list[bool]:
    """Remove those of the blocks that nobody has used since they were listed as `infos`; True for each."""
    with tier.catalog.read() as snapshot:
        victims = snapshot.as_they_were(addresses, infos)
    gone = take_out(tier.catalog, tier.current_space(), victims)
    return [address in gone for address in addresses]


def remove_unless(tier: Tier, address: bytes, is_sound: Callable[[memoryview], bool]) -> None:
    """Take out what stands under `address`, unless a sound block does by now. On a full disk it stays, a miss."""
    with suppress(OSError, lmdb.Error), tier.catalog.write() as change:
        _, value = tier.value(change.txn, address)
        if value is None or not is_sound(value):
            _remove(tier, change, address)


def take_back(tier: Tier, allowance: Allowance, about_to_be_put: Sequence[bytes]) -> None:
    """Remove some of what has expired, and what is to be stored anew. On a full disk nothing is lost but time."""
    catalog = tier.catalog
    if not catalog.retention:
        return
    with catalog.read() as snapshot:
        victims = snapshot.expired_of(about_to_be_put)
        victims += snapshot.expired(allowance.take(len(about_to_be_put)))
        ahead = snapshot.ahead(TOGETHER)
    with suppress(OSError):  # no page is free: room is made by what is evicted, then
        for start in range(0, len(victims), TOGETHER):
            take_out(catalog, tier.current_space(), victims[start : start + TOGETHER])
        if ahead:
            with catalog.write() as change:
                change.redate(ahead)


def _remove(tier: Tier, change: Change, address: bytes) -> bool:
    gone = change.discard([address])
    for entry in gone:
        change.txn.delete(place_of(entry.generation), db=tier.environment.databases[BLOCKS])
    return bool(gone)
