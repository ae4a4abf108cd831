"""Labels, tenants and pins in what `kvstore ls` and `kvstore stat` tell people and machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cli_helpers import KEYS, OTHER, machine

from kvstore import BlockWrite, Mark, open_store
from kvstore.cli import EXIT_OK, run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["file", "lmdb"])
def marked_tier(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url = f"{request.param}://{tmp_path}/kv"
    with open_store(url) as store:
        store.put_many(OTHER, [BlockWrite(key, bytes(4096)) for key in KEYS[:3]])
        store.mark_many(OTHER, KEYS[:2], Mark("handbook", pinned=True, tenant="acme"))
        store.mark_many(OTHER, KEYS[1:2], Mark("[red]prices"))
    return url


def test_ls_shows_what_was_said_of_each_block(marked_tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = {block["digest"]: block for block in machine(capsys, "ls", marked_tier, "--namespace", "")["blocks"]}
    first, second, third = (blocks[key.digest.hex()] for key in KEYS[:3])
    assert (first["labels"], first["tenants"], first["pinned"]) == (["handbook"], ["acme"], True)
    assert second["labels"] == ["[red]prices", "handbook"]
    assert (third["labels"], third["tenants"], third["pinned"]) == ([], [], False)
    assert run(["ls", marked_tier, "--namespace", ""]) == EXIT_OK
    lines = {line.split("│")[3].strip(): line for line in capsys.readouterr().out.splitlines() if line.count("│") > 3}
    assert "*handbook@acme" in lines[KEYS[0].digest.hex()]
    assert "[red]prices, *handbook@acme" in lines[KEYS[1].digest.hex()]


def test_stat_counts_labels_and_pins(marked_tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = machine(capsys, "stat", marked_tier)
    (space,) = told["namespaces"]
    assert (space["pinned"], space["labels"]) == (2, {"[red]prices": 1, "handbook": 2})
    assert told["usage"]["pinned"] == space["bytes"] * 2 // 3
    assert told["capabilities"]["marks"] is True
    assert run(["stat", marked_tier]) == EXIT_OK
    shown = capsys.readouterr().out
    assert "pinned, which nothing evicts" in shown
    assert "handbook" in shown


def test_a_tier_without_marks_shows_no_column_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    with open_store("memory://plain") as store:
        store.put_many(OTHER, [BlockWrite(KEYS[0], bytes(4096))])
        for command in (["ls", "memory://plain", "--namespace", ""], ["stat", "memory://plain"]):
            assert run(command) == EXIT_OK
            shown = capsys.readouterr().out
            assert "marks" not in shown
            assert "labels" not in shown
