"""kvstore: the storage half of a KV cache. A secondary tier is a URL.

>>> import numpy as np, kvstore
>>> layout = kvstore.BlockLayout.canonical(layers=2, tokens=16, heads=4, head_dim=64, dtype="float16")
>>> space = kvstore.Namespace("my-model", "revision-1", (layout,), block_tokens=16)
>>> key = kvstore.block_keys(range(16), block_tokens=16)[0]
>>> with kvstore.open_store("memory://docs") as store:
...     store.put_many(space, [kvstore.BlockWrite(key, np.ones(layout.shape, np.float16))])
[<PutOutcome.STORED: 'stored'>]

Importing this loads no backend, neither zarr nor torch.
"""

from kvstore.abc import BlockStore, Capabilities
from kvstore.keys import KeyExtras, Media, block_keys, chain_digests
from kvstore.layout import BlockLayout
from kvstore.marks import Mark, MarkOutcome
from kvstore.namespace import Namespace
from kvstore.registry import open_store
from kvstore.types import (
    BlockInfo,
    BlockKey,
    BlockRead,
    BlockWrite,
    GetOutcome,
    LookupResult,
    PutOutcome,
    Usage,
)
from kvstore.url import TierURL

__all__ = [
    "BlockInfo",
    "BlockKey",
    "BlockLayout",
    "BlockRead",
    "BlockStore",
    "BlockWrite",
    "Capabilities",
    "GetOutcome",
    "KeyExtras",
    "LookupResult",
    "Mark",
    "MarkOutcome",
    "Media",
    "Namespace",
    "PutOutcome",
    "TierURL",
    "Usage",
    "block_keys",
    "chain_digests",
    "open_store",
]
