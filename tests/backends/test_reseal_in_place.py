"""Blocks get new data keys where they are: whoever reads finds them, and whoever removes them has removed them."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from sealing_helpers import sealed

import kvstore_lmdb.put
import kvstore_zarr.removal
from kvstore import BlockStore, GetOutcome, PutOutcome, open_store
from kvstore.catalog import Victim, address_of
from kvstore.marks import Mark
from kvstore.objects.client import ObjectClient
from kvstore.rekeying import Resealed, keyrings_of, reseal
from kvstore.sealing.sealer import Sealer
from kvstore.testing.supply import KIB, SPACE, get, key, keys, write
from kvstore.types import ResealOutcome
from kvstore.url import TierURL
from kvstore_lmdb import LMDBStore
from kvstore_lmdb.entry import identified
from kvstore_zarr import eviction, steps
from kvstore_zarr.descriptors import Share
from kvstore_zarr.names import NameLocks
from kvstore_zarr.store import LocalZarrStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from kvstore.sealing import Ring

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS
RESEALED, GONE, KEPT = ResealOutcome.RESEALED, ResealOutcome.GONE, ResealOutcome.KEPT
NUMBERS = range(12)


@pytest.fixture
def url(sealing_kind: str, tmp_path: Path) -> str:
    """A tier of twelve blocks, every third of acme; all have a mark and the first a pin, where there are any."""
    place = (
        f"file://{tmp_path}/tier?remote=true&lookup_ttl=0"
        if sealing_kind == "remote"
        else f"{sealing_kind}://{tmp_path}/tier"
    )
    made = sealed(place, tmp_path)
    with open_store(made) as store:
        fill(store, NUMBERS)
    return made


def fill(store: BlockStore, numbers: Iterable[int]) -> None:
    put = [write(number, position=number, tenant="" if number % 3 else "acme") for number in numbers]
    assert store.put_many(SPACE, put) == [PutOutcome.STORED] * len(put)
    store.mark_many(SPACE, keys(numbers), Mark("handbook", tenant="acme"))
    store.mark_many(SPACE, keys([0]), Mark("prices", pinned=True))


def resealed(url: str) -> Resealed:
    tier = TierURL.parse(url)
    return reseal([tier], keyrings_of([tier]))


def never(*args: Any) -> Any:
    raise AssertionError(f"nothing is removed, and nothing is put: {args}")


def test_all_that_is_known_of_a_block_stays(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(url) as store:
        before, keys_before = sorted(store.scan(SPACE), key=str), set(store.sealed_with(SPACE, keys(NUMBERS)))
        used = store.usage().used
        for verb in ("delete_many", "put_many", "purge_many"):
            monkeypatch.setattr(type(store), verb, never)
        report = resealed(url)
        assert (report.resealed, report.lost, report.unmarked, report.dropped) == (len(NUMBERS), 0, 0, 2)
        assert sorted(store.scan(SPACE), key=str) == before
        assert not set(store.sealed_with(SPACE, keys(NUMBERS))) & keys_before
        assert store.usage().used == used
        assert store.usage().reserved == 0
        assert get(store, NUMBERS) == [HIT] * len(NUMBERS)


def test_whoever_reads_meanwhile_finds_them(url: str) -> None:
    over, found = threading.Event(), list[GetOutcome | str]()

    def read() -> None:
        with open_store(url) as store:
            found.extend(get(store, NUMBERS))
            while not over.is_set():
                found.extend(get(store, NUMBERS))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for _ in range(5):
            assert resealed(url).lost == 0
    finally:
        over.set()
        thread.join()
    assert set(found) == {HIT}


def test_whoever_has_read_the_keyring_before_they_have_new_keys_finds_them(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, reports = Sealer.reading, list[Resealed]()

    def reading(self: Sealer) -> Ring:
        ring = real(self)
        if not reports:
            monkeypatch.setattr(Sealer, "reading", real)
            reports.append(resealed(url))
        return ring

    with open_store(url) as store:
        monkeypatch.setattr(Sealer, "reading", reading)
        assert get(store, NUMBERS) == [HIT] * len(NUMBERS)
        assert (reports[0].resealed, reports[0].dropped) == (len(NUMBERS), 2)
        assert get(store, NUMBERS) == [HIT] * len(NUMBERS)


def write_again(store: BlockStore, numbers: Iterable[int]) -> list[ResealOutcome]:
    return store.reseal_many(SPACE, [write(number, tenant="acme") for number in numbers])


def test_what_is_not_there_is_not_stored(url: str) -> None:
    with open_store(url) as store:
        store.delete_many(SPACE, [key(1)])
        assert write_again(store, [1, 2, 99]) == [GONE, RESEALED, GONE]
        assert get(store, [1, 2, 99]) == [MISS, HIT, MISS]
        assert store.usage().blocks == len(NUMBERS) - 1


def test_what_goes_meanwhile_is_neither_lost_nor_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(url) as store:
        cls, real = type(store), type(store).reseal_many

    def gone(self: BlockStore, *args: Any) -> list[ResealOutcome]:
        self.delete_many(SPACE, [key(1)])
        return real(self, *args)

    monkeypatch.setattr(cls, "reseal_many", gone)
    report = resealed(url)
    assert (report.resealed, report.lost, report.dropped) == (len(NUMBERS) - 1, 0, 2)
    with open_store(url) as store:
        assert get(store, [1, 2]) == [MISS, HIT]


def test_a_purge_while_it_is_written_wins(url: str, sealing_kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind everything that a store looks at beforehand, and before the block is in place."""
    module, name = {
        "file": (steps, "checkpoint"), "remote": (ObjectClient, "put"), "lmdb": (kvstore_lmdb.put, "fill"),
        "sqlite": (sys.modules["kvstore_sqlite"].SQLiteStore if sealing_kind == "sqlite" else None, "replace"),
    }[sealing_kind]  # fmt: skip
    real, purged = getattr(module, name), list[bool]()
    with open_store(url) as other, open_store(url) as store:
        store.contains_many(SPACE, [key(1)])  # it has just looked for tombstones

        def act(*args: Any, **options: Any) -> Any:
            if not purged and (args[0] == "written" if isinstance(args[0], str) else True):
                purged.append(False)
                purged[:] = other.purge_many(SPACE, [key(1)])
            return real(*args, **options)

        monkeypatch.setattr(module, name, act)
        assert write_again(store, [1]) == [GONE]
        assert purged == [True]
        assert write_again(store, [2]) == [RESEALED]
        assert store.contains_many(SPACE, keys([1, 2])) == [False, True]
    with open_store(url) as store:
        assert get(store, [1, 2]) == [MISS, HIT]
        assert store.usage().blocks == len(NUMBERS) - 1


def test_a_tier_that_is_not_encrypted_or_is_read_only_keeps_what_it_has(url: str, tmp_path: Path) -> None:
    with open_store(f"{url}&readonly=true") as store:
        assert write_again(store, [1, 99]) == [KEPT] * 2
    with open_store(f"file://{tmp_path}/plain") as store:
        store.put_many(SPACE, [write(1)])
        assert write_again(store, [1]) == [KEPT]


@pytest.mark.parametrize("sealing_kind", ["file", "lmdb"], indirect=True)
def test_a_full_tier_gives_no_more_than_room_for_a_batch(
    sealing_kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity, block = 32 << 20, SPACE.block_bytes()
    url = sealed(f"{sealing_kind}://{tmp_path}/full?capacity={capacity}", tmp_path)
    monkeypatch.setattr("kvstore.rekeying.BATCH_BYTES", 1 << 20)
    with open_store(url) as store:
        for start in range(0, 5 * capacity // block // 4, 16):
            store.put_many(SPACE, [write(number) for number in range(start, start + 16)])
        store.mark_many(SPACE, [info.key for info in store.scan(SPACE)][-1:], Mark("prices", pinned=True))
        before = {info.key: info for info in store.scan(SPACE)}
        for verb in ("delete_many", "put_many"):
            monkeypatch.setattr(type(store), verb, never)
        report = resealed(url)
        after = {info.key: info for info in store.scan(SPACE)}
        usage = store.usage()
        assert usage.used + usage.reserved + usage.overhead <= capacity
    assert (len(after), report.dropped) == (report.resealed, 1)
    assert len(before) - len(after) <= (3 << 20) // block
    assert all(before[one] == info for one, info in after.items())


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    made = sealed(f"file://{tmp_path}/tier", tmp_path)
    with open_store(made) as store:
        fill(store, NUMBERS)
    return made


def files(folder: Path) -> int:
    return sum(path.stat().st_size > 64 * KIB for path in folder.rglob("*") if ".kvstore" not in path.parts)


def block_file(folder: Path, number: int) -> Path:
    tier = f"{folder}?keyring={folder.parent}/keyring.json&encryption=file:{folder.parent}/operator.key"
    with LocalZarrStore(TierURL.parse(f"file://{tier}").validated(LocalZarrStore.options)) as store:
        return folder / store._tier.tree(SPACE).block(key(number))


def test_an_eviction_that_held_the_old_file_takes_the_new_one(
    file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalZarrStore(TierURL.parse(file_url).validated(LocalZarrStore.options)) as store:
        tier = store._tier
        with tier.catalog.read() as snapshot:
            victim = next(entry for entry in snapshot.scan(SPACE.fingerprint) if entry.key == key(1))
        (held,) = eviction.hold(tier, [Victim.of(victim)], Share())
        monkeypatch.setattr(kvstore_zarr.removal, "READER_PATIENCE_S", 0.01)
        assert write_again(store, [1]) == [RESEALED]
        with tier.catalog.write() as change:
            assert change.evict([held.victim])
        eviction.clear_away(tier, [held])
        assert get(store, [1, 2]) == [MISS, HIT]
        assert files(tmp_path / "tier") == len(NUMBERS) - 1


def test_nobody_who_has_the_old_file_open_keeps_its_space(file_url: str, tmp_path: Path) -> None:
    path = block_file(tmp_path / "tier", 1)
    with path.open("rb") as old, open_store(file_url) as store:
        assert write_again(store, [1]) == [RESEALED]
        assert os.fstat(old.fileno()).st_size == 0 < path.stat().st_size


def test_a_few_names_are_locked_and_a_few_old_files_open_at_a_time(
    file_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, rename, names, descriptors = NameLocks.hold, os.rename, list[int](), list[int]()

    def counted(self: NameLocks, addresses: Sequence[bytes]) -> object:
        names.append(len(addresses))
        return hold(self, addresses)

    def renamed(source: str, target: str) -> None:
        descriptors.append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208
        rename(source, target)

    numbers = range(100, 300)
    with open_store(file_url) as store:
        fill(store, numbers)
        monkeypatch.setattr(NameLocks, "hold", counted)
        monkeypatch.setattr(os, "rename", renamed)
        assert write_again(store, numbers) == [RESEALED] * len(numbers)
        assert (sum(names), max(names)) == (len(numbers), 64)
        assert max(descriptors) - min(descriptors) < 64


def test_the_new_file_says_what_the_old_one_said(file_url: str, tmp_path: Path) -> None:
    with open_store(file_url) as store:
        before = {info.key: (info.created, info.position, info.parent) for info in store.scan(SPACE)}
        assert write_again(store, NUMBERS) == [RESEALED] * len(NUMBERS)
    shutil.rmtree(tmp_path / "tier" / ".kvstore" / "catalogue")
    with open_store(file_url) as store:  # its books are made anew from the files
        assert {info.key: (info.created, info.position, info.parent) for info in store.scan(SPACE)} == before


def test_the_new_value_says_when_the_block_was_stored(tmp_path: Path) -> None:
    url = sealed(f"lmdb://{tmp_path}/tier", tmp_path)
    with LMDBStore(TierURL.parse(url).validated(LMDBStore.options)) as store:
        fill(store, NUMBERS)

        def said() -> set[tuple[bytes, int] | None]:
            tier = store._tier
            with tier.environment.read() as txn:
                values = (tier.value(txn, address_of(SPACE, key(number)))[1] for number in NUMBERS)
                return {identified(value) for value in values if value is not None}

        assert write_again(store, NUMBERS) == [RESEALED] * len(NUMBERS)
        with store._tier.catalog.read() as snapshot:
            assert said() == {(entry.address, entry.created) for entry in snapshot.scan(SPACE.fingerprint)}


def test_what_finds_no_room_is_removed_and_put_again(file_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore_zarr.reseal._Job._reserve", lambda *_: None)
    with open_store(file_url) as store:
        before = {info.key: info.marks for info in store.scan(SPACE)}
        assert write_again(store, [1]) == [KEPT]
        assert (report := resealed(file_url)).lost == 0
        assert (report.resealed, report.unmarked) == (len(NUMBERS), 0)
        assert {info.key: info.marks for info in store.scan(SPACE)} == before


def test_a_file_of_another_size_is_counted(file_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the device counts: where a file is in many pieces, say."""
    with LocalZarrStore(TierURL.parse(file_url).validated(LocalZarrStore.options)) as store:
        used, finish = store.usage().used, store._tier.device.finish

        def in_pieces(*arguments: Any) -> int:
            return finish(*arguments) + 4096

        monkeypatch.setattr(store._tier.device, "finish", in_pieces)
        assert write_again(store, [1, 2]) == [RESEALED] * 2
        assert store.usage().used == used + 2 * 4096
