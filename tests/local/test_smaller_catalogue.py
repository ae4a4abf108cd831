"""A catalogue that was large once is small again after an opening by who is alone, and a lowered capacity has room."""

from __future__ import annotations

import base64
import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from local_helpers import HIT, STORED, catalogue_of, occupied

import kvstore.compaction
import kvstore.lmdb_free
from kvstore import BlockKey, open_store
from kvstore.catalog import Entry, address_of
from kvstore.errors import CapacityMismatchError
from kvstore.testing.supply import MIB, SPACE, get, writes
from kvstore_zarr import LocalZarrStore

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore import BlockStore


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
