"""From a URL to its backend: a table of built-ins, entry points for third parties, imported when first used.

A package adds a scheme with an entry point in the group `kvstore.backends`, named after the scheme (or
`format+scheme`), whose object is a `BlockStore` class. Built-in schemes cannot be replaced that way.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from kvstore.abc import BlockStore
from kvstore.errors import ConfigurationError, MissingDependencyError, UnknownSchemeError
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BUILTINS", "ENTRY_POINT_GROUP", "backend_class", "known_schemes", "open_store"]

ENTRY_POINT_GROUP = "kvstore.backends"

BUILTINS: Mapping[str, str] = {
    "memory": "kvstore_memory:MemoryStore",
    "file": "kvstore_zarr:LocalZarrStore",
    "zarr+file": "kvstore_zarr:LocalZarrStore",
    "lmdb": "kvstore_lmdb:LMDBStore",
}


def open_store(url: str | Mapping[str, Any] | TierURL, **options: Any) -> BlockStore:
    """Open the store that `url` names; it is created where there is none, unless `readonly=true`.

    `options` are URL options as keywords. The caller closes the store (it is a context manager).
    Raises a `ConfigurationError` when the URL is wrong and a `StoreOpenError` when the location is.
    """
    parsed = TierURL.parse(url, **options)
    backend = backend_class(parsed)
    return backend(parsed.validated(backend.options))


def backend_class(url: TierURL) -> type[BlockStore]:
    """The class that serves `url`'s scheme. Raises `UnknownSchemeError` or `MissingDependencyError`."""
    scheme = f"{url.format}+{url.scheme}" if url.format else url.scheme
    entry = _entries().get(scheme)
    if entry is None:
        raise UnknownSchemeError(f"{url}: no backend for {scheme}://. Known here: {', '.join(known_schemes())}")
    module, _, name = entry.value.partition(":")
    try:
        backend = getattr(importlib.import_module(module), name)
    except ImportError as error:
        package = error.name or module
        raise MissingDependencyError(
            f"{scheme}:// needs the package {package!r}, which is not installed: pip install {package}",
            name=error.name,
        ) from error
    if not (isinstance(backend, type) and issubclass(backend, BlockStore)):
        raise ConfigurationError(f"entry point {scheme!r} of {ENTRY_POINT_GROUP} is {entry.value}, not a BlockStore")
    return backend


def known_schemes() -> list[str]:
    """Every scheme that has a backend here, built-in or installed."""
    return sorted(_entries())


def _entries() -> dict[str, EntryPoint]:
    installed = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    builtin = {scheme: EntryPoint(scheme, path, ENTRY_POINT_GROUP) for scheme, path in BUILTINS.items()}
    return {**installed, **builtin}
