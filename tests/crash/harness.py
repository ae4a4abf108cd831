"""Kills processes that work on one tier, over and over, and looks at what they leave.

Eight workers put and get under a small cap. A round sends SIGKILL to one or two of them, every tenth round to all
eight; most kills wait until their worker is inside a put. Killed workers are replaced. Whenever all are dead, the tier
is read by the independent checker, opened and closed once through kvstore, and read again. An observer samples its size
throughout.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawArray
from typing import TYPE_CHECKING, Any

import checker
import observer
import worker
from unsealing import read_keys
from worker import COUNTS

from kvstore import open_store
from kvstore.testing.patience import without_processor_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from ctypes import Array, c_int64
    from multiprocessing.context import ForkServerProcess
    from pathlib import Path

    from observer import Observation
    from unsealing import Keys

SEATS = 8
PATIENCE_S = 1.0
"""How long a round waits for its moment."""


@dataclass(frozen=True)
class Site:
    """Where a campaign takes place. `own_disk`: nothing else is on the file system that holds `root`. `leaks`: what its
    workers are to leak, for a test of what finds that.
    """

    url: str
    root: Path
    capacity: int
    complaints: Path
    own_disk: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    leaks: str = ""

    def open_options(self) -> dict[str, Any]:
        return {"capacity": self.capacity, **self.options}


@dataclass
class Report:
    """What a campaign saw. `kills_inside_puts` by the workers' own marks, `intents_of_the_dead` by the catalogue.

    `left_reserved`: bytes that were reserved still once somebody had opened what the dead left, in sum.
    """

    rounds: int = 0
    kills: int = 0
    kills_inside_puts: int = 0
    intents_of_the_dead: int = 0
    blocks_checked: int = 0
    left_reserved: int = 0
    wrong: list[str] = field(default_factory=list[str])
    openings_s: list[float] = field(default_factory=list[float])
    """Of each opening, without waits for a processor."""
    counts: dict[str, int] = field(default_factory=dict[str, int])
    observation: Observation | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        seen = self.counts
        return (
            f"{self.rounds} rounds, {self.kills} kills in {self.seconds:.0f} s, {self.kills_inside_puts} inside a put"
            f" (intents of the dead: {self.intents_of_the_dead}); {seen}; {self.blocks_checked} blocks read by the"
            f" checker, {len(self.wrong)} wrong; {self.left_reserved} bytes left reserved; slowest opening"
            f" {max(self.openings_s):.2f} s; {self.observation}"
        )


class Crew:
    """Eight workers, each at a seat. They are forked from a process that imported everything and opened nothing."""

    def __init__(self, site: Site, seed: int) -> None:
        self.site = site
        self.chance = random.Random(seed)
        self.board: Array[c_int64] = RawArray("q", SEATS * len(COUNTS))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["worker", "kvstore_zarr", "kvstore_lmdb"])
        self._workers: dict[int, ForkServerProcess] = {}

    def inside_put(self, seat: int) -> bool:
        return bool(self._of("inside")[seat])

    def start(self) -> None:
        """Fill every empty seat."""
        for seat in set(range(SEATS)) - self._workers.keys():
            for name in ("inside", "opened"):
                self.board[seat * len(COUNTS) + COUNTS.index(name)] = 0
            arguments = (self.site.url, self.site.open_options(), seat, self.chance.getrandbits(32), self.board)
            arguments = (*arguments, self.site.complaints, self.site.leaks)
            self._workers[seat] = self._context.Process(target=worker.work, args=arguments)
            self._workers[seat].start()

    def pids(self, seats: list[int]) -> list[int]:
        """The processes of workers."""
        return [pid for seat in seats if (pid := self._workers[seat].pid) is not None]

    def kill(self, seats: list[int]) -> int:
        """SIGKILL these workers at once; how many were inside a put as they died."""
        killed = [self._workers.pop(seat) for seat in seats]
        for process in killed:
            if process.pid is not None and process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):  # it ended by itself, and has said why
                    os.kill(process.pid, signal.SIGKILL)
        for process in killed:
            process.join()
            process.close()
        return sum(map(self.inside_put, seats))

    def dismiss(self) -> None:
        """End whoever is left."""
        self.kill(list(self._workers))

    def wait_for_puts(self, seats: list[int]) -> None:
        """Return soon after a moment at which most of these workers were inside a put."""
        self._wait_until(lambda: sum(map(self.inside_put, seats)) >= 0.8 * len(seats))
        time.sleep(self.chance.expovariate(1 / 0.002))

    def wait_until_open(self, seats: list[int]) -> None:
        """Return when these workers have opened the tier."""
        self._wait_until(lambda: all(self._of("opened")[seat] for seat in seats))

    def _wait_until(self, moment: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not moment() and time.monotonic() < deadline:
            time.sleep(0.0003)

    def _of(self, name: str) -> list[int]:
        """One number of every seat."""
        return self.board[COUNTS.index(name) :: len(COUNTS)]

    def counts(self) -> dict[str, int]:
        """The sums over all seats, the dead included."""
        return {name: sum(self._of(name)) for name in COUNTS if name not in ("inside", "opened")}


@dataclass
class Campaign:
    """One campaign against one site, with the checks that its backend calls for.

    `keyring` and `operator_key` of a site that is encrypted: what the checker opens its blocks with.
    """

    site: Site
    check: Callable[[Path, bool, Keys | None], checker.Verdict]
    catalogue: Path
    leases: Path
    seed: int = 1
    keyring: Path | None = None
    operator_key: bytes = b""
    report: Report = field(default_factory=Report)
    _mourned: set[bytes] = field(default_factory=set[bytes])

    def run(self, rounds: int) -> Report:
        """`rounds` rounds, and a last check when all are dead."""
        started = time.monotonic()
        with open_store(self.site.url, **self.site.open_options()):
            pass
        with self._observed():
            crew = Crew(self.site, self.seed)
            try:
                for number in range(rounds):
                    self._round(crew, everyone=number % 10 == 9 or number == rounds - 1, pair=bool(number % 2))
            finally:
                crew.dismiss()
            self.report.counts = crew.counts()
        self.report.seconds = time.monotonic() - started
        self.report.wrong += [path.read_text() for path in self.site.complaints.iterdir()]
        return self.report

    def _round(self, crew: Crew, *, everyone: bool, pair: bool) -> None:
        crew.start()
        seats = list(range(SEATS)) if everyone else crew.chance.sample(range(SEATS), 2 if pair else 1)
        if crew.chance.random() < 0.9:  # else in the midst of starting, or anywhere
            crew.wait_until_open(seats)
            time.sleep(crew.chance.uniform(0.0, 0.06))
            crew.wait_for_puts(seats)
        self.report.rounds += 1
        self.report.kills += len(seats)
        self.report.kills_inside_puts += crew.kill(seats)
        self.report.intents_of_the_dead += self._new_intents_of_the_dead()
        if everyone:
            self._look_at_what_is_left()

    def _new_intents_of_the_dead(self) -> int:
        """Dead users who left an intent, each counted once: they died between the reservation and its end."""
        with_intents = {lease for lease, _ in checker.read_books(self.catalogue).intents}
        found = {lease for lease in with_intents - self._mourned if is_dead(self.leases, lease)}
        self._mourned |= found
        return len(found)

    def _look_at_what_is_left(self) -> None:
        """Before anybody opens the tier: no torn block, no wrong byte. After: nothing reserved, nothing left over."""
        before = self._checked(settled=False)
        started = time.perf_counter() - without_processor_s()
        with open_store(self.site.url, **self.site.open_options()) as store:
            self.report.openings_s.append(time.perf_counter() - without_processor_s() - started)
            usage = store.usage()
        after = self._checked(settled=True)
        self.report.blocks_checked += before.blocks + after.blocks
        self.report.wrong += before.wrong + after.wrong
        self.report.left_reserved += usage.reserved
        if (usage.reserved, usage.used, usage.blocks) != (0, after.used, after.blocks):
            self.report.wrong.append(f"{usage}, but there are {after.blocks} blocks of {after.used} bytes")

    def _checked(self, *, settled: bool) -> checker.Verdict:
        keys = None if self.keyring is None else read_keys(self.keyring, self.operator_key)
        verdict = self.check(self.site.root, settled, keys)
        self.report.wrong += [f"{place} is sealed with a key that is no more" for place in verdict.noise]
        return verdict

    def _observed(self) -> Observing:
        return Observing(self.site, self.report)


class Observing:
    """The observer's process, for as long as the block lasts; its findings end up in the report."""

    def __init__(self, site: Site, report: Report) -> None:
        self.site, self.report = site, report
        self.board: Array[c_int64] = RawArray("q", len(observer.FIELDS))
        self.process = multiprocessing.get_context("spawn").Process(
            target=observer.observe, args=(site.root, site.capacity, site.own_disk, self.board)
        )

    def __enter__(self) -> None:
        self.process.start()
        while not self.board[1]:
            time.sleep(0.01)

    def __exit__(self, *_: object) -> None:
        self.board[0] = 1
        self.process.join()
        self.process.close()
        self.report.observation = observer.read_observation(self.board, self.site.own_disk)


def is_dead(folder: Path, lease: bytes) -> bool:
    """Whether the user who held `lease` is gone: its file in `folder` can be locked, or is not there any more."""
    try:
        with open(folder / f"lease-{lease.hex()}", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
    return True
