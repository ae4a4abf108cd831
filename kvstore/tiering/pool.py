"""The I/O pool: threads on which blocking calls to a backend run, so that the scheduler's thread never makes one.

A job goes in by `submit`, is run by some thread, and comes out of `collect`, which the scheduler's thread polls once
per step: nothing calls back into that thread. Who has no step to make can wait for a `Bell`. Loads overtake stores, and
stores never occupy the last thread, so that a load waits for no store.

The threads are daemons of our own: those of `concurrent.futures` are joined at interpreter exit, and one call that
hangs in a backend would hang the exit with it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from kvstore.background import NICENESS, Bell

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Job", "Jobs", "Once", "TransferPool", "default_threads"]

J = TypeVar("J", bound="Job")

MAX_THREADS = 16
"""What a fast local disk can use; the default is the number of CPUs, at least two, up to this."""


def default_threads() -> int:
    """Transfers side by side: as many as there are CPUs, since more of them only take turns with the scheduler."""
    return min(MAX_THREADS, max(2, len(os.sched_getaffinity(0))))


class Once:
    """True for the first who calls it, on whichever thread, and False for everybody after. Nobody waits."""

    def __init__(self) -> None:
        self._token = [True]

    def __call__(self) -> bool:
        try:
            return self._token.pop()  # atomic, unlike a test followed by an assignment
        except IndexError:
            return False

    @property
    def taken(self) -> bool:
        """Whether somebody was first already."""
        return not self._token


class Job(ABC):
    """One blocking call, and afterwards what became of it.

    `urgent` jobs (loads, lookups) overtake the others (stores). When it is collected, either `error` is set or the
    call has returned; `made` is when the job was made, `begun` when its call began (`time.monotonic`; infinity before
    that), `seconds` how long it ran. `claim` is true for the thread that is going to run the job, or for who cancels
    it. A cancelled job never starts and is never collected. `others` are jobs that this one's call does as well
    (`takes_along`): they begin and end with it, and its time counts once.
    """

    urgent: ClassVar[bool] = False
    others: Sequence[Job] = ()
    about = float("inf")
    """Blocks that its call is about; as many as it may be, where nobody has counted them."""

    def __init__(self) -> None:
        self.made = time.monotonic()
        self.begun = float("inf")
        self.seconds = self._began = 0.0
        self.error: BaseException | None = None
        self.claim = Once()

    @abstractmethod
    def work(self) -> None:
        """Make the call, on a pool thread, and keep what it returned."""

    def takes_along(self, others: Sequence[Job], another: Job) -> bool:
        """Whether `work` can do, beside that of `others`, the work of `another`, which waits behind them."""
        del others, another
        return False

    def run(self, others: Sequence[Job] = ()) -> None:
        """`work`, timed, for itself and `others`; whatever it raises is kept, not raised."""
        self.begin(others)
        try:
            self.work()
        except BaseException as error:  # a thread of the pool outlives whatever a backend throws
            self.error = error
        self.end()

    def begin(self, others: Sequence[Job]) -> None:
        """Its call begins now, and does the work of `others`."""
        self.others = others
        self.begun = time.monotonic()
        self._began = time.perf_counter()

    def end(self) -> None:
        """Its call has ended."""
        self.seconds = time.perf_counter() - self._began
        for other in self.others:
            other.begun, other.error = self.begun, self.error


class Jobs(ABC, Generic[J]):
    """Jobs on their way: urgent ones first, at most `threads` at once, of the others at most `threads - 1` (but one)
    and no more than `patient`. Where they run is the affair of who derives from this.

    Threads: one thread, the owner's, makes all calls; none of them waits, `close` excepted.
    """

    def __init__(self, threads: int, patient: int | None = None) -> None:
        if threads < 1:
            raise ValueError(f"a transfer pool needs at least one thread, not {threads}")
        self.threads = threads
        self.bell = Bell()
        self.patient_threads = min(max(1, threads - 1), patient or threads)
        self._urgent: deque[J] = deque()
        self._patient: deque[J] = deque()
        self._patient_running = 0
        self._done: deque[J] = deque()
        self._closing = False

    def submit(self, job: J) -> None:
        """Queue a job. After `close` it is cancelled at once."""
        if self._closing:
            job.claim()
            return
        (self._urgent if job.urgent else self._patient).append(job)
        self._awake()

    def collect(self) -> Iterator[J]:
        """Jobs that ended, in the order in which they did; who stops early gets the rest with the next call."""
        while self._done:
            yield self._done.popleft()

    def cancel(self, job: J) -> bool:
        """Keep a job from starting; False when it runs or has ended."""
        return job.claim()

    def close(self, timeout: float) -> bool:
        """Cancel what is queued and wait up to `timeout` seconds for what runs to end; True if all of it did.

        Jobs that ended meanwhile are still collected. What hangs in a backend stays behind.
        """
        self._closing = True
        for job in (*self._urgent, *self._patient):
            job.claim()
        return self._wait(timeout)

    @abstractmethod
    def _awake(self) -> None:
        """A job was queued."""

    @abstractmethod
    def _wait(self, timeout: float) -> bool:
        """For what runs to end, nothing new begins; False if it did not within `timeout` seconds."""

    def _next(self) -> list[J]:
        """The next job, claimed, with those behind it that it takes along; none where none may begin. By one thread at
        a time, like `_ended`.
        """
        while self._urgent:
            job = self._urgent.popleft()
            if job.claim():
                return [job]
        while self._patient and self._patient_running < self.patient_threads:
            job = self._patient.popleft()
            if job.claim():
                self._patient_running += 1
                return [job, *self._companions(job)]
        return []

    def _companions(self, job: J) -> list[J]:
        companions: list[J] = []
        while self._patient and job.takes_along(companions, self._patient[0]):
            another = self._patient.popleft()
            if another.claim():
                companions.append(another)
        return companions

    def _ended(self, job: J) -> None:
        if not job.urgent:
            self._patient_running -= 1


class TransferPool(Jobs[J]):
    """`threads` daemon threads that run jobs. One stuck in a backend stays behind."""

    def __init__(self, threads: int, name: str, patient: int | None = None) -> None:
        super().__init__(threads, patient)
        self._taking = threading.Lock()  # between the pool's threads only
        # A token says "look at the queues". A queue of the C kind, and no lock that the owner shares: a thread that
        # loses the GIL while it holds one would keep the owner waiting, and then in line behind every other thread.
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _awake(self) -> None:
        self._tokens.put(None)

    def _wait(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        for _ in self._threads:
            self._tokens.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        _yield_to_the_scheduler()
        while not self._closing:
            self._tokens.get()
            while jobs := self._take():
                jobs[0].run(jobs[1:])
                self._done.extend(jobs)
                if not jobs[0].urgent:
                    with self._taking:
                        self._ended(jobs[0])
                self.bell.ring()
                del jobs  # an idle thread keeps no buffer alive

    def _take(self) -> list[J]:
        with self._taking:
            return self._next()


def _yield_to_the_scheduler() -> None:
    """Make this thread one that waits for a CPU when the scheduler's thread wants it.

    Copies and checksums need no GIL, but they need a CPU: on a machine with few, the scheduler's thread otherwise
    waits for the end of a transfer's time slice whenever it wakes up.
    """
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: threads have no niceness outside Linux
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
