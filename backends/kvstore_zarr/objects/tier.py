"""What one open tier of objects consists of; made by `opening`, used by the verbs.

::

    store (the contract) ──► putting, reading, scanning, removing ──► block, lookup, trees, documents ──► client
                                            all by way of this
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Self

    from kvstore.graveyard import Graveyard
    from kvstore.namespace import Namespace
    from kvstore.objects.client import ObjectClient
    from kvstore.sealing import Sealer
    from kvstore.types import BlockKey
    from kvstore_zarr.metadata import NamespaceTree
    from kvstore_zarr.objects.ages import Ages
    from kvstore_zarr.objects.block import OneBlock
    from kvstore_zarr.objects.documents import Documents
    from kvstore_zarr.objects.lookup import Lookup
    from kvstore_zarr.objects.trees import Trees
    from kvstore_zarr.objects.use import AtWork

__all__ = ["TRANSFERS", "ObjectTier"]

TRANSFERS = 8
"""Blocks of one batch under way at a time, where it has several: small ones, mostly."""


@dataclass(frozen=True, slots=True)
class ObjectTier:
    """The parts of an open tier. Thread-safe. What asks the client raises `RequestFailed`. A `with` is one verb."""

    client: ObjectClient
    at_work: AtWork
    """To be entered around every request, once for each verb; one that yields leaves it meanwhile."""
    documents: Documents
    trees: Trees
    ages: Ages
    lookup: Lookup
    one: OneBlock
    graves: Graveyard
    sealer: Sealer | None
    """What its blocks are sealed with."""
    capacity: int | None
    readonly: bool
    may_be_purged: bool
    """False where nobody can write: there are no tombstones to look for."""

    def __enter__(self) -> Self:
        self.at_work.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self.at_work.__exit__(*raised)

    def is_aside(self, namespace: Namespace) -> bool:
        """Whether the namespace is left alone: its blocks are misses, and nothing is put there or removed."""
        return namespace.name in self.trees.aside

    def takes_none(self, namespace: Namespace) -> bool:
        """Whether nothing may be changed there."""
        return self.readonly or self.is_aside(namespace)

    def refused(self, tree: NamespaceTree, keys: Iterable[BlockKey], *, looking: bool = True) -> set[BlockKey]:
        """Those of the blocks that were purged a short while ago, as far as is known here; `looking`: asks for
        tombstones of others, when it is time to.
        """
        if not self.may_be_purged or not self.graves.knows_any(looking=looking):
            return set()
        paths = {tree.block(key): key for key in keys}
        return {paths[path] for path in self.graves.known(paths)}

    def remove(self, paths: Sequence[str]) -> None:
        """Remove objects, and what is remembered of them."""
        for path in paths:
            self.lookup.forget(path)
        self.ages.forget(paths)
        self.client.delete_many(paths)

    def forget(self, name: str) -> None:
        """The namespace of that name is there no more."""
        self.documents.forget(name)
        self.trees.forget(name)

    def close(self) -> None:
        """When the last verb has ended, let go of what is held. A second call does nothing."""
        if self.at_work.end():
            self.client.close()
            if self.sealer is not None:
                self.sealer.close()
