"""Tiers for the model of the manager: each call goes through at once or is parked, with a fault that a rule chose.

Time is a `Clock` that passes only when somebody says so.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from tiering_helpers import content, keys

from kvstore import BlockLayout, GetOutcome, Namespace, PutOutcome, open_store
from kvstore.layout import as_bytes
from kvstore.testing.faults import Call, FaultyStore, failing, honest, lying, truncating
from kvstore.tiering import SecondaryTier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvstore import BlockKey
    from kvstore.testing.faults import Fault
    from kvstore.tiering.jobs import TierJob

BLOCK = 256
SPACE = Namespace("model", "1", (BlockLayout.opaque(BLOCK),), block_tokens=16)
PROMPT = keys(24)
TIMED = ("blocking", "breaker", "manager", "questions", "secondary", "transit", "pool")
TIERS = 3
HANGS = 2  # the tier that can hang on a network
LOOKUP_TIMEOUT, LOAD_TIMEOUT, SLOT_TIMEOUT, MISS_AGE, HOLD = 0.2, 0.5, 0.3, 0.2, 0.1
PAUSE = 0.1  # so that no pause is longer than 3.2 s


@cache
def bytes_of(key: BlockKey) -> NDArray[np.uint8]:
    return content(key, BLOCK)


def address(memory: Any) -> int:
    return as_bytes(memory).ctypes.data


class Clock:
    """In place of the `time` module: seconds that pass only when somebody sleeps."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.now = 1000.0
        self._meanwhile = meanwhile

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._meanwhile()


# What can become of a call; chosen when it begins, or when it is let go.
def short(call: Call) -> Any:
    """Answers about one block less than it was asked."""
    return call.answer()[1:]


def scribbling(call: Call) -> Any:
    """Writes into its buffers, and then fails."""
    for block in call.blocks:
        as_bytes(block.into)[:] = 0xEE
    return failing()(call)


def half_corrupt(call: Call) -> list[GetOutcome]:
    """Every other block is damaged, and removed, as the contract has it."""
    outcomes: list[GetOutcome] = call.answer()
    for number, block in enumerate(call.blocks):
        if number % 2 == 0 and outcomes[number] is GetOutcome.HIT:
            outcomes[number] = GetOutcome.CORRUPT
            as_bytes(block.into)[:9] = 0xEE
    return outcomes


BUG = failing(RuntimeError("bug"))
FAULTS: dict[str, list[Fault]] = {
    "contains": [*[honest] * 6, failing(), BUG, lying(True), lying(False), short],
    "get": [
        honest,
        honest,
        honest,
        honest,
        honest,
        failing(),
        BUG,
        lying(GetOutcome.MISS),
        half_corrupt,
        truncating(7),
        scribbling,
        short,
    ],
    "put": [*[honest] * 6, failing(), BUG, lying(PutOutcome.FULL), lying(PutOutcome.FAILED), short],
    "touch": [honest, failing()],
}


@dataclass(eq=False)
class Parked:
    """A call that waits for a rule to let it go."""

    call: Call
    fate: Fault = honest
    gone: threading.Event = field(default_factory=threading.Event)


class Tier:
    """One tier, and what it must have."""

    def __init__(self, number: int) -> None:
        self.store = FaultyStore(open_store(f"memory://model-{number}"), can_hang=number == HANGS)
        self.store.plan = dict.fromkeys(FAULTS, self.meet)
        self.tier = SecondaryTier(
            self.store,
            SPACE,
            threads=2,
            backlog_bytes=6 * BLOCK,
            lookup_timeout=LOOKUP_TIMEOUT,
            load_timeout=LOAD_TIMEOUT,
            staging_bytes=4 * 4096,
            pause=PAUSE,
        )
        self.modes: dict[str, Fault | None] = dict.fromkeys(FAULTS, honest)  # None: park
        self.parked: list[Parked] = []
        self.has: set[BlockKey] = set()
        self.wrong: list[str] = []

    def meet(self, call: Call) -> Any:
        """On a transfer thread: what the plan of the store does with every call."""
        self.verify(call)
        fate = self.modes[call.verb]
        if fate is None:
            parked = Parked(call)
            self.parked.append(parked)
            parked.gone.wait()
            fate = parked.fate
            self.verify(call)
        return fate(Call(call.verb, call.blocks, lambda blocks: self.ask(call, blocks)))

    def ask(self, call: Call, blocks: Sequence[Any]) -> Any:
        outcomes = call.ask(blocks)
        if call.verb == "put":
            self.has.update(block.key for block, outcome in zip(blocks, outcomes, strict=True) if outcome.present)
        return outcomes

    def verify(self, call: Call) -> None:
        """A put is handed the right bytes, from its first moment to its last."""
        for block in call.blocks if call.verb == "put" else ():
            if not np.array_equal(as_bytes(block.data), bytes_of(block.key)):
                self.wrong.append(f"{self.store}: {block.key} goes out with wrong bytes")

    def let_go(self, parked: Parked, fate: Fault) -> None:
        self.parked.remove(parked)
        parked.fate = fate
        parked.gone.set()

    def settled(self) -> bool:
        """Every thread is idle or parked, and nothing that could run is queued."""
        tier, pool = self.tier, self.tier._pool
        asking = tier._questions._asking
        asking_runs = asking is not None and asking not in tier._questions._thread._done
        ended = set(pool._done)
        under_way: list[TierJob] = [*tier._transit.live, *tier._hints.under_way.values()]
        if tier._probe is not None:
            under_way.append(tier._probe)
        waiting = {job for job in tier._staging.waiting if not job.claim.taken} if tier._staging else set()
        under_way = [job for job in under_way if job not in ended and job not in waiting]
        running = [job for job in under_way if job.claim.taken]
        queued = [job for job in under_way if not job.claim.taken]
        parked = Counter(parked.call.verb == "contains" for parked in self.parked)
        taken_along = sum(len(job.others) for job in running)
        if parked[True] != asking_runs or parked[False] != len(running) - taken_along:
            return False
        patient = sum(not job.urgent for job in running) - taken_along
        can_start = len(running) < pool.threads and any(job.urgent or patient < pool.patient_threads for job in queued)
        return not can_start
