"""How the commands name namespaces and blocks: by a prefix on the command line, in full in what machines read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvstore.types import NO_POSITION

if TYPE_CHECKING:
    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo, BlockKey

__all__ = ["address_json", "facts_json", "matching_namespaces"]


def matching_namespaces(store: BlockStore, prefix: str) -> list[Namespace]:
    """The store's namespaces whose names start with `prefix`; a usage error where none does."""
    spaces = store.namespaces()
    if not spaces:
        sought = f": no namespace starts with {prefix!r}" if prefix else ""
        raise click.UsageError(f"{store.url}: nothing was stored there yet{sought}")
    matching = [space for space in spaces if space.name.startswith(prefix.lower())]
    if not matching:
        listing = ", ".join(sorted(space.name for space in spaces))
        raise click.UsageError(f"{store.url}: no namespace starts with {prefix!r}. There are: {listing}")
    return matching


def address_json(namespace: Namespace, key: BlockKey) -> dict[str, Any]:
    """A block's address for machines."""
    return {"namespace": namespace.name, "group": key.group, "digest": key.digest.hex()}


def facts_json(info: BlockInfo) -> dict[str, Any]:
    """What a tier knows of a block, beside its address and its size, for machines."""
    return {
        "parent": info.parent.hex() or None,
        "position": None if info.position == NO_POSITION else info.position,
        "created": info.created,
        "last_used": info.last_used,
        "hits": info.hits,
        "labels": info.labels,
        "tenants": info.tenants,
        "pinned": info.pinned,
    }
