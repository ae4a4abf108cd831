"""Blocks out of a tier of objects: deleted, or purged for good, also those that no namespace lists.

For `store`, within one verb of a store that may be written. Whole namespaces and what dead writers left: `remains`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from kvstore.objects.side import side_by_side
from kvstore_zarr.objects.tier import TRANSFERS
from kvstore_zarr.objects.unseen import purge_folder, unseen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvstore.types import BlockKey, Unseen
    from kvstore_zarr.metadata import NamespaceTree
    from kvstore_zarr.objects.tier import ObjectTier

__all__ = ["delete_blocks", "purge_blocks", "purge_folders"]

K = TypeVar("K")
R = TypeVar("R")


def delete_blocks(tier: ObjectTier, tree: NamespaceTree, keys: Sequence[BlockKey]) -> list[bool]:
    """Remove each block; whether there was one."""
    removed = _each(lambda key: tier.one.delete(tree.block(key)), list(dict.fromkeys(keys)))
    return [removed.pop(key, False) for key in keys]


def purge_blocks(
    tier: ObjectTier, tree: NamespaceTree, keys: Sequence[BlockKey], until: int, *, overwriting: bool
) -> list[bool]:
    """Remove each block for good; whether there was one. Refused `until` then (ns since the epoch; 0: not at all).

    The tombstones first, so that who learns of them in time stores nothing behind the removal.
    """
    paths = {key: tree.block(key) for key in keys}
    if until:
        tier.graves.bury(list(paths.values()), until)
    there = _each(tier.client.exists, list(paths.values()))
    gone = [path for path, is_there in there.items() if is_there]
    if overwriting:
        side_by_side(tier.client.overwrite, gone, TRANSFERS)
    tier.remove(gone)
    return [there.pop(paths[key], False) for key in keys]


def purge_folders(tier: ObjectTier, names: Collection[str], until: int, *, overwriting: bool) -> list[Unseen]:
    """Remove for good what is ours in the folders of these namespaces that are not served; what went."""
    found = [one for one in unseen(tier.trees, tier.client) if one.namespace in names and not one.later]
    gone = [
        purge_folder(
            tier.client,
            one,
            bury=lambda paths: tier.graves.bury(paths, until) if until else None,
            overwrite=tier.client.overwrite if overwriting else lambda _: None,
            remove=tier.remove,
        )
        for one in found
    ]
    for one in gone:
        tier.forget(one.namespace)
        tier.trees.serve_again(one.namespace)
    return gone


def _each(call: Callable[[K], R], keys: Sequence[K]) -> dict[K, R]:
    return dict(zip(keys, side_by_side(call, keys, TRANSFERS), strict=True))
