"""What the README prints is what a reader gets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
ARCHITECTURE = README.parent / "docs" / "architecture.md"


def python_blocks(page: Path) -> list[str]:
    if not page.exists():
        pytest.skip(f"{page.name} is not beside the tests")
    return [str(block) for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)]


def test_the_six_lines_put_and_get_a_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = python_blocks(README)[0]
    assert "file:///tmp/kv?" in code
    exec(compile(code.replace("/tmp/kv", f"{tmp_path}/kv"), "README.md", "exec"), {})
    assert capsys.readouterr().out == "[<GetOutcome.HIT: 'hit'>] 1.0\n"


def test_the_scheduler_loads_in_a_second_run_what_the_first_one_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = python_blocks(ARCHITECTURE)
    assert "file:///tmp/kv?" in code
    exec(compile(code.replace("/tmp/kv", f"{tmp_path}/kv"), "architecture.md", "exec"), {})
    assert capsys.readouterr().out == "first 0 blocks loaded\nsecond 10 blocks loaded\n"


def test_every_page_it_links_to_is_there() -> None:
    links = re.findall(r"\]\(([\w./-]+)\)", README.read_text(encoding="utf-8")) if README.exists() else []
    assert len(links) >= 5
    assert [link for link in links if not (README.parent / link).exists()] == []
