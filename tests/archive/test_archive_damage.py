"""Archives whose objects were changed, cut, swapped or lost: found to the last byte, and nothing wrong is restored."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from archive_helpers import (
    BLOCKS,
    IDS,
    KEYS,
    SPACE,
    archived,
    held,
)

from kvstore import BlockRead, BlockWrite, GetOutcome, open_store
from kvstore.archive import (
    ArchiveDamagedError,
    catalogue,
    create,
    open_archive,
    remove,
    restore,
)
from kvstore.archive.document import MANIFEST_NAME

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any


class TestDamage:
    @pytest.mark.usefixtures("small_shards")
    def test_any_byte_that_changes_is_found_and_what_it_is_part_of_is_not_restored(self, tmp_path: Path) -> None:
        url, info = archived(tmp_path, tokens=IDS)
        root = tmp_path / "archives" / "one"
        files = sorted(file for file in root.rglob("*") if file.is_file())
        assert sum(file.stat().st_size for file in files) == info.stored_bytes + (root / MANIFEST_NAME).stat().st_size
        places = [(file, at) for file in files for at in _sampled(file.stat().st_size)]
        assert len(places) > 200
        with open_store("memory://archive-damage") as store:
            for file, at in places:
                data = file.read_bytes()
                file.write_bytes(data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :])
                assert not _is_intact(url), (file, at)
                _restore_as_far_as_it_goes(url, store)
                assert {True} >= set(held(store, SPACE, KEYS)) - {False}
                store.delete_many(SPACE, KEYS)
                file.write_bytes(data)
            assert _is_intact(url)

    @pytest.mark.usefixtures("small_shards")
    def test_a_shard_in_the_place_of_another_is_found_and_not_restored(self, tmp_path: Path) -> None:
        url, _ = archived(tmp_path)
        one, other = sorted((tmp_path / "archives" / "one").glob("g0/c/*/*/*/*/*"))[:2]
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second), other.write_bytes(first)
        with open_archive(url) as archive:
            found = archive.verify()
        assert (found.intact, found.corrupt) == (BLOCKS - 6, tuple(KEYS[:6]))
        with open_store("memory://archive-swapped") as store:
            report = restore(url, store)
            assert (report.restored, report.corrupt, report.complete) == (BLOCKS - 6, 6, False)
            assert held(store, SPACE, KEYS) == [False] * 6 + [True]

    @pytest.mark.usefixtures("small_shards")
    def test_a_shard_of_another_archive_of_the_same_keys_is_found_and_not_restored(self, tmp_path: Path) -> None:
        url, _ = archived(tmp_path)
        with open_store("memory://archive-other-bits") as store:  # KV is not reproducible bit by bit
            blocks = [BlockWrite(key, bytes(SPACE.block_bytes()), at) for at, key in enumerate(KEYS)]
            store.put_many(SPACE, blocks)
            create(f"file://{tmp_path}/archives/other", store, SPACE, KEYS)
        name = "g0/c/0/0/1/0/0"
        shutil.copy(tmp_path / "archives" / "other" / name, tmp_path / "archives" / "one" / name)
        with open_archive(url) as archive:
            assert archive.verify().corrupt == tuple(KEYS[3:6])
        with open_store("memory://archive-mixed") as store:
            assert restore(url, store).corrupt == 3
            assert held(store, SPACE, KEYS) == [True] * 3 + [False] * 3 + [True]

    @pytest.mark.usefixtures("small_shards")
    @pytest.mark.parametrize("compression", ["none", "zstd"])
    def test_of_a_damaged_shard_the_other_blocks_come_back(self, tmp_path: Path, compression: str) -> None:
        url, _ = archived(tmp_path, compression=compression)
        shard = sorted((tmp_path / "archives" / "one").glob("g0/c/*/*/*/*/*"))[0]
        data = bytearray(shard.read_bytes())
        data[100] ^= 1
        shard.write_bytes(data)
        with open_archive(url) as archive:
            assert archive.verify().corrupt == (KEYS[0],)
            into = bytearray(SPACE.block_bytes())
            assert archive.read_many_into([BlockRead(KEYS[0], into)]) == [GetOutcome.CORRUPT]
        with open_store("memory://archive-one-damaged") as store:
            assert restore(url, store).corrupt == 1
            assert held(store, SPACE, KEYS) == [False] + [True] * (BLOCKS - 1)

    def test_a_missing_object_and_one_cut_short_are_damage(self, tmp_path: Path) -> None:
        url, _ = archived(tmp_path)
        root = tmp_path / "archives" / "one"
        shard = next(iter(root.glob("g0/c/*/*/*/*/*")))
        data = shard.read_bytes()
        shard.write_bytes(data[:-4096])
        with open_archive(url) as archive:
            assert archive.verify().corrupt == tuple(KEYS)
        shard.write_bytes(data)
        (root / "g0_positions" / "zarr.json").unlink()
        with open_archive(url) as archive:
            assert archive.verify().damaged_objects == ("g0_positions/zarr.json",)

    def test_one_damaged_manifest_hides_no_other_archive(self, tmp_path: Path) -> None:
        url, info = archived(tmp_path)
        root = tmp_path / "archives"
        shutil.copytree(root / "one", root / "two")
        (root / "two" / MANIFEST_NAME).write_text("{}")
        told: list[str] = []
        assert catalogue(f"file://{root}", damaged=lambda place, _: told.append(place)) == [info]
        assert told == [f"file://{root}/two"]
        with pytest.raises(ArchiveDamagedError, match="two"):
            catalogue(f"file://{root}")
        assert catalogue(url) == [info]
        with pytest.raises(ArchiveDamagedError, match="force"):
            remove(f"file://{root}/two")
        remove(f"file://{root}/two", force=True)
        assert not (root / "two").exists()


def _sampled(size: int) -> list[int]:
    """Places in a file: both ends, and some between, at irregular distances."""
    return sorted({0, size - 1, size // 2, *range(13, size, 257)})


def _is_intact(url: str) -> bool:
    try:
        with open_archive(url) as archive:
            return archive.verify().ok
    except ArchiveDamagedError:
        return False


def _restore_as_far_as_it_goes(url: str, store: Any) -> None:
    try:
        restore(url, store)
    except ArchiveDamagedError:
        return
