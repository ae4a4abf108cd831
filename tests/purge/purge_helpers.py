"""What the tests of purges share: markers of blocks, looked for in raw files; processes that use a tier meanwhile."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvstore
from kvstore import GetOutcome, Mark
from kvstore.cli import run
from kvstore.testing.supply import SPACE, content, get, write

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    import pytest

PLACES = (0, 5_000, 40_000, SPACE.block_bytes() - 32)


def markers(number: int) -> list[bytes]:
    """Pieces of a block's bytes that stand nowhere else: of its first page, its last, and between."""
    data = content(number)
    return [data[place : place + 32].tobytes() for place in PLACES]


def found(folder: Path, numbers: Iterable[int]) -> set[int]:
    """The blocks of which some marker stands in some file of the folder, past its end of use included."""
    data = b"\0".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
    return {number for number in numbers if any(marker in data for marker in markers(number))}


def machine(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any]:
    """The exit code of a command, and what it prints with --json."""
    code = run([*args, "--json"])
    return code, json.loads(capsys.readouterr().out)


@contextmanager
def in_use(
    url: str, numbers: range, processes: int, *, tenants: tuple[str, ...] = ("",), **options: object
) -> Generator[Users]:
    """So many processes put and get these blocks, of these tenants in turn, for as long as the body runs."""
    context = multiprocessing.get_context("spawn")
    users = Users(Path(f"{url.partition('://')[2].partition('?')[0]}-users"))
    with context.Pool(processes) as pool:
        given = (options, str(users.folder), tenants)
        jobs = [pool.apply_async(_use, (url, numbers, seed, *given)) for seed in range(processes)]
        try:
            yield users
        finally:
            users.stop()
            users.counts = [job.get(60) for job in jobs]


class Users:
    """What the processes are told, by files that they look for, and what they counted."""

    def __init__(self, folder: Path) -> None:
        self.counts: list[dict[str, int]] = []
        self.folder = folder
        folder.mkdir()

    def purged(self) -> None:
        """From now on no block is to be found."""
        (self.folder / "purged").touch()

    def stop(self) -> None:
        (self.folder / "stop").touch()

    def wait_for_more(self, processes: int) -> None:
        """Until every process has put and got something once more."""
        (self.folder / "more").touch()
        self._wait("more-*", processes)

    def wait_for_work(self, processes: int) -> None:
        """Until every process has put and got something."""
        self._wait("ready-*", processes)

    def _wait(self, told: str, processes: int) -> None:
        deadline = time.monotonic() + 60
        while len(list(self.folder.glob(told))) < processes:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def _use(
    url: str, numbers: range, seed: int, options: dict[str, Any], folder: str, tenants: tuple[str, ...]
) -> dict[str, int]:
    chance, counts, told = random.Random(seed), dict[str, int](), Path(folder)
    with kvstore.open_store(url, **options) as store:
        while not (told / "stop").exists():
            purged = (told / "purged").exists()
            some = chance.sample(numbers, 6)
            put = [write(number, tenant=tenants[number % len(tenants)]) for number in some[:3]]
            outcomes = [f"put {outcome.value}" for outcome in store.put_many(SPACE, put)]
            for block in put if len(tenants) > 1 else ():
                store.mark_many(SPACE, [block.key], Mark(tenant=block.tenant))
            for outcome in get(store, some):
                late = " after the purge" if purged and outcome is not GetOutcome.MISS else ""
                outcomes.append(f"get {outcome if isinstance(outcome, str) else outcome.value}{late}")
            for outcome in outcomes:
                counts[outcome] = counts.get(outcome, 0) + 1
            if len(counts) > 1 and counts.get("get hit"):
                (told / f"ready-{seed}").touch()
            if (told / "more").exists():
                (told / f"more-{seed}").touch()
    return counts
