"""Kill -9 of `kvstore rekey`, at each of its steps and at random moments: the keyring is whole, and so is every block.

What a kill may cost is what the page on encryption says: the blocks that were on their way, one batch. All others can
be read, with the keyring as it is then; none is wrong, and the same command, given again, brings it to its end. The
checks are `checker`'s and `unsealing`'s, which know the formats alone.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pathlib
import random
import secrets
import signal
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import checker
import pytest
from cryptography.exceptions import InvalidTag
from unsealing import Keys, keys_in
from worker import SPACE, block_key, expected

import kvstore.rekeying
import kvstore.sealing.keyring
import kvstore_zarr.steps
from kvstore import BlockRead, BlockStore, BlockWrite, GetOutcome, open_store
from kvstore.cli import EXIT_OK, run
from kvstore.marks import Mark
from kvstore.sealing import Keyring
from kvstore_zarr.steps import STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from multiprocessing.context import ForkServerProcess
    from multiprocessing.synchronize import Event
    from pathlib import Path

NUMBERS = range(24)
BATCH = 700_000
"""Of blocks of 256 KiB and 100 kB in turn: four at a time, so that the command has six batches to be killed in."""
TENANTS = ("", "acme", "beta")
HIT, MISS = GetOutcome.HIT, GetOutcome.MISS
KINDS = ("file", "lmdb", "remote")


@dataclass
class Site:
    """One encrypted tier, and whatever can be known of its keys. `operator` and `other` take turns."""

    kind: str
    folder: Path
    root: Path = field(init=False)
    keyring: Path = field(init=False)
    keys: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def __post_init__(self) -> None:
        self.root, self.keyring = self.folder / "tier", self.folder / "keyring.json"
        for name in ("operator", "other"):
            self.keys[name] = secrets.token_bytes(32)
            (self.folder / f"{name}.key").write_text(self.keys[name].hex())

    def source(self, name: str) -> str:
        return f"file:{self.folder}/{name}.key"

    def bare(self) -> str:
        place = f"file://{self.root}?remote=true&" if self.kind == "remote" else f"{self.kind}://{self.root}?"
        return f"{place}keyring={self.keyring}"

    def url(self) -> str:
        """With the operator's key that opens the keyring at the moment."""
        return f"{self.bare()}&encryption={self.source(self.who()[0])}"

    def who(self) -> tuple[str, Keys]:
        """Whose key opens the keyring, and what it has. Raises where neither does, or where it is not whole."""
        text = self.keyring.read_bytes()
        for name, key in self.keys.items():
            with suppress(InvalidTag):
                return name, keys_in(text, key)
        raise AssertionError(f"no key opens {self.keyring}")

    def fill(self) -> None:
        """All blocks that are not there; a label on each, a pin on one."""
        with open_store(self.url()) as store:
            put = [
                BlockWrite(block_key(number), expected(block_key(number)), number, tenant=TENANTS[number % 3])
                for number in NUMBERS
            ]
            assert all(outcome.present for outcome in store.put_many(SPACE, put))
            if store.capabilities.marks:
                store.mark_many(SPACE, [block_key(number) for number in NUMBERS], Mark("handbook", tenant="acme"))
                store.mark_many(SPACE, [block_key(0)], Mark("prices", pinned=True))

    def check(self, *, settled: bool) -> checker.Verdict:
        """No byte of the tier is wrong, and no block under a key that is no more, whoever died."""
        _, keys = self.who()
        if self.kind == "lmdb":
            verdict = checker.check_lmdb_tier(self.root, settled, keys)
        elif self.kind == "file":
            verdict = checker.check_file_tier(self.root, settled, keys, catalogue=self.root / ".kvstore" / "catalogue")
        else:
            found = checker.check_blocks(self.root, keys)
            verdict = checker.Verdict(len(found.blocks), sum(found.blocks.values()), found.wrong, found.noise)
        assert verdict.wrong == []
        assert verdict.noise == []
        return verdict

    def missing(self, *, marked: bool = True) -> list[int]:
        """The blocks that are not there; all others hold what belongs to them, and have their marks if `marked`."""
        with open_store(self.url()) as store:
            keys = [block_key(number) for number in NUMBERS]
            reads = [BlockRead(key, bytearray(SPACE.block_bytes(key.group))) for key in keys]
            outcomes = store.check_many(SPACE, reads)
            assert set(outcomes) <= {HIT, MISS}
            for read, outcome in zip(reads, outcomes, strict=True):
                assert outcome is MISS or read.into == expected(read.key).tobytes()
            assert store.usage().reserved == 0
            if marked and store.capabilities.marks:
                for info in store.scan(SPACE):
                    assert info.marks[0] == Mark("handbook", tenant="acme")
                    assert info.pinned == (info.key == block_key(0))
        return [number for number, outcome in zip(NUMBERS, outcomes, strict=True) if outcome is MISS]

    def check_after_a_death(self, *, apart: bool = False) -> list[int]:
        """Before anybody opens the tier and after; what is missing: nothing, or what was on its way, if blocks are not
        replaced in one step (`apart`).
        """
        self.check(settled=False)
        missing = self.missing(marked=not apart)
        assert sum(SPACE.block_bytes(block_key(number).group) for number in missing) <= (BATCH if apart else 0)
        verdict = self.check(settled=True)
        assert verdict.blocks == len(NUMBERS) - len(missing)
        return missing

    def check_ended(self, before: Keys) -> None:
        """One key for each tenant, none of those from before, and every block under one of them."""
        _, after = self.who()
        assert sorted(after.tenants.values()) == sorted(TENANTS)
        assert not after.data.keys() & before.data.keys()
        assert before.data.keys() <= after.destroyed
        self.check(settled=True)
        assert not self.keyring.with_name("keyring.json.new").exists()


@contextmanager
def watched(site: Site) -> Generator[list[int]]:
    """Somebody reads the keyring all the time, past kvstore: it is whole at every moment. Counts the looks."""
    looks, failures, over = [0], list[BaseException](), threading.Event()

    def look() -> None:
        while not over.is_set():
            try:
                site.who()
            except BaseException as error:
                failures.append(error)
                return
            looks[0] += 1
            time.sleep(0.0003)  # the processor is for the others, too

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield looks
    finally:
        over.set()
        thread.join()
    assert failures == []


def rekey(arguments: list[str], started: Event | None, point: str, after: bool, times: int) -> None:
    """The command in a process of its own, which dies before or after the `times`-th passing of `point`."""
    kvstore.rekeying.BATCH_BYTES = BATCH
    left = times

    def passing() -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    def fatal(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if not after:
                passing()
            result = real(*args, **options)
            if after:
                passing()
            return result

        return call

    open_real = kvstore.rekeying.open_store

    def opening(*args: Any, **options: Any) -> Any:
        store = open_real(*args, **options)
        if point in APART:
            store.__dict__["reseal_many"] = partial(BlockStore.reseal_many, store)
        if point in STORE_CALLS and not options.get("readonly"):
            store.__dict__[point] = fatal(getattr(store, point))
        return store

    kvstore.rekeying.open_store = opening
    if point in STEPS:
        kvstore_zarr.steps.checkpoint = lambda step: passing() if step == point else None
    elif point in CALLS:
        where = CALLS[point]
        setattr(where, point, fatal(getattr(where, point)))
    if started is not None:
        started.set()
    os._exit(run(["rekey", *arguments]))


APART = ("delete_many", "put_many", "mark_again")
"""What a store is asked for that cannot replace a block in one step: it removes it, and puts it again."""
STORE_CALLS = ("check_many", "reseal_many", "delete_many", "put_many", "scan")
CALLS: dict[str, Any] = {
    "_replace": kvstore.sealing.keyring,
    "fsync": os,
    "rename": pathlib.Path,
    "sync_folder": kvstore.sealing.keyring,
    "mark_again": kvstore.rekeying,
    "renew": Keyring,
    "retire": Keyring,
}
"""What is passed outside of the tier. The keyring is changed twice: by `renew`, and by `retire`."""


def started(target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_rekey_kill", "kvstore_zarr", "kvstore_lmdb"])
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def ended(process: ForkServerProcess) -> int | None:
    """How it ended."""
    process.join(60)
    code = process.exitcode
    process.close()
    return code


def die(arguments: list[str], point: str, after: bool, times: int) -> None:
    """Run the command, which must be killed at that point."""
    assert ended(started(rekey, arguments, None, point, after, times)) == -signal.SIGKILL


@pytest.fixture(params=KINDS)
def site(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A tier of 24 blocks of three tenants."""
    monkeypatch.setattr(kvstore.rekeying, "BATCH_BYTES", BATCH)
    made = Site(request.param, tmp_path)
    with open_store(f"{made.bare()}&encryption={made.source('operator')}"):
        pass
    made.fill()
    assert made.check(settled=True).blocks == len(NUMBERS)
    return made


def dies_there(site: Site, point: str, after: bool, times: int) -> None:
    """Somebody dies there, and the same command again ends it."""
    _, before = site.who()
    with watched(site):
        die([site.url(), "--data", "--yes"], point, after, times)
        missing = site.check_after_a_death(apart=point in APART)
        assert bool(missing) == ((point, after) in (("delete_many", True), ("put_many", False)))
        assert run(["rekey", site.url(), "--data", "--yes"]) == EXIT_OK
    site.check_ended(before)
    assert site.missing(marked=point not in APART) == missing
    site.fill()
    assert site.check(settled=True).blocks == len(NUMBERS)


STEPS_IN_PLACE = ("reserved", "written", "renamed", "published")
"""Those of `kvstore_zarr.steps` that a batch passes whose blocks are replaced."""
QUICK = [
    ("file", "delete_many", True, 3), ("file", "retire", False, 1), ("lmdb", "rename", True, 1),
    ("lmdb", "reseal_many", True, 3), ("lmdb", "put_many", True, 3), ("remote", "reseal_many", False, 3),
]  # fmt: skip
STEPWISE = [
    *((point, after, times) for point in ("_replace", "rename", "sync_folder") for after in (False, True)
      for times in (1, 2)),
    *((point, after, 3) for point in ("check_many", "reseal_many", *APART)
      for after in (False, True)),
    *((point, after, 1) for point in ("renew", "retire") for after in (False, True)),
]  # fmt: skip


@pytest.mark.parametrize(("site", "point", "after", "times"), QUICK, indirect=["site"])
def test_whoever_dies_there_costs_no_more_than_what_was_on_its_way(
    site: Site, point: str, after: bool, times: int
) -> None:
    dies_there(site, point, after, times)


@pytest.mark.soak
@pytest.mark.parametrize(("point", "after", "times"), STEPWISE)
def test_nor_does_whoever_dies_at_any_step(site: Site, point: str, after: bool, times: int) -> None:
    dies_there(site, point, after, times)


@pytest.mark.parametrize("site", ["file"], indirect=True)
@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=[] if step == "renamed" else pytest.mark.soak) for step in STEPS_IN_PLACE]
)
def test_nor_does_whoever_dies_replacing_a_batch(site: Site, step: str) -> None:
    dies_there(site, step, after=False, times=5 if step == "written" else 2)


@pytest.mark.parametrize("site", ["lmdb"], indirect=True)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", [pytest.param("fsync", marks=pytest.mark.soak), "rename"])
def test_whoever_dies_wrapping_the_keys_anew_leaves_one_operators_key_or_the_other(
    site: Site, point: str, after: bool
) -> None:
    arguments = [site.bare(), "--encryption", site.source("operator"), "--new-encryption", site.source("other")]
    _, before = site.who()
    with watched(site):
        die(arguments, point, after, 1)
        name, keys = site.who()
        assert name == ("other" if (point, after) == ("rename", True) else "operator")
        assert keys.data == before.data
        site.check_after_a_death()
        assert run(["rekey", *arguments]) == EXIT_OK  # the same again
        assert site.who()[0] == "other"
        site.check_after_a_death()


def killed_at_random(site: Site, rounds: int, chance: random.Random) -> dict[str, Any]:
    """Kill the command over and over, somewhere; half of the times it is to change the operator's key as well."""
    told: dict[str, Any] = {"kills": 0, "ended first": 0, "old keys left": 0}
    under_way = multiprocessing.get_context("forkserver").Event()
    process = started(rekey, [site.url(), "--data", "--yes"], under_way, "", False, 0)
    assert under_way.wait(30)
    begun = time.monotonic()
    assert ended(process) == EXIT_OK
    most = time.monotonic() - begun
    with watched(site) as looks:
        for _ in range(rounds):
            name, _ = site.who()
            other = "other" if name == "operator" else "operator"
            change = ["--new-encryption", site.source(other)] if chance.random() < 0.5 else []
            under_way = multiprocessing.get_context("forkserver").Event()
            process = started(rekey, [site.url(), "--data", "--yes", *change], under_way, "", False, 0)
            assert under_way.wait(30)
            time.sleep(chance.uniform(0, most))
            process.kill()
            code = ended(process)
            told["kills" if code == -signal.SIGKILL else "ended first"] += 1
            most *= 1.05 if code == -signal.SIGKILL else 0.8  # one measurement says little on a busy machine
            assert code in (EXIT_OK, -signal.SIGKILL)
            site.check_after_a_death()
            told["old keys left"] += len(site.who()[1].data) > len(TENANTS)
        assert run(["rekey", site.url(), "--data", "--yes"]) == EXIT_OK
    assert len(site.who()[1].data) == len(TENANTS)
    assert site.missing() == []
    return told | {"looks at the keyring": looks[0], "destroyed keys": len(site.who()[1].destroyed)}


@pytest.mark.parametrize("site", ["file"], indirect=True)
def test_whoever_is_killed_at_random_leaves_a_whole_keyring_and_whole_blocks(site: Site) -> None:
    told = killed_at_random(site, 4, random.Random())
    assert told["kills"] + told["ended first"] == 4


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_so_does_whoever_is_killed_a_hundred_times(site: Site) -> None:
    told = killed_at_random(site, 100, random.Random())
    print(f"\n{site.kind}: {json.dumps(told)}")
    assert told["kills"] > 30
    assert told["old keys left"] > 15
