"""kvstore: the storage half of a KV cache. A secondary tier is a URL.

>>> import numpy as np, kvstore
>>> layout = kvstore.BlockLayout.canonical(layers=2, tokens=16, heads=4, head_dim=64, dtype="float16")
>>> space = kvstore.Namespace("my-model", "revision-1", (layout,), block_tokens=16)
>>> key = kvstore.block_keys(range(16), block_tokens=16)[0]
>>> with kvstore.open_store("memory://docs") as store:
...     store.put_many(space, [kvstore.BlockWrite(key, np.ones(layout.shape, np.float16))])
[<PutOutcome.STORED: 'stored'>]

Importing this loads nothing more: the names below come with their rooms when the first of them is asked for, so that
the command is soon where it can be interrupted. No backend is loaded before its URL is opened, neither zarr nor torch.
"""

TYPE_CHECKING = False  # type checkers know it by its name; `typing` itself is 10 ms to import
if TYPE_CHECKING:
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

_ROOMS = ("types", "marks", "layout", "namespace", "keys", "abc", "url", "registry")
"""Where those names are, each in the `__all__` of one of them."""

if not TYPE_CHECKING:  # type checkers would believe in every attribute

    def __getattr__(name: str) -> object:
        """A public name from its room, and a room itself, when it is first asked for."""
        import importlib

        if name in __all__:
            rooms = (importlib.import_module(f"kvstore.{room}") for room in _ROOMS)
            value = globals()[name] = next(getattr(room, name) for room in rooms if name in room.__all__)
            return value
        if name in (*_ROOMS, "errors"):
            return importlib.import_module(f"kvstore.{name}")
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


del TYPE_CHECKING
