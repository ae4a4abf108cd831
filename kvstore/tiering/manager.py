"""The tiering manager: what a scheduler asks, once per request and once per step, without ever waiting.

::

    engine  ──prepare_store / complete_store──►  primary tier  ──cascade──►  every secondary tier
    engine  ◄──prepare_load / complete_load───   primary tier  ◄─promotion─  the first tier that has the block

It lives in the scheduler's thread, and in no other: nothing here is locked, and every method (the constructor and
`close` excepted, and the convenience layer) returns in microseconds. Bytes move on the transfer
threads of the secondary tiers; what they finished is collected by `step`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvstore.background import Bell
from kvstore.errors import ShutdownTimeout
from kvstore.marks import Mark
from kvstore.tiering.blocking import BlockingCalls
from kvstore.tiering.opening import primary_tier, secondary_tiers
from kvstore.tiering.promises import Promises
from kvstore.tiering.promotion import Promotions
from kvstore.tiering.statistics import ManagerStats
from kvstore.tiering.warm import warming_of
from kvstore.types import NO_PARENT, NO_POSITION, LookupResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Any, Self

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.tiering.policy import PolicyFactory
    from kvstore.tiering.primary import PrimaryTier, Slot
    from kvstore.tiering.report import TierReport
    from kvstore.tiering.secondary import SecondaryTier
    from kvstore.types import BlockKey
    from kvstore.url import TierURL

__all__ = ["TieringManager"]

STEP_SHARE, STEP_BUDGET_MIN, STEP_BUDGET_MAX = 0.004, 10e-6, 60e-6
"""A step may spend this share of the time since the last one, within these bounds in seconds, on each tier's ended
transfers, and as much on starting promotions; the rest waits for the next step."""

PAUSE, REST = 200e-6, 2e-3
"""A call that waits looks at most every 200 µs what has ended, and every 2 ms whether something is overdue. One that
did not wait for news spent a third of a core on looking, beside transfers that wanted it.
"""


class TieringManager(BlockingCalls):
    """One primary tier and the secondary tiers behind it, for the blocks of one namespace.

    `tiers` are URLs (or mappings, or `TierURL`s), opened here and closed by `close`; open `BlockStore`s, which stay the
    caller's; or `SecondaryTier`s, which `close` closes. They are asked in the order given; every one gets every
    store. The primary tier is `primary`, or a new one of `primary_slots` slots of the largest group's block, under the
    eviction policy `policy` (see `PrimaryTier`); it belongs to one manager.

    - `hold`: seconds for which a HIT is kept from eviction, so that who asked can pin it; every lookup renews it.
    - `slot_timeout`: seconds without any free slot after which blocks that wait for one become misses.
    - `miss_age`: seconds for which a MISS is answered without asking the tiers again; who asked is told in any case.

    `archives` are URLs of prefixes that are restored into the first tier, in the background, from now on: what is wrong
    with one is logged and stands in `warming.errors`; see `kvstore.archive`.

    `io_process`: each tier that is opened here gets a process of its own, which moves its bytes (`kvstore.apart`), so
    that transfers and the scheduler's thread do not wait for each other's GIL. A `primary` that is given has to be
    `shared`.

    Stores may occupy three quarters of the slots, and half of them for one tier, so that loads find room behind a tier
    that writes slowly.

    Raises a `ConfigurationError` or a `StoreOpenError` when a tier cannot be opened. Afterwards nothing that a tier
    does (hang, fail, be slow) raises here or makes a call wait: it is a miss, counted in `stats`.

    Threads: one thread, the scheduler's, makes all calls.
    """

    def __init__(
        self,
        namespace: Namespace,
        tiers: Sequence[str | Mapping[str, Any] | TierURL | BlockStore | SecondaryTier] = (),
        *,
        primary_slots: int | None = None,
        primary: PrimaryTier | None = None,
        policy: str | PolicyFactory | None = None,
        hold: float = 1.0,
        slot_timeout: float = 1.0,
        miss_age: float = 1.0,
        archives: Sequence[str | Mapping[str, Any] | TierURL] = (),
        io_process: bool = False,
    ) -> None:
        primary = primary_tier(primary, primary_slots, namespace, policy, shared=io_process)
        self.namespace = namespace
        self.primary = primary
        begin_warming = warming_of(tiers, namespace, archives)
        self._tiers = secondary_tiers(tiers, namespace, primary, io_process=io_process)
        self._bell = Bell()
        for tier in self._tiers:
            tier.ring(self._bell)
        self._store_slots = max(1, primary.slots - max(1, primary.slots // 4))
        self._promises = Promises(primary, hold)
        self._promotions = Promotions(self._tiers, slot_timeout=slot_timeout, miss_age=miss_age)
        # Who pins slots: the engine that writes, the engine that reads, stores to tiers, and promises to keep a HIT.
        self._writing: dict[BlockKey, Slot] = {}
        self._reading: dict[BlockKey, int] = {}
        self._cascading: dict[Slot, int] = {}
        self._closed = False
        self._stepped = time.monotonic()
        self._hits = self._misses = self._stores = self._skipped = 0
        self.warming = begin_warming()

    def lookup(self, keys: Sequence[BlockKey]) -> list[LookupResult]:
        """Where each block of a prefix is; starts what is needed to bring it here. Never waits.

        HIT: in the primary tier; those in front of the first gap are kept there for a moment, so that `prepare_load`
        finds them. HIT_PENDING: a secondary tier has it, its promotion waits for a slot or is under way. RETRY: the
        tiers are being asked; ask again after `step`. MISS: nowhere, not readable, or no slot became free in time.

        Promotions happen in the order of `keys` and of calls. Who asks for more blocks than there are slots loads
        those that are HIT, which frees their slots for the next ones.
        """
        unknown: list[BlockKey] = []
        answers = [self._look(key, unknown) for key in keys]
        if unknown:
            self._promotions.ask(unknown)
        self._promises.keep_front(keys, answers, time.monotonic())
        self._hits += answers.count(LookupResult.HIT)
        self._misses += answers.count(LookupResult.MISS)
        return answers

    def prepare_store(
        self, keys: Sequence[BlockKey], *, position: int = NO_POSITION, parent: bytes = NO_PARENT, tenant: str = ""
    ) -> list[NDArray[np.uint8] | None]:
        """Slots for blocks that the engine is about to write, one uint8 view per key, cut to its group's block.

        None: nothing to write, because the block is here already or no slot is free; the engine passes over it. A
        view stays valid, and its slot pinned, until `complete_store` names the key.

        `keys` are consecutive blocks of one prefix and one group: `position` is the index of the first in the prefix
        and `parent` the digest of the block before it; both are stored with the blocks (see `BlockWrite`). They are
        `tenant`'s, if one is given: tiers mark them so, and encrypted ones seal them under its data key.
        """
        mark = Mark(tenant=tenant) if tenant else None
        views: list[NDArray[np.uint8] | None] = []
        for offset, key in enumerate(keys):
            slot = self._slot_for_store(key)
            views.append(slot.view if slot else None)
            if slot and position != NO_POSITION:
                slot.position = position + offset
                slot.parent = keys[offset - 1].digest if offset else parent
            if slot:
                slot.mark = mark
        return views

    def complete_store(self, keys: Sequence[BlockKey], *, success: bool = True) -> None:
        """The engine has written the views of `keys`: they are HITs from now on, and cascade to every secondary tier.

        Not before the bytes have arrived (a copy from a GPU has been synchronised). With `success=False` the slots are
        given back and nothing is stored.
        """
        for key in keys:
            slot = self._writing.pop(key, None)
            if slot is None:
                raise ValueError(f"{key!r} is not being stored: complete_store names keys whose view was not None")
            if success:
                self.primary.publish(slot)
                self._promotions.forget([key])
                self._cascade(slot)
            self.primary.unpin(slot)

    def prepare_load(self, keys: Sequence[BlockKey]) -> list[NDArray[np.uint8] | None]:
        """Pin blocks that `lookup` called HIT; one uint8 view per key, without a copy, to be read only.

        None: it is not here any more, treat it as a miss. A view is valid until `complete_load` names the key; each
        view that was given needs one `complete_load`.
        """
        views: list[NDArray[np.uint8] | None] = []
        for key in keys:
            slot = self.primary.get(key)
            if slot is None or not slot.ready:
                views.append(None)
                continue
            self.primary.pin(slot)
            self._promises.end(slot)
            self._reading[key] = self._reading.get(key, 0) + 1
            views.append(slot.view)
        return views

    def complete_load(self, keys: Sequence[BlockKey]) -> None:
        """The engine has read the views of `keys`: unpin them. Name only keys whose view was not None."""
        for key in keys:
            readers = self._reading.pop(key, 0)
            slot = self.primary.get(key)
            if slot is None or not readers:
                raise ValueError(f"{key!r} is not being loaded: complete_load names keys whose view was not None")
            if readers > 1:
                self._reading[key] = readers - 1
            self.primary.unpin(slot)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """A use, for eviction from the primary tier only; blocks that are not ready there are passed over."""
        self.primary.touch(keys)

    def finish_request(self, keys: Sequence[BlockKey]) -> None:
        """A request with these blocks has ended: they become young in every tier, and nothing is promoted for it.

        For every request, the aborted ones too: what is promoted for nobody keeps its slot for a moment.
        """
        self.forget(keys)
        self.primary.touch(keys)
        used = tuple(keys)  # a tier looks at them later
        for tier in self._tiers:
            tier.touch(used)

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Nobody waits for these blocks any more; who asks next is told anew, not what was the answer a moment ago."""
        self._promotions.forget(keys)
        for key in keys:
            slot = self.primary.get(key)
            if slot is not None:
                self._promises.end(slot)

    def step(self) -> None:
        """Once per scheduler step: collect what transfer threads finished, hand them what was asked since."""
        share = STEP_SHARE * (time.monotonic() - self._stepped)
        self._turn(min(STEP_BUDGET_MAX, max(STEP_BUDGET_MIN, share)))

    def _turn(self, budget: float = float("inf")) -> None:
        """A step with `budget` seconds for each part; without a bound for who has no scheduler to keep waiting."""
        now = self._stepped = time.monotonic()
        for number, tier in enumerate(self._tiers):
            self._take(number, tier.poll(budget), now)
        self._promises.expire(now)
        self._promote(now, budget)
        self._promotions.expire(now)  # after a step that lasted longer than the time-out, too, first come slots
        for tier in self._tiers:
            tier.submit()

    def _rest(self) -> None:
        self._turn()
        time.sleep(PAUSE)
        self._bell.wait(REST)
        self._turn()

    def stats(self) -> ManagerStats:
        """Counters and what is under way at this moment; walks over all slots."""
        return ManagerStats(
            primary=self.primary.stats(),
            tiers=tuple(tier.stats() for tier in self._tiers),
            asking=self._promotions.asking,
            waiting=self._promotions.waiting,
            held=len(self._promises),
            hits=self._hits,
            misses=self._misses,
            promotions=self._promotions.started,
            expired=self._promotions.expired,
            stores=self._stores,
            skipped_stores=self._skipped,
        )

    def drain(self, timeout: float) -> bool:
        """Wait until no store, load or lookup is under way; False if `timeout` seconds were not enough."""
        deadline = time.monotonic() + timeout
        while True:
            self._turn()
            if not (self._promotions.asking or self._promotions.waiting) and all(tier.idle for tier in self._tiers):
                return True
            if time.monotonic() > deadline:
                return False
            self._rest()

    def close(self, timeout: float = 10.0) -> None:
        """Let queued stores finish, close the tiers, within `timeout` seconds. A second call does nothing.

        Raises `ShutdownTimeout` when a transfer still holds primary memory by then: it says which tier, and the memory
        stays mapped until that transfer ends. Stores that were queued behind it are dropped and counted as shed.
        """
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout
        self._promotions.close()
        if self.warming is not None:
            self.warming.stop(timeout * 0.1)
        self.drain(timeout * 0.8)
        for number, tier in enumerate(self._tiers):
            self._take(number, tier.cancel(), 0.0)
        for number, tier in enumerate(self._tiers):
            tier.close(max(0.0, deadline - time.monotonic()))
            self._take(number, tier.poll(), 0.0)
        self._promises.end_all()
        stuck = [tier.url for tier in self._tiers if tier.holds_memory]
        if stuck:
            raise ShutdownTimeout(
                f"{', '.join(stuck)}: transfers did not end within {timeout:.1f} s and still hold slots of the primary"
                " tier; its memory stays mapped until they end. Whoever registered or shares it must keep it, too"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def room_for_stores(self) -> bool:
        """Whether a store now would find its share of the slots not used up, and no tier behind."""
        used = len(self._writing) + len(self._cascading)
        return used < self._store_slots and not any(tier.behind for tier in self._tiers)

    def _look(self, key: BlockKey, unknown: list[BlockKey]) -> LookupResult:
        slot = self.primary.get(key)
        if slot is not None:
            return LookupResult.HIT if slot.ready else LookupResult.HIT_PENDING
        standing = self._promotions.standing(key)
        if standing is None:
            self.namespace.check_key(key)
            unknown.append(key)
            return LookupResult.RETRY
        return standing

    def _slot_for_store(self, key: BlockKey) -> Slot | None:
        if self.primary.get(key) is not None:
            return None
        self.namespace.check_key(key)
        slot = None
        if len(self._writing) + len(self._cascading) < self._store_slots:
            slot = self.primary.reserve(key, self.namespace.block_bytes(key.group))
        if slot is None:
            self._skipped += 1
            return None
        self._writing[key] = slot
        return slot

    def _cascade(self, slot: Slot) -> None:
        self._stores += 1
        for tier in self._tiers:
            if tier.store(slot):
                self.primary.pin(slot)
                self._cascading[slot] = self._cascading.get(slot, 0) + 1

    def _take(self, number: int, report: TierReport, now: float) -> None:
        """Act on what tier `number` reports."""
        for key, found in report.answers:
            self._promotions.heard(number, key, found, now)
        for slot in report.loaded:
            self.primary.publish(slot)
            self._promises.take_over(slot, now)  # the pin of the load becomes a promise to who asked for it
        for slot in report.overdue:
            self.primary.discard(slot)
            self._promotions.miss(slot.key, now)
        for slot in report.failed:
            self.primary.discard(slot)
            self.primary.unpin(slot)
            self._promotions.miss(slot.key, now)
        for slot in report.released:
            self._released(slot)

    def _released(self, slot: Slot) -> None:
        """A tier is done with a slot: a store that ended, or a load that was given up and ended after all."""
        others = self._cascading.pop(slot, 1) - 1
        if others:
            self._cascading[slot] = others
        self.primary.unpin(slot)

    def _promote(self, now: float, budget: float) -> None:
        """Start promotions in the order in which they were asked for, while there are slots and time."""
        deadline = time.perf_counter() + budget
        while (first := self._promotions.first()) is not None and time.perf_counter() < deadline:
            key, tier = first
            if self.primary.get(key) is not None:  # stored by the engine meanwhile
                self._promotions.forget([key])
                continue
            slot = self.primary.reserve(key, self.namespace.block_bytes(key.group))
            if slot is None:
                return
            tier.load(slot)
            self._promotions.start(key, now)
