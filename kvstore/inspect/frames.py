"""Tables of blocks, prefixes and namespaces for pandas. Digests are hex, sizes bytes, times datetimes in UTC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvstore.inspect.axes import engine_of, tokens_of
from kvstore.types import NO_POSITION

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.inspect.summary import NamespaceSummary
    from kvstore.inspect.tree import PrefixTree, Run
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo

__all__ = ["blocks_frame", "namespaces_frame", "prefixes_frame"]


def blocks_frame(namespace: Namespace, infos: Sequence[BlockInfo]) -> pd.DataFrame:
    """One row for each block. `position` and `tokens_end` are missing where nobody knows."""
    groups = np.fromiter((info.key.group for info in infos), np.int64, len(infos))
    positions = np.fromiter((info.position for info in infos), np.int64, len(infos))
    tokens = np.array([tokens_of(namespace, group) for group in range(len(namespace.layouts))])
    unknown = positions == NO_POSITION
    return pd.DataFrame(
        {
            "group": groups,
            "digest": [info.key.digest.hex() for info in infos],
            "position": pd.arrays.IntegerArray(positions, unknown),
            "parent": [info.parent.hex() for info in infos],
            "tokens_end": pd.arrays.IntegerArray((positions + 1) * tokens[groups], unknown.copy()),
            "stored_bytes": np.fromiter((info.stored_bytes for info in infos), np.int64, len(infos)),
            "created": _times(info.created for info in infos),
            "last_used": _times(info.last_used for info in infos),
            "hits": np.fromiter((info.hits for info in infos), np.int64, len(infos)),
            "labels": _tuples(info.labels if info.marks else () for info in infos),
            "tenants": _tuples(info.tenants if info.marks else () for info in infos),
            "pinned": np.fromiter((info.pinned if info.marks else False for info in infos), np.bool_, len(infos)),
        }
    )


@dataclass(frozen=True, slots=True)
class _End:
    """Where a prefix ends, and the sums from its first block on."""

    run: Run
    blocks: int
    stored_bytes: int
    hits: int


def prefixes_frame(tree: PrefixTree) -> pd.DataFrame:
    """One row for each leaf, and for each run at whose end a label ends; the longest first.

    `bytes` and `hits` are sums from the first block that is there to the last; `created` and `last_used` are the last
    block's, because those before it belong to other prefixes, too. `tokens` counts from position 0 where positions
    are known, whether all blocks are there (`complete`) or not.
    """
    ends = sorted(_ends(tree.roots), key=lambda end: -end.blocks)
    last = [end.run.infos[-1] for end in ends]
    return pd.DataFrame(
        {
            "group": np.array([end.run.group for end in ends], np.int64),
            "digest": [end.run.last for end in ends],
            "blocks": np.array([end.blocks for end in ends], np.int64),
            "tokens": np.array([_tokens(end) for end in ends], np.int64),
            "bytes": np.array([end.stored_bytes for end in ends], np.int64),
            "hits": np.array([end.hits for end in ends], np.int64),
            "created": _times(info.created for info in last),
            "last_used": _times(info.last_used for info in last),
            "labels": _tuples(end.run.labels for end in ends),
            "complete": np.array([end.run.complete for end in ends], np.bool_),
        }
    )


def _tokens(end: _End) -> int:
    position = end.run.infos[-1].position
    return (end.blocks if position == NO_POSITION else position + 1) * end.run.block_tokens


def _ends(roots: Iterable[Run]) -> Iterable[_End]:
    stack = [_End(run, run.blocks, run.stored_bytes, run.hits) for run in roots]
    while stack:
        here = stack.pop()
        labels = {label for child in here.run.children for label in child.labels}
        if not here.run.children or set(here.run.labels) - labels:
            yield here
        stack.extend(
            _End(child, here.blocks + child.blocks, here.stored_bytes + child.stored_bytes, here.hits + child.hits)
            for child in here.run.children
        )


def namespaces_frame(namespaces: Sequence[tuple[Namespace, NamespaceSummary]]) -> pd.DataFrame:
    """One row for each namespace, under its name."""
    sums = [summary for _, summary in namespaces]
    return pd.DataFrame(
        {
            "model": [each.model for each in sums],
            "revision": [each.revision for each in sums],
            "engine": [engine_of(space) for space, _ in namespaces],
            "dtype": [", ".join(dict.fromkeys(_dtypes(space))) for space, _ in namespaces],
            "block_tokens": np.array([each.block_tokens for each in sums], np.int64),
            "groups": np.array([each.groups for each in sums], np.int64),
            "blocks": np.array([each.blocks for each in sums], np.int64),
            "bytes": np.array([each.bytes for each in sums], np.int64),
            "oldest": _times(each.oldest for each in sums),
            "newest": _times(each.newest for each in sums),
            "last_used": _times(each.last_used for each in sums),
            "pinned": np.array([each.pinned for each in sums], np.int64),
            "labels": _tuples(tuple(each.labels) for each in sums),
        },
        index=pd.Index([each.namespace for each in sums], name="name", dtype="str"),
    )


def _dtypes(namespace: Namespace) -> list[str]:
    """What elements are: of opaque rows what the engine says."""
    return [
        namespace.extra.get("kv_dtype", layout.dtype).removeprefix("torch.")
        if layout.axes == ("byte",)
        else layout.dtype
        for layout in namespace.layouts
    ]


def _times(moments: Iterable[float | None]) -> pd.DatetimeIndex:
    """Seconds since the epoch; what is None is no time (NaT)."""
    seconds = np.array([np.nan if moment is None else moment for moment in moments], np.float64)
    nanoseconds = np.where(np.isnan(seconds), np.iinfo(np.int64).min, np.nan_to_num(seconds) * 1e9).astype(np.int64)
    return pd.DatetimeIndex(nanoseconds.view("M8[ns]"), tz="UTC")


def _tuples(values: Iterable[tuple[str, ...]]) -> Any:
    """A column of tuples, which pandas must not take for rows."""
    each = list(values)
    column = np.empty(len(each), object)
    column[:] = each
    return column
