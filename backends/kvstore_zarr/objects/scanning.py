"""All blocks of a tier of objects, from its listing: what each is, how old, how much they are together.

For `store`. What yields is at work only while it asks: between two pages the tier may be closed.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from kvstore.objects.side import side_by_side
from kvstore.types import BlockInfo, Usage
from kvstore_zarr.metadata import METADATA_NAME
from kvstore_zarr.objects.block import info_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.namespace import Namespace
    from kvstore.objects.client import Listed
    from kvstore.types import BlockKey
    from kvstore_zarr.metadata import NamespaceTree
    from kvstore_zarr.objects.tier import ObjectTier

__all__ = ["measure", "scan_blocks", "scan_listing"]

HEADS_AT_ONCE = 256
"""Blocks whose facts a scan reads at a time."""


def scan_blocks(tier: ObjectTier, namespace: Namespace) -> Iterator[BlockInfo]:
    """What the end of each block says."""
    pages, tree = _pages(tier, namespace), tier.trees.of(namespace)
    entries = ((entry, key) for page in pages for entry in page if (key := tree.key_at(entry.path)) is not None)
    return _read(tier, tree, entries)


def scan_listing(tier: ObjectTier, namespace: Namespace) -> Iterator[BlockInfo]:
    """What the listing says of each block: when an object was written, or this process used it. Where a listing has no
    dates, what the block says.
    """
    return _listed(tier, tier.trees.of(namespace), _pages(tier, namespace))


def measure(tier: ObjectTier) -> Usage:
    """How much stands in the namespaces that are of use. At work throughout."""
    with tier.at_work:
        blocks = used = overhead = 0
        for tree in tier.trees.known():
            for entry in itertools.chain.from_iterable(tier.client.list(tree.namespace.name)):
                if tree.key_at(entry.path) is not None:
                    blocks, used = blocks + 1, used + entry.size
                elif entry.path.endswith(METADATA_NAME):
                    overhead += entry.size
    return Usage(blocks, used, overhead=overhead, capacity=tier.capacity)


def _pages(tier: ObjectTier, namespace: Namespace) -> Iterator[Sequence[Listed]]:
    with tier.at_work:
        return iter(() if tier.is_aside(namespace) else tier.client.list(namespace.name))


def _listed(tier: ObjectTier, tree: NamespaceTree, pages: Iterator[Sequence[Listed]]) -> Iterator[BlockInfo]:
    undated: list[tuple[Listed, BlockKey]] = []
    while True:
        with tier.at_work:
            page = next(pages, None)
        if page is None:
            break
        for entry in page:
            key = tree.key_at(entry.path)
            if key is not None and entry.modified:
                yield BlockInfo(key, entry.size, entry.modified, tier.ages.last_used(entry))
            elif key is not None:
                undated.append((entry, key))
    yield from _read(tier, tree, iter(undated))


def _read(tier: ObjectTier, tree: NamespaceTree, entries: Iterator[tuple[Listed, BlockKey]]) -> Iterator[BlockInfo]:
    def read(found: tuple[Listed, BlockKey]) -> BlockInfo | None:
        entry, key = found
        data = tier.client.get(entry.path, tree.frames[key.group].whole)
        return None if data is None else info_of(tree, entry, key, data)

    while True:
        with tier.at_work:
            batch = list(itertools.islice(entries, HEADS_AT_ONCE))
            infos = side_by_side(read, batch)
        if not batch:
            return
        yield from (info for info in infos if info is not None)
