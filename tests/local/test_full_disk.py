"""`file://` on a disk that is full, on a small ext4 of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from file_store_helpers import (
    FULL,
    HIT,
    MIB,
    MISS,
    SPACE,
    STORED,
    get,
    key,
    put,
)

from kvstore import (
    open_store,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def small_ext4(tmp_path: Path) -> Iterator[Path]:
    """An empty ext4 of 16 MiB in a file, with O_DIRECT."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("making a small ext4 takes root and mkfs.ext4")
    image, path = tmp_path / "image", tmp_path / "ext4"
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(16 * MIB)
    subprocess.run(
        ["mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", "-N", "4096", "-O", "^has_journal", image],
        check=True,
        capture_output=True,
    )
    done = subprocess.run(["mount", "-o", "loop", image, path], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", path], check=True, capture_output=True)


class TestFullDisk:
    def test_a_disk_that_is_full_refuses_blocks_one_by_one_and_recovers(self, small_ext4: Path) -> None:
        with open_store(f"file://{small_ext4}/tier") as store:
            outcomes = [put(store, [number])[0] for number in range(300)]
            stored = [number for number, outcome in enumerate(outcomes) if outcome is STORED]
            assert set(outcomes) == {STORED, FULL}
            assert len(stored) > 50
            assert get(store, stored) == [HIT] * len(stored)
            assert (store.usage().blocks, store.usage().reserved) == (len(stored), 0)
            assert not list((small_ext4 / "tier").rglob("draft-*"))
            assert store.delete_many(SPACE, [key(n) for n in stored[:20]]) == [True] * 20
            assert put(store, stored[:10]) == [STORED] * 10

    def test_a_cap_beyond_the_disk_evicts_when_the_disk_is_full(self, small_ext4: Path) -> None:
        with open_store(f"file://{small_ext4}/tier", capacity=64 * MIB) as store:
            assert {outcome for number in range(300) for outcome in put(store, [number])} == {STORED}
            assert get(store, [0, 298, 299]) == [MISS, HIT, HIT]

    def test_a_cap_below_the_disk_is_never_overshot(self, small_ext4: Path) -> None:
        """Field report 1: thirty-two writers, bytes in flight included."""
        cap = 8 * MIB
        stop, worst = threading.Event(), [0]

        def watch() -> None:
            empty = used_on(small_ext4)
            while not stop.is_set():
                worst[0] = max(worst[0], used_on(small_ext4) - empty)

        watcher = threading.Thread(target=watch)
        with open_store(f"file://{small_ext4}/tier", capacity=cap) as store, ThreadPoolExecutor(32) as pool:
            watcher.start()
            jobs = [pool.submit(put, store, range(n * 5, n * 5 + 5)) for n in range(64)]
            outcomes = [outcome for job in jobs for outcome in job.result()]
            outcomes += [
                outcome for n in range(400, 700) for outcome in put(store, [n])
            ]  # little is reserved: to the brim
            stop.set()
            watcher.join()
            assert outcomes.count(STORED) > 500
            assert worst[0] <= cap
            assert worst[0] > 0.8 * cap  # each name of a folder's document counts, and is but one file for the disk


def used_on(path: Path) -> int:
    status = os.statvfs(path)
    return (status.f_blocks - status.f_bfree) * status.f_frsize
