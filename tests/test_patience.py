"""How the suite waits, and that what is shipped does not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvstore.errors import TierUnavailable
from kvstore.testing import patience
from kvstore.testing.patience import patiently, wait_for, within, without_processor_s

DEFAULTS = """
import inspect
from kvstore.objects.settings import TIMEOUT
from kvstore.tiering import SecondaryTier
from kvstore.vllm.options import LOOKUP_TIMEOUT
print(TIMEOUT.default, inspect.signature(SecondaryTier).parameters["lookup_timeout"].default, LOOKUP_TIMEOUT.default)
"""


def test_an_engine_waits_seconds_and_not_as_long_as_the_suite() -> None:
    """Of an object store an operation ends within five, and an unanswered lookup is a miss after one."""
    done = subprocess.run([sys.executable, "-c", DEFAULTS], capture_output=True, text=True, check=True, timeout=60)
    operation, lookup, lookup_of_vllm = map(float, done.stdout.split())
    assert operation < 5
    assert lookup == lookup_of_vllm == 1


class Late:
    """A store's call that is late so many times, by its own time-out."""

    def __init__(self, times: int, seconds: float) -> None:
        self.left, self.seconds = times, seconds

    def __call__(self) -> str:
        if self.left:
            self.left -= 1
            time.sleep(self.seconds)
            raise TierUnavailable("no answer in time")
        return "done"


def test_what_was_late_is_asked_again_and_what_failed_at_once_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert patiently(Late(2, 0.1), 0.1) == "done"
    quick = Late(1, 0.0)
    with pytest.raises(TierUnavailable):
        patiently(quick, 0.1)
    assert not quick.left
    monkeypatch.setattr(patience, "PATIENCE", 0.15)
    with pytest.raises(TierUnavailable):
        patiently(Late(100, 0.1), 0.1)


def test_what_takes_too_long_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "GRACE", 0.0)
    with within(60.0):
        pass
    with pytest.raises(AssertionError, match=r"0\.05 s are the bound"), within(0.05):
        time.sleep(0.1)
    with pytest.raises(AssertionError, match=r"not within 0\.05 s"):
        wait_for(lambda: False, 0.05)
    assert wait_for(lambda: "so it is") == "so it is"


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(),
    reason="the kernel does not say how long a thread was ready to run",
)
def test_a_wait_for_a_processor_is_told_from_a_wait_for_anything_else() -> None:
    before = without_processor_s()
    threading.Event().wait(0.3)
    assert without_processor_s() - before < 0.15
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        wait_for(lambda: _ready_while_others_run() > 0.01)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _ready_while_others_run() -> float:
    before, end = without_processor_s(), time.monotonic() + 0.1
    while time.monotonic() < end:
        pass
    return without_processor_s() - before
