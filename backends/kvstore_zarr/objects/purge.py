"""Purges of object stores: tombstones in objects under `<prefix>/.purged/`, and what stays where no delete reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.objects.faults import Kind, RequestFailed
from kvstore.types import Residue

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.objects.client import ObjectClient

__all__ = ["FOLDER", "TombObjects", "residues", "seen_s"]

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


def residues(client: ObjectClient) -> list[Residue]:
    """What stays of removed objects."""
    if not client.lists_in_pages:
        return [Residue("what the file server and its disks keep of removed files: free space, snapshots, backups")]
    return [
        Residue(
            "removed objects as earlier versions, in a bucket that keeps them; replicas, backups, the provider's media",
            None,
            "delete the versions (a lifecycle rule NoncurrentVersionExpiration does); see docs/purge.md",
        ),
        Residue("tombstones with the digests of removed blocks, under .purged/", None, "kvstore gc, after they ended"),
    ]
