"""How fast archives are made and restored, beside a copy of the same blocks between two tiers.

    flock /tmp/bench.lock python benchmarks/archives.py /mnt/nvme/bench --total 2GiB
    python -m kvstore.testing.servers python benchmarks/archives.py /tmp/bench --archives s3://kvstore-test/bench

In rounds, each in another order: a `file://` tier into another one (`get_many_into` and `put_many`, as many side by
side as an archive uses), the tier into an archive, the archive into a tier. All that is read is dropped from the page
cache before. Says GB/s of blocks, their ratios within the run, CPU seconds per GB, and the most anonymous memory that
the process had (RssAnon, RssShmem), over that of a process that has only begun.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstore import BlockKey, BlockLayout, BlockRead, BlockWrite, GetOutcome, Namespace, PutOutcome, open_store
from kvstore.archive import create, remove, restore
from kvstore.archive.creating import READERS
from kvstore.archive.packing import page_memory
from kvstore.demo.disk import drop_page_cache
from kvstore.url import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.abc import BlockStore


@dataclass(frozen=True)
class Blocks:
    """A prefix of random blocks, in a namespace of its own."""

    space: Namespace
    keys: list[BlockKey]

    @classmethod
    def of(cls, total: int, block: int) -> Blocks:
        space = Namespace("bench", "archives", (BlockLayout.opaque(block),), 16, key_scheme="random")
        random = np.random.default_rng(1)
        return cls(space, [BlockKey(random.bytes(32)) for _ in range(total // block)])

    @property
    def nbytes(self) -> int:
        return len(self.keys) * self.space.block_bytes()

    def fill(self, store: BlockStore) -> None:
        """What cannot be compressed, and is another for each block."""
        size = self.space.block_bytes()
        block = np.random.default_rng(2).integers(0, 256, size, np.uint8)
        for position, key in enumerate(self.keys):
            block[:8] = np.frombuffer(position.to_bytes(8, "little"), np.uint8)
            parent = self.keys[position - 1].digest if position else b""
            assert store.put_many(self.space, [BlockWrite(key, block.data, position, parent)])[0].present


def copied(source: BlockStore, target: BlockStore, blocks: Blocks) -> None:
    """Tier to tier through the contract, in batches that suit it."""
    size = blocks.space.block_bytes()
    most = max(1, source.capabilities.batch_bytes // size)
    kept = threading.local()

    def move(start: int) -> None:
        keys = blocks.keys[start : start + most]
        if not hasattr(kept, "memory"):
            kept.memory = page_memory(most * size)
        views = [kept.memory[index * size : (index + 1) * size].data for index in range(len(keys))]
        reads = [BlockRead(key, view) for key, view in zip(keys, views, strict=True)]
        assert set(source.get_many_into(blocks.space, reads)) == {GetOutcome.HIT}
        writes = [BlockWrite(key, view, start) for key, view in zip(keys, views, strict=True)]
        assert set(target.put_many(blocks.space, writes)) == {PutOutcome.STORED}

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(move, range(0, len(blocks.keys), most)))


def anonymous() -> int:
    """Anonymous memory of this process, shared or not, in bytes."""
    found = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", Path("/proc/self/status").read_text())
    return sum(map(int, found)) * 1024


class Most:
    """The most anonymous memory while it is open, looked at every 5 ms."""

    def __enter__(self) -> Most:
        self.nbytes, self._over = anonymous(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.005):
            self.nbytes = max(self.nbytes, anonymous())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def timed(act: Callable[[], object]) -> tuple[float, float, int]:
    """Wall and CPU seconds, and the most anonymous memory."""
    wall, cpu = time.perf_counter(), time.process_time()
    with Most() as most:
        act()
    return time.perf_counter() - wall, time.process_time() - cpu, most.nbytes


def run(root: Path, blocks: Blocks, rounds: int, archives: str) -> dict[str, list[tuple[float, float, int]]]:
    """Every act in every round; the tier and the archive that are read are made before. `archives`: a folder's URL."""
    found: dict[str, list[tuple[float, float, int]]] = {"tier to tier": [], "create": [], "restore": []}
    folder, question, options = archives.partition("?")
    source, archive, made = (
        f"file://{root}/source",
        *(f"{folder}/{name}{question}{options}" for name in ("read", "made")),
    )
    with open_store(source) as store:
        blocks.fill(store)
        create(archive, store, blocks.space, blocks.keys)
    for number in range(rounds):
        for act in _rotated(list(found), number):
            for url in (source, f"file://{root}/archives"):
                drop_page_cache(url)
            with open_store(source) as store, open_store(f"file://{root}/target") as target:
                acts: dict[str, Callable[[], object]] = {
                    "tier to tier": lambda: copied(store, target, blocks),
                    "create": lambda: create(made, store, blocks.space, blocks.keys),
                    "restore": lambda: restore(archive, target),
                }
                found[act].append(timed(acts[act]))
            shutil.rmtree(root / "target", ignore_errors=True)
            if act == "create":
                remove(made)
    remove(archive)
    return found


def _rotated(names: list[str], by: int) -> Sequence[str]:
    return names[by % len(names) :] + names[: by % len(names)]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(tempfile.gettempdir())
    parser.add_argument("folder", nargs="?", type=Path, default=here, help="where; what is written there is removed")
    parser.add_argument("--total", type=parse_size, default=parse_size("2GiB"))
    parser.add_argument("--block-bytes", type=parse_size, default=parse_size("2MiB"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--archives", metavar="URL", help="where archives go, if not into the folder")
    given = parser.parse_args()
    root = given.folder / f"archives-{os.getpid()}"
    root.mkdir(parents=True)
    blocks, before = Blocks.of(given.total, given.block_bytes), anonymous()
    try:
        found = run(root, blocks, given.rounds, given.archives or f"file://{root}/archives")
    finally:
        shutil.rmtree(root)
    base = statistics.median(wall for wall, _, _ in found["tier to tier"])
    print(f"{blocks.nbytes / 1e9:.2f} GB in blocks of {given.block_bytes} bytes, {given.rounds} rounds, medians")
    print(f"{'':14}{'GB/s':>8}{'ratio':>8}{'CPU s/GB':>10}{'RssAnon':>10}")
    for name, rounds in found.items():
        wall = statistics.median(one[0] for one in rounds)
        cpu = statistics.median(one[1] for one in rounds)
        most = max(one[2] for one in rounds) - before
        gigabytes = blocks.nbytes / 1e9
        print(f"{name:14}{gigabytes / wall:8.2f}{base / wall:8.2f}{cpu / gigabytes:10.3f}{most / 2**20:8.0f} MiB")


if __name__ == "__main__":
    main()
