"""Scratch blocks there and back: stored, loaded, compared, timed, removed. Only where writing was asked for."""

from __future__ import annotations

import mmap
import secrets
import time
from typing import TYPE_CHECKING

import numpy as np

from kvstore.bench.tier import BENCH_MODEL, TierUnderTest
from kvstore.doctor.finding import Finding, ok, problem, warning
from kvstore.errors import CapacityMismatchError, ConfigurationError, KVStoreError
from kvstore.inspect.opening import with_own_capacity
from kvstore.interrupts import uninterrupted
from kvstore.types import BlockKey

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvstore.url import TierURL

__all__ = ["BLOCKS", "BLOCK_BYTES", "trial"]

BLOCK_BYTES = 1 << 20
BLOCKS = 16
"""Enough for a figure that means something, few enough for a tier of some tens of megabytes."""

ROUND_TRIP = "round trip"
OWN_NAME = "doctor"


def trial(url: TierURL, *, beside_others: bool) -> Iterator[Finding]:
    """Move `BLOCKS` blocks of `BLOCK_BYTES` random bytes through the tier at `url`, one after the other.

    `beside_others`: a tier is there already. It keeps the scratch namespace's manifest, which no verb removes.
    """
    try:
        with uninterrupted():
            tier = TierUnderTest(with_own_capacity(url)[0], BLOCK_BYTES, BLOCKS * BLOCK_BYTES, OWN_NAME)
        with tier:
            yield _there_and_back(tier)
        yield from (warning(ROUND_TRIP, note, "close it there first") for note in tier.notes if "stays" in note)
    except (ConfigurationError, CapacityMismatchError) as error:
        yield warning(ROUND_TRIP, f"not tried: {error}", "try it with an empty location on the same disk")
    except (KVStoreError, OSError) as error:
        yield problem(ROUND_TRIP, str(error))
    else:
        if beside_others:
            yield ok(ROUND_TRIP, f"an empty namespace, {BENCH_MODEL} {OWN_NAME}, stays listed in the tier")


def _there_and_back(tier: TierUnderTest) -> Finding:
    keys = [BlockKey(secrets.token_bytes(32)) for _ in range(BLOCKS)]
    sources = [_random_block() for _ in keys]
    into = np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8)
    begin = time.perf_counter()
    for key, source in zip(keys, sources, strict=True):
        tier.store([key], [source.data])
    stored = time.perf_counter() - begin
    with tier.cooling():
        pass  # read by a tier that was opened since
    loaded, wrong = 0.0, 0
    for key, source in zip(keys, sources, strict=True):
        begin = time.perf_counter()
        tier.load([key], [into.data])
        loaded += time.perf_counter() - begin
        wrong += not np.array_equal(into, source)
    if wrong:
        return problem(
            ROUND_TRIP, f"{wrong} of {BLOCKS} blocks came back with other bytes", "look for a failing device"
        )
    rate = BLOCKS * BLOCK_BYTES / 1e6
    how = tier.notes[0].removeprefix("kvstore: ")
    return ok(
        ROUND_TRIP,
        f"{BLOCKS} blocks of 1 MiB, one at a time ({how}): stored at {rate / stored:.0f} MB/s, loaded at"
        f" {rate / loaded:.0f} MB/s, bytes equal, removed again; `kvstore bench` measures many threads and cold reads",
    )


def _random_block() -> NDArray[np.uint8]:
    block = np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8)
    block[:] = np.frombuffer(secrets.token_bytes(BLOCK_BYTES), np.uint8)
    return block
