"""How fast a tier is, beside others, in one run: the engine of `kvstore bench`.

`contestant` is the contract of whatever takes part; `tier` is a kvstore tier through its `BlockStore`, `raw` the bare
device, `clients` the bare clients of an object store, `vllm_fs` vLLM's own tier, `checksum` no more than the check,
`memory_copy` no more than the move. `runner` gives all of them the same blocks in turns and takes medians; `workload`
is one lap of it, which `fresh` runs in a process of its own. Ratios are the result: absolute figures drift with the
machine, side by side they hold.
"""

from kvstore.bench.checksum import ChecksumAlone
from kvstore.bench.clients import BareObstore, BareS3fs
from kvstore.bench.contestant import Contestant
from kvstore.bench.memory_copy import MemoryCopy
from kvstore.bench.raw import RawFiles
from kvstore.bench.runner import Figure, race
from kvstore.bench.tier import TierApart, TierUnderTest
from kvstore.bench.vllm_fs import VllmFs
from kvstore.bench.workload import Workload

__all__ = [
    "BareObstore",
    "BareS3fs",
    "ChecksumAlone",
    "Contestant",
    "Figure",
    "MemoryCopy",
    "RawFiles",
    "TierApart",
    "TierUnderTest",
    "VllmFs",
    "Workload",
    "race",
]
