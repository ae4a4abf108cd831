"""What a store of `lmdb://` costs in page faults: pages that one commit has freed serve the next."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

FAULTS_A_BLOCK = """
import resource, sys
from kvstore import BlockKey, BlockLayout, BlockWrite, Namespace, open_store

space = Namespace("heap", "revision-1", (BlockLayout.opaque(65536),), block_tokens=16)
data = bytes(65536)

def stored(store, turn):
    keys = [BlockKey(b"%032d" % (64 * turn + number)) for number in range(64)]
    store.put_many(space, [BlockWrite(key, data) for key in keys])

with open_store(sys.argv[1], capacity=32 << 20) as store:
    for turn in range(10):  # until it is full, and what is put takes the place of what went
        stored(store, turn)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for turn in range(10, 20):
        stored(store, turn)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 640)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of other allocators it is not known what they keep")
@pytest.mark.parametrize("told", [False, True], ids=["as it is", "told to give back"])
def test_pages_that_a_commit_has_freed_serve_the_next(tmp_path: Path, told: bool) -> None:
    """A block of 64 KiB is seventeen pages. What an operator says of memory counts."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUN"))}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    if told:
        environment["MALLOC_TRIM_THRESHOLD_"] = "131072"
    command = [sys.executable, "-c", FAULTS_A_BLOCK, f"lmdb://{tmp_path}/tier"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert (float(done.stdout) > 10) is told, done.stdout
