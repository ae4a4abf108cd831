"""What GETs and a busy Python thread cost each other: through a tier, and through bare obstore, in one run.

    python benchmarks/object_stores.py          ends with it

The thread does what a scheduler does, Python without a pause and now and then a look at what has ended, and wants the
GIL all the time; transfers want it at each of their steps, unless they have a process of their own. Both lose; how much
a tier may cost is measured against the bare client, which has the fewest steps.
"""

from __future__ import annotations

import secrets
import statistics
import time
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from kvstore.bench.clients import BareObstore
from kvstore.bench.tier import TierApart, TierUnderTest
from kvstore.bench.workload import page_aligned_rows
from kvstore.types import BlockKey
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvstore.bench.contestant import Contestant

SECONDS = 1.0
ROUNDS = 5
POLL_S = 3e-4


@dataclass
class Kept:
    """What was left of a speed beside the other one: parts of 1, one for each round."""

    transfers: list[float]
    thread: list[float]


def busily() -> int:
    """About a millisecond of Python, as between two looks of a scheduler; how many steps."""
    number = 0
    for _ in range(30_000):
        number += 1
    return number


def restfully() -> int:
    """None."""
    time.sleep(POLL_S)
    return 0


def gets(
    contestant: Contestant, keys: list[BlockKey], rows: NDArray[np.uint8], between: Callable[[], int]
) -> tuple[float, float]:
    """GETs of whole blocks for a while, one under way into each of `rows`, by half as many threads, asked for by one
    that does something between two looks at what has ended: bytes a second, and steps that it made a second.
    """
    traffic, names = contestant.traffic(rows, len(rows) // 2), cycle(keys)
    blocks = steps = 0
    began = time.perf_counter()
    for job in range(len(rows)):
        traffic.submit(job, [next(names)], rows[job : job + 1], is_store=False)
    while time.perf_counter() < began + SECONDS:
        steps += between()
        for job in traffic.ended():
            blocks += 1
            traffic.submit(job, [next(names)], rows[job : job + 1], is_store=False)
    seconds = time.perf_counter() - began
    left = len(rows)
    while left:
        time.sleep(POLL_S)
        left -= len(traffic.ended())
    traffic.close()
    return blocks * rows.shape[1] / seconds, steps / seconds


def idle_steps() -> float:
    """Steps a second of a thread that has nothing else to do."""
    steps, began = 0, time.perf_counter()
    while time.perf_counter() < began + SECONDS / 2:
        steps += busily()
    return steps / (time.perf_counter() - began)


def compare(url: str, nbytes: int, threads: int) -> None:
    """Print one line for blocks of this size and so many threads: what is kept depends on how much is under way."""
    parsed = TierURL.parse(url)
    tier = TierUnderTest(parsed, nbytes, 16 * nbytes)
    contestants = [tier, TierApart(tier), BareObstore(parsed)]
    source = memoryview(np.frombuffer(np.random.default_rng().bytes(nbytes), np.uint8))
    keys = [BlockKey(secrets.token_bytes(32)) for _ in range(16)]
    rows = page_aligned_rows(2 * threads, nbytes, shared=True)
    kept = {contestant.name: Kept([], []) for contestant in contestants}
    try:
        for contestant in (tier, contestants[-1]):
            contestant.store(keys, [source] * len(keys))
        for _ in range(ROUNDS):
            for contestant in contestants:
                idle, (alone, _) = idle_steps(), gets(contestant, keys, rows, restfully)
                beside, steps = gets(contestant, keys, rows, busily)
                kept[contestant.name].transfers.append(beside / alone)
                kept[contestant.name].thread.append(steps / idle)
    finally:
        for contestant in reversed(contestants):
            contestant.close()
    shares = {name: (statistics.median(one.transfers), statistics.median(one.thread)) for name, one in kept.items()}
    print(
        f"GET beside a busy Python thread, {nbytes >> 20} MiB, {threads} threads: "
        + "; ".join(f"{name} keeps {gets:.0%}, the thread {thread:.0%}" for name, (gets, thread) in shares.items()),
        flush=True,
    )
