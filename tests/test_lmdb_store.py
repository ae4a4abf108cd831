"""What `lmdb://` promises beyond the contract: its bytes, the cap as outsiders see it, kills, boots, stuck readers."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import struct
import time
from typing import TYPE_CHECKING, Any

import google_crc32c
import lmdb
import numpy as np
import pytest

import kvstore_lmdb.put
from kvstore import BlockKey, BlockLayout, BlockRead, BlockWrite, GetOutcome, Namespace, PutOutcome, open_store
from kvstore.environment import PAGE
from kvstore.errors import StoreDamagedError, StoreFullError, TierUnavailable
from kvstore_lmdb import LMDBStore
from kvstore_lmdb.entry import stored_bytes
from kvstore_lmdb.get import few
from kvstore_lmdb.opening import evict
from kvstore_lmdb.space import SMALLEST_CAPACITY, Space

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor
    from multiprocessing.context import SpawnContext
    from multiprocessing.process import BaseProcess
    from pathlib import Path

KIB, MIB = 1 << 10, 1 << 20

SPACE = Namespace(
    "model",
    "revision",
    (BlockLayout.opaque(64 * KIB), BlockLayout.opaque(300_000), BlockLayout.opaque(2 * MIB), BlockLayout.opaque(100)),
    block_tokens=16,
)

SPAWN: SpawnContext = multiprocessing.get_context("spawn")


def key(number: int, group: int = 0) -> BlockKey:
    return BlockKey(random.Random(number).randbytes(32), group)


def content(number: int, group: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng([number, group]).integers(0, 256, SPACE.block_bytes(group), np.uint8)


def opened(directory: Path, **options: Any) -> LMDBStore:
    store = open_store(f"lmdb://{directory}", **options)
    assert isinstance(store, LMDBStore)
    return store


def put(store: LMDBStore, numbers: Sequence[int], group: int = 0) -> list[PutOutcome]:
    return store.put_many(SPACE, [BlockWrite(key(number, group), content(number, group)) for number in numbers])


def get(store: LMDBStore, numbers: Sequence[int], group: int = 0) -> list[GetOutcome]:
    reads = [BlockRead(key(number, group), np.empty(SPACE.block_bytes(group), np.uint8)) for number in numbers]
    outcomes = store.get_many_into(SPACE, reads)
    for number, read, outcome in zip(numbers, reads, outcomes, strict=True):
        assert outcome is not GetOutcome.HIT or np.array_equal(np.asarray(read.into), content(number, group))
    return outcomes


def occupied(directory: Path) -> int:
    """What an outsider sees: `st_blocks` of the folder and everything in it."""
    blocks = directory.stat().st_blocks
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                blocks += entry.stat().st_blocks
            except FileNotFoundError:
                continue
    return 512 * blocks


HIT, MISS, STORED, FULL = GetOutcome.HIT, GetOutcome.MISS, PutOutcome.STORED, PutOutcome.FULL


class TestFormat:
    def test_a_block_takes_the_pages_that_its_size_says(self, tmp_path: Path) -> None:
        assert (stored_bytes(64 * KIB), stored_bytes(2 * MIB)) == (17 * PAGE, 513 * PAGE)
        with opened(tmp_path) as store:
            environment = store._tier.environment
            for group in range(3):
                before = pages_of(store)
                put(store, [1], group)
                assert pages_of(store) - before == stored_bytes(SPACE.block_bytes(group)) // PAGE
            assert store.usage().used == (17 + 74 + 513) * PAGE
            assert environment.pages() * PAGE <= (tmp_path / "data.mdb").stat().st_size

    def test_the_bytes_are_those_of_format_1(self, tmp_path: Path, stranger: Executor) -> None:
        """Written out by hand: whoever changes a byte has to change the version."""
        with opened(tmp_path) as store:
            before = time.time_ns()
            put(store, [7], 1)
            after = time.time_ns()
        value = stranger.submit(raw_get, tmp_path, SPACE.fingerprint + b"\0\1" + key(7).digest).result()
        payload = content(7, 1).tobytes()
        (created,) = struct.unpack_from("<Q", value, 104)
        head = struct.pack(
            "<8sHHHH16s64sQQ8xI", b"kvblock\0", 1, 1, 32, 0, SPACE.fingerprint, key(7).digest, 300_000, created,
            google_crc32c.value(payload),
        )  # fmt: skip
        assert value == head + struct.pack("<I", google_crc32c.value(head)) + payload
        assert before <= created <= after


def pages_of(store: LMDBStore) -> int:
    environment = store._tier.environment
    with environment.read() as txn:
        return txn.stat(environment.databases["blocks"])["overflow_pages"]


def raw_get(directory: Path, address: bytes) -> bytes:
    with lmdb.open(str(directory), max_dbs=8, readonly=True) as environment:
        meta, blocks = (environment.open_db(name, create=False) for name in (b"meta", b"blocks"))
        with environment.begin() as txn:
            (generation,) = struct.unpack_from("<Q", txn.get(address, db=meta), 16)
            value: bytes = txn.get(struct.pack(">Q", generation), db=blocks)
            return value


class TestCapacity:
    @pytest.mark.parametrize("capacity", [SMALLEST_CAPACITY, 3 * MIB, 24 * MIB, 100 * MIB, 500 * 10**9])
    def test_the_map_and_all_else_stay_within_the_cap(self, capacity: int) -> None:
        space = Space(capacity)
        assert 0 < space.map_size < capacity
        assert space.map_size % PAGE == 0
        assert space.map_size + space.map_size // 340 + 96 * KIB <= capacity
        assert space.map_size >= capacity * 0.98 - 512 * KIB

    def test_a_cap_that_is_too_small_for_a_tier_names_one_that_is_not(self, tmp_path: Path) -> None:
        with pytest.raises(StoreFullError, match=str(SMALLEST_CAPACITY)):
            opened(tmp_path / "tier", capacity=SMALLEST_CAPACITY - 1)
        assert not (tmp_path / "tier").exists()
        with opened(tmp_path / "tier", capacity=SMALLEST_CAPACITY) as store:
            assert put(store, [1]) == [STORED]
            assert get(store, [1]) == [HIT]

    def test_a_block_too_large_for_the_cap_is_full_and_evicts_nothing(self, tmp_path: Path) -> None:
        with opened(tmp_path, capacity=3 * MIB) as store:
            put(store, range(10))
            assert put(store, [1], group=2) == [FULL]
            assert get(store, range(10)) == [HIT] * 10

    @pytest.mark.parametrize("groups", [(0,), (1,), (2,), (0, 1, 2, 3)], ids=["64 KiB", "300 kB", "2 MiB", "mixed"])
    def test_six_turnovers_never_exceed_the_cap_and_use_most_of_it(self, tmp_path: Path, groups: tuple[int]) -> None:
        capacity = 32 * MIB
        most = written = number = 0
        with opened(tmp_path, capacity=capacity) as store:
            while written < 6 * capacity:
                number += 1
                blocks = [(number * 10 + more, groups[(number + more) % len(groups)]) for more in range(4)]
                writes = [BlockWrite(key(*block), np.zeros(SPACE.block_bytes(block[1]), np.uint8)) for block in blocks]
                assert set(store.put_many(SPACE, writes)) == {STORED}
                written += sum(SPACE.block_bytes(group) for _, group in blocks)
                most = max(most, occupied(tmp_path))
            used = store.usage().used
        assert most <= capacity
        assert used >= 0.6 * capacity

    def test_room_that_others_took_since_it_was_made_is_not_filled_a_second_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with opened(tmp_path, capacity=8 * MIB) as store:
            for number in range(200):
                put(store, [number])
            begun = 1

            def others_put(*arguments: Any, **options: Any) -> int:
                """When one put has made room, another one begins, up to four of them; then each stores."""
                nonlocal begun
                freed = evict(*arguments, **options)
                if not freed and begun < 4:
                    begun += 1
                    assert put(store, range(1000 * begun, 1000 * begun + 6)) == [STORED] * 6
                return freed

            monkeypatch.setattr(kvstore_lmdb.put, "evict", others_put)
            assert put(store, range(1000, 1006)) == [STORED] * 6
            with store._tier.catalog.read() as snapshot:
                room = snapshot.totals().room
            assert begun == 4
            assert room is not None
            assert room >= 0
            assert occupied(tmp_path) <= 8 * MIB

    def test_a_cap_lowered_far_makes_the_file_smaller(self, tmp_path: Path) -> None:
        with opened(tmp_path) as store:
            for number in range(300):
                put(store, [number])
        assert occupied(tmp_path) > 18 * MIB
        with opened(tmp_path, capacity=8 * MIB) as store:
            assert occupied(tmp_path) <= 8 * MIB
            kept = store.usage().blocks
            assert kept >= 60
            assert get(store, range(300 - kept, 300)) == [HIT] * kept
            assert put(store, range(1000, 1100)) == [STORED] * 100
            assert occupied(tmp_path) <= 8 * MIB
        with opened(tmp_path) as store:
            assert store.usage().capacity == 8 * MIB
        with opened(tmp_path, capacity=64 * MIB) as store:
            put(store, range(2000, 2400))
            assert store.usage().used > 20 * MIB


def hammer(directory: Path, capacity: int, seed: int, seconds: float, totals: Any) -> None:
    """Put and get blocks of all sizes, and count: stored, full, wrong, hits."""
    chance = random.Random(seed)
    stop = time.monotonic() + seconds
    with opened(directory, capacity=capacity) as store:
        while time.monotonic() < stop:
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
            deadline = time.monotonic() + 20
            while not board[0] and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(random.Random(seed).random() * 0.05)
            kill(victim)
        for user in users:
            user.join()
        stop.value = 1
        observer.join()
        stored, full, wrong, hits = (sum(board[place] for board in boards) for place in range(4))
        assert wrong == 0
        assert stored > 20
        assert hits > 20
        assert full <= stored // 10
        assert seen[1] > 50
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


def touch(directory: Path, numbers: list[int]) -> bool:
    with opened(directory) as store:
        store.touch_many(SPACE, [key(number) for number in numbers])
    return True


class TestUncleanEnds:
    def other_boot(self, directory: Path) -> None:
        (directory / "state").write_text("dirty 00000000-0000-0000-0000-000000000000\n")

    def test_after_another_boot_a_sound_tier_keeps_its_blocks(self, tmp_path: Path) -> None:
        with opened(tmp_path) as store:
            put(store, range(20))
        self.other_boot(tmp_path)
        with opened(tmp_path) as store:
            assert get(store, range(20)) == [HIT] * 20
            assert store.capabilities.notes == ()
        assert (tmp_path / "state").read_text().startswith("clean ")

    def test_after_another_boot_an_unsound_tier_starts_anew_and_says_so(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with opened(tmp_path) as store:
            put(store, range(200))
            with store._tier.environment.read() as txn:
                depth = txn.stat(store._tier.environment.databases["blocks"])["depth"]
        assert depth >= 2
        lose_a_page(tmp_path / "data.mdb")
        self.other_boot(tmp_path)
        with pytest.raises(StoreDamagedError, match="started anew"):
            opened(tmp_path, readonly=True)
        with caplog.at_level(logging.WARNING), opened(tmp_path) as store:
            assert "anew" in caplog.text
            assert str(tmp_path) in store.capabilities.notes[0]
            assert get(store, range(100)) == [MISS] * 100
            assert put(store, range(100)) == [STORED] * 100
        with opened(tmp_path) as store:
            assert get(store, range(100)) == [HIT] * 100

    @pytest.mark.parametrize("length", [0, 100, 10 * PAGE])
    def test_a_file_cut_short_starts_anew_and_is_no_signal(self, tmp_path: Path, length: int) -> None:
        with opened(tmp_path) as store:
            put(store, range(20))
        os.truncate(tmp_path / "data.mdb", length)
        with opened(tmp_path) as store:
            assert get(store, range(20)) == [MISS] * 20
            assert put(store, range(20)) == [STORED] * 20

    def test_a_repair_that_died_is_begun_again(self, tmp_path: Path) -> None:
        with opened(tmp_path) as store:
            put(store, range(20))
        (tmp_path / "state").write_text("rebuilding\n")
        (tmp_path / "data.mdb").unlink()
        (tmp_path / ".new-data.mdb").write_bytes(bytes(100))
        with opened(tmp_path) as store:
            assert put(store, [1]) == [STORED]
        assert not (tmp_path / ".new-data.mdb").exists()


def lose_a_page(path: Path) -> None:
    """Zero the first leaf or branch page of a tree that the file has in use, as a lost write would leave it."""
    from kvstore.environment import damage

    with path.open("r+b") as file:
        for page in range(2, path.stat().st_size // PAGE):
            whole = os.pread(file.fileno(), PAGE, page * PAGE)
            os.pwrite(file.fileno(), bytes(PAGE), page * PAGE)
            if damage(path.parent, thorough=True):
                return
            os.pwrite(file.fileno(), whole, page * PAGE)
    raise AssertionError("no page of this file matters")


class TestDurability:
    def test_with_fsync_every_commit_is_synced(self, tmp_path: Path) -> None:
        with opened(tmp_path, durability="fsync") as store:
            assert put(store, range(4)) == [STORED] * 4
            assert store._tier.environment._opened.env.flags()["sync"]
        with opened(tmp_path) as store:
            assert not store._tier.environment._opened.env.flags()["sync"]
            assert get(store, range(4)) == [HIT] * 4


class TestWhatCannotBeDone:
    def test_a_catalogue_that_cannot_be_read_is_unavailable_not_a_miss(self, tmp_path: Path) -> None:
        with opened(tmp_path) as store:
            put(store, [1])
            with store._tier.environment.write() as txn:
                txn.delete(b"totals", db=store._tier.environment.databases["info"])
            with pytest.raises(TierUnavailable, match="totals"):
                store.usage()
            assert get(store, [1]) == [HIT]


@pytest.mark.parametrize(("nbytes", "together"), [(64 << 10, 16), (512 << 10, 2), (2 << 20, 1), (0, 40)])
def test_a_transaction_reads_a_mib_of_blocks_or_one(nbytes: int, together: int) -> None:
    into = np.empty(nbytes, np.uint8)
    wanted = [(bytes([number]), into) for number in range(40)]
    groups = few(wanted)
    assert [one for group in groups for one in group] == wanted
    assert {len(group) for group in groups[:-1]} <= {together}
    assert 0 < len(groups[-1]) <= together
    assert few([]) == []


@pytest.mark.parametrize("group", [0, 2])
def test_a_call_of_the_size_that_it_asks_for_is_one_transaction(group: int, tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as store:
        blocks = store.capabilities.batch_bytes // SPACE.block_bytes(group)
        data = content(0, group).data
        writes = [BlockWrite(key(number, group), data) for number in range(2 * blocks)]
        before = store._tier.environment.last_transaction()
        for call in (writes[:blocks], writes[blocks:]):
            assert set(store.put_many(SPACE, call)) == {PutOutcome.STORED}
        assert store._tier.environment.last_transaction() - before == 2
