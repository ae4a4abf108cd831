"""What encryption costs: stores and cold loads of an encrypted tier beside a plain one, taking turns in one process.

    python benchmarks/encryption.py [--json] [--rounds N] [--blocks N] [--block-mib N] [--threads N] [--folder DIR]

For `file://` and `lmdb://`: A B A B …, medians, and the ratio of the encrypted tier's time to the plain one's. A round
stores all blocks in a new tier, reopens it with the page cache dropped where that is permitted, and loads them. Every
byte is compared, outside of what is timed. CPU seconds are the process's own, all threads together.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore import BlockKey, BlockLayout, BlockRead, BlockWrite, GetOutcome, Namespace, PutOutcome, open_store
from kvstore.demo.disk import drop_page_cache

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import BlockStore

SCHEMES = ("file", "lmdb")
os.environ["KVSTORE_BENCHMARK_KEY"] = base64.b64encode(os.urandom(32)).decode()


@dataclass(frozen=True)
class Load:
    """What is stored and loaded; `data` has as many blocks as threads, which take turns with them."""

    space: Namespace
    keys: list[BlockKey]
    data: list[np.ndarray[Any, Any]]
    threads: int
    pool: ThreadPoolExecutor
    """Threads that stay, as an engine's do: each keeps its staging memory."""

    def parts(self) -> list[list[int]]:
        """The blocks of each thread."""
        return [list(range(start, len(self.keys), self.threads)) for start in range(self.threads)]

    def store(self, store: BlockStore) -> None:
        """All of them, one call each, from all threads."""

        def put(numbers: list[int]) -> None:
            for number in numbers:
                block = BlockWrite(self.keys[number], self.data[number % self.threads].data, tenant="benchmark")
                if store.put_many(self.space, [block]) != [PutOutcome.STORED]:
                    raise SystemExit("a block was not stored: is the disk full?")

        self._all(put)

    def load(self, store: BlockStore, into: list[np.ndarray[Any, Any]]) -> None:
        """All of them, one call each, into one buffer for each thread."""

        def get(numbers: list[int]) -> None:
            for number in numbers:
                read = BlockRead(self.keys[number], into[number % self.threads].data)
                if store.get_many_into(self.space, [read]) != [GetOutcome.HIT]:
                    raise SystemExit("a block was not found")

        self._all(get)
        for got, put in zip(into, self.data, strict=True):
            if not np.array_equal(got, put):
                raise SystemExit("a block came back with other bytes")

    def _all(self, work: Callable[[list[int]], None]) -> None:
        list(self.pool.map(work, self.parts()))


def aligned(nbytes: int) -> np.ndarray[Any, Any]:
    """A buffer that begins on a page, as an engine's does."""
    memory = np.empty(nbytes + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return memory[start : start + nbytes]


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def one_round(scheme: str, sealed: bool, folder: Path, load: Load) -> dict[str, tuple[float, float]]:
    """Store everything in a new tier, and load it cold."""
    options = f"?encryption=env:KVSTORE_BENCHMARK_KEY&keyring={folder}/keyring.json" if sealed else ""
    place = folder / "tier"
    url = f"{scheme}://{place}{options}"
    into = [aligned(block.nbytes) for block in load.data]
    for buffer in into:
        buffer[:] = 0
    try:
        with open_store(url) as store:
            stored = timed(lambda: load.store(store))
        os.sync()
        drop_page_cache(url)
        with open_store(url) as store:
            loaded = timed(lambda: load.load(store, into))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return {"store": stored, "load": loaded}


def figures(scheme: str, rounds: int, folder: Path, load: Load) -> dict[str, dict[str, float]]:
    """Medians and ratios of the two tiers' turns."""
    for sealed in (False, True):  # a first round of each warms the process
        one_round(scheme, sealed, folder, load)
    turns = [(sealed, one_round(scheme, sealed, folder, load)) for _ in range(rounds) for sealed in (False, True)]
    size = len(load.keys) * load.data[0].nbytes / 1e9
    answer: dict[str, dict[str, float]] = {}
    for verb in ("store", "load"):
        plain, encrypted = ([times[verb] for is_sealed, times in turns if is_sealed is one] for one in (False, True))
        wall = [statistics.median(seconds for seconds, _ in times) for times in (plain, encrypted)]
        cpu = [statistics.median(seconds for _, seconds in times) for times in (plain, encrypted)]
        answer[verb] = {
            "plain_gb_s": size / wall[0],
            "encrypted_gb_s": size / wall[1],
            "time_ratio": wall[1] / wall[0],
            "plain_cpu_s_per_gb": cpu[0] / size,
            "encrypted_cpu_s_per_gb": cpu[1] / size,
        }
    return answer


def prepared(blocks: int, nbytes: int, threads: int) -> Load:
    """Random bytes, one block for each thread, under random keys."""
    space = Namespace("benchmark", "encryption", (BlockLayout.opaque(nbytes),), block_tokens=16)
    chance = np.random.default_rng(0)
    data = [aligned(nbytes) for _ in range(threads)]
    for block in data:
        block[:] = chance.integers(0, 256, nbytes, np.uint8)
    return Load(space, [BlockKey(chance.bytes(32)) for _ in range(blocks)], data, threads, ThreadPoolExecutor(threads))


def main() -> None:
    parser = argparse.ArgumentParser(description="what encryption costs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=192)
    parser.add_argument("--block-mib", type=float, default=2)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    load = prepared(given.blocks, int(given.block_mib * (1 << 20)), given.threads)
    with tempfile.TemporaryDirectory(prefix="kvstore-encryption-", dir=given.folder) as name:
        answer = {scheme: figures(scheme, given.rounds, Path(name).resolve(), load) for scheme in SCHEMES}
    if given.json:
        print(json.dumps(answer, indent=2))
        return
    for scheme, verbs in answer.items():
        for verb, one in verbs.items():
            print(
                f"{scheme:5} {verb:5}  plain {one['plain_gb_s']:.2f} GB/s, encrypted {one['encrypted_gb_s']:.2f} GB/s,"
                f" times {one['time_ratio']:.2f}; CPU s/GB {one['plain_cpu_s_per_gb']:.2f},"
                f" {one['encrypted_cpu_s_per_gb']:.2f}"
            )


if __name__ == "__main__":
    main()
