"""`kvstore.copying`: what arrives is what was there, what does not is told, and memory stays bounded."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore import (
    BlockLayout,
    BlockRead,
    BlockStore,
    BlockWrite,
    GetOutcome,
    Mark,
    Namespace,
    PutOutcome,
    block_keys,
    open_store,
)
from kvstore.copying import REFUSED, Fate, copy
from kvstore.errors import TierUnavailable
from kvstore.marks import MarkOutcome
from kvstore.testing.faults import FaultyStore, failing
from kvstore.types import NO_POSITION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from kvstore import BlockInfo, BlockKey
    from kvstore.testing.faults import Call

BLOCK = 64 << 10
SPACE = Namespace("model", "revision-1", (BlockLayout.opaque(BLOCK), BlockLayout.opaque(4096)), block_tokens=4)
OTHER = Namespace("other", "revision-1", (BlockLayout.opaque(4096),), block_tokens=4)
KEYS = block_keys(range(160), 4)
"""40 of them."""


def content(key: BlockKey, nbytes: int) -> np.ndarray:
    return np.random.default_rng(key.digest[0] + 256 * key.group).integers(0, 256, nbytes, np.uint8)


def chain(keys: Sequence[BlockKey], nbytes: int = BLOCK) -> list[BlockWrite]:
    parents = [b"", *(key.digest for key in keys[:-1])]
    return [BlockWrite(key, content(key, nbytes), at, parents[at]) for at, key in enumerate(keys)]


def facts(store: BlockStore, space: Namespace) -> dict[BlockKey, tuple[int, bytes, tuple[Mark, ...]]]:
    return {info.key: (info.position, info.parent, info.marks) for info in store.scan(space)}


def read(store: BlockStore, space: Namespace, keys: Iterable[BlockKey]) -> dict[BlockKey, bytes]:
    reads = [BlockRead(key, bytearray(space.block_bytes(key.group))) for key in keys]
    assert set(store.get_many_into(space, reads)) <= {GetOutcome.HIT}
    return {one.key: bytes(one.into) for one in reads}


def url(kind: str, tmp_path: Path, name: str, options: str = "") -> str:
    return f"memory://{tmp_path.name}-{name}{options}" if kind == "memory" else f"{kind}://{tmp_path}/{name}{options}"


@pytest.fixture
def source(tmp_path: Path) -> Iterator[BlockStore]:
    """Two prefixes and a second group in one namespace, some of it marked, and two blocks of another namespace."""
    with open_store(url("file", tmp_path, "source")) as store:
        store.put_many(SPACE, chain(KEYS[:30]))
        store.put_many(SPACE, [BlockWrite(key, content(key, 4096)) for key in block_keys(range(20), 4, group=1)])
        store.put_many(OTHER, chain(KEYS[:2], 4096))
        store.mark_many(SPACE, KEYS[:8], Mark("handbook", pinned=True, tenant="acme"))
        store.mark_many(SPACE, KEYS[4:12], Mark("other"))
        yield store


@pytest.mark.parametrize("kind", ["file", "lmdb", "memory"])
def test_everything_arrives_with_what_is_known_of_it_and_a_second_time_nothing_moves(
    kind: str, source: BlockStore, tmp_path: Path
) -> None:
    with open_store(url(kind, tmp_path, "target")) as target:
        report = copy(source, target)
        assert (report.ok, report.fates[Fate.COPIED], report.fates.total()) == (True, 37, 37)
        assert report.bytes == 30 * BLOCK + 5 * 4096 + 2 * 4096
        for space in (SPACE, OTHER):
            assert facts(target, space) == facts(source, space)
            assert read(target, space, facts(source, space)) == read(source, space, facts(source, space))
        assert facts(target, SPACE)[KEYS[5]][2] == (Mark("handbook", True, "acme"), Mark("other"))
        assert facts(target, SPACE)[KEYS[29]][0] == 29
        assert facts(target, SPACE)[block_keys(range(20), 4, group=1)[1]][0] == NO_POSITION
        again = copy(source, target)
        assert (again.ok, again.fates[Fate.PRESENT], again.fates.total(), again.bytes) == (True, 37, 37, 0)


def test_marks_are_given_to_blocks_that_an_earlier_copy_left_without(source: BlockStore) -> None:
    with open_store("memory://target") as target:
        target.put_many(SPACE, chain(KEYS[:30]))
        copy(source, target)
        assert facts(target, SPACE) == facts(source, SPACE)


def test_what_is_chosen_is_copied_alone(source: BlockStore) -> None:
    with open_store("memory://target") as target:
        chosen = Mark("other")
        report = copy(source, target, named=SPACE.name.__eq__, blocks=lambda space: source.scan_marked(space, chosen))
        assert report.fates == {Fate.COPIED: 8}
        assert set(facts(target, SPACE)) == set(KEYS[4:12])
        assert target.namespaces() == [SPACE]


def test_a_dry_run_counts_and_changes_nothing(source: BlockStore) -> None:
    with open_store("memory://target") as target:
        target.put_many(SPACE, chain(KEYS[:10]))
        report = copy(source, target, dry_run=True)
        assert (report.fates[Fate.COPIED], report.fates[Fate.PRESENT]) == (27, 10)
        assert report.bytes == 20 * BLOCK + 7 * 4096
        assert set(facts(target, SPACE)) == set(KEYS[:10])
        assert not any(marks for _, _, marks in facts(target, SPACE).values())


def test_damaged_blocks_stay_behind_and_are_named_and_those_that_went_are_told_from_those_that_are_lost(
    source: BlockStore,
) -> None:
    fates = {
        KEYS[1]: GetOutcome.CORRUPT,
        KEYS[2]: GetOutcome.MISS,
        KEYS[3]: GetOutcome.MISS,
    }
    with FaultyStore(source) as faulty, open_store("memory://target") as target:
        faulty.plan["get"] = lambda call: [
            fates.get(key, outcome) for key, outcome in zip(call.keys, call.answer(), strict=True)
        ]
        faulty.plan["contains"] = lambda call: [key != KEYS[3] for key in call.keys]
        report = copy(faulty, target, named=SPACE.name.__eq__)
        assert not report.ok
        assert report.of(Fate.CORRUPT) == [(SPACE, KEYS[1])]
        assert report.of(Fate.MISSING) == [(SPACE, KEYS[2])]
        assert (report.fates[Fate.GONE], report.fates[Fate.COPIED]) == (1, 32)
        assert set(facts(target, SPACE)) == set(facts(source, SPACE)) - set(fates)


def test_a_target_that_refuses_everything_is_not_read_for() -> None:
    space = Namespace("many", "1", (BlockLayout.opaque(4096),), block_tokens=1)
    keys = block_keys(range(4 * REFUSED), 1)
    with open_store("memory://source") as source, FaultyStore(open_store("memory://target")) as target:
        source.put_many(space, [BlockWrite(key, bytes(4096)) for key in keys])
        target.plan["put"] = lambda call: [PutOutcome.FAILED] * len(call.keys)
        few = copy(source, target, blocks=lambda space: list(source.scan(space))[:3])
        assert (few.ok, few.fates) == (False, {Fate.FAILED: 3})
        assert len(few.of(Fate.FAILED)) == 3
        with pytest.raises(TierUnavailable, match="refused each of the first"):
            copy(source, target)


def test_a_target_without_room_ends_the_copy_and_keeps_what_it_has(source: BlockStore) -> None:
    with FaultyStore(open_store("memory://target")) as target:
        target.plan["put"] = lambda call: (
            call.answer() if target.inner.usage().blocks < 7 else [PutOutcome.FULL] * len(call.keys)
        )
        small_batches(target, 4 * BLOCK)
        report = copy(source, target, threads=1)
        assert (report.ok, report.full) == (False, True)
        assert report.fates[Fate.COPIED] == target.usage().blocks > 0
        target.plan.clear()
        assert copy(source, target).ok
        assert facts(target, SPACE) == facts(source, SPACE)


def small_batches(store: BlockStore, nbytes: int) -> None:
    store.capabilities = replace(store.capabilities, batch_bytes=nbytes)


def test_a_target_under_a_capacity_is_filled_and_evicts_only_where_it_may() -> None:
    space = Namespace("many", "1", (BlockLayout.opaque(4096),), block_tokens=1)
    with open_store("memory://source") as source, open_store("memory://target?capacity=409600") as target:
        source.put_many(space, [BlockWrite(key, bytes(4096)) for key in block_keys(range(400), 1)])
        small_batches(target, 8192)
        report = copy(source, target, threads=2)
        assert report.full
        assert target.usage().blocks == report.fates[Fate.COPIED] == 100
        again = copy(source, target, threads=2)
        assert (again.full, again.fates[Fate.COPIED], target.usage().blocks) == (True, 0, 100)
        report = copy(source, target, threads=2, evict=True)
        assert report.ok
        assert report.fates[Fate.COPIED] >= 300


def test_a_store_that_only_evicts_is_not_given_what_it_would_evict_for() -> None:
    """The default of `put_if_room`: it goes by what `usage` says."""
    space = Namespace("many", "1", (BlockLayout.opaque(4096),), block_tokens=1)
    blocks = [BlockWrite(key, bytes(4096)) for key in block_keys(range(6), 1)]
    with open_store("memory://target?capacity=16384") as target:
        target.put_many(space, blocks[:3])
        stored, there, full = PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.FULL
        assert BlockStore.put_if_room(target, space, blocks[1:]) == [there, there, stored, full, full]
        assert target.contains_many(space, [block.key for block in blocks]) == [True] * 4 + [False] * 2
    with open_store("memory://boundless") as target:
        assert BlockStore.put_if_room(target, space, blocks) == [stored] * 6


def test_a_block_that_finds_no_room_beside_others_is_tried_alone_before_the_copy_ends(
    source: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where those others have reserved more than they take."""
    inside = threading.Semaphore(1)
    refused: list[int] = []
    source.mark_many(SPACE, KEYS, Mark("kept"))
    with open_store(f"memory://crowded?capacity={400 * BLOCK}") as target:
        put = target.put_if_room

        def crowded(space: Namespace, blocks: Sequence[BlockWrite]) -> list[PutOutcome]:
            if not inside.acquire(blocking=False):
                refused.append(len(blocks))
                return [PutOutcome.FULL] * len(blocks)
            time.sleep(0.01)
            outcomes = put(space, blocks)
            inside.release()
            return outcomes

        monkeypatch.setattr(target, "put_if_room", crowded)
        report = copy(source, target)
        assert refused
        assert report.ok
        assert facts(target, SPACE) == facts(source, SPACE)
        assert report.marks[MarkOutcome.MARKED] >= len(KEYS)
        assert report.fates[Fate.COPIED] == target.usage().blocks


@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_a_put_of_many_for_which_nothing_is_to_go_stores_what_finds_room(kind: str, tmp_path: Path) -> None:
    keys = block_keys(range(4 * 200), 4)
    with open_store(f"{kind}://{tmp_path}/kv?capacity=9MiB") as store:
        store.put_many(SPACE, [BlockWrite(key, bytes(BLOCK)) for key in keys[:60]])
        outcomes = store.put_if_room(SPACE, [BlockWrite(key, bytes(BLOCK)) for key in keys[60:]])
        assert set(outcomes) == {PutOutcome.STORED, PutOutcome.FULL}
        there = store.contains_many(SPACE, keys)
        assert there == [True] * 60 + [outcome is PutOutcome.STORED for outcome in outcomes]
        assert store.usage().blocks == sum(there) > 90


def test_pins_that_the_target_refuses_and_marks_that_it_cannot_keep_are_counted(source: BlockStore) -> None:
    with open_store(f"memory://target?capacity={40 * BLOCK}") as target:
        source.mark_many(SPACE, KEYS[:30], Mark("all", pinned=True))
        marks = copy(source, target).marks
        assert marks[MarkOutcome.UNPINNED] > 0
        assert marks[MarkOutcome.MARKED] + marks[MarkOutcome.UNPINNED] == 8 + 8 + 30
        assert target.usage().pinned <= 20 * BLOCK
        assert all(
            Mark("all") in said or Mark("all", pinned=True) in said
            for _, _, said in (fact for key, fact in facts(target, SPACE).items() if key in KEYS[:30])
        )
    with FaultyStore(open_store("memory://target")) as target:
        target.plan["mark"] = lambda call: [MarkOutcome.MISSING] * len(call.keys)
        report = copy(source, target)
        assert (report.ok, report.marks) == (True, {MarkOutcome.MISSING: 8 + 8 + 30})


def test_no_more_is_read_ahead_than_the_threads_can_hold() -> None:
    space = Namespace("many", "1", (BlockLayout.opaque(5000),), block_tokens=1)
    held: set[int] = set()
    most = threads_seen = 0
    lock = threading.Lock()
    with open_store("memory://source") as inner, open_store("memory://target") as target:
        inner.put_many(space, [BlockWrite(key, bytes(5000)) for key in block_keys(range(300), 1)])
        small_batches(inner, 4 * 5000)
        with FaultyStore(inner) as source:
            listed = 0

            def scan(call: Call) -> Iterator[BlockInfo]:
                nonlocal listed
                for info in call.answer():
                    listed += 1
                    yield info

            def get(call: Call) -> list[GetOutcome]:
                nonlocal most, threads_seen
                assert len(call.blocks) <= 4
                with lock:
                    held.update(np.frombuffer(one.into, np.uint8).ctypes.data for one in call.blocks)
                    most = max(most, listed - target.usage().blocks)
                return call.answer()

            source.plan |= {"scan": scan, "get": get}
            assert copy(source, target, threads=3).ok
    assert len(held) <= 3 * 4
    assert all(address % 4096 == 0 for address in held)
    assert most <= (2 * 3 + 2 + 3) * 4


def test_what_has_not_begun_when_the_target_is_full_never_does(source: BlockStore) -> None:
    told = threading.Event()
    with FaultyStore(open_store("memory://target")) as target:
        small_batches(target, BLOCK)

        def put(call: Call) -> list[PutOutcome]:
            if len([verb for verb, _ in target.calls if verb == "put"]) > 1:  # the copy is told of the first before
                told.wait(20)
                time.sleep(0.05)
            return [PutOutcome.FULL] * len(call.keys)

        target.plan["put"] = put
        report = copy(source, target, threads=1, advance=lambda _: told.set())
        assert report.full
        # The second had begun when the first told that there is no room, or had not; of the others none ever does.
        assert len([verb for verb, _ in target.calls if verb == "put"]) in (1, 2)


def test_an_error_of_a_store_ends_the_copy_and_starts_nothing_more(source: BlockStore) -> None:
    with FaultyStore(open_store("memory://target")) as target:
        target.plan["put"] = failing(TierUnavailable("down"))
        with pytest.raises(TierUnavailable, match="down"):
            copy(source, target)
        assert not [one for one in threading.enumerate() if one.name.startswith("kvstore-copy")]
        target.plan.clear()
        assert copy(source, target).ok
