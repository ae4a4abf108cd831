"""Looking into stored blocks, from a notebook: tables, prefix trees, and KV as labelled arrays.

    open(url) ─► Inspection ─► NamespaceView ─► blocks(), prefixes(): pandas    tree(): PrefixTree
                                      └──────► BlockView, PrefixView: numpy, torch, zarr, xarray

>>> import numpy as np, kvstore, kvstore.inspect
>>> layout = kvstore.BlockLayout.canonical(layers=2, tokens=4, heads=1, head_dim=8, dtype="float16")
>>> space = kvstore.Namespace("my-model", "revision-1", (layout,), block_tokens=4)
>>> key = kvstore.block_keys(range(4), block_tokens=4)[0]
>>> with kvstore.open_store("memory://looked-into") as store:
...     stored = store.put_many(space, [kvstore.BlockWrite(key, np.ones(layout.shape, np.float16), position=0)])
...     with kvstore.inspect.open(store) as look:
...         block = look.namespace().block(key.digest.hex()[:8])
...         block.xarray().sel(layer=1, kv="value").mean().item()
1.0

Looking changes nothing: a tier is opened read-only, and nothing is read before its values are asked for. Importing this
loads neither pandas, xarray, zarr nor torch; what needs them (`pip install "kvstore-tiers[inspect]"`) does when asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.abc import BlockStore
    from kvstore.inspect.axes import Axes
    from kvstore.inspect.block import BlockView
    from kvstore.inspect.inspection import Inspection
    from kvstore.inspect.namespace import NamespaceView
    from kvstore.inspect.prefix import PrefixView
    from kvstore.inspect.tree import PrefixTree, Run
    from kvstore.url import TierURL

__all__ = ["Axes", "BlockView", "Inspection", "NamespaceView", "PrefixTree", "PrefixView", "Run", "open"]

_HOMES = {
    "Axes": "axes",
    "BlockView": "block",
    "Inspection": "inspection",
    "NamespaceView": "namespace",
    "PrefixTree": "tree",
    "PrefixView": "prefix",
    "Run": "tree",
}


def open(url: str | Mapping[str, Any] | TierURL | BlockStore, **options: Any) -> Inspection:  # noqa: A001 - as in zarr
    """Look into the tier at `url`: read-only, so that nothing is created, written, evicted, removed or made younger.

    `options` are URL options as keywords. Also takes an open `BlockStore`, which stays the caller's: if it was opened
    for writing, reading from it counts as use, and a damaged block is removed as ever.

    Raises what `kvstore.open_store` raises, `StoreNotFoundError` where nothing is there.
    """
    from kvstore.abc import BlockStore
    from kvstore.inspect.inspection import Inspection
    from kvstore.inspect.opening import open_to_look
    from kvstore.url import TierURL

    if isinstance(url, BlockStore):
        if options:
            raise TypeError(f"a store that is open takes no options: {', '.join(options)}")
        return Inspection(url, str(url.url), owned=False)
    tier = TierURL.parse(url, **options)
    store, note = open_to_look(tier)
    return Inspection(store, str(tier), owned=True, note=note)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        import importlib

        if name in _HOMES:
            return getattr(importlib.import_module(f"kvstore.inspect.{_HOMES[name]}"), name)
        raise AttributeError(f"module 'kvstore.inspect' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
