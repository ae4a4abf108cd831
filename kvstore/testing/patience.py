"""How long tests wait: what is healthy may take as long as a busy machine makes it take, and what hangs has no end.

A test that gives something a short time-out does so for the sake of a fault. What it does before the fault and after it
is not to meet that time-out only because others have the processor: there it asks again (`patiently`), or waits until
what it is about has come (`wait_for`). A bound that is to be exact is kept at least once in several tries, or holds for
the time without the waits for a processor (`without_processor_s`); else it is a little loose (`within`).
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvstore.errors import StoreOpenError, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["GRACE", "PATIENCE", "patiently", "wait_for", "within", "without_processor_s"]

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds after which a test that waits has failed; far beyond what anything here takes."""
GRACE = 3.0
"""Seconds that what is bounded in time may take longer on a machine that is busy with others."""


def wait_for(condition: Callable[[], T], seconds: float = PATIENCE, pause: float = 0.005) -> T:
    """Ask every `pause` seconds until the answer is true, and return it. `AssertionError` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(pause)
    return answer


def patiently(step: Callable[[], T], timeout: float) -> T:
    """What `step` returns: a call to a store of that `timeout` (s), or its opening, while its server is well.

    One that was given up for being late is made again, until `PATIENCE` is over. An error that came sooner than any
    time-out of the store's (a connection is given half of an attempt, which is three quarters of the time) is raised:
    no machine is to blame for that.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        began = time.monotonic()
        try:
            return step()
        except (StoreOpenError, TierUnavailable):
            now = time.monotonic()
            if now - began < timeout / 3 or now > deadline:
                raise


@contextmanager
def within(seconds: float) -> Generator[None]:
    """What is done in here ends after `seconds`, or `GRACE` later where others have the processor."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds + GRACE, f"took {took:.1f} s, where {seconds} s are the bound"


def without_processor_s() -> float:
    """Seconds that this thread has been ready to run, and others ran; what two calls differ by is nobody's wait for
    anything. 0 where the kernel does not say.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
