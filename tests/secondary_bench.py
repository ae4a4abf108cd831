"""A secondary tier on the bench: slots to lend to it, and what it reports."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tiering_helpers import BLOCK, PATIENCE, SPACE, content

from kvstore.tiering import PrimaryTier, SecondaryTier
from kvstore.tiering.breaker import BreakerState
from kvstore.tiering.report import TierReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from kvstore import BlockKey
    from kvstore.testing.faults import FaultyStore
    from kvstore.tiering.primary import Slot


class Bench:
    """A tier on the bench: slots to lend to it, and everything it ever reported."""

    def __init__(self, store: FaultyStore, **options: Any) -> None:
        self.tier = SecondaryTier(store, SPACE, **options)
        self.primary = PrimaryTier(64, BLOCK)
        self.report = TierReport()

    def slots(self, names: Sequence[BlockKey], *, filled: bool) -> list[Slot]:
        slots = [slot for name in names if (slot := self.primary.reserve(name, BLOCK))]
        for slot in slots if filled else ():
            slot.view[:] = content(slot.key)
        return slots

    def store(self, names: Sequence[BlockKey]) -> list[bool]:
        return [self.tier.store(slot) for slot in self.slots(names, filled=True)]

    def load(self, names: Sequence[BlockKey]) -> list[Slot]:
        slots = self.slots(names, filled=False)
        for slot in slots:
            self.tier.load(slot)
        return slots

    def run(self, condition: Callable[[], object]) -> TierReport:
        """Step until the condition holds; returns all reports so far as one."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, (self.report, self.tier.stats())
            self.tier.submit()
            new = self.tier.poll()
            for name in ("answers", "loaded", "failed", "overdue", "released"):
                getattr(self.report, name).extend(getattr(new, name))
            time.sleep(0.0005)
        return self.report

    @property
    def closed(self) -> bool:
        """The breaker lets everything through."""
        return self.tier.stats().breaker is BreakerState.CLOSED

    def settle(self) -> TierReport:
        """Step until nothing is under way."""
        self.tier.submit()
        return self.run(lambda: self.tier.idle)
