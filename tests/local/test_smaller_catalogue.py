"""A catalogue that was large once is small again after an opening by who is alone, and a lowered capacity has room."""

from __future__ import annotations

import base64
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import lmdb
import pytest
from local_helpers import HIT, STORED, catalogue_of, occupied

import kvstore.compaction
import kvstore.lmdb_free
import kvstore_zarr.trimming
from kvstore import BlockKey, Mark, open_store
from kvstore.catalog import Entry, address_of
from kvstore.errors import CapacityMismatchError, StoreAccessError, StoreFullError
from kvstore.testing.supply import MIB, SPACE, get, writes
from kvstore_zarr import LocalZarrStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore import BlockStore
    from kvstore.environment import Environment


def grow_the_catalogue(store: BlockStore, entries: int = 12000, *, keep: int = 0, size: int = 4096) -> None:
    """Have it know blocks that have no file, the oldest there are, and forget all but `keep` of them again."""
    assert isinstance(store, LocalZarrStore)
    catalog = store._tier.catalog
    for start in range(0, entries, 2000):
        keys = [BlockKey(number.to_bytes(32, "little")) for number in range(start, start + 2000)]
        with catalog.write() as change:
            change.publish([Entry(address_of(SPACE, key), size, 1, 1) for key in keys])
    for _ in range(0, entries - keep, 2000):
        with catalog.read() as snapshot:
            victims = [one for one, _ in zip(snapshot.oldest(), range(2000), strict=False) if one.last_used == 1]
        with catalog.write() as change:
            change.evict(victims)


def filled(url: str, blocks: range = range(20), *, keep: int = 0) -> None:
    with open_store(url, capacity=256 * MIB) as store:
        grow_the_catalogue(store, keep=keep)
        assert store.put_many(SPACE, writes(blocks)) == [STORED] * len(blocks)


@pytest.mark.parametrize("keep", [0, 12000], ids=["forgotten before", "evicted by the opening"])
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_capacity_below_the_catalogues_greatest_size_has_room(
    root: Path, tmp_path: Path, encrypted: bool, keep: int
) -> None:
    url = f"file://{root}"
    if encrypted:
        (tmp_path / "key").write_text(base64.b64encode(os.urandom(32)).decode())
        url += f"?encryption=file:{tmp_path}/key&keyring={tmp_path}/keyring.json"
    filled(url, keep=keep)
    data = catalogue_of(root)
    capacity = data.stat().st_size
    assert capacity > 2.5 * MIB
    with open_store(url, capacity=capacity) as store:
        assert occupied(root) <= capacity
        assert data.stat().st_size < capacity / 8
        assert get(store, range(20)) == [HIT] * 20
        assert store.put_many(SPACE, writes(range(100, 104))) == [STORED] * 4
        assert occupied(root) <= capacity
    with open_store(url) as store:
        assert store.usage().capacity == capacity
        assert get(store, range(100, 104)) == [HIT] * 4


def test_a_full_tier_keeps_its_blocks_and_its_capacity_while_there_are_two_files(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, seen = f"file://{root}", list[int]()
    with open_store(url, capacity=256 * MIB) as store:
        grow_the_catalogue(store, 16000, keep=6000, size=0)
        store.put_many(SPACE, writes(range(60)))
    before, capacity = catalogue_of(root).stat(), occupied(root) + 300 * 1024

    def write(*arguments: Any, **options: Any) -> None:
        really_write(*arguments, **options)
        seen.append(occupied(root))

    really_write = kvstore.compaction._write  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(kvstore.compaction, "_write", write)
    with open_store(url, capacity=capacity) as store:
        assert get(store, range(60)) == [HIT] * 60
        assert store.usage().blocks == 6060
    after = catalogue_of(root).stat()
    assert before.st_ino != after.st_ino
    assert MIB < after.st_size < before.st_size / 2  # the two together are more than there was room for
    assert seen[0] <= capacity


ELSEWHERE = """
import sys
import tempfile
from kvstore import open_store
with open_store(sys.argv[1]) as store:
    print("open", flush=True)
    sys.stdin.readline()
"""


def test_it_is_not_touched_by_who_is_not_alone_or_reads_only_or_gains_little(root: Path) -> None:
    url = f"file://{root}"
    with open_store(url, capacity=256 * MIB) as store:
        grow_the_catalogue(store)
        before = catalogue_of(root).stat()
        with open_store(url), pytest.raises(CapacityMismatchError):
            open_store(url, capacity=2 * MIB)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", ELSEWHERE, url], stdin=-3, env=environment, check=True, timeout=60)
    with open_store(url, readonly=True):
        pass
    assert (catalogue_of(root).stat().st_ino, catalogue_of(root).stat().st_blocks) == (before.st_ino, before.st_blocks)
    with open_store(url):
        pass
    small = catalogue_of(root).stat()
    assert small.st_ino != before.st_ino
    with open_store(url) as store:
        store.put_many(SPACE, writes(range(50)))
        store.delete_many(SPACE, [one.key for one in writes(range(50))])
    with open_store(url):
        assert catalogue_of(root).stat().st_ino == small.st_ino


def test_where_the_file_system_takes_nothing_back_the_copy_needs_room(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(kvstore.lmdb_free, "punch_hole", refuse)
    url = f"file://{root}"
    filled(url, range(60))
    full = occupied(root) + 256 * 1024
    large = catalogue_of(root).stat().st_size
    with open_store(url, capacity=full) as store:
        assert get(store, range(60)) == [HIT] * 60
        assert catalogue_of(root).stat().st_size < large  # from what it was before, there was room under 256 MiB
    with open_store(url, capacity=256 * MIB) as store:
        grow_the_catalogue(store)
    with open_store(url, capacity=occupied(root) + 16 * 4096) as store:
        assert catalogue_of(root).stat().st_size >= large - MIB
        assert occupied(root) <= (store.usage().capacity or 0)
    assert not list(root.rglob(".new-*"))


def test_several_that_open_it_at_once_find_all_blocks(root: Path) -> None:
    filled(f"file://{root}")
    source = f"""
import sys
import tempfile
sys.path[:0] = {sys.path!r}
from kvstore import open_store
from kvstore.testing.supply import SPACE, get, writes
sys.stdin.readline()
with open_store("file://{root}") as store:
    print(*[one.name for one in get(store, range(20))], *[one.name for one in store.put_many(SPACE, writes([200]))])
"""

    def run(_: int) -> list[str]:
        command = [sys.executable, "-c", source]
        return subprocess.run(command, input="\n", capture_output=True, text=True, check=True).stdout.split()

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(run, range(3)))
    assert all(one[:20] == ["HIT"] * 20 for one in found), found
    assert sorted(one[20] for one in found) == ["EXISTS", "EXISTS", "STORED"]
    assert catalogue_of(root).stat().st_size < MIB


def test_the_new_file_is_open_to_whom_the_old_one_was(root: Path) -> None:
    url = f"file://{root}"
    filled(f"{url}?mode=0666")
    if os.geteuid() == 0:
        os.chown(catalogue_of(root), 65533, 65530)
    before = catalogue_of(root).stat()
    with open_store(url):
        after = catalogue_of(root).stat()
    assert after.st_ino != before.st_ino
    assert (after.st_mode, after.st_gid) == (before.st_mode, before.st_gid)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fchmod", "copy", "rename", "sync_folder"])
def test_a_compaction_that_fails_is_a_remark_and_the_tier_is_open(
    root: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    url, tried = f"file://{root}", list[str]()

    def refuse(*_: Any) -> None:
        tried.append(call)
        raise OSError(number, os.strerror(number))

    filled(url)
    large = catalogue_of(root).stat().st_size
    if call == "rename":
        really = type(root).rename

        def rename(path: Path, to: Path) -> Path:
            return cast("Path", refuse()) if to.suffix == ".mdb" else really(path, to)

        monkeypatch.setattr(type(root), "rename", rename)
    else:
        name = {"fchmod": "permit", "copy": "_write"}.get(call, call)
        monkeypatch.setattr(kvstore.compaction, name, refuse)
    with open_store(url) as store:
        assert tried == [call]
        assert any(os.strerror(number) in note for note in store.capabilities.notes)
        assert get(store, range(20)) == [HIT] * 20
        assert store.put_many(SPACE, writes([100])) == [STORED]
        assert (catalogue_of(root).stat().st_size == large) is (call != "sync_folder")
    assert not list(root.rglob(".new-*"))


def test_a_catalogue_on_another_file_system_is_made_smaller_there(root: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        filled(f"file://{root}")
        catalogue = root / ".kvstore" / "catalogue"
        shutil.copytree(catalogue, elsewhere, dirs_exist_ok=True)
        shutil.rmtree(catalogue)
        catalogue.symlink_to(elsewhere)
        assert catalogue.stat().st_dev != root.stat().st_dev
        with open_store(f"file://{root}") as store:
            assert get(store, range(20)) == [HIT] * 20
            assert not any("smaller" in note for note in store.capabilities.notes)
            assert (catalogue / "data.mdb").stat().st_size < MIB


def test_what_a_later_version_keeps_is_counted_and_copied(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(f"file://{root}")
    environment = lmdb.open(str(catalogue_of(root).parent), max_dbs=20, map_size=1 << 30)
    later = environment.open_db(b"later")
    with environment.begin(write=True) as txn:
        for number in range(400):
            txn.put(number.to_bytes(8, "big"), bytes(1500), db=later)
    environment.close()
    rooms, really = list[int](), kvstore_zarr.trimming.compact

    def compact(environment: Environment, has_room: Callable[[int], bool], failed: Callable[[OSError], object]) -> bool:
        def noted(nbytes: int) -> bool:
            rooms.append(nbytes)
            return has_room(nbytes)

        return really(environment, noted, failed)

    monkeypatch.setattr(kvstore_zarr.trimming, "compact", compact)
    for _ in range(2):
        with open_store(f"file://{root}") as store:
            assert get(store, range(20)) == [HIT] * 20
    size = catalogue_of(root).stat().st_size
    assert len(rooms) == 1
    assert abs(rooms[0] - size) <= 16 * 4096
    environment = lmdb.open(str(catalogue_of(root).parent), max_dbs=20, map_size=1 << 30)
    with environment.begin() as txn:
        assert txn.stat(environment.open_db(b"later", txn=txn, create=False))["entries"] == 400
    environment.close()


def test_it_is_compacted_once_in_an_opening(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(f"file://{root}")
    times, really = list[int](), kvstore_zarr.trimming.compact

    def compact(*given: Any) -> bool:
        times.append(len(times))
        return really(*given)

    def is_worthwhile(*_: Any) -> bool:
        return True

    monkeypatch.setattr(kvstore_zarr.trimming, "is_worthwhile", is_worthwhile)
    monkeypatch.setattr(kvstore_zarr.trimming, "compact", compact)
    with open_store(f"file://{root}") as store:
        assert get(store, range(20)) == [HIT] * 20
    assert len(times) == 1


BY_ANOTHER = """
import os, sys, tempfile
from kvstore import open_store
from kvstore.testing.supply import MIB, SPACE, get, writes
url = sys.argv[1]
with tempfile.TemporaryDirectory() as folder:
    for capacity in (64 * MIB, 8 * MIB):  # imports all that the user below may not be able to read
        with open_store(f"{url.partition(':')[0]}://{folder}/t", capacity=capacity) as store:
            store.put_many(SPACE, writes(range(140))), get(store, [1])
os.setgroups([]), os.setresgid(65532, 65532, 65532), os.setresuid(65532, 65532, 65532)
with open_store(url, capacity=8 * MIB) as store:
    hits = sum(one.name == "HIT" for one in get(store, range(20)))
    print(hits, *[note for note in store.capabilities.notes if "smaller" in note])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="two users take root")
def test_users_of_no_common_group_make_it_smaller(scheme: str, open_folder: Path) -> None:
    root = open_folder / "tier"
    filled_for(scheme, root, "0666")
    for path in (root, *root.rglob("*")):
        os.chown(path, 65533, 65533)
    data = catalogue_of(root)
    before = data.stat()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", BY_ANOTHER, f"{scheme}://{root}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == ["20"], done.stderr
    after = data.stat()
    assert after.st_size < before.st_size
    assert (after.st_mode & 0o777, after.st_uid, after.st_gid) == (0o666, 65532, 65532)
    with open_store(f"{scheme}://{root}") as store:
        assert get(store, range(20)) == [HIT] * 20


def filled_for(scheme: str, root: Path, mode: str) -> None:
    with open_store(f"{scheme}://{root}?mode={mode}", capacity=64 * MIB) as store:
        assert set(store.put_many(SPACE, writes(range(140)))) == {STORED}
        if scheme == "file":
            grow_the_catalogue(store)
        assert get(store, range(20)) == [HIT] * 20


@pytest.mark.skipif(os.geteuid() != 0, reason="a file of another group takes root")
@pytest.mark.parametrize("mode", ["0660", "0666"])
def test_what_only_a_group_may_is_not_given_to_another(
    scheme: str, mode: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where `lmdb://` needs the room, the error says so before any block goes."""

    def refuse(*_: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    filled_for(scheme, root, mode)
    data = catalogue_of(root)
    os.chown(data, -1, 65530)
    large = data.stat().st_size
    monkeypatch.setattr(os, "fchown", refuse)
    if (scheme, mode) == ("lmdb", "0660"):
        with pytest.raises(StoreAccessError, match="Operation not permitted"):
            open_store(f"{scheme}://{root}", capacity=8 * MIB)
        with open_store(f"{scheme}://{root}") as store:
            assert (store.usage().capacity, store.usage().blocks) == (64 * MIB, 140)
    else:
        room = 8 if scheme == "lmdb" else 10  # of which the catalogue has 7, or had
        with open_store(f"{scheme}://{root}", capacity=room * MIB) as store:
            said = any("Operation not permitted" in note for note in store.capabilities.notes)
            assert said is (mode == "0660")
            assert get(store, range(20)) == [HIT] * 20
    assert (data.stat().st_size == large) is (mode == "0660")
    assert not list(root.rglob(".new-*"))


@pytest.mark.parametrize(("call", "capacity"), [("_write", 64 * MIB), ("sync_folder", 8 * MIB)])
def test_a_data_file_of_lmdb_that_cannot_be_written_anew_says_why(
    root: Path, monkeypatch: pytest.MonkeyPatch, call: str, capacity: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    filled_for("lmdb", root, "0600")
    monkeypatch.setattr(kvstore.compaction, call, refuse)
    with pytest.raises(
        StoreFullError,
        match=f"Disk quota exceeded: make room.* {'is as it was' if call == '_write' else 'lower capacity holds'}",
    ):
        open_store(f"lmdb://{root}", capacity=8 * MIB)
    monkeypatch.undo()
    with open_store(f"lmdb://{root}") as store:
        assert store.usage().capacity == capacity
        assert get(store, range(20)) == [HIT] * 20
    assert not list(root.rglob(".new-*"))


def test_a_capacity_that_pins_forbid_is_called_that(root: Path) -> None:
    filled_for("lmdb", root, "0600")
    with open_store(f"lmdb://{root}") as store:
        store.mark_many(SPACE, [one.key for one in writes(range(100))], Mark("kept", pinned=True))
    with pytest.raises(StoreFullError, match="are pinned there"):
        open_store(f"lmdb://{root}", capacity=8 * MIB)
    with open_store(f"lmdb://{root}") as store:
        assert store.usage().blocks == 140
