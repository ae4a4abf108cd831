"""Locks of blocks' names: one holder at a time, and none that died."""

from __future__ import annotations

import os
import threading
import time
from multiprocessing import get_context
from pathlib import Path

from kvstore_zarr.names import NameLocks


def test_one_holder_at_a_time_and_other_names_are_free(tmp_path: Path) -> None:
    locks, events = NameLocks(tmp_path / "names", 0o600), list[str]()

    def hold(name: bytes, label: str) -> None:
        with locks.hold([name]):
            events.append(label)

    with locks.hold([b"a" * 40, b"b" * 40]):
        waiting = threading.Thread(target=hold, args=(b"b" * 40, "b"))
        free = threading.Thread(target=hold, args=(b"c" * 40, "c"))
        waiting.start()
        free.start()
        free.join()
        time.sleep(0.05)
        assert events == ["c"]
    waiting.join()
    assert events == ["c", "b"]


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    locks = NameLocks(tmp_path / "names", 0o600)
    child = get_context("spawn").Process(target=hold_and_die, args=(str(tmp_path / "names"),))
    child.start()
    child.join()
    assert child.exitcode == -9
    with locks.hold([b"a" * 40]):
        pass


def hold_and_die(path: str) -> None:
    """Die with a name's lock held."""
    with NameLocks(Path(path), 0o600).hold([b"a" * 40]):
        os.kill(os.getpid(), 9)
