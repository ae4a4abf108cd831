"""The loads and stores of a secondary tier, each from the note to the end: started in batches, settled, or given up.

::

    noted ──submit──► [waits for staging] ──► the pool ──► settled: what became of each slot and block, in a report
                                    too late: given up, and parted from its slots where nobody else may touch them

A transfer keeps the pins of its slots until it has ended or was parted from them. What becomes of the slots then is the
manager's; the report says it.
"""

from __future__ import annotations

import time
from itertools import takewhile
from typing import TYPE_CHECKING

from kvstore.tiering.batches import STORE_BATCH_BYTES, batches
from kvstore.tiering.jobs import CopyOut, Load, StagedLoad, StagedStore, Store, TierJob, Transfer
from kvstore.types import GetOutcome, PutOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.tiering.breaker import Breaker
    from kvstore.tiering.counters import Counters
    from kvstore.tiering.hints import Hints
    from kvstore.tiering.pool import Jobs
    from kvstore.tiering.primary import Slot
    from kvstore.tiering.report import TierReport
    from kvstore.tiering.staging import Staging

__all__ = ["Transit"]


class Transit:
    """For one store. Threads: one, the manager's, makes all calls; none of them waits.

    `staging` for a store whose calls can hang, and None for others; it bounds `backlog_bytes`, too. `live` are all
    transfers that have not ended, the oldest first.
    """

    def __init__(
        self,
        store: BlockStore,
        namespace: Namespace,
        pool: Jobs[TierJob],
        staging: Staging | None,
        *,
        load_timeout: float,
        backlog_bytes: int,
        counters: Counters,
        breaker: Breaker,
        hints: Hints,
    ) -> None:
        self.namespace = namespace
        self._store, self._pool, self._staging = store, pool, staging
        self._load_timeout = load_timeout
        # What would have to wait for staging, with its slot pinned, is better shed.
        self.backlog_bytes = min(backlog_bytes, staging.for_stores_bytes) if staging else backlog_bytes
        self._counters, self._breaker, self._hints = counters, breaker, hints
        self._to_load: list[Slot] = []
        self._to_store: list[Slot] = []
        self.live: dict[Transfer, None] = {}
        self.backlog = 0
        """Bytes of stores accepted and not finished."""
        self.closed = False

    @property
    def behind(self) -> bool:
        """Whether the next store would be shed."""
        return self.backlog >= self.backlog_bytes

    @property
    def idle(self) -> bool:
        """Nothing is noted or under way; what was given up and has no slot does not count."""
        return not (self._to_load or self._to_store or any(job.slots or not job.given_up for job in self.live))

    @property
    def holds_memory(self) -> bool:
        """A transfer may still touch a slot."""
        return any(job.slots for job in self.live)

    def load(self, slot: Slot) -> None:
        """Note that the slot's block is to come."""
        self._to_load.append(slot)

    def store(self, slot: Slot) -> bool:
        """Note that the slot's block is to go; False: shed."""
        if self.behind or self.closed or self._breaker.refuses:
            self._counters.add(shed=1)
            if self.behind:
                self._counters.tell("behind", "stores are dropped; %d bytes wait to be written", self.backlog)
            return False
        self.backlog += slot.view.nbytes
        self._to_store.append(slot)
        return True

    def submit(self) -> None:
        """Hand what was noted to the pool, in batches."""
        load, store = (StagedLoad, CopyOut) if self._staging else (Load, Store)
        most = self._staging.share if self._staging else None
        at_most = self._store.capabilities.batch_bytes
        for batch in batches(self._to_load, self._pool.threads, at_most, most):
            self._start(load(self._store, self.namespace, batch))
        threads, least = self._pool.patient_threads, None if self._staging else STORE_BATCH_BYTES
        for batch in batches(self._to_store, threads, at_most, most, least=least):
            self._start(store(self._store, self.namespace, batch))
        self._to_load, self._to_store = [], []
        for job in self._staging.served() if self._staging else ():
            self._pool.submit(job)

    def _start(self, job: Transfer) -> None:
        self.live[job] = None
        if self._staging and isinstance(job, (StagedLoad, CopyOut)):
            self._staging.wait(job)
        else:
            self._pool.submit(job)

    # What became of them

    def settle(self, job: Transfer, report: TierReport) -> None:
        """It has ended."""
        del self.live[job]
        if isinstance(job, Load) and not job.given_up:
            self._breaker.heard("load", job.error)
        if job.error is not None:
            self._counters.failed("load" if isinstance(job, Load) else "store", job.error)
        if isinstance(job, CopyOut):
            self._copied(job, report)
            return
        self._take_back(job)
        if isinstance(job, Load):
            self._loaded(job, report)
        elif isinstance(job, Store):
            self._stored(job, report)

    def _copied(self, job: CopyOut, report: TierReport) -> None:
        """The slots are free; the copy goes to the store, if there is still a thread to take it there."""
        if self.closed or job.error is not None:
            self._drop(job, report)
            return
        report.released.extend(job.slots)
        self._start(StagedStore(job))

    def _loaded(self, job: Load, report: TierReport) -> None:
        if job.given_up:
            report.released.extend(job.slots)
            report.dropped.extend(job.slots)
            return
        outcomes = job.outcomes or [GetOutcome.MISS] * len(job.slots)
        arrived = [slot for slot, outcome in zip(job.slots, outcomes, strict=True) if outcome is GetOutcome.HIT]
        report.loaded.extend(arrived)
        report.failed.extend(
            slot for slot, outcome in zip(job.slots, outcomes, strict=True) if outcome is not GetOutcome.HIT
        )
        corrupt = outcomes.count(GetOutcome.CORRUPT)
        if corrupt:
            self._counters.tell("corrupt", "%d blocks failed their checks; they are computed anew", corrupt)
        self._counters.add(
            loads=len(arrived),
            corrupt=corrupt,
            failed_loads=len(outcomes) - len(arrived),
            bytes_loaded=sum(slot.view.nbytes for slot in arrived),
            load_seconds=job.seconds,
        )

    def _stored(self, job: Store, report: TierReport) -> None:
        report.released.extend(job.slots)
        self.backlog -= job.nbytes
        outcomes = job.outcomes or [PutOutcome.FAILED] * len(job.sizes)
        report.stored.extend(key for key, outcome in zip(job.keys, outcomes, strict=True) if outcome.present)
        self._mark(job, outcomes)
        # A staged store has no slots any more.
        report.dropped.extend(slot for slot, outcome in zip(job.slots, outcomes, strict=False) if not outcome.present)
        stored = [size for size, outcome in zip(job.sizes, outcomes, strict=True) if outcome is PutOutcome.STORED]
        self._counters.add(
            stores=len(stored),
            exists=outcomes.count(PutOutcome.EXISTS),
            full=outcomes.count(PutOutcome.FULL),
            refused=outcomes.count(PutOutcome.REFUSED),
            failed_stores=outcomes.count(PutOutcome.FAILED),
            bytes_stored=sum(stored),
            store_seconds=job.seconds,
        )

    def _mark(self, job: Store, outcomes: Sequence[PutOutcome]) -> None:
        """What the slots said of blocks that are in the store now is to be said there."""
        if self.closed:
            return
        for mark in set(job.marks.values()):
            there = zip(job.keys, outcomes, strict=True)
            self._hints.mark([key for key, outcome in there if outcome.present and job.marks.get(key) == mark], mark)

    # What is not going to happen

    def give_up_overdue(self, report: TierReport) -> None:
        """Loads that take too long, and stores that got no staging memory for as long."""
        now = time.monotonic()
        oldest = next(iter(self.live), None)
        if oldest is None or now - oldest.made <= self._load_timeout:
            return  # as in nearly every step
        timed = (job for job in self.live if isinstance(job, (Load, CopyOut)))
        late = list(takewhile(lambda job: now - job.made > self._load_timeout, timed))
        for job in late:
            # At least half of it in the call itself: behind others that are merely many, loads wait for a thread.
            if isinstance(job, Load) and not job.hangs and now - job.begun > self._load_timeout / 2:
                job.hangs = True
                self._breaker.timed_out("load", self._load_timeout)
        for job in [job for job in late if not job.given_up]:
            self._counters.overdue("load" if isinstance(job, Load) else "store", self._load_timeout)
            job.given_up = True
            if not self._part(job, report) and isinstance(job, Load):
                report.overdue.extend(job.slots)
                self._counters.add(failed_loads=len(job.slots))

    def drop_waiting(self, report: TierReport) -> None:
        """What has not begun does not: loads fail, stores are shed."""
        self._drop(Load(self._store, self.namespace, self._to_load), report)
        self._drop(Store(self._store, self.namespace, self._to_store), report)
        self._to_load, self._to_store = [], []
        for job in list(self.live):
            self._drop_if_waiting(job, report)

    def cancel(self, report: TierReport) -> None:
        """Drop what has not begun, and part the others from their slots, where that can be done."""
        self.drop_waiting(report)
        for job in list(self.live):
            self._part(job, report)

    def _part(self, job: Transfer, report: TierReport) -> bool:
        """Part a job from its slots: one that has not started is dropped, a staged load may go on without them.

        False if somebody else may touch them.
        """
        if self._drop_if_waiting(job, report):
            return True
        if job.withdraw():
            report.failed.extend(job.slots)
            self._counters.add(failed_loads=len(job.slots))
            job.given_up, job.slots = True, ()
            return True
        return False

    def _drop_if_waiting(self, job: Transfer, report: TierReport) -> bool:
        if not self._pool.cancel(job):
            return False
        del self.live[job]
        self._drop(job, report)
        return True

    def _drop(self, job: Transfer, report: TierReport) -> None:
        """It is not going to happen: a load failed, a store was shed."""
        if isinstance(job, Load):
            report.failed.extend(job.slots)
            self._counters.add(failed_loads=len(job.slots))
        else:
            report.released.extend(job.slots)
            report.dropped.extend(job.slots)
            self.backlog -= job.nbytes
            self._counters.add(shed=len(job.sizes))
        self._take_back(job)

    def _take_back(self, job: Transfer) -> None:
        if self._staging:
            self._staging.give_back(job.buffers)
