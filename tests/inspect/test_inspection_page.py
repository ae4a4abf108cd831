"""docs/inspection.md: its lines run, one after another, and say what it says they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from inspect_helpers import SPACE, store_prompt

pytest.importorskip("pandas", reason='pip install "kvstore-tiers[inspect]"')
pytest.importorskip("xarray", reason='pip install "kvstore-tiers[inspect]"')

import kvstore.inspect
from kvstore import open_store
from kvstore.cli import EXIT_OK, run
from kvstore.inspect import frames

PAGE = Path(__file__).parents[2] / "docs" / "inspection.md"


@pytest.fixture
def page() -> str:
    if not PAGE.exists():
        pytest.skip("docs/inspection.md is not beside the tests")
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture
def tier(tmp_path: Path) -> str:
    with open_store(f"file://{tmp_path}/kv") as store:
        store_prompt(store, tokens=range(160))
    return f"{tmp_path}/kv"


def test_its_lines_run_one_after_another(page: str, tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code.replace("/tmp/kv", tier), PAGE.name, "exec"), names)
    shown = capsys.readouterr().out
    assert "org/model" in shown
    assert "(2, 16)" not in shown
    assert "(16, 2)" in shown
    assert "range(12, 16) float16 (3, 2, 4, 2, 8)" in shown
    look = names["look"]
    assert isinstance(look, kvstore.inspect.Inspection)
    look.close()


def test_its_commands_are_commands(page: str, tier: str, capsys: pytest.CaptureFixture[str]) -> None:
    with kvstore.inspect.open(f"file://{tier}") as look:
        digest = look.namespace().infos()[5].key.digest.hex()
    lines = [line.partition("#")[0].split()[1:] for line in page.splitlines() if line.startswith("kvstore ")]
    assert len(lines) == 4
    for words in lines:
        if "--label" not in words:
            assert run([word.replace("/tmp/kv", tier).replace("3f9a41c0", digest) for word in words]) == EXIT_OK
    assert "layer 3 × kv 2" in capsys.readouterr().out


def test_its_columns_are_those_of_the_tables(page: str, tier: str) -> None:
    with kvstore.inspect.open(f"file://{tier}") as look:
        space = look.namespace()
        for frame in (look.namespaces(), space.blocks()):
            assert ", ".join(frame.columns) in page
        assert set(space.prefixes().columns) == set(frames.prefixes_frame(space.tree()).columns)
    assert SPACE.layouts[0].axes == ("layer", "kv", "token", "head", "dim")
