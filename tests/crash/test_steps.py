"""Dying at each labelled point inside a `file://` put, and around each system call: whole blocks only, nothing lost.

The campaign in `test_kill` hits these points by chance; here each is hit for sure, alone and beside a survivor.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any

import checker
import pytest
from observer import occupied
from worker import SPACE, block_key, expected

import kvstore_zarr.steps
from kvstore import BlockRead, BlockWrite, GetOutcome, PutOutcome, open_store
from kvstore_zarr import calls
from kvstore_zarr.steps import STEPS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvstore import BlockStore

CAPACITY = 8 << 20
PAGE = 4096

OLD, NEW = range(60), range(100, 108, 2)
"""Blocks of two sizes that fill the tier, and the put in which somebody dies: of one size, so that it recycles some
victims and removes others."""


def put(store: BlockStore, numbers: Sequence[int]) -> list[PutOutcome]:
    keys = [block_key(number) for number in numbers]
    return store.put_many(SPACE, [BlockWrite(key, expected(key), 7) for key in keys])


def get(store: BlockStore, numbers: Sequence[int]) -> list[GetOutcome]:
    keys = [block_key(number) for number in numbers]
    reads = [BlockRead(key, bytearray(SPACE.block_bytes(key.group))) for key in keys]
    outcomes = store.get_many_into(SPACE, reads)
    for read, outcome in zip(reads, outcomes, strict=True):
        assert outcome is not GetOutcome.HIT or read.into == expected(read.key).tobytes()
    return outcomes


def die_at(url: str, step: str, times: int) -> None:
    """Put NEW, and get killed when `step` is passed for the `times`-th time."""
    left = times

    def checkpoint(name: str) -> None:
        nonlocal left
        left -= name == step
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    with open_store(url, capacity=CAPACITY) as store:
        kvstore_zarr.steps.checkpoint = checkpoint
        put(store, NEW)
        os._exit(3)


def die_around(url: str, verb: str, call: str, times: int, after: bool) -> None:
    """Put NEW or delete OLD, and get killed before or after the `times`-th system call `call`; a write half-way."""
    real, left = getattr(os, call), times

    def fatal(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left:
            return real(*arguments, **options)
        if call == "pwritev":
            fd, (first, *_), offset = arguments
            real(fd, [first[:PAGE]], offset)
        elif after:
            real(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    calls.made_by = calls.PYTHON
    with open_store(url, capacity=CAPACITY) as store:
        setattr(os, call, fatal)
        if verb == "put":
            put(store, NEW)
        else:
            store.delete_many(SPACE, [block_key(number) for number in OLD])
        os._exit(3)


def let_die(target: Callable[..., None], *arguments: object) -> None:
    """Run `target` in a process of its own, which must be killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_steps", "kvstore_zarr"])
    process = context.Process(target=target, args=arguments)
    process.start()
    process.join(30)
    exitcode = process.exitcode
    process.close()
    assert exitcode == -signal.SIGKILL, f"it did not die at {arguments[1:]}, but ended with {exitcode}"


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("step", STEPS)
def test_whoever_dies_there_leaves_whole_blocks_and_no_debt(tmp_path: Path, step: str, times: int) -> None:
    root = tmp_path / "tier"
    url = f"file://{root}"
    with open_store(url, capacity=CAPACITY) as store:
        put(store, OLD)
    let_die(die_at, url, step, times)
    known = check_what_is_left(root)
    assert (known[0] is GetOutcome.HIT) == (step == "published" or times > 1)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("verb", "call"),
    [("put", "rename"), ("put", "unlink"), ("put", "ftruncate"), ("put", "pwritev"), ("put", "fstat"), ("put", "close"),
     ("delete", "unlink"), ("delete", "ftruncate")],
)  # fmt: skip
def test_whoever_dies_around_a_system_call_leaves_whole_blocks_and_no_debt(
    tmp_path: Path, verb: str, call: str, after: bool, times: int
) -> None:
    root = tmp_path / "tier"
    with open_store(f"file://{root}", capacity=CAPACITY) as store:
        put(store, OLD)
    let_die(die_around, f"file://{root}", verb, call, times, after)
    check_what_is_left(root)


def check_what_is_left(root: Path) -> list[GetOutcome]:
    """Nothing torn, nothing owed, nothing over the cap, before and after the next opening; what a get finds of NEW."""
    url = f"file://{root}"
    assert occupied(root) <= CAPACITY
    assert checker.check_file_tier(root, False, catalogue=root / ".kvstore" / "catalogue").wrong == []
    with open_store(url, capacity=CAPACITY) as store:
        usage = store.usage()
        assert usage.reserved == 0
        assert all(outcome is GetOutcome.HIT for outcome in get_scanned(store))
        known = get(store, NEW)  # a small cap makes a put several jobs: those before the fatal one are there
        assert known == sorted(known, key=[GetOutcome.HIT, GetOutcome.MISS].index)
        assert all(outcome.present for outcome in put(store, NEW))
        assert get(store, NEW) == [GetOutcome.HIT] * len(NEW)
    verdict = checker.check_file_tier(root, True, catalogue=root / ".kvstore" / "catalogue")
    assert verdict.wrong == []
    assert occupied(root) <= CAPACITY
    return known


@pytest.mark.parametrize("step", STEPS)
def test_a_survivor_goes_on_and_reclaims(tmp_path: Path, step: str) -> None:
    root = tmp_path / "tier"
    url = f"file://{root}"
    with open_store(url, capacity=CAPACITY) as survivor:
        put(survivor, OLD)
        let_die(die_at, url, step, 1)
        assert all(outcome is GetOutcome.HIT for outcome in get_scanned(survivor))
        for start in range(200, 280, 4):  # more than the cap holds: the room that the dead reserved is needed
            assert all(outcome.present for outcome in put(survivor, range(start, start + 4)))
            assert occupied(root) <= CAPACITY
        assert all(outcome.present for outcome in put(survivor, NEW))
        assert get(survivor, NEW) == [GetOutcome.HIT] * len(NEW)
    assert checker.check_file_tier(root, True, catalogue=root / ".kvstore" / "catalogue").wrong == []


def get_scanned(store: BlockStore) -> list[GetOutcome]:
    """Get whatever a scan finds."""
    numbers = {block_key(number): number for number in range(300)}
    return get(store, [numbers[info.key] for info in store.scan(SPACE)])
