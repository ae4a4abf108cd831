"""Files that are named like drafts of ours, and are not: nobody takes them away, nor a directory of them for a tier."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from local_helpers import HIT, STORED, TINY

import kvstore.files
import kvstore.objects.directory_client
from kvstore import open_store
from kvstore.errors import NotAStoreError
from kvstore.files import make_folder
from kvstore.testing.supply import get, writes

if TYPE_CHECKING:
    from pathlib import Path

NAMES = (
    ".new-thesis.tex",
    ".new-photos/a.jpg",
    ".new-state",
    ".new-data.mdb",
    f".new-{'0' * 32}",
    f".new-{'0' * 8}-{'0' * 16}",
    f".new-gate-{'0' * 16}",
    f".new-.kvstore-{'0' * 16}/a",
)


def made(root: Path, name: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("years of work")
    return path


@pytest.mark.parametrize("mode", ["0600", "0666"])
@pytest.mark.parametrize("name", NAMES)
def test_a_directory_of_them_is_no_tier_and_stays_as_it_is(scheme: str, name: str, mode: str, root: Path) -> None:
    file = made(root, name)
    with pytest.raises(NotAStoreError):
        open_store(f"{scheme}://{root}?mode={mode}")
    assert file.read_text() == "years of work"
    assert {path.name for path in root.iterdir()} == {name.partition("/")[0]}


@pytest.mark.parametrize("mode", ["0600", "0666"])
def test_those_that_came_into_a_tier_stay(scheme: str, mode: str, root: Path) -> None:
    url = f"{scheme}://{root}?mode={mode}"
    with open_store(url) as store:
        assert store.put_many(TINY, writes([1], TINY)) == [STORED]
    empty = root / ".new-and-empty"
    empty.touch()
    files = [made(root, name) for name in NAMES if scheme == "file" or name not in (".new-state", ".new-data.mdb")]
    for _ in range(2):
        with open_store(url) as store:
            assert get(store, [1], TINY) == [HIT]
    assert [file.read_text() for file in files] == ["years of work"] * len(files)
    assert empty.exists()


def test_what_cannot_be_removed_ends_no_opening(scheme: str, root: Path) -> None:
    with open_store(f"{scheme}://{root}"):
        pass
    for path in (root, *root.rglob("*")):
        if path.is_dir():
            (path / ".new-data.mdb" / "full").mkdir(parents=True)
    with open_store(f"{scheme}://{root}") as store:
        assert store.put_many(TINY, writes([1], TINY)) == [STORED]


def test_a_root_whose_maker_was_killed_leaves_nothing_beside_it_once_it_is_made(scheme: str, root: Path) -> None:
    url = f"{scheme}://{root}?mode=0660"
    source = f"""
import os, sys
sys.path[:0] = {sys.path!r}
import kvstore.files
from kvstore import open_store
kvstore.files.rename_new = lambda *_: os.kill(os.getpid(), {signal.SIGKILL})
open_store({url!r})
"""
    beside = [root.parent / name for name in (f".new-{'0' * 8}-{'0' * 16}", ".new-data.mdb", ".new-state")]
    for path in beside:
        path.mkdir()
    killed = subprocess.run([sys.executable, "-c", source], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(root.parent.iterdir())) == 4
    with open_store(url):
        pass
    assert sorted(root.parent.iterdir()) == sorted([*beside, root])


def test_a_name_may_be_as_long_as_the_file_system_takes(scheme: str, tmp_path: Path) -> None:
    with open_store(f"{scheme}://{tmp_path}/{'x' * 255}?mode=0660") as store:
        assert store.put_many(TINY, writes([1], TINY)) == [STORED]


def test_who_finds_his_draft_swept_away_has_the_folder_that_another_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = kvstore.files.rename_new

    def rename(source: str, target: Path) -> None:
        monkeypatch.undo()
        make_folder(target, 0o660)
        assert not os.path.lexists(source)
        really(source, target)

    monkeypatch.setattr(kvstore.files, "rename_new", rename)
    make_folder(tmp_path / "shared", 0o660)
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]


def test_a_folder_that_is_there_is_not_replaced_by_another_that_is_as_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its inode stays: who has looked it up may be making something in it."""
    path, made, really = tmp_path / "shared", list[int](), os.mkdir

    def mkdir(*arguments: Any) -> None:
        monkeypatch.undo()
        make_folder(path, 0o660)
        made.append(path.stat().st_ino)
        really(*arguments)

    monkeypatch.setattr(os, "mkdir", mkdir)
    make_folder(path, 0o660)
    assert [path.stat().st_ino] == made
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]


def test_a_shared_directory_is_put_into_though_a_folder_in_it_goes_at_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file system cannot tell, another process's folder takes the place of an empty one."""

    def vanish(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise FileNotFoundError

    with open_store(f"file://{root}?remote=true&mode=0666") as store:
        monkeypatch.setattr(kvstore.objects.directory_client, "make_folder", vanish)
        assert store.put_many(TINY, writes([1], TINY)) == [STORED]
