"""`kvstore show` and `kvstore ls --tree`: the same facts for people and machines, of a block and of a prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from inspect_helpers import KEYS, LAYOUT, PROMPT, SPACE, looking, machine, space_of, store_prompt, values

from kvstore import BlockLayout, BlockWrite, Mark, Namespace, open_store
from kvstore.cli import EXIT_OK, EXIT_USAGE, run

if TYPE_CHECKING:
    from pathlib import Path

DIGESTS = [key.digest.hex() for key in KEYS]


@pytest.fixture
def stored(local: str) -> str:
    with open_store(local) as store:
        store_prompt(store)
        store_prompt(store, tokens=[*PROMPT[:20], *[7] * 8])
        store.mark_many(SPACE, KEYS[:3], Mark("hand[red]book", pinned=True, tenant="acme"))
    return local


def test_show_tells_of_a_block(stored: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = machine(capsys, "show", stored, DIGESTS[2][:8])
    assert (told["kind"], told["digest"], told["parent"]) == ("block", DIGESTS[2], DIGESTS[1])
    assert (told["url"], told["namespace"], told["model"], told["group"]) == (stored, SPACE.name, "org/model", 0)
    assert (told["position"], told["tokens"], told["bytes"]) == (2, [8, 12], SPACE.block_bytes())
    assert (told["labels"], told["tenants"], told["pinned"]) == (["hand[red]book"], ["acme"], True)
    assert dict(zip(told["dims"], told["shape"], strict=True)) == dict(zip(LAYOUT.axes, LAYOUT.shape, strict=True))
    exact = values(KEYS[2], LAYOUT).astype(np.float64)
    row = told["layers"][3]
    assert (row["layer"], row["kv"], row["absmax"]) == (1, "value", float(np.abs(exact[1, 1]).max()))
    assert row["mean"] == pytest.approx(exact[1, 1].mean())
    assert run(["show", stored, DIGESTS[2][:8]]) == EXIT_OK
    shown = capsys.readouterr().out
    for expected in (DIGESTS[2], DIGESTS[1], "8 to 11", "hand[red]book", "pinned", "float16", "layer 3 × kv 2"):
        assert expected in shown
    assert f"{row['absmax']:.4g}" in shown


def test_show_tells_of_a_prefix(stored: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = machine(capsys, "show", stored, "--label", "hand[red]book")
    assert (told["kind"], told["blocks"], told["tokens"]) == ("prefix", DIGESTS[:3], 12)
    assert told["complete"] is True
    assert told == machine(capsys, "show", stored, DIGESTS[2], "--prefix")
    whole = np.stack([values(key, LAYOUT) for key in KEYS[:3]]).astype(np.float64)
    assert told["layers"][0]["std"] == pytest.approx(whole[:, 0, 0].std())
    assert run(["show", stored, DIGESTS[9], "--prefix"]) == EXIT_OK
    shown = capsys.readouterr().out
    assert "10, " in shown
    assert "40" in shown


def test_show_wants_to_know_what(stored: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], [DIGESTS[0], "--label", "x"]):
        assert run(["show", stored, *arguments]) == EXIT_USAGE
        assert "give the DIGEST" in capsys.readouterr().err
    for arguments, said in (
        (["abcdefabcdef"], "begins with 'abcdefabcdef'"),
        (["--label", "x"], "Labels: hand[red]book"),
        ([DIGESTS[0], "--group", "1"], "groups 0 to 0"),
        ([DIGESTS[0], "--namespace", "zz"], "no namespace starts with 'zz'"),
    ):
        assert run(["show", stored, *arguments]) == EXIT_USAGE
        assert said in capsys.readouterr().err


def test_a_block_that_two_namespaces_have_is_asked_for_by_namespace(
    local: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spaces = [SPACE, space_of("bfloat16")]
    with looking(local, *spaces):
        pass
    assert run(["show", local, DIGESTS[0]]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert all(space.name in said for space in spaces)
    for space in spaces:
        told = machine(capsys, "show", local, DIGESTS[0], "--namespace", space.name[:9])
        assert told["dtype"] == space.layouts[0].dtype


def test_show_says_why_bytes_cannot_be_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = Namespace("model", "revision", (BlockLayout.opaque(64),), block_tokens=4)
    with open_store(f"lmdb://{tmp_path}/kv") as store:
        store.put_many(space, [BlockWrite(KEYS[0], bytes(64))])
    told = machine(capsys, "show", f"lmdb://{tmp_path}/kv", DIGESTS[0])
    assert (told["dims"], told["layers"], told["position"]) == (["byte"], [], None)
    assert "names no axes" in told["why_opaque"]
    assert run(["show", f"lmdb://{tmp_path}/kv", DIGESTS[0]]) == EXIT_OK
    assert "names no axes" in capsys.readouterr().out


def test_ls_draws_prefixes_as_trees(stored: str, capsys: pytest.CaptureFixture[str]) -> None:
    runs = machine(capsys, "ls", stored, "--tree")["runs"]
    assert [(run["depth"], run["start"], run["blocks"]) for run in runs[:2]] == [(0, 0, 3), (1, 3, 2)]
    assert sorted((run["depth"], run["start"], run["blocks"]) for run in runs[2:]) == [(2, 5, 2), (2, 5, 5)]
    assert runs[0]["labels"] == ["hand[red]book"]
    assert runs[0]["last"] == DIGESTS[2]
    assert sum(run["blocks"] for run in runs) == 12
    assert run(["ls", stored, "--tree"]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert "12 blocks" in lines[0]
    assert "[hand[red]book]" in lines[1]
    assert lines[4].index("──") == lines[3].index("──") > lines[2].index("──") > lines[1].index("──")


def test_ls_stops_a_tree_at_the_limit(stored: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = machine(capsys, "ls", stored, "--tree", "--limit", "2")
    assert (len(told["runs"]), told["truncated"]) == (2, True)
    assert not machine(capsys, "ls", stored, "--tree", "--limit", "0")["truncated"]
    assert run(["ls", stored, "--tree", "--limit", "2"]) == EXIT_OK
    assert "and 2 more" in capsys.readouterr().err


def test_a_tree_of_an_empty_tier_or_of_no_such_namespace(local: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(local):
        pass
    assert machine(capsys, "ls", local, "--tree")["runs"] == []
    assert run(["ls", local, "--tree", "--namespace", "zz"]) == EXIT_USAGE
