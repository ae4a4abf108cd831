"""What is in a tier as a whole: how full it is, and the blocks whose namespace has no manifest that can be read."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.environment import PAGE
from kvstore.types import Unseen, Usage
from kvstore_lmdb.opening import tree_bytes
from kvstore_lmdb.space import SMALLEST_CAPACITY, Space

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore_lmdb.opening import Tier

__all__ = ["addresses_in", "excess", "unseen", "usage"]


def usage(tier: Tier) -> Usage:
    """By the catalogue, and what the disk says of the files."""
    with tier.catalog.read() as snapshot:
        totals = snapshot.totals()
        overhead = max(0, _occupied(tier.directory) - totals.used)
    return Usage(totals.blocks, totals.used, totals.reserved, overhead, totals.capacity, totals.pinned)


def excess(tier: Tier, capacity: int) -> int:
    """See `BlockStore.excess`: by what blocks and trees occupy. The file's free pages are room for blocks to come."""
    with tier.catalog.read() as snapshot:
        totals, trees = snapshot.totals(), tree_bytes(tier.catalog, snapshot.txn)
        live = tier.environment.live_pages(snapshot.txn) * PAGE
    if capacity < SMALLEST_CAPACITY:  # no tier has that: what its files would occupy
        data = (tier.directory / "data.mdb").stat().st_blocks * 512
        return _occupied(tier.directory) - max(0, data - live) - capacity
    return totals.used + totals.reserved + Space(capacity).overhead(trees) - capacity


def _occupied(directory: Path) -> int:
    """`st_blocks` of a directory and its files, in bytes; what vanishes meanwhile is passed over."""
    blocks = 0
    for path in (directory, *directory.iterdir()):
        with suppress(FileNotFoundError):
            blocks += path.stat().st_blocks
    return 512 * blocks


def unseen(tier: Tier) -> list[Unseen]:
    """See `BlockStore.unseen`."""
    found: list[Unseen] = []
    with tier.catalog.read() as snapshot:
        for fingerprint in snapshot.nameless():
            name, sizes = fingerprint.hex(), [entry.size for entry in snapshot.scan(fingerprint)]
            why = f"namespace {name} has no manifest that can be read: what is in it is found again when an engine"
            why += " stores into it; kvstore purge --all removes it"
            found.append(Unseen(name, why, len(sizes), sum(sizes)))
    return found


def addresses_in(tier: Tier, one: Unseen) -> list[bytes]:
    """The addresses of its blocks."""
    with tier.catalog.read() as snapshot:
        return [entry.address for entry in snapshot.scan(bytes.fromhex(one.namespace))]
