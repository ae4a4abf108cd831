"""`kvstore stat` and `ls`: right answers for machines and people, and nothing changed by looking."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cli_helpers import KEYS, MODEL, OTHER, QUICK, machine, occupied, tree

import kvstore
from kvstore import BlockWrite
from kvstore.cli import EXIT_OK, EXIT_USAGE, run
from kvstore.testing.patience import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path


# stat and ls
def test_stat_counts_namespaces_blocks_bytes_and_ages(tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = machine(capsys, "stat", tier)
    first, second = told["namespaces"]
    assert (first["namespace"], first["model"], first["groups"], first["blocks"]) == (MODEL.name, "org/model", 2, 10)
    assert (second["namespace"], second["blocks"], second["bytes"]) == (OTHER.name, 2, occupied(tier, OTHER))
    assert first["bytes"] == occupied(tier, MODEL) > 6 * 8192 + 4 * 4096
    assert first["oldest"] <= first["newest"]
    assert told["usage"]["blocks"] == 12
    assert told["usage"]["capacity"] is None
    assert told["capabilities"]["io"] == "buffered"
    assert told["url"] == tier


def test_stat_tells_people_the_same(tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["stat", tier]) == EXIT_OK
    shown = capsys.readouterr().out
    for expected in (tier, "12 blocks", "no capacity set", "buffered", "org/model", "org/other", MODEL.name):
        assert expected in shown


def test_stat_shows_usage_against_the_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    with kvstore.open_store("memory://capped?capacity=100kB") as store:
        store.put_many(OTHER, [BlockWrite(KEYS[0], bytes(4096))])
        assert run(["stat", "memory://capped?capacity=100kB"]) == EXIT_OK
        assert "4.1 kB of 100.0 kB (4%)" in capsys.readouterr().out
        assert machine(capsys, "stat", "memory://capped?capacity=100kB")["usage"]["capacity"] == 100_000


def test_ls_lists_namespaces_and_with_a_prefix_their_blocks(tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    spaces = machine(capsys, "ls", tier)["namespaces"]
    assert {space["namespace"]: space["blocks"] for space in spaces} == {MODEL.name: 10, OTHER.name: 2}
    listed = machine(capsys, "ls", tier, "--namespace", OTHER.name[:8])
    assert {block["digest"] for block in listed["blocks"]} == {key.digest.hex() for key in KEYS[:2]}
    assert sum(block["bytes"] for block in listed["blocks"]) == occupied(tier, OTHER)
    assert not listed["truncated"]
    assert len(machine(capsys, "ls", tier, "--namespace", "")["blocks"]) == 12


def test_ls_stops_at_the_limit_and_says_so(tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    listed = machine(capsys, "ls", tier, "--namespace", MODEL.name, "--limit", "3")
    assert (len(listed["blocks"]), listed["truncated"]) == (3, True)
    listed = machine(capsys, "ls", tier, "--namespace", MODEL.name, "--limit", "0")
    assert (len(listed["blocks"]), listed["truncated"]) == (10, False)
    assert run(["ls", tier, "--namespace", MODEL.name, "--limit", "3"]) == EXIT_OK
    shown = capsys.readouterr()
    assert "--limit 0" in shown.err
    assert sum(line.count(key.digest.hex()) for key in KEYS for line in shown.out.splitlines()) == 3


def test_ls_of_a_namespace_that_is_not_there_lists_those_that_are(
    tier: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ls", tier, "--namespace", "zzz"]) == EXIT_USAGE
    assert MODEL.name in capsys.readouterr().err


@pytest.mark.parametrize("command", ["stat", "ls", "verify"])
def test_looking_changes_nothing_and_creates_nothing(
    command: str, tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(tmp_path / "kv")
    assert run([command, tier]) == EXIT_OK
    assert tree(tmp_path / "kv") == before
    assert run([command, f"dir://{tmp_path}/nothing"]) == EXIT_USAGE
    assert not (tmp_path / "nothing").exists()
    for option in ("readonly=false", "readonly=maybe"):
        assert run([command, f"{tier}?{option}"]) == EXIT_USAGE
        assert "readonly" in capsys.readouterr().err
    assert run([command, tier + "?readonly=yes"]) == EXIT_OK
    assert tree(tmp_path / "kv") == before
    capsys.readouterr()


@pytest.mark.parametrize("command", ["stat", "ls", "verify"])
def test_looking_depends_on_no_capacity(command: str, shipped: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run([command, f"{shipped}?capacity=lots"]) == EXIT_USAGE
    capfd.readouterr()
    for asked in ("900MB", "10kB"):
        assert run([command, f"{shipped}?capacity={asked}"]) == EXIT_OK
        assert "is not the tier's, which has none" in capfd.readouterr().err
    with kvstore.open_store(f"{shipped}?capacity=50MB"):
        assert run([command, f"{shipped}?capacity=900MB"]) == EXIT_OK
        assert f"{shipped}?capacity=900MB" in (said := capfd.readouterr().err)
        assert "50.0 MB (50000000 bytes)" in said


@pytest.mark.parametrize("command", ["stat", "ls", "verify"])
def test_another_process_s_memory_is_said_to_be_out_of_sight(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "memory://nobody"]) == EXIT_USAGE
    assert "memory of another process cannot be seen" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["verify"], ["bench", "--namespace", "mine", *QUICK]])
def test_what_takes_long_says_how_far_it_is_where_no_terminal_is(
    command: list[str], tier: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvstore.cli._common.PROGRESS_S", PATIENCE)
    assert run([*command, tier]) == EXIT_OK
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("kvstore.cli._common.PROGRESS_S", 0.0)
    assert run([*command, tier]) == EXIT_OK
    total = 12 if command == ["verify"] else 16  # two contestants, four steps, two rounds
    assert capsys.readouterr().err.endswith(f"ing: {total} of {total}\n")


@pytest.mark.parametrize("command", ["stat", "ls", "verify"])
@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_a_location_where_nothing_is_stays_that_way(
    scheme: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("nothing", "empty"):
        assert run([command, f"{scheme}://{tmp_path}/{name}", "--json"]) == EXIT_USAGE
        said = capsys.readouterr().err
        assert said.startswith("kvstore: ")
        assert f"{tmp_path}/{name}" in said
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]
