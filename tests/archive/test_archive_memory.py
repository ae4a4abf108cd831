"""However long a prefix is, archiving and restoring it takes the memory of two shards."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "archives.py"
TOTAL = os.environ.get("KVSTORE_ARCHIVE_TOTAL", "2GiB")
"""Three times as much is written below the folder of the tests."""
MOST_MIB = 256


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", ["64KiB", "2MiB", "32MiB"])
def test_a_long_prefix_takes_less_than_256_mib_of_anonymous_memory(tmp_path: Path, block: str) -> None:
    words = ["--total", TOTAL, "--block-bytes", block, "--rounds", "1"]
    done = subprocess.run([sys.executable, BENCHMARK, tmp_path, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    most = {name: int(mib) for name, mib in re.findall(r"^(create|restore) .* (\d+) MiB$", done.stdout, re.MULTILINE)}
    assert most.keys() == {"create", "restore"}
    assert max(most.values()) < MOST_MIB
