"""What stands below a bucket's prefix and in no listing: namespaces that are set aside or have no manifest.

Counted, and for a purge removed, by the names of objects; what has other names is not ours.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from kvstore.namespace import is_namespace_name
from kvstore.types import Unseen
from kvstore_zarr.metadata import METADATA_NAME, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.objects.client import Listed, ObjectClient
    from kvstore_zarr.objects.trees import Trees

__all__ = ["purge_folder", "unseen"]

AT_ONCE = 1000


def unseen(trees: Trees, client: ObjectClient) -> list[Unseen]:
    """See `BlockStore.unseen`. Lists what it tells of. Raises `RequestFailed`."""
    names = sorted(name for name in client.folders() if is_namespace_name(name))
    seen = {tree.namespace.name for tree in trees.read_all(names)}
    found = (_counted(trees, client, name) for name in names if name not in seen)
    return [one for one in found if one.blocks or one.namespace in trees.aside]


def _counted(trees: Trees, client: ObjectClient, name: str) -> Unseen:
    blocks = [entry.size for entry in _ours(client, name, Kind.BLOCK)]
    why = trees.aside.get(name) or (
        f"namespace {name} has no manifest ({name}/{METADATA_NAME}): what is in it is found again when an engine stores"
        " into it; kvstore purge --all removes it, and kvstore gc when it is a day old"
    )
    return Unseen(name, why, len(blocks), sum(blocks), later=trees.is_of_another_version(name))


def _ours(client: ObjectClient, name: str, *kinds: Kind) -> Iterator[Listed]:
    entries = (entry for page in client.list(name) for entry in page)
    return (entry for entry in entries if Kind.of(entry.path.removeprefix(f"{name}/")) in kinds)


def purge_folder(
    client: ObjectClient,
    one: Unseen,
    *,
    bury: Callable[[Sequence[str]], object],
    overwrite: Callable[[str], object],
    remove: Callable[[Sequence[str]], object],
) -> Unseen:
    """Remove what is ours in a namespace's folder: blocks, documents, the manifest last; what went."""
    blocks = nbytes = 0
    entries = _ours(client, one.namespace, Kind.BLOCK)
    while some := list(islice(entries, AT_ONCE)):
        paths = [entry.path for entry in some]
        bury(paths)
        for path in paths:
            overwrite(path)
        remove(paths)
        blocks, nbytes = blocks + len(some), nbytes + sum(entry.size for entry in some)
    documents = sorted((entry.path for entry in _ours(client, one.namespace, Kind.DOCUMENT)), key=len, reverse=True)
    for start in range(0, len(documents), AT_ONCE):
        remove(documents[start : start + AT_ONCE])
    client.remove_folder(one.namespace)
    return Unseen(one.namespace, one.why, blocks, nbytes)
