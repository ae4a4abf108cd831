"""Of what was purged nothing is on the disk that the receipt does not name, in any tier, whoever dies meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from purge_helpers import found, markers

import kvstore
import kvstore_zarr.purge
from kvstore import GetOutcome, Mark, PutOutcome
from kvstore.purging import Request, purge
from kvstore.testing.supply import SPACE, get, held, key, keys, writes
from kvstore_zarr.rebuild import rebuild
from kvstore_zarr.removal import erase, take_off

if TYPE_CHECKING:
    from collections.abc import Callable

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS
STORED, REFUSED = PutOutcome.STORED, PutOutcome.REFUSED


@pytest.mark.parametrize("options", ["", "?capacity=4MB", "?remote=true"])
@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_markers_of_a_purged_tenant_are_nowhere(kind: str, options: str, tmp_path: Path) -> None:
    if kind == "lmdb" and "remote" in options:
        pytest.skip("LMDB shares no directory")
    url, tier = f"{kind}://{tmp_path}/kv{options}", tmp_path / "kv"
    with kvstore.open_store(url) as store:
        store.put_many(SPACE, writes(range(40)))
        if store.capabilities.marks:
            store.mark_many(SPACE, keys(range(20)), Mark("handbook", tenant="acme"))
            store.mark_many(SPACE, keys(range(15, 40)), Mark("handbook", tenant="zeta"))
    assert len(found(tier, range(40))) == 40
    gone = range(20) if "remote" not in options else range(40)
    asked = Request(tenant="acme") if len(gone) == 20 else Request(all=True)
    (receipt,) = purge([f"{url}&lookup_ttl=0" if "remote" in options else url], asked, dry_run=False).tiers
    assert (receipt.blocks, receipt.complete) == (len(gone), True)
    assert found(tier, gone) == set()
    with kvstore.open_store(url) as store:
        assert get(store, range(40)) == [MISS] * len(gone) + [HIT] * (40 - len(gone))


@pytest.fixture
def last_words(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What each file of a purged block holds when it is about to be unlinked."""
    seen: list[bytes] = []

    def looking(path: str, *_: object) -> None:
        seen.append(Path(path).read_bytes())
        erase(path)

    monkeypatch.setattr(kvstore_zarr.purge, "erase", looking)
    return seen


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_a_file_is_zeros_before_it_goes(io: str, tmp_path: Path, last_words: list[bytes]) -> None:
    with kvstore.open_store(f"file://{tmp_path}/kv?io={io}") as store:
        store.put_many(SPACE, writes(range(3)))
        store.purge_many(SPACE, keys([0, 1]))
        store.purge_many(SPACE, keys([2]), overwrite=False)
    assert [len(data) > SPACE.block_bytes() for data in last_words] == [True] * 3
    assert [not any(data) for data in last_words] == [True, True, False]
    assert all(marker in last_words[2] for marker in markers(2))


def test_the_zeros_are_on_the_device_before_the_file_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not synced when a file is truncated never reaches the device: the old bytes would stay there."""
    synced: list[int] = []
    fdatasync = os.fdatasync

    def syncing(fd: int) -> None:
        fdatasync(fd)
        synced.append(os.fstat(fd).st_ino)

    def looking(path: str, *_: object) -> None:
        assert Path(path).stat().st_ino in synced
        erase(path)

    with kvstore.open_store(f"file://{tmp_path}/kv") as store:
        store.put_many(SPACE, writes(range(2)))
        monkeypatch.setattr(os, "fdatasync", syncing)
        monkeypatch.setattr(kvstore_zarr.purge, "erase", looking)
        assert store.purge_many(SPACE, keys(range(2))) == [True, True]
    assert len(synced) >= 2


def test_who_has_a_block_open_while_it_is_purged_reads_no_wrong_byte(tmp_path: Path) -> None:
    with kvstore.open_store(f"file://{tmp_path}/kv") as store:
        store.put_many(SPACE, writes([1]))
        (path,) = (one for one in (tmp_path / "kv" / SPACE.name).rglob("*.0") if not one.name.startswith("draft-"))
        with path.open("rb") as file:
            store.purge_many(SPACE, keys([1]))
            assert not any(file.read())
        assert not path.exists()


_KILLED = """
import os, signal, sys
import kvstore, kvstore_zarr.purge as purge
from kvstore.testing.supply import SPACE, keys
step, url = sys.argv[1:]
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
if step == "rename":
    real, left = os.rename, [2]
    def rename(*args):
        left[0] -= "/draft-" in str(args[1])
        real(*args)
        if not left[0]:
            die()
    purge.os.rename = rename
else:
    setattr(purge, step, die)
with kvstore.open_store(url) as store:
    store.purge_many(SPACE, keys(range(4)))
"""


@pytest.mark.parametrize("step", ["rename", "overwrite", "erase"])
def test_whoever_dies_in_a_purge_leaves_no_block_and_the_next_one_overwrites_it(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/kv"
    with kvstore.open_store(url) as store:
        store.put_many(SPACE, writes(range(6)))
    died = subprocess.run([sys.executable, "-c", _KILLED, step, url], env=dict(os.environ), check=False)
    assert died.returncode == -signal.SIGKILL
    assert found(tmp_path / "kv", range(4))
    overwritten: list[bool] = []

    def looking(path: str) -> int:
        if Path(path).exists():
            overwritten.append(not any(Path(path).read_bytes()))
        return take_off(path)

    monkeypatch.setattr("kvstore_zarr.removal.take_off", looking)
    with kvstore.open_store(url) as store:
        assert len(overwritten) == 4
        assert all(overwritten)
        assert found(tmp_path / "kv", range(4)) == set()
        assert get(store, range(6)) == [MISS] * 4 + [HIT] * 2
        assert store.put_many(SPACE, writes(range(4))) == [REFUSED] * 4
        assert store.usage().reserved == 0


def _reindexed(url: str) -> None:
    with kvstore.open_store(url) as store:
        store.reindex()  # type: ignore[attr-defined]


def _rebuilt(url: str) -> None:
    """After an unclean end and another boot the catalogue is made anew from the files, but for its tombstones."""
    with kvstore.open_store(url) as store:
        rebuild(store._tier)  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", [_reindexed, _rebuilt])
def test_a_file_of_a_purged_block_that_is_copied_back_is_no_block_of_the_tier(
    how: Callable[[str], None], tmp_path: Path
) -> None:
    url, tier = f"file://{tmp_path}/kv", tmp_path / "kv"
    with kvstore.open_store(url) as store:
        store.put_many(SPACE, writes(range(4)))
    files = {
        path: path.read_bytes()
        for path in tier.rglob("*.*.*.*")
        if path.is_file() and any(marker in path.read_bytes() for marker in (*markers(0), *markers(1)))
    }
    assert len(files) == 2
    with kvstore.open_store(url) as store:
        store.purge_many(SPACE, keys([0, 1]))
    for path, data in files.items():
        path.write_bytes(data)
    how(url)
    with kvstore.open_store(url) as store:
        assert held(store) == {key(2), key(3)}
        assert get(store, range(4)) == [MISS, MISS, HIT, HIT]
    assert found(tier, range(2)) == set()
