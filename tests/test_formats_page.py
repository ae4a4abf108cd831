"""The reader on the formats page reads what kvstore wrote, knowing nothing but the page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore import BlockKey, BlockLayout, BlockWrite, Namespace, open_store

PAGE = Path(__file__).parents[1] / "docs" / "formats.md"

DRIVER = """
import sys
root, namespace, digest, group, scheme, expected = sys.argv[1:]
assert not any(name.startswith("kvstore") for name in sys.modules)
read = {"file": read_file_block, "lmdb": read_lmdb_block}[scheme]
assert read(Path(root), namespace, int(group), bytes.fromhex(digest)) == Path(expected).read_bytes()
"""


def reader() -> str:
    if not PAGE.exists():
        pytest.skip("docs/formats.md is not beside the tests")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 1
    return str(blocks[0])


def test_the_reader_on_the_page_is_about_forty_lines() -> None:
    assert len([line for line in reader().splitlines() if line.strip()]) <= 45


@pytest.mark.parametrize("digest_bytes", [16, 32, 64])
@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_the_reader_on_the_page_reads_a_block_and_refuses_a_damaged_one(
    scheme: str, digest_bytes: int, tmp_path: Path
) -> None:
    layouts = (BlockLayout.opaque(100), BlockLayout.canonical(layers=2, tokens=3, heads=2, head_dim=5, dtype="float16"))
    space = Namespace("model", "revision", layouts, block_tokens=3, digest_bytes=digest_bytes)
    key = BlockKey(bytes(range(200, 200 + 16)) * (digest_bytes // 16), group=1)
    block = np.arange(120, dtype=np.float16)
    root, expected, script = tmp_path / "tier", tmp_path / "expected", tmp_path / "reader.py"
    with open_store(f"{scheme}://{root}") as store:
        store.put_many(space, [BlockWrite(key, block, position=3, parent=b"p" * digest_bytes)])
    expected.write_bytes(block.tobytes())
    script.write_text(reader() + DRIVER)
    run = [sys.executable, "-I", str(script), str(root), space.name, key.digest.hex(), "1", scheme, str(expected)]
    assert subprocess.run(run, check=False, capture_output=True, text=True).stderr == ""

    for path in root.rglob("*"):
        if path.is_file() and block.tobytes() in (data := path.read_bytes()):
            path.write_bytes(data.replace(block.tobytes(), block.tobytes()[:-1] + b"\xff"))
    assert "AssertionError" in subprocess.run(run, check=False, capture_output=True, text=True).stderr
