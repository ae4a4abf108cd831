"""The documents of a group's arrays: one file under many names, where the file system has links."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from local_helpers import HIT, STORED, file_of

from kvstore import open_store
from kvstore.files import replace_file
from kvstore.testing.supply import SPACE, get, writes
from kvstore_zarr import folders

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Buffer

BLOCKS = range(12)


def documents(root: Path) -> list[Path]:
    """Of the arrays that hold the blocks."""
    return sorted({file_of(root, number).parent / "zarr.json" for number in BLOCKS})


def test_each_array_has_its_document_and_all_are_one_file(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}") as store:
        assert set(store.put_many(SPACE, writes(BLOCKS))) == {STORED}
    found = documents(tmp_path)
    assert len(found) > 1
    assert {path.lstat().st_ino for path in found} == {found[0].lstat().st_ino}
    assert json.loads(found[0].read_text())["node_type"] == "array"


def test_an_array_that_is_new_after_an_opening_has_the_same_file_and_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(f"file://{tmp_path}") as store:
        store.put_many(SPACE, writes(BLOCKS[:6]))
    with open_store(f"file://{tmp_path}") as store, monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: pytest.fail("the disk was waited for"))
        assert set(store.put_many(SPACE, writes(BLOCKS[6:]))) == {STORED}
    assert len({path.lstat().st_ino for path in documents(tmp_path)}) == 1


@pytest.mark.parametrize("what", ["damaged", "a link", "a folder"])
def test_no_array_has_a_document_that_is_not_sound(what: str, tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}") as store:
        store.put_many(SPACE, writes([0]))
    document = file_of(tmp_path, 0).parent / "zarr.json"
    sound = document.read_bytes()
    document.unlink()
    if what == "damaged":
        document.write_bytes(sound[:-1])
    elif what == "a link":
        (tmp_path / "elsewhere").write_bytes(sound)
        document.symlink_to(tmp_path / "elsewhere")
    else:
        document.mkdir()
    with open_store(f"file://{tmp_path}") as store:
        assert set(store.put_many(SPACE, writes(BLOCKS[1:]))) == {STORED}
    for path in set(documents(tmp_path)) - {document}:
        assert path.read_bytes() == sound
        assert not path.is_symlink()


def test_a_document_that_cannot_be_read_is_no_reason_to_store_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(f"file://{tmp_path}") as store:
        store.put_many(SPACE, writes([0]))

    def unreadable(path: str, _: bytes) -> bool:
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(folders, "_says", unreadable)
    with open_store(f"file://{tmp_path}") as store:
        assert set(store.put_many(SPACE, writes(BLOCKS[1:]))) == {STORED}
    assert all(path.exists() for path in documents(tmp_path))


def test_threads_that_begin_together_write_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def counted(path: str | Path, data: bytes, *, draft: str | Path, mode: int) -> None:
        written.append(os.path.relpath(path, tmp_path))
        replace_file(path, data, draft=draft, mode=mode)

    monkeypatch.setattr(folders, "replace_file", counted)
    with open_store(f"file://{tmp_path}") as store, ThreadPoolExecutor(len(BLOCKS)) as pool:
        outcomes = list(pool.map(lambda number: store.put_many(SPACE, writes([number])), BLOCKS))
    assert outcomes == [[STORED]] * len(BLOCKS)
    assert sorted(path.count("/") for path in written) == [1, 2, 3]  # of the namespace, its group, and one array


def test_where_there_are_no_links_each_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    with open_store(f"file://{tmp_path}") as store:
        assert set(store.put_many(SPACE, writes(BLOCKS))) == {STORED}
        assert get(store, BLOCKS) == [HIT] * len(BLOCKS)
    found = documents(tmp_path)
    assert len({path.lstat().st_ino for path in found}) == len(found)
    assert len({path.read_text() for path in found}) == 1


def test_a_document_that_went_behind_the_tiers_back_is_linked_from_no_more(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}") as store:
        store.put_many(SPACE, writes([0]))
        gone = file_of(tmp_path, 0).parent / "zarr.json"
        gone.unlink()
        assert set(store.put_many(SPACE, writes(BLOCKS[1:]))) == {STORED}
        assert get(store, BLOCKS) == [HIT] * len(BLOCKS)
    assert [path for path in documents(tmp_path) if not path.exists()] == [gone]


def test_a_system_that_writes_a_little_at_a_time_writes_whole_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.pwrite

    def little(fd: int, data: Buffer, offset: int) -> int:
        return whole(fd, memoryview(data)[:20], offset)

    monkeypatch.setattr(os, "pwrite", little)
    with open_store(f"file://{tmp_path}") as store:
        assert set(store.put_many(SPACE, writes(BLOCKS))) == {STORED}
    assert (tmp_path / ".kvstore" / "state").stat().st_size == 64
    with open_store(f"file://{tmp_path}") as store:
        assert store.namespaces() == [SPACE]
        assert get(store, BLOCKS) == [HIT] * len(BLOCKS)


@pytest.mark.parametrize("written", [0, 5])
def test_a_file_that_cannot_be_replaced_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    (tmp_path / "file").write_bytes(b"as it was")
    whole = os.pwrite

    def fails(fd: int, data: Buffer, offset: int) -> int:
        if offset or not written:
            raise OSError(errno.ENOSPC, "full")
        return whole(fd, memoryview(data)[:written], offset)

    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(OSError, match="full"):
        replace_file(tmp_path / "file", b"as it is to be", draft=tmp_path / "draft", mode=0o600)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"as it was"]
