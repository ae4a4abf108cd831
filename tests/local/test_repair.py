"""`kvstore verify --repair` of local tiers: what is damaged goes, what can be made anew is, no block gets younger."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import lmdb
import pytest
from local_helpers import EXISTS, HIT, MISS, REFUSED, STORED, TINY, catalogue_of, file_of

from kvstore import open_store
from kvstore.catalog import address_of
from kvstore.cli import EXIT_NOT_INTACT, EXIT_OK, run
from kvstore.lmdb_files import damage
from kvstore.marks import Mark
from kvstore.testing.supply import SPACE, get, held, key, keys, writes
from kvstore.types import GetOutcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NUMBERS = range(24)
PAGE = 4096


@pytest.fixture
def url(scheme: str, root: Path) -> str:
    """A tier of 24 blocks, three of them pinned."""
    url = f"{scheme}://{root}"
    with open_store(url) as store:
        assert set(store.put_many(SPACE, writes(NUMBERS))) == {STORED}
        store.mark_many(SPACE, keys(range(3)), Mark("kept", pinned=True))
    return url


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """What the command answers."""

    def ask(*args: str, exit_code: int = EXIT_OK) -> dict[str, Any]:
        capsys.readouterr()
        assert run(["verify", *args, "--json"]) == exit_code
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    return ask


def change_entries(root: Path, database: bytes, change: Callable[[lmdb.Transaction], object]) -> None:
    """Change one database of the tier's environment behind its back."""
    with lmdb.open(str(catalogue_of(root).parent), max_dbs=16, map_size=1 << 30) as environment:
        handle = environment.open_db(database, create=False)
        with environment.begin(write=True, db=handle) as txn:
            change(txn)


def entry_of(txn: lmdb.Transaction, number: int) -> tuple[bytes, bytearray]:
    """Where the bytes of a block stand in `blocks`, and these."""
    digest = key(number).digest
    return next((bytes(place), bytearray(value)) for place, value in txn.cursor() if digest in value[:128])


def damage_block(url: str, root: Path, number: int) -> None:
    if url.startswith("file"):
        with file_of(root, number).open("r+b") as file:
            file.seek(5000)
            byte = file.read(1)[0]
            file.seek(5000)
            file.write(bytes([byte ^ 4]))
        return

    def flip(txn: lmdb.Transaction) -> None:
        place, value = entry_of(txn, number)
        value[5000] ^= 4
        txn.put(place, bytes(value))

    change_entries(root, b"blocks", flip)


def damage_page(root: Path, wanted: int, which: int = 0) -> None:
    """Zero a leaf (2) or branch (1) page that is in use."""
    path = catalogue_of(root)
    raw = path.read_bytes()
    for number in range(2, len(raw) // PAGE):
        head = struct.unpack_from("=QHH", raw, number * PAGE)
        if (head[0], head[2]) != (number, wanted):
            continue
        with path.open("r+b") as file:
            file.seek(number * PAGE)
            file.write(bytes(PAGE))
        if damage(path.parent, thorough=False, trees=True) is not None:
            if not which:
                return
            which -= 1
        path.write_bytes(raw)
    raise AssertionError("no such page is in use")


def damage_header(root: Path) -> None:
    """Zero the header of the last transaction but one."""
    raw = catalogue_of(root).read_bytes()
    transactions = [struct.unpack_from("=Q", raw, page * PAGE + 144)[0] for page in (0, 1)]
    with catalogue_of(root).open("r+b") as file:
        file.seek(transactions.index(min(transactions)) * PAGE)
        file.write(bytes(PAGE))


def test_corrupt_blocks_are_removed_and_the_next_store_replaces_them(
    url: str, root: Path, told: Callable[..., dict[str, Any]]
) -> None:
    damage_block(url, root, 5)
    damage_block(url, root, 9)
    names = {key(5).digest.hex(), key(9).digest.hex()}
    assert {block["digest"] for block in told(url, exit_code=EXIT_NOT_INTACT)["corrupt"]} == names
    answer = told(url, "--repair")
    assert (answer["ok"], answer["intact"]) == (True, 22)
    assert {block["digest"] for block in answer["corrupt"]} == names
    assert told(url)["intact"] == 22
    with open_store(url) as store:
        assert get(store, [5, 9]) == [MISS, MISS]
        assert store.put_many(SPACE, writes([5, 9])) == [STORED, STORED]
    assert told(url)["intact"] == 24


def test_no_block_becomes_younger(url: str, told: Callable[..., dict[str, Any]]) -> None:
    with open_store(url) as store:
        before = {info.key: (info.last_used, info.hits) for info in store.scan(SPACE)}
    told(url, "--repair")
    told(url)
    with open_store(url) as store:
        assert {info.key: (info.last_used, info.hits) for info in store.scan(SPACE)} == before


def test_a_sample_says_how_much_it_did_not_look_at(url: str, told: Callable[..., dict[str, Any]]) -> None:
    seen = [told(url, "--sample", "25%") for _ in range(5)]
    assert all(answer["ok"] and answer["blocks"] + answer["not_read"] == 24 for answer in seen)
    assert all(answer["blocks"] > 0 for answer in seen)
    assert min(answer["blocks"] for answer in seen) < 24
    assert told(url, "--sample", "0.0001%")["not_read"] == 23
    for wrong in ("0", "101%", "some", "-1%"):
        assert run(["verify", url, f"--sample={wrong}"]) == 2


def test_documents_that_are_missing_or_damaged_are_written_anew(
    root: Path, told: Callable[..., dict[str, Any]]
) -> None:
    url = f"file://{root}"
    with open_store(url) as store:
        store.put_many(SPACE, writes(NUMBERS))
    documents = sorted(root.glob("*/**/zarr.json"))
    texts = {path: path.read_text() for path in documents}
    manifest = root / SPACE.name / "zarr.json"
    manifest.write_text(manifest.read_text().replace("revision-1", "revision-2"))
    arrays = sorted(root.glob(f"{SPACE.name}/g0/*/zarr.json"))
    arrays[0].unlink()
    arrays[1].unlink()  # it is one file with the others
    arrays[1].write_text("{")
    with open_store(url) as store:
        assert get(store, NUMBERS) == [MISS] * 24  # set aside
    answer = told(url, "--repair")
    assert (answer["intact"], [one["count"] for one in answer["repaired"]]) == (24, [3])
    assert {path: path.read_text() for path in sorted(root.glob("*/**/zarr.json"))} == texts
    with open_store(url) as store:
        assert get(store, NUMBERS) == [HIT] * 24


def test_files_and_catalogue_are_brought_together(root: Path, told: Callable[..., dict[str, Any]]) -> None:
    url = f"file://{root}"
    with open_store(url) as store:
        store.put_many(SPACE, writes(NUMBERS))
    file_of(root, 3).unlink()
    torn, fresh = file_of(root, 100), file_of(root, 101)
    for path in (torn, fresh):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(file_of(root, 4).read_bytes()[:5000])
    os.utime(torn, (time.time() - 3600,) * 2)
    for name in (b"meta", b"age"):
        change_entries(root, name, partial(_delete_with, address_of(SPACE, key(8))))
    answer = told(url, "--repair")
    assert answer["intact"] == 23
    said = " ".join(f"{one['count']} {one['what']}" for one in answer["repaired"])
    assert "1 blocks whose file was gone" in said
    assert "1 blocks that the catalogue did not know" in said
    assert "1 files removed" in said
    assert not torn.exists()
    assert fresh.exists()  # a copy may be under way
    with open_store(url) as store:
        assert get(store, NUMBERS) == [HIT] * 3 + [MISS] + [HIT] * 20


def _delete_with(address: bytes, txn: lmdb.Transaction) -> None:
    for name, _ in list(txn.cursor()):
        if address in name:
            txn.delete(name)


def test_entries_and_books_of_an_lmdb_tier_are_brought_together(
    root: Path, told: Callable[..., dict[str, Any]]
) -> None:
    url = f"lmdb://{root}"
    with open_store(url) as store:
        store.put_many(SPACE, writes(NUMBERS))
    change_entries(root, b"blocks", lambda txn: txn.delete(entry_of(txn, 3)[0]))
    change_entries(root, b"blocks", lambda txn: txn.put(b"\1" * 8, b"no block"))
    for name in (b"meta", b"age"):
        change_entries(root, name, partial(_delete_with, address_of(SPACE, key(8))))
    answer = told(url, "--repair")
    assert [one["count"] for one in answer["repaired"]] == [1, 1, 1]
    assert answer["intact"] == 23
    with open_store(url) as store:
        assert get(store, NUMBERS) == [HIT] * 3 + [MISS] + [HIT] * 20
        assert held(store) == set(keys(NUMBERS)) - {key(3)}
        assert store.usage().blocks == len(list(store.scan(SPACE))) + 1  # the totals are LMDB's to lose


def test_a_booked_value_that_does_not_say_whose_it_is_is_left_to_the_verification(root: Path) -> None:
    def flip(txn: lmdb.Transaction) -> None:
        place, value = entry_of(txn, 5)
        value[120] ^= 4
        value[40] ^= 4
        txn.put(place, bytes(value))

    with open_store(f"lmdb://{root}") as store:
        store.put_many(SPACE, writes(NUMBERS))
    change_entries(root, b"blocks", flip)
    with open_store(f"lmdb://{root}") as store:
        assert store.repair() == []
        assert store.usage().blocks == len(NUMBERS)
        assert get(store, NUMBERS) == [HIT] * 5 + [GetOutcome.CORRUPT] + [HIT] * 18


def test_puts_go_on_where_something_stands_behind_every_generation(root: Path) -> None:
    with open_store(f"lmdb://{root}") as store:
        store.put_many(SPACE, writes([0]))
    change_entries(root, b"blocks", lambda txn: txn.put(b"\xff" * 8, b"no block"))
    with open_store(f"lmdb://{root}") as store:
        assert store.put_many(SPACE, writes(range(1, 9))) == [STORED] * 8
        assert get(store, range(9)) == [HIT] * 9


@pytest.mark.parametrize("kind", [1, 2], ids=["branch", "leaf"])
def test_a_damaged_page_is_said_and_the_tier_made_anew_from_what_can_be_trusted(
    scheme: str, root: Path, told: Callable[..., dict[str, Any]], kind: int
) -> None:
    url = f"{scheme}://{root}"
    many = range(400)
    with open_store(url) as store:
        store.put_many(SPACE, writes(NUMBERS))
        store.mark_many(SPACE, keys(NUMBERS), Mark("kept", pinned=True))
        store.put_many(TINY, writes(many, TINY))
    damage_page(root, kind)
    answer = told(url, exit_code=EXIT_NOT_INTACT)
    assert answer["records"]
    assert not answer["blocks"]
    assert told(url, exit_code=EXIT_NOT_INTACT) == answer  # it changed nothing
    answer = told(url, "--repair")
    assert (answer["ok"], answer["corrupt"], answer["missing"]) == (True, [], [])
    assert told(url)["ok"]
    with open_store(url) as store:
        outcomes = get(store, many, TINY) + get(store, NUMBERS)
        assert set(outcomes) <= {HIT, MISS}
        assert outcomes.count(HIT) == answer["intact"] > 0
        if scheme == "file":
            assert answer["intact"] == 424


@pytest.mark.parametrize("number", [0, 1])
def test_one_of_two_headers_is_enough_to_save_blocks(
    root: Path, told: Callable[..., dict[str, Any]], number: int
) -> None:
    url = f"lmdb://{root}"
    with open_store(url) as store:
        store.put_many(SPACE, writes(range(12)))
        store.put_many(SPACE, writes(range(12, 24)))
    with catalogue_of(root).open("r+b") as file:
        file.seek(number * PAGE)
        file.write(bytes(PAGE))
    assert "header" in told(url, exit_code=EXIT_NOT_INTACT)["records"][0]
    assert told(url, "--repair")["intact"] >= 12
    with open_store(url) as store:
        assert get(store, range(12)) == [HIT] * 12


def test_what_was_purged_stays_away_and_no_block_gets_younger(
    scheme: str, root: Path, url: str, told: Callable[..., dict[str, Any]]
) -> None:
    with open_store(url) as store:
        get(store, [5, 6])
    with open_store(url) as store:
        store.purge_many(SPACE, keys(range(4)))
        before = {info.key: info for info in store.scan(SPACE)}
    damage_header(root)
    assert told(url, "--repair")["intact"] == 20
    with open_store(url) as store:
        after = {info.key: info for info in store.scan(SPACE)}
        if scheme == "lmdb":
            assert after == before
        assert store.put_many(SPACE, writes([0, 1, 2, 3, 9])) == [REFUSED] * 4 + [EXISTS]
        assert get(store, [0, 3, 4, 23]) == [MISS, MISS, HIT, HIT]


def test_a_block_that_the_catalogue_lost_is_as_old_as_its_bytes_say(
    root: Path, told: Callable[..., dict[str, Any]]
) -> None:
    url = f"lmdb://{root}"
    with open_store(url) as store:
        store.put_many(SPACE, writes(range(3)))
    change_entries(root, b"meta", lambda txn: txn.delete(address_of(SPACE, key(1))))
    damage_header(root)
    before = time.time()
    told(url, "--repair")
    with open_store(url) as store:
        assert {info.key: info.created < before for info in store.scan(SPACE)}.get(key(1)) is True


IN_USE = """
import sys, time
from kvstore import open_store
with open_store(sys.argv[1]) as store:
    print("open", flush=True)
    sys.stdin.read()
"""


def test_what_is_in_use_and_would_end_the_reader_ends_a_child_and_is_said(
    scheme: str, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = f"{scheme}://{root}"
    with open_store(url) as store:
        store.put_many(TINY, writes(range(400), TINY))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    user = subprocess.Popen(
        [sys.executable, "-c", IN_USE, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    try:
        assert user.stdout is not None
        assert user.stdout.readline() == b"open\n"
        raw = catalogue_of(root).read_bytes()
        with catalogue_of(root).open("r+b") as file:
            for number in range(2, len(raw) // PAGE):
                if struct.unpack_from("=QHH", raw, number * PAGE)[::2] == (number, 2):
                    os.pwrite(file.fileno(), bytes(PAGE), number * PAGE)
        capfd.readouterr()
        assert run(["verify", url]) in (EXIT_NOT_INTACT, 2)
        said = capfd.readouterr()
        assert "damaged" in said.err + said.out
    finally:
        user.kill()
        user.communicate()
