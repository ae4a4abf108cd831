"""The power goes after free pages were given back or overwritten, and nothing else of that has reached the disk."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from local_helpers import HIT, REFUSED, STORED, catalogue_of
from test_smaller_catalogue import grow_the_catalogue

import kvstore.lmdb_free
from kvstore import Mark, open_store
from kvstore.environment import Environment
from kvstore.testing.supply import MIB, SPACE, get, writes

if TYPE_CHECKING:
    from pathlib import Path

PINNED = Mark("kept", pinned=True)


class Disk:
    """What of a tier's data file is on the device: as of the last sync, and each change of free pages since."""

    def __init__(self, root: Path, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.image, self.changes = root, image, 0
        self._sync, self._punch, self._write = (
            Environment.sync,
            kvstore.lmdb_free.punch_hole,
            kvstore.lmdb_free.write_all,
        )
        shutil.copytree(root, image)
        self._data, self._on_disk = catalogue_of(root), catalogue_of(image)

        def synced(environment: Environment) -> None:
            self._sync(environment)
            shutil.copyfile(self._data, self._on_disk)

        monkeypatch.setattr(Environment, "sync", synced)
        monkeypatch.setattr(kvstore.lmdb_free, "punch_hole", self._punched)
        monkeypatch.setattr(kvstore.lmdb_free, "write_all", self._written)

    def _punched(self, fd: int, offset: int, nbytes: int) -> None:
        self._punch(fd, offset, nbytes)
        self._written(-1, bytes(nbytes), offset)

    def _written(self, fd: int, data: Any, offset: int) -> None:
        self.changes += 1
        if fd >= 0:
            self._write(fd, data, offset)
        with self._on_disk.open("r+b") as file:
            if offset < self._on_disk.stat().st_size:
                file.seek(offset)
                file.write(data)

    def after_the_power_is_back(self) -> str:
        next(self.image.rglob("state")).write_text("dirty another-boot-id".ljust(63) + "\n")
        (self._on_disk.parent / "lock.mdb").unlink(missing_ok=True)
        return str(self.image)


@pytest.mark.parametrize("durability", ["fsync", "none"])
def test_a_compaction_takes_nothing_from_the_blocks_on_disk(
    scheme: str, durability: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(f"{scheme}://{root}?durability={durability}", capacity=64 * MIB) as store:
        assert set(store.put_many(SPACE, writes(range(40)))) == {STORED}
        store.mark_many(SPACE, [one.key for one in writes(range(10))], PINNED)
        store.purge_many(SPACE, [one.key for one in writes(range(30, 40))], refuse_s=600)
        if scheme == "file":
            grow_the_catalogue(store)
        else:
            store.put_many(SPACE, writes(range(100, 300)))
            assert get(store, range(30)) == [HIT] * 30
    disk = Disk(root, tmp_path / "image", monkeypatch)
    before = catalogue_of(root).stat().st_size
    with open_store(f"{scheme}://{root}?durability={durability}", capacity=8 * MIB):
        assert catalogue_of(root).stat().st_size < before / 2
    assert disk.changes
    monkeypatch.undo()
    with open_store(f"{scheme}://{disk.after_the_power_is_back()}") as store:
        assert get(store, range(30)) == [HIT] * 30
        assert {info.key for info in store.scan_marked(SPACE, PINNED)} == {one.key for one in writes(range(10))}
        assert store.put_many(SPACE, writes(range(30, 40))) == [REFUSED] * 10
        assert not any("anew" in note for note in store.capabilities.notes)


def test_a_purge_takes_nothing_from_the_other_blocks_on_disk(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(f"lmdb://{root}", capacity=64 * MIB) as store:
        assert set(store.put_many(SPACE, writes(range(40)))) == {STORED}
    with open_store(f"lmdb://{root}") as store:
        disk = Disk(root, tmp_path / "image", monkeypatch)
        store.purge_many(SPACE, [one.key for one in writes(range(30, 40))], refuse_s=600)
        store.finish_purge()
        assert disk.changes
    monkeypatch.undo()
    with open_store(f"lmdb://{disk.after_the_power_is_back()}") as store:
        assert get(store, range(30)) == [HIT] * 30
        assert not any("anew" in note for note in store.capabilities.notes)
