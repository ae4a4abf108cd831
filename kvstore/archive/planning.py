"""What an archive will consist of, worked out before anything of it is written: its manifest, its shards, its prompt.

For `creating`. The same blocks, layouts and options give the same plan, by which an interrupted archive is known again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import numpy as np

from kvstore.archive.document import LAST_MOMENT, Manifest, Segment, plan_of
from kvstore.archive.errors import SelectionError
from kvstore.archive.nodes import GridAxes
from kvstore.archive.packing import Packing, room_for
from kvstore.archive.selecting import Selection, Start
from kvstore.marks import Mark

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kvstore.abc import BlockStore
    from kvstore.archive.compression import Compression
    from kvstore.archive.places import ArchivePlace
    from kvstore.namespace import Namespace
    from kvstore.types import BlockKey

__all__ = ["Shard", "Work", "planned"]


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done: `chains` are the keys of each KV-cache group."""

    manifest: Manifest
    chains: tuple[tuple[BlockKey, ...], ...]
    packings: tuple[Packing, ...]
    tokens: NDArray[np.int64] | None

    def shards(self) -> Iterator[Shard]:
        for packing, chain in zip(self.packings, self.chains, strict=True):
            grid = GridAxes(packing.layout)
            for number, start in enumerate(range(0, len(chain), packing.room)):
                yield Shard(packing, number, grid.chunk(packing.group, number), chain[start : start + packing.room])


@dataclass(frozen=True, slots=True)
class Shard:
    """A file or object of blocks: the `number`-th of its group, and the keys of what is in it."""

    packing: Packing
    number: int
    path: str
    keys: Sequence[BlockKey]


def planned(
    place: ArchivePlace,
    store: BlockStore,
    namespace: Namespace,
    keys: Sequence[BlockKey],
    label: str,
    compression: Compression,
    tokens: Sequence[int] | None,
    keep_until: float | None,
) -> Work:
    """Raises `SelectionError` for keys, token ids or a time that no archive can have, `ValueError` for such a label."""
    _check(place, namespace, keys, label, keep_until)
    chains = tuple(tuple(key for key in keys if key.group == group) for group in range(len(namespace.layouts)))
    segments = _segments(namespace, keys, chains)
    plan = plan_of(namespace, keys, segments, compression)
    packings = tuple(
        Packing(layout, group, segment.room, plan, compression)
        for group, (layout, segment) in enumerate(zip(namespace.layouts, segments, strict=True))
    )
    manifest = Manifest(
        namespace=namespace,
        segments=segments,
        compression=compression,
        plan=plan,
        label=label,
        created=time.time(),
        version=_version(),
        source=str(store.url),
        keep_until=keep_until,
        has_token_ids=tokens is not None,
        nbytes=sum(namespace.block_bytes(key.group) for key in keys),
    )
    return Work(manifest, chains, packings, _token_ids(tokens, manifest))


def _check(
    place: ArchivePlace, namespace: Namespace, keys: Sequence[BlockKey], label: str, keep_until: float | None
) -> None:
    if keep_until is not None and not 0 <= keep_until <= LAST_MOMENT:
        raise SelectionError(
            f"{place}: keep_until={keep_until} is no time up to the year 9999: give seconds since the epoch"
        )
    Mark(label)  # what no tier could keep is no label here
    if not keys or len(set(keys)) < len(keys):
        raise SelectionError(f"{place}: {'a key is given twice' if keys else 'no keys: nothing to archive'}")
    for key in keys:
        namespace.check_key(key)


def _segments(
    namespace: Namespace, keys: Sequence[BlockKey], chains: Sequence[Sequence[BlockKey]]
) -> tuple[Segment, ...]:
    """Where each group's blocks stand in the prefix, and how many of them a shard has room for."""
    starts = keys.starts if isinstance(keys, Selection) else {}
    found: list[Segment] = []
    for group, (chain, layout) in enumerate(zip(chains, namespace.layouts, strict=True)):
        start = starts.get(group, Start())
        found.append(Segment(len(chain), room_for(layout, len(chain)), start.position, start.parent))
    return tuple(found)


def _token_ids(tokens: Sequence[int] | None, manifest: Manifest) -> NDArray[np.int64] | None:
    """Those that the blocks are of."""
    if tokens is None:
        return None
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(ids) < manifest.tokens:
        raise SelectionError(
            f"token ids of shape {ids.shape} and type {ids.dtype}: the blocks are of {manifest.tokens}"
        )
    return ids[: manifest.tokens].astype(np.int64)


def _version() -> str:
    try:
        return version("kvstore-tiers")
    except PackageNotFoundError:
        return "unknown"
