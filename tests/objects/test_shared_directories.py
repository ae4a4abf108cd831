"""`file://…?remote=true`: a directory of several machines, on whatever file system, where nobody keeps order."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import pytest

from kvstore import open_store
from kvstore.errors import InvalidOptionError, NotAStoreError, StoreAccessError, UnknownOptionError
from kvstore.objects.directory_client import DirectoryClient
from kvstore.testing.supply import SPACE, get, held, key, keys, write, writes
from kvstore.types import GetOutcome, PutOutcome
from kvstore_zarr.metadata import NamespaceTree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS
STORED, EXISTS, FULL, FAILED = PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.FULL, PutOutcome.FAILED
TREE = NamespaceTree(SPACE)


@pytest.fixture
def shared(tmp_path: Path) -> str:
    return f"file://{tmp_path}/tier?remote=true"


def files(tmp_path: Path) -> list[str]:
    """Every file of the tier, relative to it."""
    root = tmp_path / "tier"
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def refusing(error: int) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> None:
        raise OSError(error, os.strerror(error))

    return call


def test_a_network_mount_is_refused_with_the_option_that_it_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("kvstore.lmdb_files", "kvstore.objects.directory_client"):
        monkeypatch.setattr(f"{module}.filesystem_of", lambda _: "nfs4")
    with pytest.raises(StoreAccessError, match=r"is on nfs4.*remote=true"):
        open_store(f"file://{tmp_path}/tier")
    with open_store(f"file://{tmp_path}/tier?remote=true") as store:
        assert store.put_many(SPACE, writes(range(3))) == [STORED] * 3
        assert get(store, range(4)) == [HIT, HIT, HIT, MISS]
        assert store.capabilities.notes == ("client: directory",)
    assert not (tmp_path / "tier/.kvstore").exists()  # neither LMDB nor locks


def test_a_directory_of_this_machine_is_told_what_it_misses(shared: str) -> None:
    with open_store(shared) as store:
        assert any(re.search(r"file system of this machine.*exact capacity", note) for note in store.capabilities.notes)


def test_its_options_are_its_own(tmp_path: Path) -> None:
    for wrong, kind in {"remote=perhaps": InvalidOptionError, "remote=true&io=direct": UnknownOptionError}.items():
        with pytest.raises(kind):
            open_store(f"file://{tmp_path}/tier?{wrong}")
    open_store(f"file://{tmp_path}/local?remote=false").close()
    assert (tmp_path / "local/.kvstore").exists()
    (tmp_path / "file").touch()
    with pytest.raises((NotAStoreError, StoreAccessError)):
        open_store(f"file://{tmp_path}/file?remote=true")


def test_it_becomes_a_local_tier_and_a_local_tier_becomes_one(shared: str, tmp_path: Path) -> None:
    with open_store(shared) as store:
        store.put_many(SPACE, writes(range(5)))
    with open_store(f"file://{tmp_path}/tier?capacity=10MB") as local:
        assert get(local, range(6)) == [HIT] * 5 + [MISS]
        assert local.usage().blocks == 5
        local.put_many(SPACE, [write(5)])
        with open_store(shared) as store:
            assert get(store, range(6)) == [HIT] * 6
            store.put_many(SPACE, [write(6)])
            store.delete_many(SPACE, keys([0]))
        found = local.reindex()  # type: ignore[attr-defined]
        assert (found.added, found.removed) == (1, 1)
        assert held(local) == set(keys(range(1, 7)))


def put_all(url: str) -> list[PutOutcome]:
    """In a process of its own: put the same eight blocks as everybody else."""
    with open_store(url) as store:
        return store.put_many(SPACE, writes(range(8)))


def test_sixteen_writers_leave_one_intact_file_of_each_block_and_nothing_else(shared: str, tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        outcomes = list(pool.map(put_all, [shared] * 16))
    for number in range(8):
        assert [outcome[number] for outcome in outcomes].count(STORED) == 1
    with open_store(shared) as store:
        assert get(store, range(8)) == [HIT] * 8
    assert [name for name in files(tmp_path) if not name.endswith("zarr.json")] == sorted(
        TREE.block(name) for name in keys(range(8))
    )


@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV])
def test_without_hard_links_a_block_is_renamed_into_place(
    shared: str, tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refusing(error))
    with open_store(shared) as store:
        assert store.put_many(SPACE, writes(range(4))) == [STORED] * 4
        assert store.put_many(SPACE, writes(range(4))) == [EXISTS] * 4
        assert get(store, range(4)) == [HIT] * 4
    assert not [name for name in files(tmp_path) if "draft" in name]


@pytest.mark.parametrize(("error", "outcome"), [(errno.EDQUOT, FULL), (errno.ENOSPC, FULL), (errno.EROFS, FAILED)])
def test_what_the_file_system_says_when_a_file_is_closed_counts(
    shared: str, tmp_path: Path, error: int, outcome: PutOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS a full disk is told at the close, when all the writes have succeeded."""
    written = DirectoryClient._write

    def closed(client: DirectoryClient, *words: Any) -> None:
        written(client, *words)
        refusing(error)()

    with open_store(shared) as store:
        store.put_many(SPACE, [write(0)])
        monkeypatch.setattr(DirectoryClient, "_write", closed)
        assert store.put_many(SPACE, [write(1)]) == [outcome]
        monkeypatch.undo()
        assert get(store, [0, 1]) == [HIT, MISS]
    assert not [name for name in files(tmp_path) if "draft" in name]


KILLED = """
import os, signal, sys
from kvstore import open_store
from kvstore.testing.supply import SPACE, writes
os.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
with open_store(sys.argv[1]) as store:
    store.put_many(SPACE, writes(range(1)))
"""


def test_what_a_killed_writer_leaves_is_no_block_and_is_swept_when_it_is_old(shared: str, tmp_path: Path) -> None:
    with open_store(shared) as store:
        store.put_many(SPACE, [write(0)])
        store.delete_many(SPACE, keys([0]))
    done = subprocess.run([sys.executable, "-c", KILLED, shared], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    drafts = [name for name in files(tmp_path) if "draft" in name]
    assert len(drafts) == 1
    with open_store(shared) as store:
        assert get(store, [0]) == [MISS]
        assert held(store) == set()
        store.put_many(SPACE, [write(0)])
        assert [name for name in files(tmp_path) if "draft" in name] == drafts  # somebody may be writing it
    os.utime(tmp_path / "tier" / drafts[0], (0, 0))
    with open_store(shared) as store:
        store.delete_many(SPACE, keys([0]))
        assert store.put_many(SPACE, [write(0)]) == [STORED]
    assert not [name for name in files(tmp_path) if "draft" in name]


def test_a_folder_that_somebody_removed_is_made_again(shared: str, tmp_path: Path) -> None:
    with open_store(shared) as store:
        store.put_many(SPACE, [write(0)])
        folder = tmp_path / "tier" / TREE.folder(key(0))
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        assert store.put_many(SPACE, [write(0)]) == [STORED]
        assert get(store, [0]) == [HIT]


def test_files_have_the_mode_that_was_asked_for(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}/tier?remote=true&mode=0640&durability=fsync") as store:
        store.put_many(SPACE, [write(0)])
    block = tmp_path / "tier" / TREE.block(key(0))
    assert (block.stat().st_mode & 0o777, block.parent.stat().st_mode & 0o777) == (0o640, 0o750)


def test_a_link_or_a_pipe_in_a_blocks_place_is_no_block(shared: str, tmp_path: Path) -> None:
    with open_store(shared) as store:
        store.put_many(SPACE, writes(range(2)))
        one, other = (tmp_path / "tier" / TREE.block(name) for name in keys(range(2)))
        one.unlink()
        os.mkfifo(one)
        other.rename(tmp_path / "elsewhere")
        other.symlink_to(tmp_path / "elsewhere")
        assert get(store, range(2)) == [MISS, MISS]
        assert store.contains_many(SPACE, keys(range(2))) == [False, False]
        assert held(store) == set()
