"""A secondary tier: one URL behind the primary tier, made asynchronous.

The manager asks, loads, stores and touches; all of that is only noted. `submit` hands what was noted to transfer
threads in batches that suit the backend, `poll` collects what they finished. Between the two a backend may hang, fail
or be slow: the tier turns that into misses and dropped stores, counts it and logs the first of each kind.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from kvstore.abc import BlockStore
from kvstore.registry import open_store
from kvstore.tiering.jobs import Load, Lookup, Store, Touch, Transfer
from kvstore.tiering.transfer import TransferPool
from kvstore.types import GetOutcome, PutOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvstore.namespace import Namespace
    from kvstore.tiering.primary import Slot
    from kvstore.types import BlockKey
    from kvstore.url import TierURL

__all__ = ["SecondaryTier", "TierReport", "TierStats", "default_threads"]

log = logging.getLogger(__name__)

MAX_THREADS = 16
"""What a fast local disk can use; the default is the number of CPUs, at least two, up to this."""
MIN_BATCH_BYTES = 1 << 20
"""Smaller batches cost more in hand-overs between threads than they gain by running side by side."""
MAX_TOUCHES = 65536
"""Touched keys kept for a tier that is busy; recency is a hint, so more are dropped."""


def default_threads() -> int:
    """Transfers side by side: as many as there are CPUs, since more of them only take turns with the scheduler."""
    return min(MAX_THREADS, max(2, len(os.sched_getaffinity(0))))


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a secondary tier did since it was opened. Blocks unless it says otherwise; seconds are thread seconds."""

    url: str
    hits: int = 0
    """Lookups answered with yes."""
    misses: int = 0
    """Lookups answered with no, late answers and failures included."""
    loads: int = 0
    stores: int = 0
    exists: int = 0
    """Stores of a block that the tier had already."""
    full: int = 0
    """Stores refused for want of room."""
    shed: int = 0
    """Stores dropped because the tier fell behind, or was closed before it came to them."""
    corrupt: int = 0
    failed_loads: int = 0
    """Blocks that a lookup had promised and a load did not deliver, damaged and overdue ones included."""
    failed_stores: int = 0
    failed_calls: int = 0
    """Calls that the backend ended with an exception."""
    overdue_calls: int = 0
    """Lookups and loads given up after their time-out."""
    bytes_loaded: int = 0
    bytes_stored: int = 0
    load_seconds: float = 0.0
    store_seconds: float = 0.0
    backlog_bytes: int = 0
    """Stores accepted and not finished, at this moment."""


@dataclass(slots=True)
class TierReport:
    """What `poll` collected: answers to `ask`, and the slots of transfers that changed their state."""

    answers: list[tuple[BlockKey, bool]] = field(default_factory=list["tuple[BlockKey, bool]"])
    loaded: list[Slot] = field(default_factory=list["Slot"])
    """They hold their block, intact. The transfer's pin is the manager's again."""
    failed: list[Slot] = field(default_factory=list["Slot"])
    """They do not, and nobody writes into them any more. The pin is the manager's again."""
    overdue: list[Slot] = field(default_factory=list["Slot"])
    """Given up, but somebody may still write into them: they stay pinned until they are `released`."""
    released: list[Slot] = field(default_factory=list["Slot"])
    """Stores that ended, in whichever way, and overdue loads that did after all: to be unpinned, nothing else."""


class SecondaryTier:
    """One store, with its threads. `tier` is a URL, opened here and closed by `close`, or a store that stays yours.

    - `threads`: how many transfers run at once (default: `default_threads`); one more answers lookups.
    - `backlog_bytes`: stores accepted and not finished; beyond it a store is shed (one is always accepted).
    - `lookup_timeout`, `load_timeout`: seconds after which an unanswered lookup is a miss, and a load a failed one.

    Raises a `ConfigurationError` or a `StoreOpenError` when the URL cannot be opened, and nothing ever after.
    Threads: one, the manager's, makes all calls; only the constructor and `close` wait.
    """

    def __init__(
        self,
        tier: str | Mapping[str, Any] | TierURL | BlockStore,
        namespace: Namespace,
        *,
        threads: int | None = None,
        backlog_bytes: int = 1 << 30,
        lookup_timeout: float = 1.0,
        load_timeout: float = 10.0,
    ) -> None:
        self._owned = not isinstance(tier, BlockStore)
        self._store = tier if isinstance(tier, BlockStore) else open_store(tier)
        self.url = str(self._store.url)
        self._namespace = namespace
        self.backlog_bytes = backlog_bytes
        self._lookup_timeout = lookup_timeout
        self._load_timeout = load_timeout
        threads = threads or default_threads()
        self._transfers: TransferPool[Transfer | Touch] = TransferPool(threads, f"kvstore-{self._store.url.scheme}")
        self._lookups: TransferPool[Lookup] = TransferPool(1, f"kvstore-{self._store.url.scheme}-lookup")
        self._questions: dict[BlockKey, None] = {}
        self._to_load: list[Slot] = []
        self._to_store: list[Slot] = []
        self._to_touch: dict[BlockKey, None] = {}
        self._asking: Lookup | None = None
        self._touching: Touch | None = None
        self._live: dict[Transfer, None] = {}
        self._backlog = 0
        self._closed = False
        self._counts: defaultdict[str, Any] = defaultdict(int)
        self._told: set[str] = set()

    # Notes, taken at once and handed on by `submit`.

    def ask(self, keys: Iterable[BlockKey]) -> None:
        """Is it there? `poll` answers about each key, no later than the look-up time-out from `submit`."""
        self._questions.update(dict.fromkeys(keys))

    def load(self, slot: Slot) -> None:
        """Fetch `slot.key` into the slot, whose pin is lent to the transfer."""
        self._to_load.append(slot)

    def store(self, slot: Slot) -> bool:
        """Write the slot's block. True lends the caller's pin to the transfer; False: shed, the tier is behind."""
        if self.behind or self._closed:
            self._count(shed=1)
            self._tell("behind", "stores are dropped; %d bytes wait to be written", self._backlog)
            return False
        self._backlog += slot.view.nbytes
        self._to_store.append(slot)
        return True

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Make these blocks young in the store, some time soon."""
        if len(self._to_touch) < MAX_TOUCHES:
            self._to_touch.update(dict.fromkeys(keys))

    @property
    def behind(self) -> bool:
        """Whether the next store would be shed."""
        return self._backlog >= self.backlog_bytes

    @property
    def idle(self) -> bool:
        """Nothing is under way, nor waits for `submit` or `poll`; a lookup that was given up does not count."""
        asking = self._asking is not None and not self._asking.given_up
        noted = self._questions or self._to_load or self._to_store or self._to_touch
        return not (noted or asking or self._live or self._touching)

    @property
    def holds_memory(self) -> bool:
        """A transfer may still touch a slot."""
        return bool(self._live)

    # The two ends of the transfer threads, once per step each.

    def submit(self) -> None:
        """Hand what was noted to the transfer threads, in batches."""
        if self._questions and self._asking is None and not self._stuck:
            self._asking = Lookup(self._store, self._namespace, list(self._questions))
            self._questions.clear()
            self._lookups.submit(self._asking)
        for batch in self._batches(self._to_load, self._transfers.threads):
            self._start(Load(self._store, self._namespace, batch))
        for batch in self._batches(self._to_store, self._transfers.patient_threads):
            self._start(Store(self._store, self._namespace, batch))
        self._to_load, self._to_store = [], []
        if self._to_touch and self._touching is None:
            self._touching = Touch(self._store, self._namespace, list(self._to_touch))
            self._to_touch.clear()
            self._transfers.submit(self._touching)

    def poll(self) -> TierReport:
        """Collect what ended, give up what is overdue."""
        report = TierReport()
        for lookup in self._lookups.collect():
            self._answered(lookup, report)
        for job in self._transfers.collect():
            self._settle(job, report)
        self._give_up(report)
        return report

    def stats(self) -> TierStats:
        """Counters of this moment."""
        return TierStats(self.url, **self._counts, backlog_bytes=self._backlog)

    def cancel(self) -> TierReport:
        """Take no more, and drop every transfer that has not started: stores are shed, loads failed."""
        self._closed = True
        self._questions.clear()
        report = self.poll()
        self._dropped(self._to_load, self._to_store, report)
        self._to_load, self._to_store = [], []
        for job in [job for job in self._live if self._transfers.cancel(job)]:
            self._cancelled(job, report)
        return report

    def close(self, timeout: float) -> bool:
        """End the threads and close the store, if it was opened here; True if all of that ended in `timeout` seconds.

        `cancel` first; afterwards `poll` still reports transfers that end. A store in which a call hangs is left
        open: closing it under that call could crash the process.
        """
        deadline = time.monotonic() + timeout
        ended = self._transfers.close(timeout)
        ended = self._lookups.close(max(0.0, deadline - time.monotonic())) and ended
        if ended and self._owned:
            closer = threading.Thread(target=self._close_store, name="kvstore-close", daemon=True)
            closer.start()
            closer.join(max(0.1, deadline - time.monotonic()))
            ended = not closer.is_alive()
        if not ended:
            log.warning("%s: a call did not return within %.1f s; the store is left open", self.url, timeout)
        return ended

    def _batches(self, slots: Sequence[Slot], threads: int) -> Iterator[Sequence[Slot]]:
        """Split so that all threads have work, but no more than `batch_bytes` (and at least a block) each."""
        total = sum(slot.view.nbytes for slot in slots)
        size = min(self._store.capabilities.batch_bytes, max(MIN_BATCH_BYTES, -(-total // threads)))
        batch: list[Slot] = []
        filled = 0
        for slot in slots:
            if batch and filled + slot.view.nbytes > size:
                yield batch
                batch, filled = [], 0
            batch.append(slot)
            filled += slot.view.nbytes
        if batch:
            yield batch

    def _start(self, job: Transfer) -> None:
        self._live[job] = None
        self._transfers.submit(job)

    def _answered(self, lookup: Lookup, report: TierReport) -> None:
        self._asking = None
        if lookup.error is not None:
            self._failed("lookup", lookup.error)
        if not lookup.given_up:
            self._answer(lookup.keys, lookup.found or [False] * len(lookup.keys), report)

    def _answer(self, keys: Sequence[BlockKey], found: Sequence[bool], report: TierReport) -> None:
        hits = sum(found)
        self._count(hits=hits, misses=len(keys) - hits)
        report.answers.extend(zip(keys, found, strict=True))

    def _settle(self, job: Transfer | Touch, report: TierReport) -> None:
        if isinstance(job, Touch):
            self._touching = None
            if job.error is not None:
                self._failed("touch", job.error)
            return
        del self._live[job]
        if job.error is not None:
            self._failed(type(job).__name__.lower(), job.error)
        if isinstance(job, Load):
            self._loaded(job, report)
        elif isinstance(job, Store):
            self._stored(job, report)

    def _loaded(self, job: Load, report: TierReport) -> None:
        if job.given_up:
            report.released.extend(job.slots)
            return
        outcomes = job.outcomes or [GetOutcome.MISS] * len(job.slots)
        arrived = [slot for slot, outcome in zip(job.slots, outcomes, strict=True) if outcome is GetOutcome.HIT]
        report.loaded.extend(arrived)
        report.failed.extend(
            slot for slot, outcome in zip(job.slots, outcomes, strict=True) if outcome is not GetOutcome.HIT
        )
        corrupt = outcomes.count(GetOutcome.CORRUPT)
        if corrupt:
            self._tell("corrupt", "%d blocks failed their checks; they are computed anew", corrupt)
        self._count(
            loads=len(arrived),
            corrupt=corrupt,
            failed_loads=len(outcomes) - len(arrived),
            bytes_loaded=sum(slot.view.nbytes for slot in arrived),
            load_seconds=job.seconds,
        )

    def _stored(self, job: Store, report: TierReport) -> None:
        report.released.extend(job.slots)
        self._backlog -= job.nbytes
        outcomes = job.outcomes or [PutOutcome.FAILED] * len(job.slots)
        stored = [slot for slot, outcome in zip(job.slots, outcomes, strict=True) if outcome is PutOutcome.STORED]
        self._count(
            stores=len(stored),
            exists=outcomes.count(PutOutcome.EXISTS),
            full=outcomes.count(PutOutcome.FULL),
            failed_stores=outcomes.count(PutOutcome.FAILED),
            bytes_stored=sum(slot.view.nbytes for slot in stored),
            store_seconds=job.seconds,
        )

    def _give_up(self, report: TierReport) -> None:
        """What is not answered in time is a miss; and while such a call is stuck, nobody else waits for this tier."""
        now = time.monotonic()
        asking = self._asking
        if asking is not None and not asking.given_up and now - asking.submitted > self._lookup_timeout:
            asking.given_up = True
            self._overdue("lookup", self._lookup_timeout)
            self._answer(asking.keys, [False] * len(asking.keys), report)
        for load in self._late_loads(now):
            self._overdue("load", self._load_timeout)
            if self._transfers.cancel(load):
                self._cancelled(load, report)
            else:
                load.given_up = True
                report.overdue.extend(load.slots)
                self._count(failed_loads=len(load.slots))
        if self._questions and self._stuck:
            self._answer(list(self._questions), [False] * len(self._questions), report)
            self._questions.clear()

    def _late_loads(self, now: float) -> list[Load]:
        loads = (job for job in self._live if isinstance(job, Load))  # in the order of submission
        late = takewhile(lambda load: now - load.submitted > self._load_timeout, loads)
        return [load for load in late if not load.given_up]

    @property
    def _stuck(self) -> bool:
        calls = self._live if self._asking is None else (self._asking, *self._live)
        return any(call.given_up for call in calls)

    def _cancelled(self, job: Transfer, report: TierReport) -> None:
        del self._live[job]
        if isinstance(job, Load):
            self._dropped(job.slots, [], report)
        else:
            self._dropped([], job.slots, report)

    def _dropped(self, loads: Sequence[Slot], stores: Sequence[Slot], report: TierReport) -> None:
        report.failed.extend(loads)
        report.released.extend(stores)
        self._backlog -= sum(slot.view.nbytes for slot in stores)
        self._count(failed_loads=len(loads), shed=len(stores))

    def _close_store(self) -> None:
        try:
            self._store.close()
        except Exception:
            log.exception("%s: closing failed", self.url)

    def _failed(self, what: str, error: BaseException) -> None:
        self._count(failed_calls=1)
        self._tell(what, "%s failed: %r", what, error)

    def _overdue(self, what: str, seconds: float) -> None:
        self._count(overdue_calls=1)
        self._tell(f"overdue {what}", "no answer to a %s within %.1f s", what, seconds)

    def _tell(self, kind: str, message: str, *values: object) -> None:
        """Log the first of each kind; all of them are counted."""
        if kind not in self._told:
            self._told.add(kind)
            log.warning(f"%s: {message} (said once; see the counters)", self.url, *values)

    def _count(self, **more: float) -> None:
        for name, number in more.items():
            self._counts[name] += number
