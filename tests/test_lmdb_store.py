"""What `lmdb://` promises beyond the contract: its bytes, the cap as outsiders see it, kills, boots, stuck readers."""

from __future__ import annotations

import logging
import os
import struct
import time
from typing import TYPE_CHECKING, Any

import google_crc32c
import lmdb
import numpy as np
import pytest
from lmdb_helpers import KIB, MIB, SPACE, content, get, key, occupied, opened, put

import kvstore_lmdb.put
from kvstore import BlockWrite, GetOutcome, PutOutcome
from kvstore.environment import PAGE
from kvstore.errors import StoreDamagedError, StoreFullError, TierUnavailable
from kvstore_lmdb import LMDBStore
from kvstore_lmdb.entry import stored_bytes
from kvstore_lmdb.get import few
from kvstore_lmdb.opening import evict
from kvstore_lmdb.space import SMALLEST_CAPACITY, Space

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from pathlib import Path

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
