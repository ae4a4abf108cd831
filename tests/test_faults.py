"""Stores that misbehave on order: each fault does what it says, to whatever store is behind it, and nothing else."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tiering_helpers import BLOCK, PATIENCE, SPACE, content, intact, keys, writes

from kvstore import BlockRead, GetOutcome, PutOutcome, open_store
from kvstore.errors import TierUnavailable
from kvstore.testing.faults import FaultyStore, failing, flapping, lying, slow, truncating, wrong_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore import BlockKey
    from kvstore.testing.faults import Hanging

KEYS = keys(4)


@pytest.fixture(params=["memory", "file", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FaultyStore]:
    urls = {"memory": "memory://faults", "file": f"file://{tmp_path}/kv", "lmdb": f"lmdb://{tmp_path}/kv.lmdb"}
    with FaultyStore(open_store(urls[request.param])) as faulty:
        yield faulty


def get(store: FaultyStore, names: Sequence[BlockKey]) -> tuple[list[GetOutcome], list[NDArray[np.uint8]]]:
    buffers = [np.full(BLOCK, 7, np.uint8) for _ in names]
    reads = [BlockRead(name, buffer.data) for name, buffer in zip(names, buffers, strict=True)]
    return store.get_many_into(SPACE, reads), buffers


def test_without_a_plan_it_is_the_store_behind_it_and_says_who_called(store: FaultyStore) -> None:
    assert store.put_many(SPACE, writes(KEYS[:2])) == [PutOutcome.STORED] * 2
    assert store.contains_many(SPACE, KEYS[:3]) == [True, True, False]
    assert intact(store, KEYS[:3]) == [True, True, False]
    store.touch_many(SPACE, KEYS[:1])
    assert store.delete_many(SPACE, KEYS[:1]) == [True]
    assert [info.key for info in store.scan(SPACE)] == KEYS[1:2]
    assert store.usage().blocks == 1
    assert store.namespaces() == [SPACE]
    assert store.capabilities == store.inner.capabilities
    verbs = ["put", "contains", "get", "touch", "delete", "scan", "usage", "namespaces"]
    assert [verb for verb, _ in store.calls] == verbs
    assert store.calls[1] == ("contains", KEYS[:3])


def test_a_failing_verb_reaches_nothing_and_the_others_work(store: FaultyStore) -> None:
    store.plan["put"] = failing()
    with pytest.raises(TierUnavailable, match="put"):
        store.put_many(SPACE, writes(KEYS))
    assert store.contains_many(SPACE, KEYS) == [False] * 4
    store.plan.clear()
    assert store.put_many(SPACE, writes(KEYS)) == [PutOutcome.STORED] * 4


def test_faults_are_put_together(store: FaultyStore) -> None:
    store.plan["contains"] = slow(0.05, flapping([True, False, False], lying(True)))
    begin = time.monotonic()
    answers = [store.contains_many(SPACE, KEYS[:1])[0] for _ in range(6)]
    assert answers == [False, True, True] * 2
    assert time.monotonic() - begin >= 0.3


def test_calls_hang_until_they_are_released_and_not_after(store: FaultyStore, hanging: Hanging) -> None:
    store.plan["put"] = hanging
    thread = threading.Thread(target=store.put_many, args=(SPACE, writes(KEYS)))
    thread.start()
    deadline = time.monotonic() + PATIENCE
    while not hanging.waiting:
        assert time.monotonic() < deadline
    assert hanging.waiting == ["put"]
    assert store.contains_many(SPACE, KEYS) == [False] * 4
    hanging.release()
    thread.join(PATIENCE)
    assert not hanging.waiting
    assert store.put_many(SPACE, writes(KEYS)) == [PutOutcome.EXISTS] * 4


def test_a_truncating_get_fills_the_front_only_and_owns_up_unless_it_is_to_lie(store: FaultyStore) -> None:
    store.put_many(SPACE, writes(KEYS[:1]))
    for told in (GetOutcome.CORRUPT, GetOutcome.HIT):
        store.plan["get"] = truncating(100, told)
        outcomes, (buffer, missing) = get(store, KEYS[:2])
        assert outcomes == [told, GetOutcome.MISS]
        assert np.array_equal(buffer[:100], content(KEYS[0])[:100])
        assert (buffer[100:] == 7).all()
        assert (missing[100:] == 7).all()


def test_a_truncating_put_stores_zeros_behind_the_front(store: FaultyStore) -> None:
    store.plan["put"] = truncating(100)
    assert store.put_many(SPACE, writes(KEYS[:1])) == [PutOutcome.STORED]
    outcomes, (buffer,) = get(store, KEYS[:1])
    assert outcomes == [GetOutcome.HIT]
    assert np.array_equal(buffer[:100], content(KEYS[0])[:100])
    assert not buffer[100:].any()


def test_wrong_bytes_are_called_a_hit(store: FaultyStore) -> None:
    store.put_many(SPACE, writes(KEYS[:1]))
    store.plan["get"] = wrong_bytes
    outcomes, (buffer,) = get(store, KEYS[:1])
    assert outcomes == [GetOutcome.HIT]
    assert (buffer != content(KEYS[0])).sum() == 1


def test_what_can_hang_is_said_as_ordered() -> None:
    with FaultyStore(open_store("memory://faults"), can_hang=True) as store:
        assert store.capabilities.can_hang
        assert not store.inner.capabilities.can_hang
