"""The page that maps what users suffered to tests names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"


def rows() -> dict[int, str]:
    if not PAGE.exists():
        pytest.skip("docs/reliability.md is not beside the tests")
    found = re.findall(r"^\| (\d+) \|(.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {int(number): text for number, text in found}


def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_row_names_what_proves_it() -> None:
    assert sorted(rows()) == list(range(1, 27))
    assert all("`tests/" in text or "`kvstore/" in text or "`benchmarks/" in text for text in rows().values())


@pytest.mark.parametrize("row", range(1, 27))
def test_the_tests_of_a_row_are_there(row: int) -> None:
    for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", rows()[row]):
        assert name in functions(ROOT / file), f"{file}::{name}"
    for file in re.findall(r"`([\w/]+\.py)`", rows()[row]):
        assert (ROOT / file).exists(), file
