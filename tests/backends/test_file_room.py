"""How `file://` keeps its cap to the byte, and every sound block, while blocks come, go and are being read at once."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import raw
from tiers import Tier

import kvstore_zarr.eviction
import kvstore_zarr.folders
import kvstore_zarr.get
import kvstore_zarr.put
import kvstore_zarr.steps
from kvstore import BlockLayout, GetOutcome, PutOutcome, open_store
from kvstore.catalog import Catalog
from kvstore.testing.supply import KIB, MIB, SPACE, get, key, keys, write, writes
from kvstore_zarr import calls
from kvstore_zarr.deleting import remove
from kvstore_zarr.put import DISK_HEADROOM

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import BlockStore, Namespace

LARGE = dataclasses.replace(SPACE, layouts=(BlockLayout.opaque(2 * MIB),))
MEDIUM = dataclasses.replace(SPACE, layouts=(BlockLayout.opaque(128 * KIB),))
SMALL = dataclasses.replace(SPACE, layouts=(BlockLayout.opaque(8 * KIB),))

CAPACITY = 16 * MIB
DESCRIPTORS = Path("/proc/self/fd")


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return Tier(f"file://{tmp_path}/tier?capacity={CAPACITY}", tmp_path / "tier")


def occupied(tier: Tier) -> int:
    assert tier.path is not None
    return sum(path.lstat().st_blocks * 512 for path in (tier.path, *tier.path.rglob("*")))


def room(store: BlockStore) -> int:
    """Bytes that may still be put."""
    usage = store.usage()
    assert usage.capacity is not None
    return usage.capacity - usage.used - usage.reserved - usage.overhead


@pytest.mark.parametrize("step", ["reserved", "removed", "written", "renamed"])
def test_room_that_an_eviction_makes_is_not_given_away_before_it_is_there(
    tier: Tier, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put of a small block that evicts a large one stops half-way; others fill the tier meanwhile."""
    reached, go_on = threading.Event(), threading.Event()
    slow = threading.Thread(target=lambda: put_slowly.put_many(SMALL, [write(0, SMALL)]))

    def checkpoint(name: str) -> None:
        if name == step and threading.current_thread() is slow:
            reached.set()
            go_on.wait(30)

    with tier.open() as put_slowly, tier.open() as others:
        number = 0
        while set(others.contains_many(LARGE, keys(range(number)))) <= {True}:
            others.put_many(LARGE, [write(number, LARGE)])
            number += 1
        for filler, most in ((MEDIUM, 400 * KIB), (SMALL, 96 * KIB)):
            while room(others) > most:
                number += 1
                others.put_many(filler, [write(number, filler)])
        monkeypatch.setattr(kvstore_zarr.steps, "checkpoint", checkpoint)
        slow.start()
        try:
            assert reached.wait(30)
            for more in range(2000, 2020):
                others.put_many(MEDIUM, [write(more, MEDIUM)])
                assert occupied(tier) <= CAPACITY
        finally:
            go_on.set()
            slow.join()
        assert occupied(tier) <= CAPACITY
        assert get(others, [0], SMALL) == [GetOutcome.HIT]


def test_a_new_folder_takes_no_room_before_the_victims_are_gone(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large block goes for a small one, whose folders are new: both would be more than was reserved."""
    seen: list[int] = []

    def make_folder(path: str | Path, mode: int, **options: Any) -> None:
        before = occupied(tier)
        real(path, mode, **options)
        seen.append(before)

    with tier.open() as store:
        number = 0
        while store.usage().blocks == number:
            store.put_many(LARGE, [write(number, LARGE)])
            number += 1
        while room(store) > 128 * KIB:
            number += 1
            store.put_many(MEDIUM, [write(number, MEDIUM)])
        full = occupied(tier)
        real = kvstore_zarr.folders.make_folder
        monkeypatch.setattr(kvstore_zarr.folders, "make_folder", make_folder)
        assert store.put_many(SMALL, [write(0, SMALL)]) == [PutOutcome.STORED]
    assert seen
    assert max(seen) <= full - MIB, "the folders were made while the victim's file was there"


@pytest.mark.parametrize("space", [LARGE, MEDIUM, SMALL], ids=["2 MiB", "128 KiB", "8 KiB"])
def test_a_call_as_large_as_suits_the_store_is_one_job(
    tmp_path: Path, space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commits and the names' locks, once: what a block may cost beside its bytes does not part it in two."""
    reserved: list[str] = []
    monkeypatch.setattr(kvstore_zarr.steps, "checkpoint", lambda step: reserved.append(step))
    with open_store(f"file://{tmp_path}/tier?capacity=8GB") as store:
        together = min(64, store.capabilities.batch_bytes // space.block_bytes())
        assert set(store.put_many(space, writes(range(together), space))) == {PutOutcome.STORED}
    assert reserved.count("reserved") == 1


def test_a_put_that_evicts_and_fails_has_no_descriptor_and_no_block_left(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A victim whose folder went cannot be handed on, and its bytes cannot be freed, while another one was."""
    real, renamed = os.rename, 0

    def rename(source: str, target: str) -> None:
        nonlocal renamed
        if "draft-" in target and "draft-" not in source:
            renamed += 1
            if renamed == 2:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", target)
        real(source, target)

    def free(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error", fd)

    with tier.open() as store:
        for number in range(0, 140, 10):
            store.put_many(MEDIUM, writes(range(number, number + 10), MEDIUM))
        before = len(list(DESCRIPTORS.iterdir()))
        with monkeypatch.context() as patched:
            patched.setattr(os, "rename", rename)
            patched.setattr(kvstore_zarr.eviction, "free", free)
            store.put_many(MEDIUM, writes(range(200, 208), MEDIUM))
        assert renamed >= 2
        assert len(list(DESCRIPTORS.iterdir())) == before
        assert set(store.put_many(MEDIUM, writes(range(300, 308), MEDIUM))) == {PutOutcome.STORED}
        assert store.usage().reserved == 0


def test_uses_are_told_outside_of_the_read_that_found_the_blocks(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who commits while a read of its own is open holds up the file that it writes into."""
    behind: list[int] = []
    real = Catalog.settle_in_passing

    def settle(self: Catalog) -> None:
        real(self)
        behind.append(self.environment.oldest_reader()[1])

    with tier.open() as store:
        store.put_many(SMALL, writes(range(300), SMALL))
        monkeypatch.setattr(Catalog, "settle_in_passing", settle)
        assert set(store.put_many(SMALL, writes(range(300), SMALL))) == {PutOutcome.EXISTS}
    assert behind
    assert max(behind) == 0


def test_a_block_that_is_being_read_is_spared_and_whole(tier: Tier) -> None:
    with tier.open() as store:
        store.put_many(LARGE, [write(0, LARGE)])
        path = raw.file_of(tier, (LARGE, key(0)))
        before = path.read_bytes()
        with path.open("rb") as reader:
            fcntl.flock(reader, fcntl.LOCK_SH)
            for number in range(1, 20):
                assert store.put_many(LARGE, [write(number, LARGE)]) == [PutOutcome.STORED]
            assert reader.read() == before
        assert get(store, [0, 1], LARGE) == [GetOutcome.HIT, GetOutcome.MISS]


@pytest.mark.parametrize("how", ["evicted", "deleted"])
def test_whoever_has_a_block_open_does_not_keep_its_space_when_it_goes(tier: Tier, how: str) -> None:
    with tier.open() as store:
        store.put_many(LARGE, [write(0, LARGE)])
        path = raw.file_of(tier, (LARGE, key(0)))
        onlooker = os.open(path, os.O_RDONLY)
        try:
            if how == "deleted":
                store.delete_many(LARGE, [key(0)])
            else:
                store.put_many(MEDIUM, writes(range(140), MEDIUM))  # of another size: the file is not used again
            assert not path.exists()
            assert os.fstat(onlooker).st_blocks == 0
        finally:
            os.close(onlooker)


@pytest.mark.parametrize("how", ["evicted for its like", "evicted", "deleted"])
def test_a_block_that_somebody_keeps_under_another_name_is_not_written_into(
    tier: Tier, tmp_path: Path, how: str
) -> None:
    with tier.open() as store:
        store.put_many(LARGE, [write(0, LARGE)])
        path, kept = raw.file_of(tier, (LARGE, key(0))), tmp_path / "kept"
        kept.hardlink_to(path)
        before = kept.read_bytes()
        if how == "deleted":
            store.delete_many(LARGE, [key(0)])
        elif how == "evicted":
            store.put_many(MEDIUM, writes(range(140), MEDIUM))
        else:
            store.put_many(LARGE, writes(range(1, 10), LARGE))
        assert not path.exists()
        assert kept.read_bytes() == before
        assert occupied(tier) <= CAPACITY


def test_nor_is_one_whose_file_goes_because_the_disk_is_full(
    tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tier.open() as store:
        number = 0
        while store.usage().blocks == number:
            store.put_many(LARGE, [write(number, LARGE)])
            number += 1
        oldest = number - store.usage().blocks
        path, kept = raw.file_of(tier, (LARGE, key(oldest))), tmp_path / "kept"
        kept.hardlink_to(path)
        before, reserve = kept.read_bytes(), kvstore_zarr.put.PutJob._reserve
        monkeypatch.setattr(kvstore_zarr.put.PutJob, "_reserve", full_once(reserve))
        assert store.put_many(LARGE, [write(number, LARGE)]) == [PutOutcome.STORED]
        assert not path.exists()
        assert kept.read_bytes() == before


def full_once(reserve: Callable[..., Any]) -> Callable[..., Any]:
    """As if the disk had no page for the catalogue, once."""
    calls: list[object] = []

    def call(job: object, held: object) -> Any:
        calls.append(job)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return reserve(job, held)

    return call


def test_puts_leave_room_on_the_disk_for_the_catalogue_to_take_blocks_out(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(12 * MIB)
    with open_store(f"file://{disk}/tier") as store:
        number = 0
        while store.put_many(SMALL, [write(number, SMALL)]) == [PutOutcome.STORED]:
            number += 1
        left = os.statvfs(disk)
        assert left.f_bavail * left.f_frsize >= DISK_HEADROOM // 2  # some of it the catalogue has grown into
        assert store.delete_many(SMALL, keys(range(number))) == [True] * number


def test_a_file_that_a_put_took_over_while_it_was_being_opened_is_looked_at_again(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tier.open() as store:
        store.put_many(SMALL, [write(0, SMALL)])
        path = raw.file_of(tier, (SMALL, key(0)))
        opened: list[str] = []

        def overtaken(name: str, *flags: int) -> int:
            fd = os_open(name, *flags)
            if name == str(path):
                opened.append(name)
            if opened == [name]:
                again = path.with_suffix(".again")
                again.write_bytes(path.read_bytes())
                os.truncate(path, 0)
                again.rename(path)
            return fd

        os_open = os.open
        monkeypatch.setattr(calls, "made_by", calls.PYTHON)
        monkeypatch.setattr(os, "open", overtaken)
        assert get(store, [0], SMALL) == [GetOutcome.HIT]
        assert len(opened) == 2


def test_a_sound_copy_that_came_meanwhile_does_not_go_with_the_damaged_one(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tier.open() as store:
        store.put_many(SMALL, [write(0, SMALL)])
        path = raw.file_of(tier, (SMALL, key(0)))
        whole = path.read_bytes()
        path.write_bytes(bytes(len(whole)))

        def remove_late(*arguments: Any, **options: Any) -> list[bool]:
            again = path.with_suffix(".again")
            again.write_bytes(whole)
            again.rename(path)
            return remove(*arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(kvstore_zarr.get, "remove", remove_late)
            assert get(store, [0], SMALL) == [GetOutcome.MISS]
        assert get(store, [0], SMALL) == [GetOutcome.HIT]
