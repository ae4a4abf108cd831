"""Threads that move small blocks of `lmdb://` take turns; none waits for one that waits for something else."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from lmdb_helpers import MIB, SPACE, get, opened, put

from kvstore import GetOutcome, PutOutcome
from kvstore.catalog import Catalog
from kvstore_lmdb import seat as seats
from kvstore_lmdb.seat import LOADS, STORES, Place, Seat

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from kvstore.catalog import Change

HIT = GetOutcome.HIT
STORED, EXISTS, FULL = PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.FULL
SOON_S = 20.0
"""What a test waits for that must come: long, on a busy machine."""


@contextmanager
def somebody_sits(place: Place = LOADS) -> Generator[threading.Event]:
    """A thread that has a seat until the event is set, or the test is over."""
    sits, goes = threading.Event(), threading.Event()

    def sit() -> None:
        with Seat(place, needed=True):
            sits.set()
            goes.wait(SOON_S)

    holder = threading.Thread(target=sit)
    holder.start()
    assert sits.wait(SOON_S)
    try:
        yield goes
    finally:
        goes.set()
        holder.join()


def is_free(place: Place = LOADS) -> bool:
    """Whether a seat can be had at once."""
    if free := place.lock.acquire(blocking=False):
        place.lock.release()
    return free


def test_small_blocks_are_read_by_one_thread_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seats, "PATIENCE_S", SOON_S)
    with opened(tmp_path) as store, ThreadPoolExecutor(1) as pool:
        put(store, range(40))
        with somebody_sits() as goes:
            reading = pool.submit(get, store, range(40))
            time.sleep(0.2)
            assert not reading.done()
            goes.set()
            assert reading.result(SOON_S) == [HIT] * 40
    assert is_free()


def test_small_blocks_are_stored_by_one_thread_at_a_time_and_loads_do_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats, "PATIENCE_S", SOON_S)
    with opened(tmp_path) as store, ThreadPoolExecutor(2) as pool:
        put(store, range(8))
        with somebody_sits(STORES) as goes:
            storing = pool.submit(put, store, range(8, 16))
            assert pool.submit(get, store, range(8)).result(SOON_S / 2) == [HIT] * 8
            time.sleep(0.2)
            assert not storing.done()
            goes.set()
            assert storing.result(SOON_S) == [STORED] * 8
        assert get(store, range(16)) == [HIT] * 16
    assert is_free(STORES)


def test_while_one_commits_the_next_prepares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, free = Catalog.write, list[bool]()

    @contextmanager
    def written(catalog: Catalog, *arguments: Any, **named: Any) -> Generator[Change]:
        with write(catalog, *arguments, **named) as change:
            yield change
            free.append(is_free(STORES))

    with opened(tmp_path) as store:
        monkeypatch.setattr(Catalog, "write", written)
        assert put(store, range(8)) == [STORED] * 8
    assert free == [True]


def test_nobody_waits_with_the_seat_to_write_uses_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle, free = Catalog.settle_in_passing, list[bool]()

    def settled(catalog: Catalog) -> None:
        free.append(is_free(STORES))
        settle(catalog)

    monkeypatch.setattr(Catalog, "settle_in_passing", settled)
    with opened(tmp_path) as store:
        store._tier.catalog.settle_due = 8
        put(store, range(8))
        assert put(store, range(10)) == [EXISTS] * 8 + [STORED] * 2
        assert put(store, range(8)) == [EXISTS] * 8
    assert free == [True] * 2


def test_a_store_that_failed_leaves_the_seat(tmp_path: Path) -> None:
    with opened(tmp_path, capacity="4MiB") as store:
        assert FULL in put(store, [1, 2, 3], group=2)
        assert store.put_many(SPACE, []) == []
        put(store, range(100))
        assert is_free(STORES)
        with somebody_sits(STORES):
            assert put(store, [200]) == [STORED]
            assert is_free(STORES)


def test_large_blocks_wait_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seats, "PATIENCE_S", SOON_S)
    with opened(tmp_path) as store, ThreadPoolExecutor(1) as pool, somebody_sits(), somebody_sits(STORES):
        for group in (1, 2):
            assert pool.submit(put, store, [1], group).result(SOON_S / 2) == [STORED]
            assert pool.submit(get, store, [1], group).result(SOON_S / 2) == [HIT]


def test_whoever_hangs_with_the_seat_holds_up_the_others_once(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, range(40))
        with somebody_sits():
            assert get(store, range(40)) == [HIT] * 40
            assert is_free()  # it is another one
        assert get(store, range(40)) == [HIT] * 40


def test_who_never_finds_the_seat_free_gets_in_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seats, "PATIENCE_S", 0.01)
    over = threading.Event()

    def take_it_again_and_again() -> None:
        while not over.is_set():
            with Seat(LOADS, needed=True):
                over.wait(0.005)

    with opened(tmp_path) as store, ThreadPoolExecutor(4) as pool:
        put(store, range(40))
        others = [pool.submit(take_it_again_and_again) for _ in range(3)]
        try:
            assert pool.submit(get, store, range(40)).result(SOON_S) == [HIT] * 40
        finally:
            over.set()
        for other in others:
            other.result(SOON_S)
    assert is_free()


def test_a_load_of_what_is_on_the_device_takes_no_seat_from_its_first_block_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = iter(range(1000))
    with opened(tmp_path) as store:
        put(store, range(40))  # three transactions of a load
        monkeypatch.setattr(seats, "_SUSPECT_S", 0.0)
        monkeypatch.setattr(seats, "_reads_of_the_device", lambda: next(reads))
        assert get(store, range(40)) == [HIT] * 40
    assert next(reads) == 2  # asked when it took the seat, and after the first block


def test_who_has_to_wait_for_the_device_gives_the_seat_up(tmp_path: Path) -> None:
    path = tmp_path / "cold"
    with path.open("wb+") as file:
        file.write(os.urandom(MIB))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), MIB, prot=mmap.PROT_READ) as mapped, Seat(LOADS, needed=True) as seat:
            seat.keep()
            assert not is_free()
            before = seats._reads_of_the_device()
            sum(mapped[::4096])
            if seats._reads_of_the_device() == before:
                pytest.skip("this file system keeps its files in memory")
            seat.keep()
            assert is_free()
            with seat:  # what is left of the call
                assert is_free()
    assert is_free()


def test_who_is_slow_for_another_reason_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seats, "PATIENCE_S", SOON_S)
    with Seat(LOADS, needed=True) as seat:
        time.sleep(0.01)
        seat.keep()
        assert not is_free()
    assert is_free()


def test_a_failed_read_leaves_the_seat(tmp_path: Path) -> None:
    with opened(tmp_path):
        with pytest.raises(ZeroDivisionError), Seat(LOADS, needed=True):
            _ = 1 // 0
        assert is_free()


def test_a_child_that_was_forked_while_somebody_read_reads_too(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, range(8))
    with somebody_sits():
        child = os.fork()
        if not child:
            signal.alarm(int(SOON_S))
            with opened(tmp_path) as store:
                found = get(store, range(8))
            os._exit(0 if found == [HIT] * 8 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
