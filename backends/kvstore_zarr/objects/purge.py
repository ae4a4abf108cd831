"""Purges of object stores: tombstones in objects under `<prefix>/.purged/`, and what stays where no delete reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.objects.faults import Kind, RequestFailed
from kvstore.types import Residue
from kvstore_zarr.objects.remains import abandoned

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.objects.client import ObjectClient

__all__ = ["FOLDER", "TombObjects", "purge_drafts", "residues", "seen_s"]

FOLDER = ".purged"


def seen_s(lookup_ttl: float) -> float:
    """How often a store looks for tombstones: it is a request."""
    return max(lookup_ttl, 1.0)


class TombObjects:
    """The documents of a `kvstore.graveyard.Graveyard`, each an object. Raises `RequestFailed`."""

    def __init__(self, client: ObjectClient) -> None:
        self._client = client

    def names(self) -> Iterable[str]:
        try:
            return [entry.path.rpartition("/")[2] for page in self._client.list(FOLDER) for entry in page]
        except RequestFailed as failed:
            if failed.kind in (Kind.DENIED, Kind.UNSUPPORTED):  # who may not list goes without
                return []
            raise

    def read(self, name: str) -> bytes | None:
        data = self._client.get(f"{FOLDER}/{name}")
        return None if data is None else bytes(data)

    def write(self, name: str, text: bytes) -> None:
        self._client.put(f"{FOLDER}/{name}", [np.frombuffer(text, np.uint8)], new=False)

    def remove(self, names: Sequence[str]) -> None:
        self._client.delete_many([f"{FOLDER}/{name}" for name in names])


def purge_drafts(client: ObjectClient, *, overwrite: bool) -> list[Residue]:
    """Remove what dead writers left, whichever blocks it was to be; what may be under way stays, and is told."""
    found = client.leftovers()
    dead = [entry.path for entry in abandoned(found)]
    for path in dead if overwrite else ():
        client.overwrite(path)
    client.delete_many(dead)
    young = [entry.size for entry in found if entry.path not in dead]
    what = f"{len(young)} drafts of blocks that are being written, or that a writer left which died within the hour"
    return [Residue(what, sum(young), "kvstore gc, when they are older")] if young else []


def residues(client: ObjectClient) -> list[Residue]:
    """What stays of removed objects."""
    if not client.lists_in_pages:
        return [Residue("what the file server and its disks keep of removed files: free space, snapshots, backups")]
    tombs = [entry for page in client.list(FOLDER) for entry in page]
    versions = client.keeps_versions(max(tombs, key=lambda entry: entry.modified).path) if tombs else None
    kept = [] if versions is False else [_VERSIONS[versions]]
    return [
        *kept,
        Residue("replicas, backups and media of the provider"),
        Residue("tombstones with the digests of removed blocks, under .purged/", None, "kvstore gc, after they ended"),
    ]


_REMEDY = "delete the versions: a lifecycle rule NoncurrentVersionExpiration, docs/purge.md"
_VERSIONS = {
    True: Residue("every removed object as an earlier version: this bucket keeps them", None, _REMEDY),
    None: Residue("removed objects as earlier versions, if the bucket keeps them: it does not tell", None, _REMEDY),
}
