"""What the suite has other processes do with a store. Each function opens it, works, and closes it again."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from kvstore.registry import open_store
from kvstore.testing.supply import SPACE, get, keys, writes

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.marks import Mark, MarkOutcome
    from kvstore.namespace import Namespace
    from kvstore.types import GetOutcome, PutOutcome, Usage

__all__ = [
    "delete",
    "hammer",
    "in_a_new_process",
    "in_another_process",
    "look",
    "mark_elsewhere",
    "marks_elsewhere",
    "put",
    "read",
]

P = ParamSpec("P")
T = TypeVar("T")


def in_another_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call it in a process that shares nothing with this one but the disk; always the same one."""
    return _pool(tuple(sys.path)).submit(function, *args, **kwargs).result()


def in_a_new_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call it in a process that starts for this call alone, as after a restart."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()


@cache
def _pool(_path: tuple[str, ...]) -> ProcessPoolExecutor:
    """One process for each `sys.path`, which it takes over as it starts: backends come and go on it."""
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def put(url: str, numbers: list[int]) -> list[PutOutcome]:
    """Store blocks."""
    with open_store(url) as store:
        return store.put_many(SPACE, writes(numbers))


def read(url: str, numbers: list[int]) -> list[GetOutcome | str]:
    """Get blocks and compare their bytes."""
    with open_store(url) as store:
        return get(store, numbers)


def delete(url: str, numbers: list[int]) -> list[bool]:
    """Remove blocks."""
    with open_store(url) as store:
        return store.delete_many(SPACE, keys(numbers))


def look(url: str) -> tuple[list[Namespace], set[bytes], Usage]:
    """The namespaces, the digests of SPACE's blocks, and the usage."""
    with open_store(url) as store:
        return store.namespaces(), {info.key.digest for info in store.scan(SPACE)}, store.usage()


def mark_elsewhere(url: str, numbers: list[int], mark: Mark) -> list[MarkOutcome]:
    """Say something of blocks."""
    with open_store(url) as store:
        return store.mark_many(SPACE, keys(numbers), mark)


def marks_elsewhere(url: str) -> dict[bytes, tuple[Mark, ...]]:
    """What was said of SPACE's blocks, by digest."""
    with open_store(url) as store:
        return {info.key.digest: info.marks for info in store.scan(SPACE)}


def hammer(url: str, seed: int, rounds: int, options: dict[str, Any]) -> dict[str, int]:
    """Put, get, delete and touch the same few blocks as everybody else; counts by outcome."""
    chance = random.Random(seed)
    counts: dict[str, int] = {}
    with open_store(url, **options) as store:
        for _ in range(rounds):
            numbers = [chance.randrange(24) for _ in range(chance.randrange(1, 5))]
            match chance.randrange(8):
                case 0 | 1 | 2:
                    outcomes = [str(outcome) for outcome in store.put_many(SPACE, writes(numbers))]
                case 3 | 4 | 5:
                    outcomes = [str(outcome) for outcome in get(store, numbers)]
                case 6:
                    store.touch_many(SPACE, keys(numbers))
                    outcomes = []
                case _:
                    outcomes = [f"deleted {done}" for done in store.delete_many(SPACE, keys(numbers))]
            for outcome in outcomes:
                counts[outcome] = counts.get(outcome, 0) + 1
    return counts
