"""A secondary tier: one URL behind the primary tier, made asynchronous.

The manager asks, loads, stores, touches and marks; all of that is only noted. `submit` hands what was noted to transfer
threads in batches that suit the backend, `poll` collects what they finished. Between the two a backend may hang, fail
or be slow: the tier turns that into misses and dropped stores, counts it and logs the first of each kind.

Where calls can hang on a network, they get staging memory in place of slots (`staging.py`, `jobs.py`), so that nothing
that waits for a slot waits for a backend.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from kvstore.abc import BlockStore
from kvstore.apart import StoreApart
from kvstore.registry import open_store
from kvstore.tiering.breaker import PAUSE, Breaker, Probe
from kvstore.tiering.counters import Counters
from kvstore.tiering.hints import Hints
from kvstore.tiering.jobs import Transfer
from kvstore.tiering.pool import default_threads
from kvstore.tiering.pool_apart import pool_for
from kvstore.tiering.questions import Questions
from kvstore.tiering.report import TierReport
from kvstore.tiering.staging import Staging
from kvstore.tiering.transit import Transit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from typing_extensions import Buffer

    from kvstore.background import Bell
    from kvstore.marks import Mark
    from kvstore.namespace import Namespace
    from kvstore.tiering.counters import TierStats
    from kvstore.tiering.jobs import TierJob
    from kvstore.tiering.pool import Jobs
    from kvstore.tiering.primary import Slot
    from kvstore.types import BlockKey
    from kvstore.url import TierURL

__all__ = ["SecondaryTier"]

log = logging.getLogger(__name__)

LOCAL_STORES = 12
"""Stores side by side in a local tier, at most: six reached 0.87 of vLLM's `fs` where twelve reached 0.95."""

NETWORK_THREADS = 16
"""Transfers side by side where calls wait for a network: 144 blocks of 0.7 MiB from an S3 server on the same two cores
came in 0.21 s, with two threads in 0.28 to 0.53 s."""

LOAD_TIMEOUT = 10.0
"""Seconds. A disk that is busy with others is worth waiting for: its load cannot be parted from its slots anyway."""
NETWORK_LOAD_TIMEOUT = 4.0
"""Seconds. A server that is silent for longer is likely to stay so, and a load that is given up costs no slot."""

ABANDON_S = 1.0
"""Seconds in which calls to a process that was ended have come back: they have only to be told."""


class SecondaryTier:
    """One store, with its threads. `tier` is a URL, opened here and closed by `close`, or a store that stays yours.

    - `threads`: how many transfers run at once (default: `NETWORK_THREADS` where calls can hang on a network, else
      `default_threads`); one more answers lookups.
    - `backlog_bytes`: stores accepted and not finished; beyond it a store is shed (one is always accepted).
    - `lookup_timeout`, `load_timeout`: seconds after which an unanswered lookup is a miss, and a load a failed one
      (default: `LOAD_TIMEOUT`, or `NETWORK_LOAD_TIMEOUT` where a call can hang on a network).
    - `staging_bytes`: memory for the calls of a store that can hang on a network (default: 256 MiB, or 8 blocks if that
      is more); a quarter of it is kept for loads. Others need none.
    - `io_process`: the store is opened, and its bytes are moved, in a process of its own (`kvstore.apart`), so that the
      GIL of this one is left to the scheduler; for a `StoreApart` that is so anyway. `memory` is then what every slot
      lies in: it must be memory that can be shared.
    - `pause`: seconds for which a store that fails or hangs is left alone before it is tried again (see `breaker.py`).

    Raises a `ConfigurationError` or a `StoreOpenError` when the URL cannot be opened, or the memory not be shared,
    `ValueError` for staging of less than two blocks or less than one thread, and nothing ever after.
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
        load_timeout: float | None = None,
        staging_bytes: int | None = None,
        pause: float = PAUSE,
        io_process: bool = False,
        memory: Buffer | None = None,
    ) -> None:
        self._owned = not isinstance(tier, BlockStore)
        self._store = tier if isinstance(tier, BlockStore) else _opened(tier, io_process=io_process)
        self.url = str(self._store.url)
        self._namespace = namespace
        can_hang = self._store.capabilities.can_hang
        self._counters = Counters(self.url)
        self._breaker = Breaker(self.url, pause)
        self._probe: Probe | None = None
        threads = threads or (NETWORK_THREADS if can_hang else default_threads())
        stores = threads if can_hang else LOCAL_STORES
        with ExitStack() as opened:
            if self._owned:
                opened.callback(self._store.close)
            self._staging = self._made_memory(staging_bytes, memory)
            self._pool: Jobs[TierJob] = pool_for(self._store, threads, f"kvstore-{self._store.url.scheme}", stores)
            opened.pop_all()
        self._questions = Questions(self._store, namespace, lookup_timeout, self._counters, self._breaker)
        self._hints = Hints(self._store, namespace, self._counters)
        self._transit = Transit(
            *(self._store, namespace, self._pool, self._staging),
            load_timeout=load_timeout or (NETWORK_LOAD_TIMEOUT if can_hang else LOAD_TIMEOUT),
            backlog_bytes=backlog_bytes,
            counters=self._counters,
            breaker=self._breaker,
            hints=self._hints,
        )

    def _made_memory(self, nbytes: int | None, slots: Buffer | None) -> Staging | None:
        """What calls can be lent: slots, or staging; the store's own process is given both."""
        apart = self._store if isinstance(self._store, StoreApart) else None
        if apart is not None and slots is not None:
            apart.lend(slots)
        if not self._store.capabilities.can_hang:
            return None
        largest = max(layout.nbytes for layout in self._namespace.layouts)
        staging = Staging(nbytes, largest, shared=apart is not None)
        if apart is not None:
            apart.lend(staging.memory.data)
        return staging

    def use(self, namespace: Namespace) -> None:
        """Blocks are those of `namespace` from now on, whose layouts are the same: somebody learnt it from a key.

        A call that is under way ends as it began.
        """
        self._namespace = self._questions.namespace = namespace
        self._hints.namespace = self._transit.namespace = namespace

    def ring(self, bell: Bell) -> None:
        """Ring `bell` whenever there is something for `poll` to collect."""
        self._pool.bell = bell
        self._questions.ring(bell)

    # Notes, taken at once and handed on by `submit`.

    def ask(self, keys: Iterable[BlockKey]) -> None:
        """Is it there? `poll` answers about each key, no later than the look-up time-out from `submit`."""
        self._questions.ask(keys)

    def load(self, slot: Slot) -> None:
        """Fetch `slot.key` into the slot, whose pin is lent to the transfer."""
        self._transit.load(slot)

    def store(self, slot: Slot) -> bool:
        """Write the slot's block. True lends the caller's pin to the transfer; False: shed, the tier is behind."""
        return self._transit.store(slot)

    def touch(self, keys: Collection[BlockKey]) -> None:
        """Make these blocks young in the store, some time soon, the first of them youngest. Those of a later call are
        younger. Iterated on a transfer thread.
        """
        if not self._transit.closed:
            self._hints.touch(keys)

    def mark(self, keys: Collection[BlockKey], mark: Mark) -> None:
        """Say `mark` of those of these blocks that are in the store when it is told, some time soon. Iterated on a
        transfer thread. Of a block that is on its way into the store, its slot says it (`Slot.mark`).
        """
        if not self._transit.closed:
            self._hints.mark(keys, mark)

    @property
    def backlog_bytes(self) -> int:
        """Stores accepted and not finished that make the tier be behind."""
        return self._transit.backlog_bytes

    @property
    def behind(self) -> bool:
        """Whether the next store would be shed."""
        return self._transit.behind

    @property
    def idle(self) -> bool:
        """Nothing is under way, nor waits for `submit` or `poll`; what was given up and has no slot does not count."""
        return self._questions.idle and self._hints.idle and self._transit.idle

    @property
    def holds_memory(self) -> bool:
        """A transfer may still touch a slot."""
        return self._transit.holds_memory

    # The two ends of the transfer threads, once per step each.

    def submit(self) -> None:
        """Hand what was noted to the transfer threads, in batches; for a store that is left alone, only a probe."""
        if not (self._transit.closed or self._questions.stuck) and self._breaker.probe_is_due():
            self._probe = Probe(self._store, self._namespace)
            self._pool.submit(self._probe)
        if self._breaker.refuses:
            self._send()
            return
        self._questions.submit()
        self._transit.submit()
        self._hints.submit(self._pool)
        self._send()

    def poll(self, budget: float = float("inf")) -> TierReport:
        """Collect what ended, as far as that can be done in `budget` seconds, and give up what is overdue."""
        deadline = time.perf_counter() + budget
        report = TierReport(answers=self._questions.collect())
        for job in self._pool.collect():
            self._settle(job, report)
            if time.perf_counter() > deadline:
                break
        self._transit.give_up_overdue(report)
        if self._breaker.refuses:  # nobody waits for this tier
            self._drop_waiting(report)
            report.answers += self._questions.refuse()
        self._send()
        return report

    def stats(self) -> TierStats:
        """Counters of this moment."""
        lent = self._staging.lent_bytes if self._staging else 0
        return self._counters.stats(
            backlog_bytes=self._transit.backlog,
            staging_bytes=lent,
            breaker=self._breaker.state,
            trips=self._breaker.trips,
        )

    def cancel(self) -> TierReport:
        """Take no more, and drop every transfer that has not started or needs no slot: stores shed, loads failed."""
        self._transit.closed = True
        self._questions.cancel()
        if self._probe is not None and self._pool.cancel(self._probe):
            self._probe = None
        report = self.poll()
        self._hints.cancel(self._pool)
        self._transit.cancel(report)
        return report

    def close(self, timeout: float) -> bool:
        """End the threads and close the store, if it was opened here; True if all of that ended in `timeout` seconds.

        `cancel` first; afterwards `poll` still reports transfers that end. A store in which a call hangs is left
        open: closing it under that call could crash the process. Where it has a process of its own, that is ended.
        """
        deadline = time.monotonic() + timeout
        ended = self._pool.close(timeout)
        ended = self._questions.close(max(0.0, deadline - time.monotonic())) and ended
        if ended and self._owned:
            closer = threading.Thread(target=self._close_store, name="kvstore-close", daemon=True)
            closer.start()
            closer.join(max(0.1, deadline - time.monotonic()))
            ended = not closer.is_alive()
        if not ended and self._owned and isinstance(self._store, StoreApart):
            log.warning("%s: a call did not return within %.1f s; its I/O process is ended", self.url, timeout)
            return self._store.abandon() and self._pool.close(ABANDON_S)
        if not ended:
            log.warning("%s: a call did not return within %.1f s; the store is left open", self.url, timeout)
        return ended

    def _send(self) -> None:
        """What goes to a process goes at once."""
        if isinstance(self._store, StoreApart):
            self._store.send()

    def _settle(self, job: TierJob, report: TierReport) -> None:
        if isinstance(job, Probe):
            self._probe = None
            self._breaker.probed(job.error)
        elif isinstance(job, Transfer):
            self._transit.settle(job, report)
        else:
            self._hints.settle(job)

    def _drop_waiting(self, report: TierReport) -> None:
        """What has not begun does not: loads fail, stores are shed, hints are forgotten."""
        self._hints.cancel(self._pool)
        self._transit.drop_waiting(report)

    def _close_store(self) -> None:
        try:
            self._store.close()
        except Exception:
            log.exception("%s: closing failed", self.url)


def _opened(tier: str | Mapping[str, Any] | TierURL, *, io_process: bool) -> BlockStore:
    return StoreApart(tier) if io_process else open_store(tier)
