"""What GETs and a busy Python thread cost each other: through a tier, and through bare obstore, in one run.

    python benchmarks/object_stores.py          ends with it

The thread does what a scheduler does, Python without a pause, and wants the GIL all the time; transfers want it at each
of their steps. Both lose; how much a tier may cost is measured against the bare client, which has the fewest steps.
"""

from __future__ import annotations

import secrets
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.bench.clients import BareObstore
from kvstore.bench.tier import TierUnderTest
from kvstore.types import BlockKey
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.bench.contestant import Contestant

THREADS = 4
SECONDS = 1.0
ROUNDS = 5


@dataclass
class Kept:
    """What was left of a speed beside the other one: parts of 1, one for each round."""

    transfers: list[float]
    thread: list[float]


def counting(over: threading.Event, counted: list[int]) -> None:
    """Python without a pause; how far it came."""
    number = 0
    while not over.is_set():
        for _ in range(1000):
            number += 1
    counted.append(number)


def steps(work: Callable[[], object]) -> float:
    """How many steps a second the busy thread makes while `work` is done."""
    over, counted = threading.Event(), list[int]()
    thread = threading.Thread(target=counting, args=(over, counted))
    began = time.perf_counter()
    thread.start()
    work()
    over.set()
    thread.join()
    return counted[0] / (time.perf_counter() - began)


def gets(contestant: Contestant, keys: list[BlockKey], nbytes: int) -> float:
    """GETs of whole blocks by all threads for a while; bytes a second."""
    until = time.perf_counter() + SECONDS

    def load(number: int) -> int:
        target, done = memoryview(np.ones(nbytes, np.uint8)), 0
        while time.perf_counter() < until:
            contestant.load([keys[(number + done * THREADS) % len(keys)]], [target])
            done += 1
        return done

    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        blocks = sum(pool.map(load, range(THREADS)))
    return blocks * nbytes / (time.perf_counter() - began)


def compare(url: str, nbytes: int) -> None:
    """Print one line for blocks of this size."""
    parsed = TierURL.parse(url)
    contestants = [TierUnderTest(parsed, nbytes, 16 * nbytes), BareObstore(parsed)]
    source = memoryview(np.frombuffer(np.random.default_rng().bytes(nbytes), np.uint8))
    keys = [BlockKey(secrets.token_bytes(32)) for _ in range(16)]
    kept = {contestant.name: Kept([], []) for contestant in contestants}
    try:
        for contestant in contestants:
            contestant.store(keys, [source] * len(keys))
        for _ in range(ROUNDS):
            for contestant in contestants:
                alone, idle = gets(contestant, keys, nbytes), steps(lambda: time.sleep(SECONDS / 2))
                rates: list[float] = []
                beside = steps(lambda one=contestant, into=rates: into.append(gets(one, keys, nbytes)))
                kept[contestant.name].transfers.append(rates[0] / alone)
                kept[contestant.name].thread.append(beside / idle)
    finally:
        for contestant in contestants:
            contestant.close()
    shares = {name: (statistics.median(one.transfers), statistics.median(one.thread)) for name, one in kept.items()}
    print(
        f"GET beside a busy Python thread, {nbytes >> 20} MiB: "
        + "; ".join(f"{name} keeps {gets:.0%}, the thread {thread:.0%}" for name, (gets, thread) in shares.items()),
        flush=True,
    )
