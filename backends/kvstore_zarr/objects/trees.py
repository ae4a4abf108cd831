"""Namespaces of a tier without a catalogue: read when they are first asked for, and set aside where of no use.

A folder whose manifest cannot be read, or is another format's or another seal's, is left alone with all that is in it:
its blocks are misses, and nothing is put there.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvstore.errors import NewerFormatError, NotAStoreError, OlderFormatError, StoreNotFoundError, StoreOpenError
from kvstore.namespace import is_namespace_name
from kvstore.objects.faults import Kind, RequestFailed
from kvstore.objects.side import side_by_side
from kvstore.sealing import PLAIN
from kvstore_zarr.metadata import NamespaceTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.namespace import Namespace
    from kvstore.objects.client import ObjectClient
    from kvstore.url import TierURL
    from kvstore_zarr.objects.documents import Documents

__all__ = ["Trees"]

_REFUSED = (Kind.FULL, Kind.DENIED, Kind.REFUSED, Kind.UNSUPPORTED)

_log = logging.getLogger("kvstore.objects")


class Trees:
    """Of the tier at `url`. Thread-safe. Every method but `of` may raise `RequestFailed`."""

    def __init__(self, url: TierURL, client: ObjectClient, documents: Documents) -> None:
        self._url, self._client, self._documents = url, client, documents
        self._trees: dict[str, NamespaceTree] = {}
        self.aside: dict[str, str] = {}
        """Names of namespaces that are left alone, and why."""
        self._damaged: set[str] = set()
        self._mendable: set[str] = set()
        self.seal: str | None = None
        """What says how the tier is sealed; None while it is not known: any is read."""

    def found(self, folders: Sequence[str], *, must_be_some: bool) -> set[str]:
        """Read the manifests, and set aside what is of no use; how the others say that they are sealed, or where there
        are none, the arrays of those that are damaged.

        Raises a `StoreOpenError` where nothing is but what another version wrote, or nothing at all and `must_be_some`.
        """
        names = [name for name in folders if is_namespace_name(name)]
        if must_be_some and not names:
            raise StoreNotFoundError(f"{self._url}: nothing is stored there, and a read-only opening creates nothing")
        trees = self._read_all(names)
        if not trees and any(map(self.is_of_another_version, self.aside)):
            raise StoreOpenError("; ".join(self.aside.values()))
        return {tree.seal for tree in trees} or self._seals_of(sorted(self._damaged))

    def _seals_of(self, names: Sequence[str]) -> set[str]:
        return {seal for name in names if (seal := self._documents.seal_in(name)) is not None}

    def known(self) -> list[NamespaceTree]:
        """All that are there now and of use."""
        return self.read_all([name for name in self._client.folders() if is_namespace_name(name)])

    def of(self, namespace: Namespace) -> NamespaceTree:
        """That of a namespace, whether something is stored of it or not. No request."""
        tree = self._trees.get(namespace.name)
        if tree is None:
            tree = self._trees.setdefault(namespace.name, NamespaceTree(namespace, self.seal or PLAIN))
        return tree

    def forget(self, name: str) -> None:
        """It was dropped."""
        self._trees.pop(name, None)

    def set_aside(self, name: str, error: StoreOpenError) -> None:
        """Leave it alone from now on."""
        if not isinstance(error, NewerFormatError | OlderFormatError):
            self._damaged.add(name)
        if isinstance(error, NotAStoreError):
            self._mendable.add(name)
        self.aside[name] = f"namespace {name} is set aside, and what is in it is left alone: {error}"
        _log.warning(self.aside[name])

    def is_of_another_version(self, name: str) -> bool:
        """Whether it is left alone for that."""
        return name in self.aside and name not in self._damaged

    def serve_again(self, name: str) -> None:
        """What was damaged there is no more."""
        self.aside.pop(name, None)
        self._damaged.discard(name)
        self._mendable.discard(name)

    def mend(self, namespace: Namespace) -> bool:
        """Serve a namespace again whose document is damaged, as somebody stores into it: what it describes is known
        then, and its folder's name is the checksum of that. Whether it is served.
        """
        name = namespace.name
        if name not in self._mendable:
            return False
        try:
            self._documents.read(name, self.seal)
        except NotAStoreError:
            tree = NamespaceTree(namespace, self.seal or PLAIN)
            if self._documents.seal_in(name) not in (None, tree.seal):
                return False
            try:
                self._documents.rewrite(tree)
            except RequestFailed as failed:
                if failed.kind in _REFUSED:
                    return False
                raise
        except StoreOpenError:  # it is of another version by now, or sealed otherwise
            return False
        self.serve_again(name)
        return True

    def read_all(self, names: Sequence[str]) -> list[NamespaceTree]:
        """Those of the namespaces that are of use."""
        return self._read_all([name for name in names if name not in self.aside])

    def _read_all(self, names: Sequence[str]) -> list[NamespaceTree]:
        return [tree for tree in side_by_side(self._read, names) if tree is not None]

    def _read(self, name: str) -> NamespaceTree | None:
        tree = self._trees.get(name)
        if tree is not None:
            return tree
        try:
            tree = self._documents.read(name, self.seal)
        except RequestFailed:
            raise
        except StoreOpenError as error:
            self.set_aside(name, error)
            return None
        return None if tree is None else self._trees.setdefault(name, tree)
