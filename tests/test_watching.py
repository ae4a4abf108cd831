"""`kvstore.watching`: samples count what comes and goes, and cost no more than they may however large the tier is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import BlockLayout, BlockRead, BlockWrite, Mark, Namespace, block_keys, open_store
from kvstore.testing.faults import FaultyStore
from kvstore.watching import HOTTEST, WINDOW_S, Watcher

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore import BlockInfo, BlockKey, BlockStore
    from kvstore.testing.faults import Call

SPACE = Namespace("model", "revision-1", (BlockLayout.opaque(4096),), block_tokens=1)
OTHER = Namespace("other", "revision-1", (BlockLayout.opaque(4096),), block_tokens=1)
KEYS = block_keys(range(400), 1)


class Clock:
    """Of the test's own: the watcher's and the memory store's."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("kvstore_memory.now_ns", lambda: int(clock.now * 1e9))
    return clock


@pytest.fixture
def store() -> Iterator[BlockStore]:
    with open_store("memory://watched?capacity=1228800") as store:  # room for 300 blocks
        yield store


def put(store: BlockStore, keys: Sequence[BlockKey], space: Namespace = SPACE) -> None:
    parents = [b"", *(key.digest for key in keys)]
    store.put_many(space, [BlockWrite(key, bytes(4096), at, parents[at]) for at, key in enumerate(keys)])


def use(store: BlockStore, keys: Iterable[BlockKey], times: int = 1) -> None:
    for _ in range(times):
        store.get_many_into(SPACE, [BlockRead(key, bytearray(4096)) for key in keys])


def test_stores_and_evictions_are_those_of_the_last_minute(store: BlockStore, clock: Clock) -> None:
    watcher = Watcher(store, clock=clock)
    empty = watcher.sample()
    assert (empty.usage.blocks, empty.stores_per_s, empty.evictions_per_s, empty.exact) == (0, 0.0, None, True)
    clock.now += 10
    put(store, KEYS[:120])
    first = watcher.sample()
    assert first.exact
    assert first.stores_per_s == pytest.approx(120 / WINDOW_S)
    assert first.evictions_per_s == 0
    clock.now += 10
    put(store, KEYS[120:330])  # 30 of the first are evicted
    second = watcher.sample()
    assert second.usage.blocks == 300
    assert second.evictions_per_s == 0  # of those that came since the first sample, and went
    clock.now += WINDOW_S - 5
    put(store, KEYS[330:390])  # 60 that came before
    third = watcher.sample()
    assert third.stores_per_s == pytest.approx((60 + 210) / WINDOW_S)
    assert third.evictions_per_s == pytest.approx(60 / (WINDOW_S - 5))
    clock.now += WINDOW_S + 1
    quiet = watcher.sample()
    assert (quiet.stores_per_s, quiet.evictions_per_s) == (0.0, None)


def test_the_hottest_prefixes_are_named_by_their_first_block(store: BlockStore) -> None:
    for at in range(HOTTEST + 3):
        put(store, KEYS[10 * at : 10 * at + 10])
        use(store, KEYS[10 * at : 10 * at + 10], times=at + 1)
    store.mark_many(SPACE, [KEYS[10]], Mark("handbook", pinned=True))
    use(store, [KEYS[10]], times=50)
    hottest = Watcher(store).sample().hottest
    assert len(hottest) == HOTTEST
    assert [hot.hits for hot in hottest] == [52, *range(HOTTEST + 3, 4, -1)]
    first = hottest[0]
    assert (first.digest, first.namespace, first.labels, first.pinned) == (
        KEYS[10].digest.hex(), SPACE.name, ("handbook",), True,
    )  # fmt: skip


def test_a_large_tier_is_read_in_parts_and_its_rates_are_estimated(store: BlockStore, clock: Clock) -> None:
    put(store, KEYS[:200])
    put(store, KEYS[:50], OTHER)
    store.mark_many(OTHER, KEYS[:3], Mark("x", pinned=True))
    clock.now += 2 * WINDOW_S
    store.delete_many(SPACE, KEYS[:50])
    put(store, KEYS[:50])
    listed = 0

    def scan(call: Call) -> Iterator[BlockInfo]:
        nonlocal listed
        for info in sorted(call.answer(), key=lambda info: info.key.digest):  # as a catalogue lists them
            listed += 1
            yield info

    faulty = FaultyStore(store)
    faulty.plan["scan"] = scan
    watcher = Watcher(faulty, at_once=100, clock=clock)
    for complete in (False, False, True):
        before = listed
        sample = watcher.sample()
        assert listed - before == sample.scanned == 100  # behind the last comes the first
        assert (sample.exact, sample.complete) == (False, complete)
    assert [(space.namespace, space.blocks, space.pinned) for space in sample.namespaces] == [
        (SPACE.name, 200, 0),
        (OTHER.name, 50, 3),
    ]
    rates = [watcher.sample().stores_per_s for _ in range(5)]
    assert sum(rates) / 5 == pytest.approx(50 / WINDOW_S, rel=0.5)
    assert watcher.sample().complete
