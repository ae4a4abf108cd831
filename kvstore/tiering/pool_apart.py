"""Jobs whose calls are made in the process that has the store: of these calls none has a thread here.

The scheduler's thread sends the call of a job that it submits, if that is about few blocks and fewer than `threads`
are under way; the two threads of the link (`kvstore.apart.link`) send those of many, hear of ends and send the next. So
a transfer costs the process of the scheduler a message each way, however many system calls it is made of there.

A job that is claimed for its call has begun. What has not been claimed is here, and can be cancelled.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.apart import StoreApart
from kvstore.tiering.jobs import FEW, TierJob
from kvstore.tiering.pool import Jobs, TransferPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.abc import BlockStore
    from kvstore.tiering.jobs import Calls

__all__ = ["PoolApart", "pool_for"]

J = TypeVar("J", bound=TierJob)

_LOOK_S = 0.001


class PoolApart(Jobs[J]):
    """At most `threads` calls to `store` at once."""

    def __init__(self, store: StoreApart, threads: int, patient: int | None = None) -> None:
        super().__init__(threads, patient)
        self._store = store
        self._running = 0
        self._sending = threading.Lock()
        self._looked = False

    def _awake(self) -> None:
        """Send what may be sent. The owner never waits: who has the lock looks again after it has let go of it."""
        self._looked = False
        while not self._looked and self._sending.acquire(blocking=False):
            self._looked = True
            begun: list[list[J]] = []
            try:
                while self._running < self.threads and (jobs := self._next()):
                    self._running += 1
                    begun.append(jobs)
            finally:
                self._sending.release()
            for jobs in begun:  # without the lock: a call that fails at once ends here
                many = sum(job.about for job in jobs) > FEW
                if not many or not self._store.later(partial(self._begin_later, jobs)):
                    self._begin(jobs)

    def _begin_later(self, jobs: Sequence[J]) -> None:
        self._begin(jobs)
        self._awake()

    def _begin(self, jobs: Sequence[J]) -> None:
        jobs[0].begin(jobs[1:])
        self._go_on(jobs, jobs[0].calls(), None, None)

    def _answered(self, jobs: Sequence[J], calls: Calls, answer: Any, error: BaseException | None) -> None:
        self._go_on(jobs, calls, answer, error)
        self._awake()

    def _go_on(self, jobs: Sequence[J], calls: Calls, answer: Any, error: BaseException | None) -> None:
        """With an answer to the job's next call, or to its end. What else can begin then, is for who called this."""
        job = jobs[0]
        try:
            if error is not None:
                raise error
            call = calls.send(answer)
            self._store.begin(call.name, call.arguments, partial(self._answered, jobs, calls))
            return
        except StopIteration:
            pass
        except BaseException as raised:  # as in a thread of a pool
            job.error = raised
        calls.close()
        job.end()
        self._done.extend(jobs)
        with self._sending:
            self._running -= 1
            self._ended(job)
            self._looked = False
        self.bell.ring()

    def _wait(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while self._running:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)
        return True


def pool_for(store: BlockStore, threads: int, name: str, patient: int | None = None) -> Jobs[J]:
    """Threads that call `store`, or none where its process has them."""
    if isinstance(store, StoreApart):
        return PoolApart(store, threads, patient)
    return TransferPool(threads, name, patient)
