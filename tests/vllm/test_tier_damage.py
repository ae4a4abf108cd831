"""Whatever happens to stored blocks behind the tier's back: misses, computed anew; no wrong bytes and no error."""

from __future__ import annotations

import itertools
import re
import shutil
from typing import TYPE_CHECKING

import lmdb
import pytest
from driver import Driver, keys, kvstore_tier
from vllm.v1.kv_offload.base import LookupResult

from kvstore.environment import MAP_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROMPT = keys(8)
BLOCK_FILE = re.compile(r"[0-9]+(\.[0-9]+)+")


def block_files(folder: Path) -> list[Path]:
    """Of a `file://` tier."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and BLOCK_FILE.fullmatch(path.name))


def flip(data: bytes) -> bytes:
    """Another byte in the middle of the payload."""
    middle = len(data) // 3
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def change_files(folder: Path, change: Callable[[bytes], bytes]) -> int:
    """Every block of a `file://` tier; returns how many."""
    for path in block_files(folder):
        path.write_bytes(change(path.read_bytes()))
    return len(block_files(folder))


def change_entries(folder: Path, change: Callable[[bytes], bytes]) -> int:
    """Every block of an `lmdb://` tier; returns how many."""
    with (
        lmdb.open(str(folder), map_size=MAP_SIZE, max_dbs=16, create=False) as environment,
        environment.begin(write=True) as txn,
    ):
        blocks = environment.open_db(b"blocks", txn)
        entries = [(bytes(key), bytes(value)) for key, value in txn.cursor(blocks)]
        for key, value in entries:
            txn.put(key, change(value), db=blocks)
    return len(entries)


def swap_files(folder: Path) -> int:
    """Each block lies under the name of the next."""
    files = block_files(folder)
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)
    return len(files)


def swap_entries(folder: Path) -> int:
    """Each block lies under the key of the next."""
    kept: list[bytes] = []
    change_entries(folder, lambda value: kept.append(value) or value)
    turn = itertools.chain(kept[1:], kept[:1])
    return change_entries(folder, lambda _value: next(turn))


def delete_files(folder: Path) -> int:
    """All blocks, and nothing else."""
    files = block_files(folder)
    for path in files:
        path.unlink()
    return len(files)


def folders_in_their_place(folder: Path) -> int:
    """Nothing can be read under the name of a block, whoever asks."""
    files = block_files(folder)
    for path in files:
        path.unlink()
        path.mkdir()
    return len(files)


DAMAGE: dict[str, tuple[str, Callable[[Path], int]]] = {
    "file, one byte flipped": ("file", lambda folder: change_files(folder, flip)),
    "file, truncated": ("file", lambda folder: change_files(folder, lambda data: data[:5000])),
    "file, emptied": ("file", lambda folder: change_files(folder, lambda _data: b"")),
    "file, swapped": ("file", swap_files),
    "file, deleted": ("file", delete_files),
    "file, unreadable": ("file", folders_in_their_place),
    "lmdb, one byte flipped": ("lmdb", lambda folder: change_entries(folder, flip)),
    "lmdb, truncated": ("lmdb", lambda folder: change_entries(folder, lambda data: data[:5000])),
    "lmdb, swapped": ("lmdb", swap_entries),
}


def stored(url: str) -> None:
    """An earlier engine has stored the prompt."""
    with Driver([kvstore_tier(url)], rows=16) as engine:
        assert engine.store(PROMPT) == len(PROMPT)


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_bad_block_is_a_miss_once_and_good_again_when_it_was_computed(kind: str, tmp_path: Path) -> None:
    backend, damage = DAMAGE[kind]
    url = f"{backend}://{tmp_path}/tier"
    stored(url)
    assert damage(tmp_path / "tier") == len(PROMPT)
    with Driver([kvstore_tier(url)], rows=16) as engine:
        assert engine.load(PROMPT) == 0
        stats = engine.tiers[0]._tier.stats()
        assert stats.failed_loads <= len(PROMPT), "each was tried once at most: nothing goes round"
        assert stats.loads == 0
        engine.store(PROMPT)
        engine.evict_all()
        assert engine.load(PROMPT) == len(PROMPT)


@pytest.mark.parametrize("bad", [0, 3, 6])
@pytest.mark.parametrize("row_bytes", [8192, 1 << 20], ids=["one call for all", "a call for each"])
def test_exactly_the_bad_block_of_a_load_is_a_miss(bad: int, row_bytes: int, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/tier"
    with Driver([kvstore_tier(url)], rows=16, row_bytes=row_bytes) as engine:
        engine.store(PROMPT)
    victim = _file_of(tmp_path / "tier", PROMPT[bad])
    victim.write_bytes(flip(victim.read_bytes()))
    with Driver([kvstore_tier(url)], rows=16, row_bytes=row_bytes) as engine:
        request = engine.arrive(PROMPT)
        answers = engine.until(lambda: engine.final(request))
        assert answers == [LookupResult.HIT] * bad + [LookupResult.MISS]
        assert engine.read(request, PROMPT[:bad]) == []
        behind = engine.arrive(PROMPT[bad + 1 :])
        assert engine.until(lambda: engine.final(behind)) == [LookupResult.HIT] * (len(PROMPT) - bad - 1)
        stats = engine.tiers[0]._tier.stats()
        assert (stats.loads, stats.failed_loads, stats.corrupt) == (len(PROMPT) - 1, 1, 1)


def test_two_requests_that_wait_for_the_same_bad_block_are_both_released(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/tier"
    stored(url)
    change_files(tmp_path / "tier", flip)
    with Driver([kvstore_tier(url)], rows=16) as engine:
        first, second = engine.arrive(PROMPT), engine.arrive(PROMPT)
        engine.until(lambda: engine.final(first) and engine.final(second))
        assert engine.lookup(first) == engine.lookup(second) == [LookupResult.MISS]


def test_the_whole_folder_goes_while_the_engine_runs(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/tier"
    with Driver([kvstore_tier(url)], rows=16) as engine:
        engine.store(PROMPT)
        engine.evict_all()
        shutil.rmtree(tmp_path / "tier")
        assert engine.load(PROMPT) == 0
        engine.store(keys(8, "b"))
        engine.evict_all()
        assert engine.load(keys(8, "b")) in (0, 8)


def test_the_tree_is_replaced_by_a_file_while_the_engine_runs(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/tier"
    with Driver([kvstore_tier(url)], rows=16) as engine:
        engine.store(PROMPT)
        engine.evict_all()
        tree = block_files(tmp_path / "tier")[0].parents[2]
        shutil.move(tree, tmp_path / "elsewhere")
        tree.write_text("no folder")
        assert engine.load(PROMPT) == 0
        assert engine.store(keys(8, "b")) == 8, "primary memory serves on"
        assert engine.load(keys(8, "b")) == 8


def test_the_second_tier_serves_what_the_first_has_damaged(tmp_path: Path) -> None:
    tiers = [kvstore_tier(f"{kind}://{tmp_path}/{kind}") for kind in ("file", "lmdb")]
    with Driver(tiers, rows=16) as engine:
        engine.store(PROMPT)
        engine.evict_all()
        change_files(tmp_path / "file", flip)
        assert engine.load(PROMPT) == len(PROMPT)
        assert engine.tiers[1]._tier.stats().loads == len(PROMPT)


def _file_of(folder: Path, key: bytes) -> Path:
    """The first byte names the folder, the next seven are the first word of the name."""
    found = folder.rglob(f"g0/{key[0]:02x}/{int.from_bytes(key[1:8], 'big')}.*")
    return next(found)
