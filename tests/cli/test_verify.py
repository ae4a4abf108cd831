"""`kvstore verify`: every block is read, those that are not intact are named, and all stay where they are."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from cli_helpers import KEYS, LARGE, MODEL, OTHER, damage, machine, tree
from readme_backend import install_wheel

import kvstore
from kvstore import BlockWrite
from kvstore.cli import EXIT_NOT_INTACT, run

if TYPE_CHECKING:
    from pathlib import Path


def test_verify_of_an_intact_tier_reads_every_block(tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = machine(capsys, "verify", tier)
    assert told == {
        "url": tier,
        "ok": True,
        "blocks": 12,
        "intact": 12,
        "bytes": 6 * 8192 + 6 * 4096,
        "removed_meanwhile": 0,
        "not_read": 0,
        "corrupt": [],
        "missing": [],
        "later": [],
        "records": [],
        "not_looked_into": [],
        "repaired": [],
    }


@pytest.mark.parametrize("threads", ["1", "3"])
def test_verify_names_every_corrupt_block_and_leaves_it_where_it_is(
    tier: str, threads: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    damage(tier, 1)
    damage(tier, 4, cut=True)
    before = tree(tmp_path / "kv")
    told = machine(capsys, "verify", tier, "--threads", threads, exit_code=EXIT_NOT_INTACT)
    assert (told["ok"], told["blocks"], told["intact"]) == (False, 12, 10)
    assert {block["digest"] for block in told["corrupt"]} == {KEYS[1].digest.hex(), KEYS[4].digest.hex()}
    assert {(block["namespace"], block["group"]) for block in told["corrupt"]} == {(MODEL.name, 0)}
    assert tree(tmp_path / "kv") == before
    assert run(["verify", tier]) == EXIT_NOT_INTACT
    assert f"corrupt: {MODEL.name} group 0 digest {KEYS[1].digest.hex()}" in capsys.readouterr().out


FORGETFUL = """
from kvstore import GetOutcome
from kvstore_memory import MemoryStore

class Forgetful(MemoryStore):
    def get_many_into(self, namespace, blocks):
        return [GetOutcome.MISS for _ in blocks]

class Evicting(Forgetful):
    def contains_many(self, namespace, keys):
        return [False for _ in keys]
"""


def test_a_block_that_is_listed_and_cannot_be_found_is_not_intact_unless_it_went_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schemes = {"forgetful": "forgetful:Forgetful", "evicting": "forgetful:Evicting"}
    monkeypatch.syspath_prepend(install_wheel(tmp_path, "forgetful", {"forgetful.py": FORGETFUL}, schemes))
    with kvstore.open_store("memory://x") as store:
        store.put_many(OTHER, [BlockWrite(KEYS[0], bytes(4096))])
        told = machine(capsys, "verify", "forgetful://x", exit_code=EXIT_NOT_INTACT)
        assert (told["ok"], told["intact"]) == (False, 0)
        assert told["missing"] == [{"namespace": OTHER.name, "group": 0, "digest": KEYS[0].digest.hex()}]
        told = machine(capsys, "verify", "evicting://x")
        assert (told["ok"], told["intact"], told["removed_meanwhile"], told["missing"]) == (True, 0, 1, [])
    sys.modules.pop("forgetful")


def flip_a_bit(folder: Path, fill: int) -> None:
    """In the middle of whatever file below `folder` holds a block filled with `fill`."""
    for file in folder.rglob("*"):
        if file.is_file() and bytes([fill]) * 8192 in (data := file.read_bytes()):
            place = data.index(bytes([fill]) * 8192) + 5000
            with file.open("r+b") as opened:
                opened.seek(place)
                opened.write(bytes([fill ^ 1]))
            return
    raise AssertionError("no file holds the block")


def test_a_shipped_backend_is_inspected_like_any_other(
    shipped: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert machine(capsys, "stat", shipped)["usage"]["blocks"] == 2
    assert [space["model"] for space in machine(capsys, "ls", shipped)["namespaces"]] == ["org/large"]
    listed = machine(capsys, "ls", shipped, "--namespace", LARGE.name)["blocks"]
    assert {block["digest"] for block in listed} == {key.digest.hex() for key in KEYS[:2]}
    assert machine(capsys, "verify", shipped)["intact"] == 2
    flip_a_bit(tmp_path / "tier", 9)
    told = machine(capsys, "verify", shipped, exit_code=EXIT_NOT_INTACT)
    assert told["corrupt"] == [{"namespace": LARGE.name, "group": 0, "digest": KEYS[1].digest.hex()}]
    # It is still there to be looked at.
    assert machine(capsys, "verify", shipped, exit_code=EXIT_NOT_INTACT)["corrupt"] == told["corrupt"]
    assert machine(capsys, "stat", shipped)["usage"]["blocks"] == 2
