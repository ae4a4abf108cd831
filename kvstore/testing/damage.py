"""The contract, part five: whatever happens to a stored block behind the store's back, no get says HIT to wrong bytes.

Blocks are damaged, moved and forged through `raw_get` and `raw_set`, past the store, while the store is open.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import pytest

from kvstore.layout import BlockLayout
from kvstore.registry import open_store
from kvstore.testing.hooks import StoreHooks
from kvstore.testing.supply import SPACE, buffer, content, get, held, key, write, writes
from kvstore.types import BlockWrite, GetOutcome, PutOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.types import BlockKey

Place: TypeAlias = "tuple[Namespace, BlockKey]"

HIT, MISS, CORRUPT = GetOutcome.HIT, GetOutcome.MISS, GetOutcome.CORRUPT
STORED = PutOutcome.STORED

SMALL = dataclasses.replace(SPACE, layouts=(BlockLayout.opaque(6000), BlockLayout.opaque(6000)))
"""A block of two pages with room behind the payload, and a second group of the same size."""

TWIN = dataclasses.replace(SMALL, revision="of the same size")
"""A namespace whose blocks look exactly like SMALL's."""


def check_replaced(store: BlockStore, number: int = 1) -> None:
    """A block that failed is gone, counts no more, and the next put replaces it."""
    assert store.contains_many(SMALL, [key(number)]) == [False]
    assert get(store, [number], SMALL) == [MISS]
    assert key(number) not in held(store, SMALL)
    assert store.put_many(SMALL, [write(number, SMALL)]) == [STORED]
    assert get(store, [number], SMALL) == [HIT]
    infos = list(store.scan(SMALL))
    assert (store.usage().blocks, store.usage().used) == (len(infos), sum(info.stored_bytes for info in infos))


def bits_of(size: int, chance: random.Random) -> list[int]:
    """A bit in every region of a stored block: each byte of the frame's fields, and a choice of everything else."""
    edges = [*range(200), *range(size - 420, size), *range(5996, 6400)]
    places = sorted({place % size for place in edges[::5]} | {chance.randrange(size) for _ in range(40)} | {size - 1})
    return [8 * place + chance.randrange(8) for place in places]


def flipped(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda _data: b"",
    "to a byte": lambda data: data[:1],
    "to a page": lambda data: data[:4096],
    "to the payload": lambda data: data[:6000],
    "by a byte": lambda data: data[:-1],
    "longer by a byte": lambda data: data + b"\0",
    "longer by a page": lambda data: data + bytes(4096),
    "zeroed": lambda data: bytes(len(data)),
    "pages swapped": lambda data: data[4096:] + data[:4096],
    "end zeroed": lambda data: data[:4096] + bytes(len(data) - 4096),
    "something else": lambda _data: b"not a block at all",
}


@dataclass(frozen=True)
class Damager:
    """The raw hooks of one suite on one store."""

    hooks: StoreHooks
    url: str

    def read(self, place: Place) -> bytes:
        return self.hooks.raw_get(self.url, *place)

    def put(self, place: Place, data: bytes) -> None:
        self.hooks.raw_set(self.url, *place, data)

    def remove(self, place: Place) -> None:
        self.hooks.raw_set(self.url, *place, None)


def place(number: int, space: Namespace = SMALL, group: int = 0) -> Place:
    """Where the block of that number stands."""
    return space, key(number, group=group)


class DamageTests(StoreHooks):
    """Damaged, lost and forged blocks."""

    @pytest.fixture
    def damager(self, url: str) -> Damager:
        """What the device has of the store at `url`."""
        if type(self).raw_get is StoreHooks.raw_get:
            pytest.skip("damage cannot be planted: there are no raw hooks")
        return Damager(self, url)

    # Damage

    def test_any_one_bit(self, store: BlockStore, damager: Damager) -> None:
        store.put_many(SMALL, [write(1, SMALL), write(2, SMALL)])
        whole = damager.read(place(1))
        for bit in bits_of(len(whole), random.Random(1)):
            damager.put(place(1), flipped(whole, bit))
            assert get(store, [1, 2], SMALL) == [CORRUPT, HIT], f"bit {bit} of {8 * len(whole)}"
            assert get(store, [1, 2], SMALL) == [MISS, HIT]
            assert store.put_many(SMALL, [write(1, SMALL)]) == [STORED]
            assert get(store, [1], SMALL) == [HIT]
            whole = damager.read(place(1))

    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_a_block_that_was_cut_grew_or_lost_pages(
        self, store: BlockStore, damager: Damager, change: Callable[[bytes], bytes]
    ) -> None:
        store.put_many(SMALL, writes([1, 2], SMALL))
        damager.put(place(1), change(damager.read(place(1))))
        bad, good = get(store, [1, 2], SMALL)
        assert bad in (CORRUPT, MISS)
        assert good is HIT
        check_replaced(store)

    def test_a_block_that_vanished_is_a_miss_and_counts_no_more(self, store: BlockStore, damager: Damager) -> None:
        """Field report 6: a file missing behind the index."""
        store.put_many(SMALL, writes([1, 2], SMALL))
        damager.remove(place(1))
        assert get(store, [1, 2], SMALL) == [MISS, HIT]
        assert store.usage().blocks == 1
        check_replaced(store)

    def test_deleting_what_vanished_and_putting_it_anew(self, store: BlockStore, damager: Damager) -> None:
        store.put_many(SMALL, writes([1, 2], SMALL))
        damager.remove(place(1))
        store.delete_many(SMALL, [key(1)])
        check_replaced(store)

    def test_a_read_only_store_says_so_and_leaves_the_block(self, persistent_url: str, damager: Damager) -> None:
        with open_store(persistent_url) as store:
            store.put_many(SMALL, writes([1, 2], SMALL))
        damaged = flipped(damager.read(place(1)), 77)
        damager.put(place(1), damaged)
        with open_store(persistent_url, readonly=True) as store:
            assert get(store, [1, 2], SMALL) == [CORRUPT, HIT]
            assert get(store, [1, 2], SMALL) == [CORRUPT, HIT]
        assert damager.read(place(1)) == damaged

    def test_damage_before_a_restart_is_found_after_it(self, persistent_url: str, damager: Damager) -> None:
        with open_store(persistent_url) as store:
            store.put_many(SMALL, writes([1, 2], SMALL))
        damager.put(place(1), flipped(damager.read(place(1)), 4001))
        with open_store(persistent_url) as store:
            assert get(store, [1, 2], SMALL) == [CORRUPT, HIT]
            check_replaced(store)

    # A block copied, renamed or swapped under another digest, group or namespace is no hit there

    def test_two_blocks_swapped(self, store: BlockStore, damager: Damager) -> None:
        store.put_many(SMALL, writes([1, 2, 3], SMALL))
        one, two = damager.read(place(1)), damager.read(place(2))
        damager.put(place(1), two)
        damager.put(place(2), one)
        outcomes = get(store, [1, 2, 3], SMALL)
        assert set(outcomes[:2]) <= {CORRUPT, MISS}
        assert outcomes[2] is HIT
        check_replaced(store, 1)
        check_replaced(store, 2)

    def test_a_block_in_the_place_of_another(self, store: BlockStore, damager: Damager) -> None:
        store.put_many(SMALL, writes([1, 2], SMALL))
        damager.put(place(1), damager.read(place(2)))
        assert get(store, [1], SMALL)[0] in (CORRUPT, MISS)
        assert get(store, [2], SMALL) == [HIT]
        check_replaced(store)

    def test_an_older_copy_of_the_same_block_is_never_mistaken(self, store: BlockStore, damager: Damager) -> None:
        """The same key with the bytes of an earlier life: the digest says that they are as good."""
        store.put_many(SMALL, [write(1, SMALL)])
        old = damager.read(place(1))
        store.delete_many(SMALL, [key(1)])
        store.put_many(SMALL, [write(1, SMALL)])
        damager.put(place(1), old)
        assert get(store, [1], SMALL)[0] in (HIT, CORRUPT, MISS)  # `get` itself says "wrong bytes" if they were
        if get(store, [1], SMALL) != [HIT]:
            check_replaced(store)

    @pytest.mark.parametrize(
        ("space", "group", "number"),
        [(SMALL, 0, 9), (SMALL, 1, 1), (TWIN, 0, 1), (TWIN, 1, 9)],
        ids=["another digest", "another group", "another namespace", "another of everything"],
    )
    @pytest.mark.parametrize("known", [False, True], ids=["where nothing was", "over a block"])
    def test_a_copy_elsewhere(
        self, store: BlockStore, damager: Damager, space: Namespace, group: int, number: int, known: bool
    ) -> None:
        store.put_many(SMALL, [write(1, SMALL)])
        store.put_many(TWIN, [write(5, TWIN)])
        other = BlockWrite(key(number, group=group), buffer(content(number, 6000)))
        if known:
            assert store.put_many(space, [other]) == [STORED]
        damager.put(place(number, space, group), damager.read(place(1)))
        assert get(store, [number], space, group)[0] in (CORRUPT, MISS)
        assert store.put_many(space, [other]) == [STORED]
        assert get(store, [number], space, group) == [HIT]
        assert get(store, [1], SMALL) == [HIT]
        assert store.usage().blocks == 3

    def test_a_tier_of_another_namespace_renamed_into_this_one(self, store: BlockStore, damager: Damager) -> None:
        """Field report 10: equal sizes, incompatible bytes."""
        store.put_many(TWIN, writes(range(3), TWIN))
        store.put_many(SMALL, [write(9, SMALL)])
        for number in range(3):
            damager.put(place(number), damager.read(place(number, TWIN)))
        assert set(get(store, range(3), SMALL)) <= {CORRUPT, MISS}
        assert store.put_many(SMALL, writes(range(3), SMALL)) == [STORED] * 3
        assert get(store, range(3), SMALL) == [HIT] * 3
