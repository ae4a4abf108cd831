"""What is to go from an object store beside single blocks: whole namespaces, and what dead writers left.

Objects that kvstore did not write are never touched, and nothing outside of the tier's prefix is looked at.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvstore.errors import InvalidOptionError
from kvstore.namespace import is_namespace_name
from kvstore.objects.client import Listed
from kvstore.objects.settings import SWEEP
from kvstore.retention import TTL, TTL_FROM, now_ns
from kvstore.url import CAPACITY
from kvstore_zarr.metadata import METADATA_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.objects.client import ObjectClient
    from kvstore.url import TierURL
    from kvstore_zarr.metadata import NamespaceTree

__all__ = [
    "abandoned",
    "drop",
    "empty_folders",
    "is_long_empty",
    "nameless_in",
    "retention_notes",
    "stale",
    "wanted_capacity",
]

DRAFT_LIVES_S = 3600.0
"""A draft that is older was left by a process that died."""
EMPTY_FOR_S = 3600.0
"""A namespace whose documents are younger may be about to get its first block: writers put them anew every 10 min."""
ORPHANED_FOR_S = 86400.0
"""Blocks without their namespace's manifest are older than this, or somebody is still writing there."""
AT_ONCE = 1000

_OURS = re.compile(r"[0-9a-f]{32}/(g[0-9]+/)?([0-9a-f]{2}/)?([0-9.]+|zarr\.json)")


def wanted_capacity(url: TierURL) -> int | None:
    """The option `capacity` in bytes. Raises `InvalidOptionError` for a share: there is no disk to take it of."""
    capacity = url.option(CAPACITY)
    if capacity is not None and capacity.bytes is None:
        raise InvalidOptionError(f"{url}: there is no disk to take a share of: give the capacity in bytes")
    return capacity.bytes if capacity else None


def retention_notes(url: TierURL, readonly: bool) -> tuple[str, ...]:
    """What an operator should know of how `ttl` and `capacity` are kept where there is no catalogue."""
    ttl, capacity, sweep = url.option(TTL), url.option(CAPACITY), url.option(SWEEP)
    notes: list[str] = []
    if ttl is not None and url.option(TTL_FROM) == "used":
        notes.append("ttl counts from storing, or from a use by this process: an object store knows of no other use")
    if (ttl is not None or capacity is not None) and sweep is None and not readonly:
        notes.append("what ttl and capacity say goes when somebody sweeps: give sweep=1h, or run kvstore gc")
    return tuple(notes)


def drop(tree: NamespaceTree, client: ObjectClient, remove: Callable[[Sequence[str]], None]) -> int:
    """Remove the namespace's blocks, its documents, its manifest last, so that what was interrupted is found again."""
    name, blocks = tree.namespace.name, 0
    manifest, batch = f"{name}/{METADATA_NAME}", list[str]()
    for page in client.list(name):
        for entry in page:
            is_block = tree.key_at(entry.path) is not None
            if is_block or (_is_document(tree, entry.path) and entry.path != manifest):
                batch.append(entry.path)
                blocks += is_block
        if len(batch) >= AT_ONCE:
            remove(batch)
            batch = []
    remove([*batch, *([manifest] if client.exists(manifest) else [])])
    client.remove_folder(name)
    return blocks


def is_long_empty(tree: NamespaceTree, client: ObjectClient) -> bool:
    """Whether nothing but documents is there, and none of them is young."""
    young = now_ns() / 1e9 - EMPTY_FOR_S
    pages = client.list(tree.namespace.name)
    return all(_is_document(tree, entry.path) and entry.modified < young for page in pages for entry in page)


def abandoned(drafts: Iterable[Listed]) -> list[Listed]:
    """Those of the drafts that nobody will finish."""
    long_ago = now_ns() / 1e9 - DRAFT_LIVES_S
    return [entry for entry in drafts if 0 < entry.modified < long_ago]


def stale(client: ObjectClient, nameless: Sequence[str]) -> list[Listed]:
    """Drafts that nobody will finish, and blocks and documents of namespaces that are `nameless`."""
    now, found = now_ns() / 1e9, abandoned(client.leftovers())
    for folder in nameless:
        entries = [entry for page in client.list(folder) for entry in page if _OURS.fullmatch(entry.path)]
        has_blocks = any(not entry.path.endswith(f"/{METADATA_NAME}") for entry in entries)
        old = now - (ORPHANED_FOR_S if has_blocks else EMPTY_FOR_S)
        if all(0 < entry.modified < old for entry in entries):
            found += entries
    return found


def empty_folders(client: ObjectClient, nameless: Sequence[str]) -> list[Listed]:
    """Those of the `nameless` folders that have no file at all, for long; where a store has folders."""
    old, found = now_ns() / 1e9 - EMPTY_FOR_S, list[Listed]()
    for folder in nameless:
        changed = client.empty_since(folder)
        if changed is not None and 0 < changed < old:
            found.append(Listed(f"{folder}/", 0, changed))
    return found


def nameless_in(client: ObjectClient) -> list[str]:
    """The folders of namespaces that have no manifest."""
    names = [folder for folder in client.folders() if is_namespace_name(folder)]
    return [name for name in names if not client.exists(f"{name}/{METADATA_NAME}")]


def _is_document(tree: NamespaceTree, path: str) -> bool:
    folder, _, name = path.rpartition("/")
    if name != METADATA_NAME:
        return False
    groups = [tree.group_folder(group) for group in range(len(tree.frames))]
    above, _, last = folder.rpartition("/")
    return folder in (tree.namespace.name, *groups) or (
        above in groups and re.fullmatch("[0-9a-f]{2}", last) is not None
    )
