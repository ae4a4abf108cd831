"""Killed on its way, at any point: nothing half is visible, and the same call goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from archive_helpers import BLOCKS, IDS, KEYS, LABEL, SPACE, facts, filled, held

from kvstore import open_store
from kvstore.archive import NoArchiveError, catalogue, create, open_archive, remove, restore
from kvstore.archive.document import DRAFT_NAME, MANIFEST_NAME

PROCESS = Path(__file__).with_name("interrupted.py")


def killed(task: str, at: int, folder: Path) -> bool:
    """Run it; whether it was killed (it may have had less to do)."""
    done = subprocess.run([sys.executable, PROCESS, task, str(at), folder], capture_output=True, text=True, check=False)
    assert done.returncode in (0, -9), done.stderr
    return done.returncode == -9


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("at", [0, 1, 3, 5, 26, 28, 29, 30])
def test_a_killed_creation_leaves_no_archive_and_is_gone_on_with(tmp_path: Path, at: int) -> None:
    filled(tmp_path / "source")
    url, root = f"file://{tmp_path}/archives/one", tmp_path / "archives" / "one"
    assert killed("create", at, tmp_path)
    shards = {file: file.stat().st_mtime_ns for file in root.glob("g0/c/*/*/*/*/*") if file.name[0] != "."}
    if not (root / MANIFEST_NAME).exists():
        assert catalogue(f"file://{tmp_path}/archives") == []
        with pytest.raises(NoArchiveError):
            open_archive(url)
    with open_store(f"file://{tmp_path}/source") as store:
        create(url, store, SPACE, KEYS, label=LABEL, tokens=IDS)
    assert {file: file.stat().st_mtime_ns for file in shards} == shards
    with open_archive(url) as archive:
        assert archive.verify().ok
        objects = {*archive.manifest.objects, MANIFEST_NAME}
    left = {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()}
    assert left - {DRAFT_NAME} == objects
    remove(url)
    assert not root.exists()


def test_what_is_left_of_a_killed_creation_can_be_removed(tmp_path: Path) -> None:
    filled(tmp_path / "source")
    assert killed("create", 4, tmp_path)
    remove(f"file://{tmp_path}/archives/one")
    assert not (tmp_path / "archives" / "one").exists()


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_killed_restore_leaves_whole_blocks_and_is_gone_on_with(tmp_path: Path, at: int) -> None:
    with open_store(filled(tmp_path / "source")) as source:
        create(f"file://{tmp_path}/archives/one", source, SPACE, KEYS, label=LABEL)
        expected = facts(source, SPACE)
    assert killed("restore", at, tmp_path)
    with open_store(f"file://{tmp_path}/target") as store:
        there = held(store, SPACE, KEYS)
        # Shards overlap: what was begun before may have ended or not. The mark, which is last, comes after all of them.
        assert sum(there) == BLOCKS if at == 3 else sum(there) <= 3 * at
        report = restore(f"file://{tmp_path}/archives/one", store)
        assert (report.there, report.complete, report.labelled) == (sum(there), True, BLOCKS)
        assert facts(store, SPACE) == expected


@pytest.mark.parametrize("at", [2, 3, 4, 9])
def test_a_killed_removal_leaves_no_archive_and_is_gone_on_with(tmp_path: Path, at: int) -> None:
    url, root = f"file://{tmp_path}/archives/one", tmp_path / "archives" / "one"
    with open_store(filled(tmp_path / "source")) as source:
        create(url, source, SPACE, KEYS)
        assert killed("remove", at, tmp_path)
        assert (root / MANIFEST_NAME).exists() == (at == 2)
        if at % 2:
            create(url, source, SPACE, KEYS)
            with open_archive(url) as archive:
                assert archive.verify().ok
    remove(url)
    assert not root.exists()
