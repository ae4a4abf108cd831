"""The `zarr.json` beside the blocks, written once by each process, before its first block in a folder.

kvstore itself needs only a namespace's manifest; the others are for stock zarr readers. The first one written also
tells whether the store honours a put that must not overwrite: what was just stored is put again, and has to be refused.
"""

from __future__ import annotations

import re
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from kvstore.objects.faults import Kind, RequestFailed
from kvstore_zarr.metadata import METADATA_NAME, parse_namespace, seal_said_by_array

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kvstore.objects.client import ObjectClient
    from kvstore.types import BlockKey
    from kvstore.url import TierURL
    from kvstore_zarr.metadata import NamespaceTree

__all__ = ["Documents"]

BELIEVED_S = 600.0
"""A document is looked after again: the rules of a bucket's lifecycle remove old objects, these as well."""


_ARRAY = re.compile(r"g[0-9]+/[0-9a-f]{2}/zarr\.json")


class Documents:
    """What one open store knows of the documents in its tier. Thread-safe."""

    def __init__(self, url: TierURL, client: ObjectClient) -> None:
        self._url, self._client = url, client
        self._lock = threading.Lock()
        self._known: dict[str, float] = {}
        self._refuses: bool | None = None if client.takes_new else False

    @property
    def refuses_to_overwrite(self) -> bool:
        """Whether a put with `new` can be trusted; known once something was written."""
        return self._refuses is True

    def read(self, name: str, seal: str | None = None) -> NamespaceTree | None:
        """The namespace whose folder is `name`; None where it has no manifest. Raises what `parse_namespace` raises."""
        path = f"{name}/{METADATA_NAME}"
        data = self._client.get(path)
        return None if data is None else parse_namespace(bytes(data), name, f"{self._url}: {path}", seal)

    def prepare(self, tree: NamespaceTree, keys: Iterable[BlockKey]) -> dict[str, bytes]:
        """Put the namespace's manifest, if need be; the other documents that the folders of `keys` still want.

        Those are for `write`, beside the blocks. Raises `RequestFailed`, and what `read` raises.
        """
        now = time.monotonic()
        missing = {
            path: text
            for key in keys
            for path, text in tree.documents(key).items()
            if self._known.get(path, 0.0) <= now
        }
        manifest = f"{tree.namespace.name}/{METADATA_NAME}"
        text = missing.pop(manifest, None)
        if text is not None:
            with self._lock:  # the first one finds out what the store does, the others wait to know
                if self._known.get(manifest, 0.0) <= now:
                    self._write_manifest(tree, manifest, text)
        return missing

    def write(self, path: str, text: bytes) -> None:
        """Put one of the documents that `prepare` named. Raises `RequestFailed`."""
        self._put(path, text)
        self._known[path] = time.monotonic() + BELIEVED_S

    def rewrite(self, tree: NamespaceTree) -> None:
        """Put the namespace's manifest in place of a damaged one. Raises `RequestFailed`."""
        path = f"{tree.namespace.name}/{METADATA_NAME}"
        self._client.put(path, [_array(tree.manifest)], new=False)
        self._known[path] = time.monotonic() + BELIEVED_S

    def seal_in(self, name: str) -> str | None:
        """How the first array in a namespace's folder says that its blocks are sealed; None where there is none, or it
        does not say.
        """
        paths = (entry.path for page in self._client.list(name) for entry in page)
        array = next((path for path in paths if _ARRAY.fullmatch(path.removeprefix(f"{name}/"))), None)
        data = None if array is None else self._client.get(array)
        return None if data is None else seal_said_by_array(bytes(data))

    def forget(self, name: str) -> None:
        """What was in the folder of this namespace is there no more."""
        with self._lock:
            self._known = {path: until for path, until in self._known.items() if not path.startswith(f"{name}/")}

    def _write_manifest(self, tree: NamespaceTree, path: str, text: bytes) -> None:
        stored = self._put(path, text)
        if stored and self._refuses is None:
            self._refuses = not self._put(path, text)
        elif not stored:
            self.read(tree.namespace.name, tree.seal)  # of a later format, damaged, or sealed otherwise: left alone
        self._known[path] = time.monotonic() + BELIEVED_S

    def _put(self, path: str, text: bytes) -> bool:
        """Whether it was not there yet."""
        data = _array(text)
        if self._refuses is not False:
            try:
                stored = self._client.put(path, [data], new=True)
            except RequestFailed as failed:
                if failed.kind is not Kind.UNSUPPORTED:
                    raise
                self._refuses = False
            else:
                if not stored:
                    self._refuses = True
                return stored
        return not self._client.exists(path) and self._client.put(path, [data], new=False)


def _array(text: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(text, np.uint8)
