"""The I/O pool: urgent work overtakes the rest, and nothing a job does is the submitter's problem."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from kvstore.testing.patience import PATIENCE, wait_for, within
from kvstore.tiering.pool import Job, TransferPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Call(Job):
    """A job that makes one call."""

    def __init__(self, call: Callable[[], object] = lambda: None, *, urgent: bool = False) -> None:
        super().__init__()
        self.call = call
        self.urgent = urgent

    def work(self) -> None:
        self.call()


Pool = TransferPool[Call]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What jobs wait at; open at the end of the test, whatever happens."""
    event = threading.Event()
    yield event
    event.set()


def ended(pool: Pool, count: int) -> list[Call]:
    jobs: list[Call] = []
    deadline = time.monotonic() + PATIENCE
    while len(jobs) < count:
        assert time.monotonic() < deadline, f"{len(jobs)} of {count} jobs ended"
        jobs += pool.collect()
        time.sleep(0.001)
    return jobs


def test_every_job_runs_once_and_is_collected_once() -> None:
    pool, ran = Pool(3, "test"), []
    jobs = [Call(lambda number=number: ran.append(number)) for number in range(200)]
    for job in jobs:
        pool.submit(job)
    assert set(ended(pool, 200)) == set(jobs)
    assert sorted(ran) == list(range(200))
    assert list(pool.collect()) == []
    assert pool.close(PATIENCE)


def test_loads_overtake_stores_that_were_queued_before_them(gate: threading.Event) -> None:
    pool, order = Pool(1, "test"), []
    pool.submit(Call(gate.wait))
    for number in range(5):
        pool.submit(Call(lambda number=number: order.append(f"store {number}")))
    for number in range(2):
        pool.submit(Call(lambda number=number: order.append(f"load {number}"), urgent=True))
    gate.set()
    ended(pool, 8)
    assert order == ["load 0", "load 1", "store 0", "store 1", "store 2", "store 3", "store 4"]
    assert pool.close(PATIENCE)


def test_a_load_never_waits_for_running_stores(gate: threading.Event) -> None:
    pool = Pool(4, "test")
    stores = [Call(gate.wait) for _ in range(20)]
    for job in stores:
        pool.submit(job)
    wait_for(lambda: sum(job.claim.taken for job in stores) == 3)
    load = Call(urgent=True)
    pool.submit(load)
    assert ended(pool, 1) == [load]
    assert sum(job.claim.taken for job in stores) == 3
    gate.set()
    assert len(ended(pool, 20)) == 20, "the threads that were kept from stores went on with them"
    assert pool.close(PATIENCE)


def test_whatever_a_job_raises_is_kept_and_its_thread_lives_on() -> None:
    pool = Pool(1, "test")
    errors = [ValueError("no"), SystemExit(3), KeyboardInterrupt()]

    def throw(error: BaseException) -> None:
        raise error

    for error in errors:
        pool.submit(Call(lambda error=error: throw(error)))
    pool.submit(Call())
    assert [job.error for job in ended(pool, 4)] == [*errors, None]
    assert pool.close(PATIENCE)


def test_a_cancelled_job_never_starts_and_a_started_one_cannot_be_cancelled(gate: threading.Event) -> None:
    pool, ran = Pool(1, "test"), []
    first, second, third = Call(gate.wait), Call(lambda: ran.append("second")), Call(lambda: ran.append("third"))
    for job in (first, second, third):
        pool.submit(job)
    wait_for(lambda: first.claim.taken)
    assert not pool.cancel(first)
    assert pool.cancel(second)
    assert not pool.cancel(second)
    gate.set()
    assert ended(pool, 2) == [first, third]
    assert ran == ["third"]
    assert not pool.cancel(third)
    assert pool.close(PATIENCE)


def test_closing_is_bounded_and_drops_what_was_queued_behind_a_job_that_hangs(gate: threading.Event) -> None:
    pool, ran = Pool(2, "test"), []
    hung = [Call(gate.wait, urgent=True) for _ in range(2)]
    for job in hung:
        pool.submit(job)
    wait_for(lambda: all(job.claim.taken for job in hung))
    queued = Call(lambda: ran.append("queued"))
    pool.submit(queued)
    with within(0.2):
        assert not pool.close(0.2)
    gate.set()
    assert set(ended(pool, 2)) == set(hung), "a job that ends after all is still reported"
    assert pool.close(PATIENCE)
    late = Call(lambda: ran.append("late"))
    pool.submit(late)
    assert not queued.claim()
    assert not late.claim()
    assert ran == []


def test_a_job_that_hangs_does_not_keep_the_interpreter_from_ending() -> None:
    code = """
import threading
from kvstore.tiering.pool import Job, TransferPool
class Hang(Job):
    def work(self): print("hangs", flush=True); started.set(); threading.Event().wait()
started = threading.Event()
TransferPool(2, "test").submit(Hang())
started.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hangs\n", "")


def test_a_pool_without_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one thread"):
        Pool(0, "test")
