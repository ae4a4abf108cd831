"""How a secondary tier cuts what was noted in a step into calls: work for every thread, and none of it too small."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.tiering.primary import Slot

__all__ = ["MIN_BATCH_BYTES", "STORE_BATCH_BYTES", "batches"]

MIN_BATCH_BYTES = 1 << 20
"""Smaller batches cost more in hand-overs between threads than they gain by running side by side."""

STORE_BATCH_BYTES = 8 << 20
"""Of stores in a local tier: each call commits twice, under a lock that all writers share, and as many calls as blocks
spent their time waiting for it.
"""


def batches(
    slots: Sequence[Slot], threads: int, batch_bytes: int, most: int | None = None, *, least: int | None = None
) -> Iterator[Sequence[Slot]]:
    """All of `slots`, in their order, split so that every one of `threads` has work.

    Each batch has at most `batch_bytes` (and at least a block), and no more than `most` blocks; none but the last is
    smaller than `least` bytes (default: `MIN_BATCH_BYTES`) because there are more threads.
    """
    total = sum(slot.view.nbytes for slot in slots)
    size = min(batch_bytes, max(least or MIN_BATCH_BYTES, -(-total // threads)))
    batch: list[Slot] = []
    filled = 0
    for slot in slots:
        if batch and (filled + slot.view.nbytes > size or len(batch) == most):
            yield batch
            batch, filled = [], 0
        batch.append(slot)
        filled += slot.view.nbytes
    if batch:
        yield batch
