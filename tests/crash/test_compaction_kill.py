"""A data file made smaller by who opens its tier alone: dying at each line of that, what an onlooker sees meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
from itertools import count
from typing import TYPE_CHECKING, Any

import checker
import pytest
from observer import occupied
from worker import SPACE, block_key, expected

import kvstore.compaction
import kvstore.lmdb_free
from kvstore import BlockKey, BlockRead, BlockStore, BlockWrite, GetOutcome, PutOutcome, open_store
from kvstore.catalog import Entry, address_of
from kvstore.marks import Mark
from kvstore_zarr import LocalZarrStore

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
PINNED = Mark("kept", pinned=True)
TRACED = {
    (kvstore.compaction.__file__, "compact"),
    (kvstore.compaction.__file__, "_write"),
    (kvstore.lmdb_free.__file__, "_step"),
}
OVER, DONE = 4, 5
"""How a child ends that saw its tier above the bound, and one that nothing killed."""


def put(store: BlockStore, numbers: range) -> list[PutOutcome]:
    return store.put_many(SPACE, [BlockWrite(block_key(number), expected(block_key(number))) for number in numbers])


def get(store: BlockStore, numbers: range) -> list[GetOutcome]:
    reads = [BlockRead(block_key(number), bytearray(SPACE.block_bytes(number % 2))) for number in numbers]
    outcomes = store.get_many_into(SPACE, reads)
    assert all(read.into == expected(read.key).tobytes() for read, one in zip(reads, outcomes, strict=True) if one)
    return outcomes


def grow_the_catalogue(store: BlockStore, entries: int) -> None:
    """Have a `file://` tier's catalogue know blocks, and no more."""
    assert isinstance(store, LocalZarrStore)
    catalog = store._tier.catalog
    for start in range(0, entries, 2000):
        keys = [BlockKey(number.to_bytes(32, "little")) for number in range(start, start + 2000)]
        with catalog.write() as change:
            change.publish([Entry(address_of(SPACE, key), 4096, 1, 1) for key in keys])
    while True:
        with catalog.read() as snapshot:
            victims = [one for one, _ in zip(snapshot.oldest(), range(2000), strict=False) if one.last_used == 1]
        if not victims:
            return
        with catalog.write() as change:
            change.evict(victims)


def open_and_die(url: str, capacity: int, bound: int, at: int) -> None:
    """Open it; at the first passage of each line in TRACED look what is there; get killed at the `at`-th."""
    seen: set[tuple[str, int]] = set()
    root = url.partition("://")[2]

    def on_line(frame: Any, event: str, _: object) -> Any:
        place = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and place not in seen:
            seen.add(place)
            if occupied(root) > bound:
                os._exit(OVER)
            if len(seen) == at:
                os.kill(os.getpid(), signal.SIGKILL)
        return on_line

    sys.settrace(lambda frame, *_: on_line if (frame.f_code.co_filename, frame.f_code.co_name) in TRACED else None)
    with open_store(url, capacity=capacity):
        sys.settrace(None)
    os._exit(DONE if len(seen) > 20 else 0)


def exit_of(*arguments: object) -> int | None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_compaction_kill", "kvstore_zarr", "kvstore_lmdb"])
    process = context.Process(target=open_and_die, args=arguments)
    process.start()
    process.join(30)
    exitcode = process.exitcode
    process.close()
    return exitcode


@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_whoever_dies_there_leaves_a_whole_tier_and_nothing_over_the_bound(scheme: str, tmp_path: Path) -> None:
    """A full `file://` tier keeps its capacity and its blocks; `lmdb://` compacts for a lower capacity only."""
    big, root = tmp_path / "big", tmp_path / "tier"
    blocks = range(20)
    capacity = (12 if scheme == "file" else 6) * MIB
    with open_store(f"{scheme}://{big}?mode=0666", capacity=64 * MIB) as store:
        if scheme == "file":
            grow_the_catalogue(store, 14000)
            assert put(store, blocks) == [PutOutcome.STORED] * 20
        else:
            assert put(store, range(100, 240)) == [PutOutcome.STORED] * 140
            assert put(store, blocks) == [PutOutcome.STORED] * 20
        store.mark_many(SPACE, [block_key(3)], PINNED)
    bound = occupied(big) + 16 * 4096  # what an opening writes beside
    if scheme == "file":
        capacity = bound = (occupied(big) // 4096 + 140) * 4096  # a little air, less than a copy takes
    files = {path.name for path in big.rglob("*") if not path.name.startswith("lease")}
    check = checker.check_file_tier if scheme == "file" else checker.check_lmdb_tier
    for at in count(1):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(big, root)
        ended = exit_of(f"{scheme}://{root}", capacity, bound, at)
        data = next(root.rglob("data.mdb"))
        where = {} if scheme == "lmdb" else {"catalogue": data.parent}
        assert check(root, ended == DONE, **where).wrong == []
        assert data.stat().st_mode & 0o777 == 0o666
        with open_store(f"{scheme}://{root}", capacity=capacity) as store:
            assert occupied(root) <= capacity
            assert data.stat().st_size < 3 * MIB if scheme == "file" else capacity
            assert get(store, blocks) == [GetOutcome.HIT] * 20
            assert [info.key for info in store.scan_marked(SPACE, PINNED)] == [block_key(3)]
            assert not any("anew" in note for note in store.capabilities.notes)
        assert check(root, True, **where).wrong == []
        assert {path.name for path in root.rglob("*")} <= files
        if ended != -signal.SIGKILL:
            break
    assert ended == DONE
