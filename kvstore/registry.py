"""From a URL to its backend: a table of built-ins, entry points for third parties, imported when first used.

A package adds a scheme with an entry point in the group `kvstore.backends`, named after the scheme (or
`format+scheme`), whose object is a `BlockStore` class. Built-in schemes cannot be replaced that way.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import traceback
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from kvstore.abc import BlockStore
from kvstore.errors import ConfigurationError, MissingDependencyError, UnknownSchemeError
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BUILTINS", "ENTRY_POINT_GROUP", "backend_class", "known_schemes", "open_store", "package_at_fault"]

ENTRY_POINT_GROUP = "kvstore.backends"

_OBJECTS = "kvstore_zarr.objects:ObjectZarrStore"

BUILTINS: Mapping[str, str] = {
    "memory": "kvstore_memory:MemoryStore",
    "file": "kvstore_zarr:LocalZarrStore",
    "zarr+file": "kvstore_zarr:LocalZarrStore",
    "lmdb": "kvstore_lmdb:LMDBStore",
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys"), "kvstore_redis:RedisStore"),
    **dict.fromkeys(
        ("s3", "s3a", "gs", "gcs", "az", "abfs", "sftp", "ssh", "smb", "webhdfs", "http", "https"), _OBJECTS
    ),
}
"""What fsspec knows beyond these is served as `zarr+scheme://`, and so are chains of its protocols (`_of_fsspec`)."""


def open_store(url: str | Mapping[str, Any] | TierURL, **options: Any) -> BlockStore:
    """Open the store that `url` names; it is created where there is none, unless `readonly=true`.

    `options` are URL options as keywords. The caller closes the store (it is a context manager).
    Raises a `ConfigurationError` when the URL is wrong and a `StoreOpenError` when the location is.
    """
    parsed = TierURL.parse(url, **options)
    backend = backend_class(parsed)
    checked = parsed.validated(backend.options)
    try:
        store = backend(checked)
    except AttributeError as error:
        if error.name == "capabilities":
            raise _unfinished(parsed, backend, ["capabilities"]) from error
        raise
    if not hasattr(store, "capabilities"):
        store.close()
        raise _unfinished(parsed, backend, ["capabilities"])
    return store


def backend_class(url: TierURL) -> type[BlockStore]:
    """The class that serves `url`: its scheme's, or the one that this one names for its options.

    Raises `UnknownSchemeError` or `MissingDependencyError`.
    """
    scheme = f"{url.format}+{url.scheme}" if url.format else url.scheme
    candidates = _entries().get(scheme) or _of_fsspec(url)
    if not candidates:
        raise UnknownSchemeError(_unknown(url, scheme))
    if len(candidates) > 1:
        claims = ", ".join(sorted(f"{_origin(entry)} ({entry.value})" for entry in candidates))
        raise ConfigurationError(f"{scheme}:// is claimed by more than one package: {claims}. Uninstall all but one")
    entry = candidates[0]
    try:
        backend = entry.load()
    except ModuleNotFoundError as error:
        package = (error.name or entry.module).partition(".")[0]
        raise MissingDependencyError(
            f"{scheme}:// needs the package {package!r}, which is not installed: pip install {package}"
        ) from error
    except ImportError as error:
        raise MissingDependencyError(f"{scheme}:// cannot be used here: {error}") from error
    except AttributeError as error:
        raise ConfigurationError(f"{scheme}:// is {entry.value} of {_origin(entry)}: {error}") from error
    if not (isinstance(backend, type) and issubclass(backend, BlockStore)):
        raise ConfigurationError(f"{scheme}:// is {entry.value} of {_origin(entry)}, which is not a BlockStore class")
    serving = backend.serving(url)
    if inspect.isabstract(serving):
        raise _unfinished(url, serving, sorted(serving.__abstractmethods__))
    return serving


def package_at_fault(error: BaseException) -> str | None:
    """Whose code raised `error`, if it is that of a backend from another package; else None."""
    owners = {
        entry.module.partition(".")[0]: f"package {entry.dist.name}, which serves {entry.name}://"
        for entries in _entries().values()
        for entry in entries
        if entry.dist
    }
    ours = {"kvstore", *(path.partition(":")[0].partition(".")[0] for path in BUILTINS.values())}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        top = str(frame.f_globals.get("__name__")).partition(".")[0]
        if top in ours:
            return None
        if top in owners:
            return owners[top]
    return None


def known_schemes() -> list[str]:
    """Every scheme that has a backend here, built-in or installed."""
    return sorted(_entries())


def _entries() -> dict[str, list[EntryPoint]]:
    """Scheme -> who claims it; one package that is found twice on the path claims it once."""
    builtin = {scheme: [EntryPoint(scheme, path, ENTRY_POINT_GROUP)] for scheme, path in BUILTINS.items()}
    installed: dict[str, dict[str, EntryPoint]] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        installed.setdefault(entry.name, {}).setdefault(entry.value, entry)
    return {scheme: list(claims.values()) for scheme, claims in installed.items()} | builtin


def _of_fsspec(url: TierURL) -> list[EntryPoint]:
    """Who serves `zarr+scheme://` and `protocol::scheme://`, where fsspec knows all of the protocols."""
    protocols = url.scheme.split("::")
    if url.format not in (None, "zarr") or (url.format is None and len(protocols) == 1):
        return []
    registry: Any = importlib.import_module("fsspec.registry")  # which has no types
    known = set(registry.available_protocols()) >= set(protocols)
    return [EntryPoint(url.scheme, _OBJECTS, ENTRY_POINT_GROUP)] if known else []


def _unfinished(url: TierURL, backend: type[BlockStore], lacks: list[str]) -> ConfigurationError:
    """A class that a package has registered, and that is no whole backend."""
    return ConfigurationError(
        f"{url.scheme}:// is {backend.__module__}:{backend.__qualname__}, which lacks {', '.join(lacks)}: its package"
        " has to define that (backends/README.md); report it there"
    )


def _origin(entry: EntryPoint) -> str:
    return f"package {entry.dist.name}" if entry.dist else "kvstore"


def _unknown(url: TierURL, scheme: str) -> str:
    known = known_schemes()
    close = difflib.get_close_matches(scheme, known, 1)
    guess = f" Did you mean {close[0]}://?" if close else ""
    return (
        f"{url}: no backend for {scheme}://.{guess} Known here: {', '.join(known)}. A package that is installed adds"
        f" its schemes with entry points in the group {ENTRY_POINT_GROUP}"
    )
