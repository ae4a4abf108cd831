"""The contract, part one: what is put is read back, exactly, and every batch answers for each of its blocks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

from kvstore.abc import BlockStore
from kvstore.errors import InvalidBlockError
from kvstore.layout import BlockLayout, as_bytes
from kvstore.namespace import Namespace
from kvstore.testing.hooks import StoreHooks
from kvstore.testing.supply import KIB, SPACE, buffer, content, get, held, key, keys, write, writes
from kvstore.types import BlockKey, BlockRead, BlockWrite, GetOutcome, PutOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer


HIT, MISS = GetOutcome.HIT, GetOutcome.MISS
STORED, EXISTS = PutOutcome.STORED, PutOutcome.EXISTS

LAYOUTS = {
    "float16": BlockLayout.canonical(layers=2, tokens=16, heads=3, head_dim=64, dtype="float16"),
    "bfloat16": BlockLayout.canonical(layers=30, tokens=32, heads=3, head_dim=64, dtype="bfloat16"),  # 737,280 bytes
    "float32": BlockLayout.canonical(layers=1, tokens=3, heads=5, head_dim=7, dtype="float32"),
    "one byte": BlockLayout.opaque(1),
    "1000 bytes": BlockLayout.opaque(1000),
    "a page": BlockLayout.opaque(4096),
    "a page and a byte": BlockLayout.opaque(4097),
    "737280 bytes": BlockLayout.opaque(737_280),
    "2 MiB": BlockLayout.opaque(2 << 20),
}

KINDS: dict[str, Callable[[bytes], Buffer]] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "array": lambda data: buffer(np.frombuffer(data, np.uint8)),
}


class BlockTests(StoreHooks):
    """Put, get, ask, delete."""

    # Put and get

    def test_a_block_comes_back_as_it_was_put(self, store: BlockStore) -> None:
        assert store.put_many(SPACE, [write(1)]) == [STORED]
        assert get(store, [1]) == [HIT]

    @pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
    def test_any_layout_and_size_comes_back(self, store: BlockStore, layout: BlockLayout) -> None:
        space = dataclasses.replace(SPACE, layouts=(layout,))
        assert store.put_many(space, writes(range(3), space)) == [STORED] * 3
        assert get(store, [2, 0, 3, 1], space) == [HIT, HIT, MISS, HIT]

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_arrays_of_the_layouts_dtype_are_put_and_filled_as_they_are(self, store: BlockStore, dtype: str) -> None:
        layout = BlockLayout.canonical(layers=2, tokens=4, heads=2, head_dim=8, dtype=dtype)
        space = dataclasses.replace(SPACE, layouts=(layout,))
        given = np.random.default_rng(1).standard_normal(layout.shape).astype(layout.numpy_dtype)
        into = np.zeros(layout.shape, layout.numpy_dtype)
        assert store.put_many(space, [BlockWrite(key(1), buffer(given))]) == [STORED]
        assert store.get_many_into(space, [BlockRead(key(1), buffer(into))]) == [HIT]
        assert np.array_equal(as_bytes(buffer(into)), as_bytes(buffer(given)))
        assert into.dtype == (ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype))

    @pytest.mark.parametrize("digest_bytes", [16, 17, 20, 32, 63, 64])
    def test_digests_of_any_allowed_length(self, store: BlockStore, digest_bytes: int) -> None:
        space = dataclasses.replace(SPACE, digest_bytes=digest_bytes)
        extremes = [
            BlockKey(bytes(digest_bytes)),
            BlockKey(b"\xff" * digest_bytes),
            BlockKey(bytes(digest_bytes - 1) + b"\1"),
        ]
        given = [BlockWrite(name, buffer(content(number))) for number, name in enumerate(extremes)]
        assert store.put_many(space, given) == [STORED] * 3
        for number, name in enumerate(extremes):
            into = np.empty(space.block_bytes(), np.uint8)
            assert store.get_many_into(space, [BlockRead(name, buffer(into))]) == [HIT]
            assert np.array_equal(into, content(number))
        assert held(store, space) == set(extremes)

    def test_outcomes_come_in_the_order_given(self, store: BlockStore) -> None:
        store.put_many(SPACE, writes([2, 4]))
        assert store.put_many(SPACE, writes(range(6))) == [STORED, STORED, EXISTS, STORED, EXISTS, STORED]
        assert get(store, [9, 5, 8, 0, 5]) == [MISS, HIT, MISS, HIT, HIT]
        assert store.contains_many(SPACE, keys([9, 5, 8, 0, 5])) == [False, True, False, True, True]
        assert store.delete_many(SPACE, keys([9, 5, 8, 0])) == [False, True, False, True]

    def test_a_batch_may_be_empty(self, store: BlockStore) -> None:
        assert store.put_many(SPACE, []) == []
        assert store.get_many_into(SPACE, []) == []
        assert store.contains_many(SPACE, []) == []
        assert store.delete_many(SPACE, []) == []
        store.touch_many(SPACE, [])

    def test_a_batch_may_be_larger_than_what_suits_the_store(self, store: BlockStore) -> None:
        numbers = range(store.capabilities.batch_bytes // SPACE.block_bytes() + 3)
        assert set(store.put_many(SPACE, writes(numbers))) == {STORED}
        assert set(get(store, numbers)) == {HIT}

    def test_a_block_that_is_there_is_left_as_it_is(self, store: BlockStore) -> None:
        store.put_many(SPACE, [write(1)])
        assert store.put_many(SPACE, [BlockWrite(key(1), buffer(content(2)))]) == [EXISTS]
        assert get(store, [1]) == [HIT]

    def test_of_two_writes_of_one_key_in_a_batch_the_first_counts(self, store: BlockStore) -> None:
        batch = [write(0), write(1), BlockWrite(key(1), buffer(content(2))), write(3)]
        assert store.put_many(SPACE, batch) == [STORED, STORED, EXISTS, STORED]
        assert get(store, [0, 1, 3]) == [HIT, HIT, HIT]
        assert store.usage().blocks == len(held(store)) == 3

    def test_one_get_may_ask_twice_for_a_block(self, store: BlockStore) -> None:
        store.put_many(SPACE, [write(1)])
        assert get(store, [1, 1]) == [HIT, HIT]

    # Misses

    def test_a_miss_is_a_value(self, store: BlockStore) -> None:
        assert get(store, [1, 2]) == [MISS, MISS]
        assert store.contains_many(SPACE, keys([1, 2])) == [False, False]
        assert store.delete_many(SPACE, keys([1, 2])) == [False, False]
        assert list(store.scan(SPACE)) == []
        store.touch_many(SPACE, keys([1, 2]))

    def test_asking_for_a_namespace_does_not_create_it(self, store: BlockStore) -> None:
        get(store, [1])
        list(store.scan(SPACE))
        store.delete_many(SPACE, keys([1]))
        store.touch_many(SPACE, keys([1]))
        assert store.namespaces() == []

    def test_a_missing_block_does_not_spoil_its_batch(self, store: BlockStore) -> None:
        store.put_many(SPACE, writes([1, 3]))
        assert get(store, [1, 2, 3]) == [HIT, MISS, HIT]

    # Delete

    def test_a_deleted_block_is_gone_and_may_be_put_anew(self, store: BlockStore) -> None:
        store.put_many(SPACE, [BlockWrite(key(1), buffer(content(2))), write(3)])
        assert store.delete_many(SPACE, keys([1])) == [True]
        assert get(store, [1, 3]) == [MISS, HIT]
        assert store.delete_many(SPACE, keys([1])) == [False]
        assert store.put_many(SPACE, [write(1)]) == [STORED]
        assert get(store, [1]) == [HIT]

    def test_a_key_given_twice_is_deleted_once(self, store: BlockStore) -> None:
        store.put_many(SPACE, writes([1, 2]))
        assert store.delete_many(SPACE, keys([1, 1])) == [True, False]
        assert held(store) == {key(2)}

    # Namespaces and groups

    def test_the_same_digest_is_another_block_in_each_namespace_and_group(self, store: BlockStore) -> None:
        layouts = (BlockLayout.opaque(4 * KIB), BlockLayout.opaque(4 * KIB), BlockLayout.opaque(5000))
        spaces = [dataclasses.replace(SPACE, revision=name, layouts=layouts) for name in ("one", "two")]
        places = [(space, group) for space in spaces for group in range(3)]
        for number, (space, group) in enumerate(places):
            block = BlockWrite(key(7, group=group), buffer(content(number, space.block_bytes(group))))
            assert store.put_many(space, [block]) == [STORED]
        for number, (space, group) in enumerate(places):
            into = np.empty(space.block_bytes(group), np.uint8)
            assert store.get_many_into(space, [BlockRead(key(7, group=group), buffer(into))]) == [HIT]
            assert np.array_equal(into, content(number, len(into)))
        assert store.delete_many(spaces[0], [key(7, group=1)]) == [True]
        assert held(store, spaces[0]) == {key(7), key(7, group=2)}
        assert held(store, spaces[1]) == {key(7, group=group) for group in range(3)}

    def test_one_batch_may_hold_blocks_of_several_groups(self, store: BlockStore) -> None:
        space = dataclasses.replace(SPACE, layouts=(BlockLayout.opaque(4096), BlockLayout.opaque(100_000)))
        assert store.put_many(space, [write(1, space, 0), write(1, space, 1)]) == [STORED, STORED]
        assert get(store, [1], space, 0) == get(store, [1], space, 1) == [HIT]

    def test_a_store_lists_the_namespaces_of_which_something_was_put(self, store: BlockStore) -> None:
        spaces = [
            Namespace("modèle/7B", "r", (LAYOUTS["bfloat16"], LAYOUTS["1000 bytes"]), 32, extra={"rope": "yarn"}),
            dataclasses.replace(SPACE, digest_bytes=16),
            dataclasses.replace(SPACE, digest_bytes=64),
        ]
        for space in spaces:
            store.put_many(space, [write(1, space)])
        assert sorted(store.namespaces(), key=lambda space: space.name) == sorted(spaces, key=lambda space: space.name)

    # Buffers

    @pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
    def test_any_contiguous_buffer_can_be_put(self, store: BlockStore, kind: Callable[[bytes], Buffer]) -> None:
        data = kind(content(1).tobytes())
        assert store.put_many(SPACE, [BlockWrite(key(1), data)]) == [STORED]
        assert np.array_equal(as_bytes(data), content(1))
        assert get(store, [1]) == [HIT]

    @pytest.mark.parametrize("offset", [0, 1, 8, 511, 512, 4095])
    def test_a_buffer_may_lie_at_any_address_and_nothing_beside_it_is_touched(
        self, store: BlockStore, offset: int
    ) -> None:
        size = SPACE.block_bytes()
        memory = np.full(size + 3 * 4096, 0xA5, np.uint8)
        start = -memory.ctypes.data % 4096 + offset
        memory[start : start + size] = content(1)
        before = memory.copy()
        assert store.put_many(SPACE, [BlockWrite(key(1), buffer(memory[start : start + size]))]) == [STORED]
        assert np.array_equal(memory, before)
        memory[start : start + size] = 0x5A
        assert store.get_many_into(SPACE, [BlockRead(key(1), buffer(memory[start : start + size]))]) == [HIT]
        assert np.array_equal(memory, before)

    def test_a_miss_writes_nothing_beside_its_buffer(self, store: BlockStore) -> None:
        store.put_many(SPACE, [write(1)])
        memory = np.full(3 * SPACE.block_bytes(), 0xA5, np.uint8)
        into = memory[SPACE.block_bytes() : 2 * SPACE.block_bytes()]
        assert store.get_many_into(SPACE, [BlockRead(key(2), buffer(into))]) == [MISS]
        assert set(memory[: SPACE.block_bytes()]) == set(memory[2 * SPACE.block_bytes() :]) == {0xA5}

    def test_nobody_holds_or_reads_a_buffer_after_the_call(self, store: BlockStore) -> None:
        given, into = bytearray(content(1).tobytes()), bytearray(SPACE.block_bytes())
        store.put_many(SPACE, [BlockWrite(key(1), given)])
        given[:] = bytes(len(given))
        given.append(0)  # BufferError while anybody holds a view
        assert store.get_many_into(SPACE, [BlockRead(key(1), into)]) == [HIT]
        assert np.array_equal(np.frombuffer(bytes(into), np.uint8), content(1))
        into.append(0)
        assert get(store, [1]) == [HIT]

    # Whatever does not fit raises before anything is done, whichever verb it is given to

    @pytest.mark.parametrize(
        "bad",
        [
            BlockWrite(key(2), bytes(SPACE.block_bytes() - 1)),
            BlockWrite(key(2), bytes(SPACE.block_bytes() + 1)),
            BlockWrite(key(2), b""),
            BlockWrite(key(2), buffer(np.zeros((SPACE.block_bytes(), 2), np.uint8)[:, 0])),
            BlockWrite(key(2, digest_bytes=16), buffer(content(2))),
            BlockWrite(key(2, group=1), buffer(content(2))),
            BlockWrite(key(2, group=-1), buffer(content(2))),
            write(2, parent=bytes(31)),
            write(2, parent=bytes(70)),
            write(2, position=-2),
            write(2, position=1 << 63),
        ],
        ids=["short", "long", "empty", "with gaps", "digest length", "group", "negative group", "short parent",
             "long parent", "negative position", "huge position"],
    )  # fmt: skip
    def test_a_block_that_does_not_fit_stops_its_batch_before_anything_is_stored(
        self, store: BlockStore, bad: BlockWrite
    ) -> None:
        with pytest.raises(InvalidBlockError):
            store.put_many(SPACE, [write(1), bad])
        assert get(store, [1]) == [MISS]
        assert store.namespaces() == []

    def test_a_buffer_that_does_not_fit_stops_its_batch_before_anything_is_read(self, store: BlockStore) -> None:
        store.put_many(SPACE, writes([1, 2]))
        size = SPACE.block_bytes()
        gaps = buffer(np.zeros((size, 2), np.uint8)[:, 0])
        for bad in (bytearray(size - 1), bytearray(size + 1), gaps, bytes(size)):
            into = np.zeros(size, np.uint8)
            with pytest.raises(InvalidBlockError):
                store.get_many_into(SPACE, [BlockRead(key(1), buffer(into)), BlockRead(key(2), bad)])
            assert not into.any()

    @pytest.mark.parametrize("bad", [key(2, digest_bytes=16), key(2, group=1)], ids=["digest length", "group"])
    def test_a_key_that_does_not_fit_stops_every_verb(self, store: BlockStore, bad: BlockKey) -> None:
        store.put_many(SPACE, [write(1)])
        into = np.zeros(SPACE.block_bytes(), np.uint8)
        verbs: list[Callable[[Namespace, list[BlockKey]], object]] = [store.contains_many, store.delete_many]
        if type(store).touch_many is not BlockStore.touch_many:  # which is for stores that evict
            verbs.append(store.touch_many)
        for verb in verbs:
            with pytest.raises(InvalidBlockError):
                verb(SPACE, [key(1), bad])
        with pytest.raises(InvalidBlockError):
            store.get_many_into(SPACE, [BlockRead(key(1), buffer(into)), BlockRead(bad, buffer(into.copy()))])
        assert not into.any()
        assert get(store, [1]) == [HIT]
