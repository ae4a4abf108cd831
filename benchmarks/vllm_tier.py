"""kvstore behind vLLM's real tiering manager, beside vLLM's own `fs` tier: stores and cold loads of 64 blocks of 2 MiB.

    python benchmarks/vllm_tier.py [--json] [--rounds N] [--folder DIR] [--tier fs|file|lmdb|URL …] [--requests N …]
    python benchmarks/vllm_tier.py --hang [--json]

Runs in an environment that has vLLM (`make test-vllm` makes one). The tiers take turns in one process, the loop that
drives the manager is the same for all of them, medians count. A store is timed from the first `complete_store` until
the manager has nothing under way; a load from the first `lookup` of a fresh manager until every block is a HIT in
primary memory, with the page cache dropped where that is permitted. Every byte is compared, outside of what is timed.
`--requests`: over how many requests the blocks are spread, and with that over how many of vLLM's jobs.

`--hang`: what the manager's calls take of the scheduler's time while every call of the backend hangs, on a network and
in the kernel; other requests come and go. The promise: p99 <= 200 µs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

warnings.simplefilter("ignore")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "vllm"))

from driver import Driver, keys  # noqa: E402 - a test's helper, found by the line above

from kvstore import open_store  # noqa: E402
from kvstore.testing.faults import FaultyStore, Hanging  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver import Request

BLOCKS, BLOCK = 64, 2 << 20
MIB = BLOCKS * BLOCK / (1 << 20)


def configuration(tier: str, folder: Path) -> dict[str, Any]:
    """What stands in `secondary_tiers`."""
    if tier == "fs":
        return {"type": "fs", "root_dir": str(folder)}
    urls = {"file": f"file://{folder}/kv", "lmdb": f"lmdb://{folder}/kv.lmdb"}
    name, apart, _ = tier.partition("-apart")
    url = urls.get(name, tier)
    options = {"url": url, "namespace": "benchmark", "io_process": bool(apart)}
    return {"type": "KVStoreTier", "module_path": "kvstore.vllm", **options}


def prompts(requests: int) -> list[list[bytes]]:
    """All blocks, spread over requests."""
    return [keys(BLOCKS // requests, f"prompt {number}") for number in range(requests)]


def store(engine: Driver, requests: int) -> float:
    """Seconds until all blocks are in the tier; none was there."""
    arrived = [engine.arrive(names) for names in prompts(requests)]
    for request in arrived:
        engine.prepare_store(request)
    engine.step()
    begin = time.perf_counter()
    for request in arrived:
        engine.complete_store(request, request.keys)
    engine.settle()
    seconds = time.perf_counter() - begin
    for request in arrived:
        engine.finish(request)
    return seconds


def load(engine: Driver, requests: int) -> float:
    """Seconds until all blocks are in primary memory; none was there."""
    begin = time.perf_counter()
    arrived = [engine.arrive(names) for names in prompts(requests)]
    engine.until(lambda: not [request for request in arrived if not engine.final(request)])
    seconds = time.perf_counter() - begin
    for request in arrived:
        compare(engine, request)
    return seconds


def compare(engine: Driver, request: Request) -> None:
    """Every byte; the request ends."""
    wrong = engine.read(request, request.keys)
    if wrong:
        raise SystemExit(f"{len(wrong)} blocks have wrong bytes")
    engine.finish(request)


def drop_page_cache(folder: Path) -> None:
    """All of it where that is permitted; otherwise of these files."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        for path in (path for path in folder.rglob("*") if path.is_file()):
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(tier: str, folder: Path, requests: int) -> dict[str, float]:
    """One store and one cold load, in fresh managers."""
    tiers = [configuration(tier, folder)]
    with Driver(tiers, rows=BLOCKS, row_bytes=BLOCK) as engine:
        stored = store(engine, requests)
    drop_page_cache(folder)
    with Driver(tiers, rows=BLOCKS, row_bytes=BLOCK) as engine:
        loaded = load(engine, requests)
        slow = engine.slow_calls()
    return {"store": MIB / stored, "load": MIB / loaded, "call_p99_us": slow[int(len(slow) * 0.99)] * 1e6}


def while_it_hangs(can_hang: bool) -> dict[str, Any]:
    """Calls of the manager behind a store of which no call returns."""
    store = FaultyStore(open_store("memory://hang"), can_hang=can_hang)
    hanging = Hanging()
    with mock.patch("kvstore.tiering.secondary.open_store", return_value=store):
        engine = Driver([configuration("memory://hang", Path())], rows=32, row_bytes=64 * 1024)
    with engine:
        cold = keys(8)
        engine.store(cold)
        engine.evict_all()
        store.plan["get"] = hanging
        stuck = engine.arrive(cold)
        engine.until(lambda: engine.final(stuck) or hanging.waiting)
        store.plan.update(put=hanging, contains=hanging)
        engine.calls.clear()
        for number in range(500):
            request = engine.arrive(keys(4, f"prompt {number % 16}"))
            written = engine.prepare_store(request)
            engine.step()
            engine.complete_store(request, written or [])
            engine.lookup(request)
            engine.finish(request)
        slow = engine.slow_calls()
        hanging.release()
    return {
        "hangs": "on a network" if can_hang else "in the kernel",
        "calls": len(slow),
        "p50_us": round(slow[len(slow) // 2] * 1e6, 1),
        "p99_us": round(slow[int(len(slow) * 0.99)] * 1e6, 1),
        "max_us": round(slow[-1] * 1e6, 1),
    }


def table(results: dict[tuple[str, int], dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Medians, and what they are of the `fs` tier's in the same run."""
    rows: list[dict[str, Any]] = []
    for (tier, requests), runs in results.items():
        row: dict[str, Any] = {"tier": tier, "requests": requests}
        fs = results.get(("fs", requests))
        for way in ("store", "load"):
            row[f"{way}_mib_per_s"] = round(statistics.median(runs[way]))
            row[f"{way}_spread"] = [round(min(runs[way])), round(max(runs[way]))]
            if fs:
                row[f"{way}_to_fs"] = round(statistics.median(runs[way]) / statistics.median(fs[way]), 2)
        row["call_p99_us"] = round(statistics.median(runs["call_p99_us"]))
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tier",
        action="append",
        help="fs, file, lmdb, either of these with -apart (io_process) or a URL; default: those three",
    )
    parser.add_argument("--requests", type=int, action="append", help="default: 1 and 8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where the tiers are made, and removed; default: a temporary folder")
    parser.add_argument("--hang", action="store_true", help="calls while the backend hangs, and nothing else")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    if given.hang:
        for row in (while_it_hangs(True), while_it_hangs(False)):
            print(json.dumps(row) if given.json else "   ".join(f"{name} {value}" for name, value in row.items()))
        return 0
    results: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    tiers = given.tier or ["fs", "file", "lmdb"]
    for number in range(given.rounds):
        for requests in given.requests or [1, 8]:
            for tier in [*tiers[number % len(tiers) :], *tiers[: number % len(tiers)]]:
                os.sync()  # what the one before it wrote or removed is not its own to wait for
                folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=given.folder))
                try:
                    for name, value in measure(tier, folder, requests).items():
                        results[tier, requests][name].append(value)
                finally:
                    shutil.rmtree(folder)
    rows = table(results)
    for row in rows:
        print(json.dumps(row) if given.json else _line(row))
    return 0


def _line(row: dict[str, Any]) -> str:
    ways = "   ".join(
        f"{way} {row[f'{way}_mib_per_s']:5} MiB/s"
        + (f" = {row[f'{way}_to_fs']:.2f} x fs" if f"{way}_to_fs" in row else "")
        + f" ({row[f'{way}_spread'][0]}-{row[f'{way}_spread'][1]})"
        for way in ("store", "load")
    )
    return f"{row['tier']:10} {row['requests']:2} requests   {ways}   calls p99 {row['call_p99_us']} µs"


if __name__ == "__main__":
    raise SystemExit(main())
