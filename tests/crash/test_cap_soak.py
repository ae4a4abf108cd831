"""Field report 26: a stream of prefixes that never come again plateaus at the cap, and is as fast at its end.

Thirty-two writers in eight processes, a cap of 256 MiB, and blocks that nobody has stored before. An onlooker in a
process of its own, which knows nothing of kvstore, sums up the tree every ten milliseconds.

    make soak TESTS=tests/crash/test_cap_soak.py ARGS=-s      20 GiB through each local tier, with its numbers
    KVSTORE_SOAK_GIB=1 make soak ARGS=…                   less of it; how fast the end was is not judged then
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING

import numpy as np
import observer
import pytest

from kvstore import BlockKey, BlockLayout, BlockWrite, Namespace, PutOutcome, open_store

if TYPE_CHECKING:
    from ctypes import Array, c_int64
    from pathlib import Path

MIB = 1 << 20
CAPACITY = 256 * MIB
PROCESSES, THREADS = 8, 4
BLOCK = 512 << 10
TOGETHER = 2
VOLUME_GIB = int(os.environ.get("KVSTORE_SOAK_GIB", "20"))
SPACE = Namespace("soak", "revision-1", (BlockLayout.opaque(BLOCK),), block_tokens=16)
SPAWN = get_context("spawn")

COUNTS = ("stored", "full", "other")


def write(url: str, seat: int, volume: int, board: Array[c_int64], gate: Array[c_int64]) -> None:
    """One process: its threads store new blocks until `volume` bytes of each are stored, and count outcomes."""
    data = np.random.default_rng(seat).integers(0, 256, BLOCK, np.uint8)

    def stream(thread: int) -> None:
        mine = (seat * THREADS + thread) * len(COUNTS)
        for number in range(1 << 60):
            if board[mine] >= volume:
                return
            names = [hashlib.sha256(f"{seat} {thread} {number} {n}".encode()).digest() for n in range(TOGETHER)]
            for outcome in store.put_many(SPACE, [BlockWrite(BlockKey(name), data.data) for name in names]):
                kind = {PutOutcome.STORED: 0, PutOutcome.FULL: 1}.get(outcome, 2)
                board[mine + kind] += BLOCK if kind == 0 else 1

    with open_store(url) as store:
        gate[seat] = 1
        while not gate[PROCESSES]:
            time.sleep(0.01)
        threads = [threading.Thread(target=stream, args=(thread,)) for thread in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gate[seat] = 2
        while gate[PROCESSES] < 2:  # so that closing is no part of what is measured
            time.sleep(0.01)


@dataclass
class Course:
    """How the stored bytes grew: when each quarter was reached, in seconds from the start."""

    volume: int
    board: Array[c_int64]
    gate: Array[c_int64]

    def watched(self) -> list[float]:
        while 0 in self.gate[:PROCESSES]:
            time.sleep(0.01)
        self.gate[PROCESSES] = 1
        began, reached = time.monotonic(), [0.0]
        while len(reached) < 5:
            while sum(self.board[:: len(COUNTS)]) >= self.volume * len(reached) // 4 and len(reached) < 5:
                reached.append(time.monotonic() - began)
            time.sleep(0.01)
        while 1 in self.gate[:PROCESSES]:
            time.sleep(0.01)
        self.gate[PROCESSES] = 2
        return reached

    def count(self, name: str) -> int:
        return sum(self.board[COUNTS.index(name) :: len(COUNTS)])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_new_blocks_without_end_plateau_at_the_cap(scheme: str, tmp_path: Path) -> None:
    root, volume = tmp_path / "tier", VOLUME_GIB << 30
    url = f"{scheme}://{root}?capacity={CAPACITY}"
    with open_store(url):
        pass
    seen = RawArray("q", len(observer.FIELDS))
    onlooker = SPAWN.Process(target=observer.observe, args=(root, CAPACITY, False, seen))
    onlooker.start()
    course = Course(volume, RawArray("q", PROCESSES * THREADS * len(COUNTS)), RawArray("q", PROCESSES + 1))
    each = -(-volume // (PROCESSES * THREADS))
    writers = [
        SPAWN.Process(target=write, args=(url, seat, each, course.board, course.gate)) for seat in range(PROCESSES)
    ]
    for writer in writers:
        writer.start()
    reached = course.watched()
    full_size = observer.occupied(root)
    for writer in writers:
        writer.join()
    seen[0] = 1
    onlooker.join()
    found = observer.read_observation(seen, own_disk=False)
    speeds = [volume / 4 / MIB / (later - earlier) for earlier, later in pairwise(reached)]
    print(
        f"\n{scheme}://: {course.count('stored') / 2**30:.1f} GiB in {reached[-1]:.0f} s,"
        f" {', '.join(f'{speed:.0f}' for speed in speeds)} MiB/s by quarters;"
        f" {course.count('full')} blocks found no room; seen at most {found.walk_max / MIB:.1f} MiB in {found.walks}"
        f" looks, {found.walks_over} above the cap of {CAPACITY / MIB:.0f}; {full_size / MIB:.1f} MiB at the end",
        file=sys.stderr,
    )
    assert found.walks_over == 0, found
    assert found.walks > 100
    assert course.count("other") == 0
    assert course.count("full") <= volume // BLOCK // 50
    assert full_size >= 0.7 * CAPACITY
    with open_store(url) as store:
        infos, usage = list(store.scan(SPACE)), store.usage()
        assert (usage.blocks, usage.used) == (len(infos), sum(info.stored_bytes for info in infos))
        assert usage.reserved == 0
        if scheme == "file":
            files = [path for path in (root / SPACE.name).rglob("*.0") if path.is_file()]
            assert sum(path.stat().st_blocks * 512 for path in files) == usage.used
            assert len(files) == usage.blocks
    assert observer.occupied(root) <= usage.used + usage.overhead <= CAPACITY
    if VOLUME_GIB >= 20:
        assert speeds[-1] >= 0.8 * speeds[0]
