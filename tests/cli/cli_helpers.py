"""What tests of the command line share: blocks, the command in this process and in one of its own, a tier's files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvstore
from kvstore import BlockLayout, Namespace, block_keys
from kvstore.cli import EXIT_OK, run
from kvstore.url import TierURL
from kvstore.values import name_of

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]
MODEL = Namespace("org/model", "revision-1", (BlockLayout.opaque(8192), BlockLayout.opaque(4096)), block_tokens=4)
OTHER = Namespace("org/other", "revision-1", (BlockLayout.opaque(4096),), block_tokens=4)
LARGE = Namespace("org/large", "revision-1", (BlockLayout.opaque(65536),), block_tokens=4)
KEYS = block_keys(range(40), 4)
QUICK = ("--total", "512KiB", "--block-bytes", "64KiB", "--threads", "3", "--rounds", "2")


def source_tree() -> list[Path]:
    """The source tree for child processes, if that is what is under test here."""
    return [ROOT, ROOT / "backends"] if Path(kvstore.__file__).is_relative_to(ROOT / "kvstore") else []


def kv(*args: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run([sys.executable, "-m", "kvstore.cli", *args], capture_output=True, text=True, timeout=60)


def machine(capsys: pytest.CaptureFixture[str], *args: str, exit_code: int = EXIT_OK) -> Any:
    """The JSON that the command prints, and nothing else with it but how far it is, on a slow machine."""
    capsys.readouterr()
    assert run([*args, "--json"]) == exit_code
    out, err = capsys.readouterr()
    assert re.sub(r"\w+: \d+ of \d+\n", "", err) == ""
    return json.loads(out)


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


def occupied(tier: str, space: Namespace) -> int:
    """The sizes of the namespace's block files."""
    return sum(file.stat().st_size for file in Path(TierURL.parse(tier).location).glob(f"{space.name}-*"))


# verify
def damage(tier: str, number: int, *, cut: bool = False) -> Path:
    file = Path(TierURL.parse(tier).location) / name_of(MODEL, KEYS[number])
    data = file.read_bytes()
    file.write_bytes(data[:100] if cut else bytes([data[0] ^ 1]) + data[1:])
    return file
