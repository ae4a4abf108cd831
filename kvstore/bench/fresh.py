"""Warm loads in a process that has never mapped the blocks: `python -P -m kvstore.bench.fresh`, the job on stdin.

A tier that is read through a mapping has two speeds: in the first pass the page tables of the mapping are filled, from
the second on they are there. In a process that has loaded the same blocks before, both would look like the second.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.bench.workload import Lap, Targets, Workload, page_aligned_rows, pool, run_lap
from kvstore.demo.worker import run_worker
from kvstore.errors import TierUnavailable
from kvstore.namespace import Namespace
from kvstore.registry import open_store
from kvstore.types import BlockKey, BlockRead, GetOutcome
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["laps_in_a_fresh_process"]


def laps_in_a_fresh_process(
    url: TierURL, namespace: Namespace, load: Workload, keys: Sequence[BlockKey], passes: int
) -> list[Lap]:
    """Load all blocks `passes` times in a process of its own. Raises `WorkerFailed` where one does not arrive."""
    job = {
        "url": [url.scheme, url.location, url.format, dict(url.raw_options)],
        "namespace": namespace.to_manifest(),
        "load": asdict(load),
        "keys": [key.digest.hex() for key in keys],
        "passes": passes,
    }
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        found = run_worker(["-m", __name__], job, Path(folder), lambda _: None)
    return [Lap(**lap) for lap in found["laps"]]


def _measure(job: dict[str, Any]) -> dict[str, Any]:
    load, space = Workload(**job["load"]), Namespace.from_manifest(job["namespace"])
    keys = [BlockKey(bytes.fromhex(digest)) for digest in job["keys"]]
    targets = Targets(load, page_aligned_rows(load.threads * load.batch, load.block_bytes))
    with open_store(TierURL(*job["url"])) as store, pool(load.threads) as executor:

        def work(_: int, wanted: Sequence[BlockKey]) -> None:
            reads = [BlockRead(*read) for read in zip(wanted, targets.of_this_thread(len(wanted)), strict=True)]
            if any(outcome is not GetOutcome.HIT for outcome in store.get_many_into(space, reads)):
                raise TierUnavailable(f"{store.url}: not every block is there, whole, for another process")

        laps = [asdict(run_lap(executor, work, load, keys)) for _ in range(job["passes"])]
    return {"laps": laps}


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    Path(asked["result"]).write_text(json.dumps(_measure(asked)), encoding="utf-8")
