"""Promises to keep a HIT: pins that end by themselves, between being told HIT and `prepare_load`."""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile
from typing import TYPE_CHECKING

from kvstore.types import LookupResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.tiering.primary import PrimaryTier, Slot
    from kvstore.types import BlockKey

__all__ = ["Promises"]


class Promises:
    """Slots of `primary` that are kept from eviction for `hold` seconds each. Times are `time.monotonic`."""

    def __init__(self, primary: PrimaryTier, hold: float) -> None:
        self._primary = primary
        self._hold = hold
        self._ends: OrderedDict[Slot, float] = OrderedDict()  # the one that ends first in front

    def __len__(self) -> int:
        return len(self._ends)

    def keep_front(self, keys: Sequence[BlockKey], answers: Sequence[LookupResult], now: float) -> None:
        """`keep` the HITs up to the first gap.

        Those behind a gap are of no use before it is filled, and may be what has to make room for that.
        """
        for key, answer in zip(keys, answers, strict=True):
            slot = self._primary.get(key)
            if slot is None or answer is not LookupResult.HIT:
                break
            self.keep(slot, now)

    def keep(self, slot: Slot, now: float) -> None:
        """From now on; renews the promise if there is one."""
        if self._ends.pop(slot, None) is None:
            self._primary.pin(slot)
        self._ends[slot] = now + self._hold

    def take_over(self, slot: Slot, now: float) -> None:
        """As `keep`, with a pin that is the caller's: from now on it is the promise's."""
        self._ends[slot] = now + self._hold

    def end(self, slot: Slot) -> None:
        """Nobody counts on it any more, or somebody has pinned it."""
        if self._ends.pop(slot, None) is not None:
            self._primary.unpin(slot)

    def expire(self, now: float) -> None:
        """End those whose time is over."""
        for slot in [slot for slot, _ in takewhile(lambda entry: entry[1] <= now, self._ends.items())]:
            self.end(slot)

    def end_all(self) -> None:
        """End every one."""
        for slot in list(self._ends):
            self.end(slot)
