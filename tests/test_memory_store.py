"""`memory://`, as far as it is not what every backend promises (`tests/backends` has that)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import kvstore_memory
from kvstore import (
    BlockKey,
    BlockLayout,
    BlockRead,
    BlockStore,
    BlockWrite,
    GetOutcome,
    Namespace,
    PutOutcome,
    open_store,
)
from kvstore.errors import InvalidOptionError, StoreNotFoundError, UnknownOptionError

SPACE = Namespace("model", "rev", (BlockLayout.opaque(1000),), block_tokens=16)
KEY = BlockKey(bytes(32))
DATA = np.arange(1000, dtype=np.uint8)


def get(store: BlockStore, key: BlockKey = KEY) -> GetOutcome:
    into = np.zeros(1000, np.uint8)
    (outcome,) = store.get_many_into(SPACE, [BlockRead(key, into)])
    assert outcome is not GetOutcome.HIT or np.array_equal(into, DATA)
    return outcome


def test_stores_of_one_name_share_their_blocks_and_other_names_do_not() -> None:
    with open_store("memory://one") as one, open_store("memory://one") as same, open_store("memory://two") as other:
        one.put_many(SPACE, [BlockWrite(KEY, DATA)])
        assert (get(same), get(other)) == (GetOutcome.HIT, GetOutcome.MISS)


def test_blocks_go_with_the_last_store_of_their_name() -> None:
    with open_store("memory://gone") as first:
        first.put_many(SPACE, [BlockWrite(KEY, DATA)])
        with open_store("memory://gone") as second:
            assert get(second) is GetOutcome.HIT
        assert get(first) is GetOutcome.HIT
    with open_store("memory://gone") as third:
        assert get(third) is GetOutcome.MISS
        assert third.namespaces() == []


def test_it_says_what_it_is() -> None:
    with open_store("memory://x") as store:
        found = store.capabilities
    assert (found.persistent, found.shared, found.can_hang, found.io) == (False, False, False, "memory")


def test_a_cap_counts_payload_bytes_to_the_last_one() -> None:
    with open_store("memory://tight", capacity=3000) as store:
        keys = [BlockKey(bytes(31) + bytes([number])) for number in range(4)]
        assert store.put_many(SPACE, [BlockWrite(key, DATA) for key in keys]) == [PutOutcome.STORED] * 4
        assert store.contains_many(SPACE, keys) == [False, True, True, True]
        assert store.usage() == dataclasses.replace(store.usage(), blocks=3, used=3000, capacity=3000)


@pytest.mark.parametrize("damage", [lambda data: b"\1" + data[1:], lambda data: data[:-1]], ids=["flipped", "short"])
def test_memory_that_went_bad_is_corrupt_once_and_then_a_miss(damage: Any) -> None:
    with open_store("memory://bad") as store:
        store.put_many(SPACE, [BlockWrite(KEY, DATA)])
        shelf = kvstore_memory._shelves["bad"]
        entry = shelf.entries[SPACE.fingerprint, KEY]
        entry.data = damage(entry.data)
        shelf.used += len(entry.data) - 1000
        with open_store("memory://bad", readonly=True) as reader:
            assert (get(reader), get(reader)) == (GetOutcome.CORRUPT, GetOutcome.CORRUPT)
        assert (get(store), get(store)) == (GetOutcome.CORRUPT, GetOutcome.MISS)
        assert store.usage().used == 0
        assert store.put_many(SPACE, [BlockWrite(KEY, DATA)]) == [PutOutcome.STORED]
        assert get(store) is GetOutcome.HIT


def test_options_it_does_not_know_are_refused() -> None:
    with pytest.raises(UnknownOptionError, match=r"(?s)durability.*capacity"):
        open_store("memory://x?durability=fsync")
    with pytest.raises(InvalidOptionError, match="capacity"):
        open_store("memory://x?capacity=lots")


def test_nothing_to_read_is_an_error_not_an_empty_store() -> None:
    with pytest.raises(StoreNotFoundError, match="memory://never-opened"):
        open_store("memory://never-opened?readonly=true")
