"""Which blocks a purge is about, and how a store's scans find them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from kvstore.marks import Mark
from kvstore.retention import now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo

    Untold: TypeAlias = Callable[[BlockInfo], object]

__all__ = ["Request"]

AT_ONCE = 1000
"""Blocks asked for the key that they are under, in one call."""


def _ignored(info: BlockInfo) -> None:
    del info


@dataclass(frozen=True, slots=True)
class Request:
    """Which blocks are to go: those to which all that is given applies. Nothing given is nothing at all, but `all`.

    `namespaces`: names, in full. `label`, `tenant`: what requests or operators said of blocks (`kvstore.marks`).
    `older_than`: seconds since the block was stored.
    """

    namespaces: tuple[str, ...] | None = None
    label: str = ""
    tenant: str = ""
    older_than: float | None = None
    all: bool = False

    def __post_init__(self) -> None:
        if not (self.all or self.namespaces or self.label or self.tenant or self.older_than is not None):
            raise ValueError("which blocks are to go? Give namespaces, a label, a tenant, an age, or `all`")

    @property
    def mark(self) -> Mark:
        """What the blocks are marked with."""
        return Mark(self.label, tenant=self.tenant)

    @property
    def is_whole(self) -> bool:
        """Whether everything goes, or everything of a tenant."""
        return self == Request(all=True) or bool(self.tenant and self == Request(tenant=self.tenant))

    @property
    def is_of_namespaces(self) -> bool:
        """Whether everything goes, of all namespaces or of some."""
        return self.mark == Mark() and self.older_than is None

    def takes(self, name: str) -> bool:
        """Whether blocks of the namespace with this name may go."""
        return self.namespaces is None or name in self.namespaces

    def infos(
        self, store: BlockStore, space: Namespace, data_keys: frozenset[bytes] = frozenset(), untold: Untold = _ignored
    ) -> Iterator[BlockInfo]:
        """The blocks of a namespace that are to go. Raises `ValueError` where the store cannot tell which.

        `data_keys`: ids of the keys that the tenant's blocks are sealed with; for stores that keep no marks. `untold`
        is called with each block that does not say how old it is, or under which key: it is damaged, or a later
        kvstore's, and not known to be one of those that are to go.
        """
        by_keys = not store.capabilities.marks and self.mark != Mark()
        if by_keys and not (store.capabilities.sealed and self.mark == Mark(tenant=self.tenant)):
            raise ValueError("it keeps no labels and tenants: purge it by namespace, by age, or as a whole")
        any_mark = by_keys or self.mark == Mark()
        found = store.scan_ages(space) if any_mark else store.scan_marked(space, self.mark)
        if self.older_than is not None:
            found = _stored_by(now_ns() / 1e9 - self.older_than, found, untold)
        return _sealed_with(data_keys, store, space, found, untold) if by_keys else found


def _stored_by(cutoff: float, infos: Iterator[BlockInfo], untold: Untold) -> Iterator[BlockInfo]:
    """The blocks that were stored by then."""
    for info in infos:
        if not info.dated:
            untold(info)
        elif info.created <= cutoff:
            yield info


def _sealed_with(
    data_keys: frozenset[bytes], store: BlockStore, space: Namespace, infos: Iterator[BlockInfo], untold: Untold
) -> Iterator[BlockInfo]:
    """The blocks that are sealed with those keys: each is asked for its id."""
    while some := list(islice(infos, AT_ONCE)):
        ids = store.sealed_with(space, [info.key for info in some])
        yield from (info for info, key_id in zip(some, ids, strict=True) if key_id in data_keys)
        silent = [info for info, key_id in zip(some, ids, strict=True) if key_id is None]
        there = store.contains_many(space, [info.key for info in silent])
        for info in (info for info, is_there in zip(silent, there, strict=True) if is_there):
            untold(info)
