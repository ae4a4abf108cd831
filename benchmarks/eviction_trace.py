"""How many blocks of a real request trace each eviction policy has ready, by cache size.

Replays a trace against the policies themselves, with a capacity counted in blocks and no bytes moved. A request's
hits are its leading blocks that are present; afterwards the missing ones are added and all are touched, as the
primary tier does it. Prints, for each cache size, the share of all requested blocks that were hits.

A trace has one JSON object a line, with the ids of the request's blocks under `hash_ids`: equal ids mean equal
prefixes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from kvstore.tiering.policy import POLICIES, make_policy
from kvstore.types import BlockKey

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_TRACE = Path(__file__).resolve().parents[2] / "shared" / "traces" / "mooncake_conversation.jsonl.gz"
SHARES = (0.01, 0.03, 0.1, 0.3)
DOWNLOAD = (
    "download FAST25-release/traces/conversation_trace.jsonl from https://github.com/kvcache-ai/Mooncake and pass its"
    f" path, or put it, gzipped, at {DEFAULT_TRACE}"
)


@dataclass(frozen=True, slots=True)
class Result:
    """What one policy made of the trace: `hit_rate` is hits over all blocks requested."""

    policy: str
    share: float
    """The cache's size as a share of all different blocks in the trace."""
    slots: int
    hits: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order, each the keys of its blocks from the front."""

    requests: Sequence[Sequence[BlockKey]]
    blocks: int
    """All blocks that are requested."""
    unique: int
    """Different blocks."""

    @classmethod
    def read(cls, path: Path) -> Trace:
        """From a file as Mooncake publishes it, gzipped or not."""
        keys: dict[int, BlockKey] = {}
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            requests = [
                [keys.setdefault(number, _key(number)) for number in json.loads(line)["hash_ids"]] for line in lines
            ]
        return cls(requests, sum(map(len, requests)), len(keys))

    def replay(self, policy: str, share: float) -> Result:
        """Run all requests through a cache of `share` of the different blocks, empty at first."""
        slots = max(1, int(self.unique * share))
        cache = _Cache(policy, slots)
        hits = sum(cache.serve(request) for request in self.requests)
        return Result(policy, share, slots, hits, hits / self.blocks)


class _Cache:
    """The primary tier without its memory."""

    def __init__(self, policy: str, slots: int) -> None:
        self._policy = make_policy(policy, slots)
        self._slots = slots
        self._present: set[BlockKey] = set()

    def serve(self, request: Sequence[BlockKey]) -> int:
        """How many leading blocks are here; all of the request's are afterwards, unless there are more than slots."""
        present = self._present
        hits = sum(1 for _ in takewhile(present.__contains__, request))
        for key in request[hits:]:
            if key not in present:
                self._add(key)
        for key in reversed(request):
            if key in present:
                self._policy.touched(key)
        return hits

    def _add(self, key: BlockKey) -> None:
        if len(self._present) == self._slots and (victim := self._policy.evict()):
            self._present.remove(victim)
        self._policy.added(key)
        self._policy.unpinned(key)
        self._present.add(key)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Prefix hits of the eviction policies on a request trace")
    parser.add_argument("trace", nargs="?", type=Path, default=DEFAULT_TRACE, help="a trace, as .jsonl or .jsonl.gz")
    parser.add_argument("--policy", action="append", choices=sorted(POLICIES), help="one of them only (repeatable)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if not options.trace.exists():
        print(f"there is no trace at {options.trace}: {DOWNLOAD}", file=sys.stderr)
        return 0 if options.trace == DEFAULT_TRACE else 2  # `make bench` goes on without it
    trace = Trace.read(options.trace)
    policies: list[str] = options.policy or sorted(POLICIES)
    results = [trace.replay(policy, share) for share in SHARES for policy in policies]
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        _print(trace, policies, results)
    return 0


def _print(trace: Trace, policies: Sequence[str], results: Sequence[Result]) -> None:
    limit = trace.replay(policies[0], 1.0).hit_rate
    table = Table("cache", "blocks", *policies, title="Prefix hits over blocks requested")
    for start in range(0, len(results), len(policies)):
        row = results[start : start + len(policies)]
        table.add_row(f"{row[0].share:.0%}", f"{row[0].slots:,}", *(f"{result.hit_rate:.3f}" for result in row))
    Console().print(table)
    print(
        f"{len(trace.requests):,} requests for {trace.blocks:,} blocks, {trace.unique:,} of them different;"
        f" with room for all: {limit:.3f}"
    )


def _key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


if __name__ == "__main__":
    sys.exit(main())
