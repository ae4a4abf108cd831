"""`lmdb://` in several processes at once: the cap as an outsider sees it, stopped and killed users, order of use."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from lmdb_helpers import MIB, SPACE, content, get, key, occupied, opened, put

import kvstore.catalog
from kvstore import BlockRead, BlockWrite, GetOutcome, PutOutcome
from kvstore.testing.patience import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor
    from multiprocessing.context import SpawnContext
    from multiprocessing.process import BaseProcess
    from pathlib import Path

HIT, MISS, STORED, FULL = GetOutcome.HIT, GetOutcome.MISS, PutOutcome.STORED, PutOutcome.FULL

SPAWN: SpawnContext = multiprocessing.get_context("spawn")


def hammer(directory: Path, capacity: int, seed: int, seconds: float, totals: Any) -> None:
    """Put and get blocks of all sizes, and count: stored, full, wrong, hits; for longer, where there are few."""
    chance = random.Random(seed)
    stop = time.monotonic() + seconds
    with opened(directory, capacity=capacity) as store:
        while time.monotonic() < stop or min(totals[0], totals[3]) <= 20:
            blocks = [(chance.randrange(400), chance.randrange(3)) for _ in range(chance.randint(1, 5))]
            outcomes = store.put_many(SPACE, [BlockWrite(key(*block), content(*block)) for block in blocks])
            totals[0] += sum(outcome.present for outcome in outcomes)
            totals[1] += outcomes.count(FULL)
            for block in blocks:
                into = np.empty(SPACE.block_bytes(block[1]), np.uint8)
                (outcome,) = store.get_many_into(SPACE, [BlockRead(key(*block), into)])
                totals[2] += outcome is HIT and not np.array_equal(into, content(*block))
                totals[3] += outcome is HIT


def observe(directory: Path, stop: Any, seen: Any) -> None:
    while not stop.value:
        seen[0] = max(seen[0], occupied(directory))
        seen[1] += 1


def hold_a_read(directory: Path, capacity: int, ready: Any) -> None:
    with opened(directory, capacity=capacity) as store, store._tier.environment.read() as txn:
        txn.get(b"x", db=store._tier.environment.databases["blocks"])
        ready.set()
        time.sleep(60)


def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = SPAWN.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def kill(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


class TestProcesses:
    def test_an_outsider_never_sees_more_than_the_cap_while_users_come_and_are_killed(self, tmp_path: Path) -> None:
        capacity = 24 * MIB
        directory = tmp_path / "tier"
        with opened(directory, capacity=capacity) as store:
            put(store, range(1000, 1080), group=1)
        stop, seen = SPAWN.RawValue("i"), SPAWN.RawArray("q", 2)
        boards = [SPAWN.RawArray("q", 4) for _ in range(6)]
        observer = start(observe, directory, stop, seen)
        users = [start(hammer, directory, capacity, seed, 2.0, board) for seed, board in enumerate(boards[:2])]
        for seed, board in enumerate(boards[2:]):
            victim = start(hammer, directory, capacity, 10 + seed, 60.0, board)
            wait_for(lambda board=board: board[0])
            time.sleep(random.Random(seed).random() * 0.05)
            kill(victim)
        for user in users:
            user.join()
        wait_for(lambda: seen[1] > 50)
        stop.value = 1
        observer.join()
        stored, full, wrong, hits = (sum(board[place] for board in boards) for place in range(4))
        assert wrong == 0
        assert min(stored, hits) > 20
        assert full <= stored // 10
        assert seen[0] <= capacity
        with opened(directory) as store:
            infos = list(store.scan(SPACE))
            usage = store.usage()
            assert (usage.blocks, usage.used) == (len(infos), sum(info.stored_bytes for info in infos))
            assert usage.used + usage.overhead <= capacity
            assert usage.used >= 0.5 * capacity
            scratch = {group: np.empty(SPACE.block_bytes(group), np.uint8) for group in range(3)}
            reads = [BlockRead(info.key, scratch[info.key.group]) for info in infos]
            assert set(store.get_many_into(SPACE, reads)) == {HIT}

    def test_a_stopped_reader_costs_room_and_nothing_else(self, tmp_path: Path) -> None:
        """It pins every page freed since: the cap holds, some blocks find no room, most of the tier stays."""
        capacity = 16 * MIB
        with opened(tmp_path, capacity=capacity) as store:
            put(store, range(400))
            before = store.usage().used
            ready = SPAWN.Event()
            reader = start(hold_a_read, tmp_path, capacity, ready)
            assert ready.wait(20)
            outcomes = [put(store, [number])[0] for number in range(1000, 1030)]
            assert set(outcomes) <= {STORED, FULL}
            assert FULL in outcomes
            assert occupied(tmp_path) <= capacity
            assert store.usage().used >= 0.6 * before
            kill(reader)
            assert put(store, range(2000, 2040)) == [STORED] * 40
            assert get(store, range(2000, 2040)) == [HIT] * 40
            assert occupied(tmp_path) <= capacity

    def test_of_a_prefix_that_was_put_or_read_at_once_the_end_goes_first(self, tmp_path: Path) -> None:
        with opened(tmp_path, capacity=8 * MIB) as store:
            store.put_many(SPACE, [BlockWrite(key(number), content(number), number) for number in range(60)])
            put(store, range(100, 170))
            after_put = get(store, range(60))
            put(store, range(200, 240))
            after_get = get(store, range(60))
            for outcomes in (after_put, after_get):
                assert set(outcomes) == {HIT, MISS}
                assert outcomes == sorted(outcomes, key=lambda outcome: outcome is MISS)

    def test_a_use_in_one_process_keeps_a_block_from_eviction_by_another(
        self, tmp_path: Path, stranger: Executor
    ) -> None:
        capacity = 8 * MIB
        with opened(tmp_path, capacity=capacity) as store:
            put(store, range(40))
        assert stranger.submit(touch, tmp_path, list(range(10))).result()
        with opened(tmp_path) as store:
            put(store, range(100, 160))
            assert get(store, range(10)) == [HIT] * 10
            assert MISS in get(store, range(10, 40))

    def test_who_only_reads_keeps_what_it_reads_from_eviction_by_another(self, tmp_path: Path) -> None:
        with opened(tmp_path, capacity=32 * MIB) as writer, opened(tmp_path) as reader:
            assert put(writer, range(400)) == [STORED] * 400
            for start in range(0, 300, 10):
                assert get(reader, range(start, start + 10)) == [HIT] * 10
            put(writer, range(1000, 1130))
            assert writer.contains_many(SPACE, [key(number) for number in range(256)]) == [True] * 256
            assert not all(writer.contains_many(SPACE, [key(number) for number in range(300, 400)]))


def touch(directory: Path, numbers: list[int]) -> bool:
    with opened(directory) as store:
        store.touch_many(SPACE, [key(number) for number in numbers])
    return True


@pytest.mark.parametrize(
    ("options", "is_read"),
    [({}, False), ({"capacity": "64MiB"}, True), ({"keep_free": "1MiB"}, True), ({"ttl": "1h"}, True)],
    ids=str,
)
def test_uses_are_written_down_while_blocks_are_loaded_where_somebody_goes_by_them_and_else_once_a_minute(
    options: dict[str, str], is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, **options) as store:
        assert put(store, range(300), group=3) == [STORED] * 300
        before = store._tier.environment.last_transaction()
        for _ in range(3):
            assert get(store, range(300), group=3) == [HIT] * 300
        written = store._tier.environment.last_transaction() - before
        assert (written > 0) is is_read
        monkeypatch.setattr(kvstore.catalog, "now_ns", lambda: time.time_ns() + 61_000_000_000)
        get(store, range(1), group=3)
        assert store._tier.environment.last_transaction() > before + written
    with opened(tmp_path) as store:
        assert sorted(info.hits for info in store.scan(SPACE)) == [3] * 299 + [4]
