"""How the commands name namespaces, labels and blocks: what there is where nothing is called so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvstore.inspect.wording import listing
from kvstore.marks import Mark
from kvstore.types import NO_POSITION

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo, BlockKey

__all__ = ["address_json", "facts_json", "has_mark", "marks_of", "matching_namespaces", "no_block_has"]


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


def has_mark(store: BlockStore, spaces: Iterable[Namespace], mark: Mark) -> bool:
    """Whether any block of these namespaces has what `mark` says."""
    return any(True for space in spaces for _ in store.scan_marked(space, mark))


def marks_of(store: BlockStore) -> set[Mark]:
    """Everything that is said of any block."""
    return {mark for space in store.namespaces() for info in store.scan_marked(space, Mark()) for mark in info.marks}


def no_block_has(mark: Mark, where: str, there: Iterable[Mark] | None) -> str:
    """For a label or a tenant that was mistyped: what there is; None where the tiers keep no list of them."""
    asked = [f"{what} {text!r}" for what, text in (("label", mark.label), ("tenant", mark.tenant)) if text]
    known, has = list(there or ()), [f"no block has the {' and the '.join(asked)}"]
    if mark.label:
        has.append(f"labels: {listing({one.label for one in known if one.label})}")
    if mark.tenant:
        has.append(f"tenants: {listing({one.tenant for one in known if one.tenant})}")
    listed = "" if there is None else f". There are {'; '.join(has[1:])}"
    return f"kvstore: {where}: {has[0]}{listed}"


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
