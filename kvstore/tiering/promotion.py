"""Blocks that are asked for and not in the primary tier: asked about, waiting for a slot, or missed.

A key passes from one to the next: `ask` the first tier, `heard` from one tier after the other, and either wait for
`take` to find it a slot or be a miss for a while. Nothing stays for ever: tiers answer in bounded time, and waiting
ends when no slot was given to anybody for `slot_timeout` seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile
from typing import TYPE_CHECKING

from kvstore.types import LookupResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.tiering.secondary import SecondaryTier
    from kvstore.types import BlockKey

__all__ = ["Promotions"]


class Promotions:
    """The queue in front of the slots. Times are `time.monotonic`; every method is called on the manager's thread."""

    def __init__(self, tiers: Sequence[SecondaryTier], *, slot_timeout: float, miss_age: float) -> None:
        self._tiers: Sequence[SecondaryTier] = tuple(tiers)
        self._slot_timeout = slot_timeout
        self._miss_age = miss_age
        # Ordered by time, oldest in front (a plain dict gets slow when it is eaten from the front).
        self._asking: dict[BlockKey, int] = {}
        self._waiting: OrderedDict[BlockKey, tuple[SecondaryTier, float]] = OrderedDict()
        self._missed: OrderedDict[BlockKey, float] = OrderedDict()
        self._slot_given = 0.0
        self.started = 0
        self.expired = 0

    @property
    def asking(self) -> int:
        """Blocks about which a tier is being asked."""
        return len(self._asking)

    @property
    def waiting(self) -> int:
        """Blocks that a tier has, without a slot so far."""
        return len(self._waiting)

    def standing(self, key: BlockKey) -> LookupResult | None:
        """What is known of a block that is not in the primary tier; None: nothing, `ask`."""
        if key in self._waiting:
            return LookupResult.HIT_PENDING
        if key in self._asking:
            return LookupResult.RETRY
        if key in self._missed or not self._tiers:
            return LookupResult.MISS
        return None

    def ask(self, keys: Iterable[BlockKey]) -> None:
        """Ask the first tier about keys of which nothing is known."""
        self._asking.update(dict.fromkeys(keys, 0))
        self._tiers[0].ask(keys)

    def heard(self, number: int, key: BlockKey, found: bool, now: float) -> None:
        """Tier `number` has answered; the next one is asked, or the key waits for a slot, or it is a miss."""
        if self._asking.get(key) != number:
            return  # nobody waits for this answer any more
        if not found and number + 1 < len(self._tiers):
            self._asking[key] = number + 1
            self._tiers[number + 1].ask([key])
            return
        del self._asking[key]
        if found:
            self._waiting[key] = (self._tiers[number], now)
        else:
            self.miss(key, now)

    def miss(self, key: BlockKey, now: float) -> None:
        """The block cannot be had: lookups say so at once for `miss_age` seconds, and until `expire` comes to it."""
        self._missed[key] = now + self._miss_age
        self._missed.move_to_end(key)

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Nobody wants these any more, or they are here: whoever asks next is told anew."""
        for key in keys:
            self._asking.pop(key, None)
            self._waiting.pop(key, None)
            self._missed.pop(key, None)

    def first(self) -> tuple[BlockKey, SecondaryTier] | None:
        """The block that gets the next slot, and the tier that has it."""
        for key, (tier, _) in self._waiting.items():
            return key, tier
        return None

    def start(self, key: BlockKey, now: float) -> None:
        """A slot was found."""
        del self._waiting[key]
        self._slot_given = now
        self.started += 1

    def close(self) -> None:
        """Nobody wants anything any more, and what is not in the primary tier is a miss from now on."""
        self._tiers = ()
        self._asking.clear()
        self._waiting.clear()

    def expire(self, now: float) -> None:
        """Turn what waited for too long into misses, and forget misses that are too old."""
        if self._waiting and now - self._slot_given > self._slot_timeout:
            too_old = takewhile(lambda entry: now - entry[1][1] > self._slot_timeout, self._waiting.items())
            for key in [key for key, _ in too_old]:
                del self._waiting[key]
                self.miss(key, now)
                self.expired += 1
        # Only here, once per step, and not in the step that found the miss: however long a step is, who asks in every
        # one of them is told.
        for key in [key for key, _ in takewhile(lambda entry: entry[1] < now, self._missed.items())]:
            del self._missed[key]
