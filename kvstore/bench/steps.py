"""What transfers cost a scheduler: a step of fixed Python work, timed alone and while a contestant moves blocks.

`kvstore bench --step` measures here; `benchmarks/scheduler_step.py`, which times every call of the library's manager,
takes the step's work and its clock from here.

Half of the jobs that are kept in flight store, half load. Between its steps a scheduler either rests, as one does that
waits for its GPU, or it does not and never lets go of the GIL. A contestant alone is driven by a thread that only
sleeps, asks and hands on.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.bench.workload import page_aligned_rows
from kvstore.errors import TierUnavailable
from kvstore.types import BlockKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvstore.bench.contestant import Contestant, Traffic

__all__ = ["Clock", "StepFigure", "calibrated_rounds", "measure_steps", "python_work"]

WORK_SECONDS = 1e-3
RESTS_S = (1e-3, 0.0)
"""What lies between two steps."""
SLICE_S = 0.5
"""Idle, solo and busy alternate in slices of that length, so that the machine is the same for all."""

_JOBS = 4
_IN_FLIGHT_BYTES = 64 << 20
_MOST_IN_FLIGHT = 128
_POLL_S = 3e-4
_DRAIN_S = 60.0


@dataclass
class Clock:
    """Durations in seconds, by name of the call."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict[str, list[float]](list))

    def timed(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """The result of the call."""
        begin = time.perf_counter()
        result = call(*arguments)
        self.seconds[name].append(time.perf_counter() - begin)
        return result

    def quantile(self, name: str, share: float) -> float:
        """In seconds."""
        return float(np.quantile(self.seconds[name], share))


def python_work(rounds: int) -> int:
    """Pure Python, as a scheduler's own bookkeeping: no call in it releases the GIL."""
    table: dict[int, int] = {}
    for number in range(rounds):
        table[number & 255] = table.get(number & 127, 0) + number
    return len(table)


def calibrated_rounds() -> int:
    """How much of `python_work` takes about 1 ms here, when nothing else runs."""
    rounds, clock = 10_000, Clock()
    for _ in range(50):
        clock.timed("work", python_work, rounds)
    return max(1, int(rounds * WORK_SECONDS / min(clock.seconds["work"])))


@dataclass(frozen=True, slots=True)
class StepFigure:
    """A scheduler's step beside one contestant, in milliseconds, and what that leaves of the contestant's throughput.

    `rest_ms` lies between two steps, `in_flight` blocks are under way. `p99_to_idle` is busy over idle, `share_kept`
    busy over solo throughput; speeds are in 10^9 payload bytes a second, stores and loads together.
    """

    contestant: str
    block_bytes: int
    in_flight: int
    rest_ms: float
    idle_p50_ms: float
    idle_p99_ms: float
    busy_p50_ms: float
    busy_p99_ms: float
    p99_to_idle: float
    solo_gb_per_s: float
    busy_gb_per_s: float
    share_kept: float


def measure_steps(
    contestants: Sequence[Contestant],
    *,
    block_bytes: int,
    total: int,
    threads: int,
    slices: int,
    advance: Callable[[], object],
) -> list[StepFigure]:
    """Figures by rest and contestant. `total` bytes of blocks are stored by each first, and loaded again and again;
    `advance` is called after each contestant's slice.
    """
    in_flight = max(_JOBS, min(_MOST_IN_FLIGHT, _IN_FLIGHT_BYTES // block_bytes) // _JOBS * _JOBS)
    memory = page_aligned_rows(in_flight * len(contestants), block_bytes, shared=True)
    rounds = calibrated_rounds()
    feeders: list[_Feeder] = []
    try:
        for number, contestant in enumerate(contestants):
            rows = memory[number * in_flight : (number + 1) * in_flight]
            feeders.append(_Feeder(contestant, rows, block_bytes, max(in_flight, total // block_bytes), threads))
        figures: list[StepFigure] = []
        for rest in RESTS_S:
            laps = [_Laps() for _ in contestants]
            idle = Clock()
            for _ in range(slices):
                _steps(idle, rounds, rest, lambda: None)
                for feeder, lap in zip(feeders, laps, strict=True):
                    lap.solo.append(feeder.alone())
                    lap.busy.append(feeder.beside(lap.clock, rounds, rest))
                    advance()
            figures += [lap.figure(feeder, rest, idle) for feeder, lap in zip(feeders, laps, strict=True)]
        return figures
    finally:
        for feeder in feeders:
            feeder.close()


def _steps(clock: Clock, rounds: int, rest: float, serve: Callable[[], object]) -> float:
    """A slice of steps; the seconds that it took."""
    begin = time.perf_counter()
    while time.perf_counter() < begin + SLICE_S:
        clock.timed("step", _step, rounds, serve)
        if rest:
            time.sleep(rest)
    return time.perf_counter() - begin


def _step(rounds: int, serve: Callable[[], object]) -> None:
    python_work(rounds)
    serve()


@dataclass
class _Laps:
    """What one contestant's slices came to."""

    clock: Clock = field(default_factory=Clock)
    solo: list[float] = field(default_factory=list[float])
    busy: list[float] = field(default_factory=list[float])

    def figure(self, feeder: _Feeder, rest: float, idle: Clock) -> StepFigure:
        idle_p50, idle_p99 = (idle.quantile("step", share) * 1e3 for share in (0.5, 0.99))
        busy_p50, busy_p99 = (self.clock.quantile("step", share) * 1e3 for share in (0.5, 0.99))
        solo, busy = float(np.mean(self.solo)), float(np.mean(self.busy))
        return StepFigure(
            contestant=feeder.name,
            block_bytes=feeder.block_bytes,
            in_flight=feeder.in_flight,
            rest_ms=rest * 1e3,
            idle_p50_ms=idle_p50,
            idle_p99_ms=idle_p99,
            busy_p50_ms=busy_p50,
            busy_p99_ms=busy_p99,
            p99_to_idle=busy_p99 / idle_p99,
            solo_gb_per_s=solo,
            busy_gb_per_s=busy,
            share_kept=busy / solo,
        )


class _Feeder:
    """Keeps jobs of one contestant in flight, half of them stores of fresh blocks, half loads of `blocks` old ones."""

    def __init__(
        self, contestant: Contestant, rows: NDArray[np.uint8], block_bytes: int, blocks: int, threads: int
    ) -> None:
        self.name, self.block_bytes, self.in_flight = contestant.name, block_bytes, len(rows)
        self._contestant = contestant
        self._rows = np.array_split(rows[:, :block_bytes], _JOBS)
        self._old = [BlockKey(secrets.token_bytes(32)) for _ in range(blocks)]
        self._next_old: Iterator[BlockKey] = itertools.cycle(self._old)
        self._fresh: list[BlockKey] = []
        self._moved = 0
        self._traffic: Traffic = contestant.traffic(rows, threads)
        each = len(self._rows[0])
        for start in range(0, blocks, each):
            keys = self._old[start : start + each]
            contestant.expect(keys)
            self._traffic.submit(0, keys, self._rows[0][: len(keys)], is_store=True)
            self._drain(1)

    def alone(self) -> float:
        """Throughput of a slice with nothing beside it, in 10^9 bytes a second."""
        begin = time.perf_counter()
        self._start()
        while time.perf_counter() < begin + SLICE_S or not self._moved:
            time.sleep(_POLL_S)
            self._serve()
            self._check(begin)
        return self._ended(time.perf_counter() - begin)

    def beside(self, clock: Clock, rounds: int, rest: float) -> float:
        """Throughput of a slice beside steps, which `clock` times."""
        self._start()
        return self._ended(_steps(clock, rounds, rest, self._serve))

    def close(self) -> None:
        """Wait for what is in flight, and take back what was stored."""
        self._traffic.close()
        self._contestant.clear(self._old + self._fresh)

    def _start(self) -> None:
        self._moved = 0
        for job in range(_JOBS):
            self._submit(job)

    def _submit(self, job: int) -> None:
        rows = self._rows[job]
        if job % 2:
            self._traffic.submit(job, [next(self._next_old) for _ in rows], rows, is_store=False)
        else:
            keys = [BlockKey(secrets.token_bytes(32)) for _ in rows]
            self._fresh += keys
            self._contestant.expect(keys)
            self._traffic.submit(job, keys, rows, is_store=True)

    def _serve(self) -> None:
        """What an engine asks of a tier in a step: what has ended? And the next."""
        for job in self._traffic.ended():
            self._moved += len(self._rows[job]) * self.block_bytes
            self._submit(job)

    def _ended(self, seconds: float) -> float:
        speed = self._moved / seconds / 1e9
        self._drain(_JOBS)
        self._contestant.clear(self._fresh)
        self._fresh = []
        return speed

    def _drain(self, jobs: int) -> None:
        begin = time.perf_counter()
        while jobs:
            jobs -= len(self._traffic.ended())
            time.sleep(_POLL_S)
            self._check(begin)

    def _check(self, begin: float) -> None:
        if time.perf_counter() > begin + _DRAIN_S:
            raise TierUnavailable(f"{self.name}: a transfer has not ended for {_DRAIN_S:.0f} s")
