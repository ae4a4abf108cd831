"""Saving what can be saved of an `lmdb://` tier: all of it or nothing, and nobody else's file is touched for it."""

from __future__ import annotations

import base64
import json
import os
import struct
from typing import TYPE_CHECKING

import pytest
from local_helpers import HIT, STORED, TINY

from kvstore import BlockLayout, Namespace, open_store
from kvstore.cli import EXIT_NOT_INTACT, EXIT_OK, EXIT_USAGE, run
from kvstore.environment import PAGE
from kvstore.errors import StoreFullError
from kvstore.registry import backend_class
from kvstore.testing.supply import KIB, MIB, SPACE, get, writes
from kvstore.url import TierURL
from kvstore_lmdb import salvage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore.repairing import Repaired

LARGE = Namespace("large", "revision-1", (BlockLayout.opaque(1 * MIB),), block_tokens=16)


def damaged(root: Path, count: int, space: Namespace = SPACE, options: str = "") -> str:
    """A tier with so many blocks, of which the first one's page is damaged."""
    url = f"lmdb://{root}"
    with open_store(url + options) as store:
        assert store.put_many(space, writes(range(count), space)) == [STORED] * count
    data = (root / "data.mdb").read_bytes()
    with (root / "data.mdb").open("r+b") as file:
        file.seek(data.index(b"kvblock\0") - 16)
        file.write(b"\xff" * 16)
    return url


def salvaged(url: str) -> list[Repaired]:
    parsed = TierURL.parse(url)
    backend = backend_class(parsed)
    return backend.salvage(parsed.validated(backend.options))


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_what_finds_no_room_stops_it_and_everything_is_as_it_was(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(24 * MIB)
    url = damaged(disk / "tier", 200)
    before = contents(disk)
    with pytest.raises(StoreFullError, match="nothing was changed"):
        salvaged(url)
    after = contents(disk)
    assert set(after) == set(before)
    assert after["tier/data.mdb"] == before["tier/data.mdb"]


def test_it_says_how_many_blocks_are_lost_and_that_it_is_not_all_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = damaged(tmp_path / "tier", 20)
    assert run(["verify", url, "--repair"]) == EXIT_NOT_INTACT
    said = capsys.readouterr().out
    assert "19 blocks saved" in said
    assert "lost: 1 block that" in said
    assert run(["verify", url, "--repair"]) == EXIT_OK


def test_it_says_so_where_nothing_tells_how_many_were_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = damaged(tmp_path / "tier", 20)
    with (tmp_path / "tier" / "data.mdb").open("r+b") as file:
        file.write(bytes(2 * PAGE))
    assert run(["stat", url]) == EXIT_USAGE
    assert "run kvstore verify --repair" in capsys.readouterr().err
    assert run(["verify", url, "--repair", "--json"]) == EXIT_NOT_INTACT
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], [one["lost"] for one in answer["repaired"]]) == (False, [None])


def test_of_an_encrypted_tier_all_is_lost_and_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text(base64.b64encode(os.urandom(32)).decode())
    sealed = f"?encryption=file:{tmp_path}/key&keyring={tmp_path}/keyring.json"
    url = f"lmdb://{tmp_path}/tier{sealed}"
    with open_store(url) as store:
        store.put_many(TINY, writes(range(300), TINY))
    data = bytearray((tmp_path / "tier" / "data.mdb").read_bytes())
    for number in range(2, len(data) // PAGE):
        if struct.unpack_from("=QHH", data, number * PAGE)[::2] == (number, 1):  # a branch of a tree
            data[number * PAGE + 12 : number * PAGE + 16] = b"\xff" * 4
    (tmp_path / "tier" / "data.mdb").write_bytes(data)
    assert run(["verify", url, "--repair"]) == EXIT_NOT_INTACT
    said = capsys.readouterr().out
    assert "lost: 300 blocks" in said
    with open_store(url) as store:
        assert store.usage().blocks == 0


@pytest.mark.parametrize("what", ["link", "folder"])
def test_it_neither_follows_nor_removes_what_has_a_name_beside_the_tier(tmp_path: Path, what: str) -> None:
    url = damaged(tmp_path / "tier", 20)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "precious").write_text("mine")
    if what == "link":
        (tmp_path / ".tier.salvaged").symlink_to(theirs)
    else:
        theirs.rename(tmp_path / ".tier.salvaged")
    (repaired,) = salvaged(url)
    assert repaired.count >= 19
    assert contents(tmp_path / ".tier.salvaged") == {"precious": b"mine"}
    assert {path.name for path in tmp_path.iterdir()} <= {"tier", "theirs", ".tier.salvaged"}
    with open_store(url) as store:
        assert get(store, range(1, 20)) == [HIT] * 19


def test_large_blocks_under_a_small_cap_are_saved_too(tmp_path: Path) -> None:
    url = damaged(tmp_path / "tier", 6, LARGE, f"?capacity={8 * MIB + 512 * KIB}")
    salvaged(url)
    with open_store(url) as store:
        assert store.usage().capacity == 8 * MIB + 512 * KIB
        assert get(store, range(1, 6), LARGE) == [HIT] * 5


def test_what_a_killed_one_left_beside_the_tier_is_gone_after_the_next(tmp_path: Path) -> None:
    url = damaged(tmp_path / "a[t]ier", 20)
    theirs = tmp_path / ".a[t]ier.12345678.salvaged"
    theirs.mkdir()
    (theirs / "precious").write_text("mine")
    (tmp_path / ".a[t]ier.abcdefgh.salvaged").symlink_to(theirs)
    child = os.fork()
    if not child:
        salvage._check_saved = lambda *_: os._exit(9)  # type: ignore[attr-defined]
        try:
            salvaged(url)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    kept = {"a[t]ier", theirs.name, ".a[t]ier.abcdefgh.salvaged"}
    assert len({path.name for path in tmp_path.iterdir()} - kept) == 1
    (repaired,) = salvaged(url)
    assert repaired.count >= 19
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert (theirs / "precious").read_text() == "mine"
