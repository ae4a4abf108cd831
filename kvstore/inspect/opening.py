"""Opening a tier to look at it: for notebooks (`kvstore.inspect.open`) and for the commands that only look.

And how a command opens one that it writes into: as large as it is (`with_own_capacity`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import (
    CapacityMismatchError,
    InvalidOptionError,
    KVStoreError,
    OlderFormatError,
    StoreDamagedError,
    StoreFullError,
    StoreNotFoundError,
)
from kvstore.namespace import is_namespace_name
from kvstore.registry import backend_class, open_store
from kvstore.url import CAPACITY, READONLY, format_size

if TYPE_CHECKING:
    from kvstore.abc import BlockStore
    from kvstore.url import Capacity, TierURL

__all__ = ["capacity_in_bytes", "open_to_look", "with_own_capacity"]


def open_to_look(url: TierURL) -> tuple[BlockStore, str]:
    """Open a tier so that looking at it changes nothing: a location that does not exist is an error, not created.

    Every option is checked. A `capacity` other than the tier's own is passed over: it would take effect when the tier
    is opened for writing, and looking depends on none. The text says so; it is empty where there is nothing to say.
    """
    checked = url.validated(backend_class(url).options)
    if "readonly" in url.raw_options and not checked.option(READONLY):
        raise InvalidOptionError(f"{url}: who only looks opens every tier read-only: leave out readonly")
    options = {**url.raw_options, "readonly": True}
    try:
        return open_store(replace(url, raw_options=options)), ""
    except (CapacityMismatchError, StoreFullError):
        if options.pop("capacity", None) is None:
            raise
        store = open_store(replace(url, raw_options=options))
        return store, f"{url}: the capacity asked for is not the tier's, {_capacity(store)}"
    except StoreNotFoundError as error:
        if url.scheme != "memory":
            raise
        raise StoreNotFoundError(f"{error}. Blocks in the memory of another process cannot be seen from here") from None


def with_own_capacity(url: TierURL) -> tuple[TierURL, str]:
    """The URL by which a command opens a tier that it writes into and that is to stay as large as it is.

    A local tier keeps the last capacity that it was opened with, and evicts down to it: that is for engines to say. So
    a `capacity` goes out of the URL where the tier has the same, and stays where there is no tier yet. Where the tier's
    own cannot be told, as its records are gone or damaged, it goes, too, and the text says so; it is empty elsewhere.
    What follows an opening by itself, a sweep say, goes in any case.

    Raises `CapacityMismatchError` where the tier has another one, and `ConfigurationError` for a wrong URL.
    """
    checked = url.validated(backend_class(url).options)
    url = _without(url, "sweep")
    wanted = checked.option(CAPACITY)
    if wanted is None:
        return url, ""
    own = _without(url, CAPACITY.name)
    try:
        with open_store(replace(own, raw_options={**own.raw_options, READONLY.name: True})) as store:
            if not (store.capabilities.persistent and store.capabilities.capacity_is_exact):
                return url, ""  # each opener has its own
            if capacity_in_bytes(url, wanted) == store.usage().capacity:
                return own, ""
            raise CapacityMismatchError(
                f"{url}: the URL says {_said(url, wanted)}, and the tier's own capacity is another, {_capacity(store)}:"
                " leave capacity= out, and the tier stays as large as it is. Who opens it alone, an engine say, gives"
                " it another capacity; what is over a size goes with kvstore gc --capacity"
            )
    except StoreNotFoundError:
        return (own, _untold(own)) if _has_blocks(Path(url.location)) else (url, "")
    except (StoreDamagedError, OlderFormatError):
        return own, _untold(own)
    except CapacityMismatchError:
        raise
    except KVStoreError:  # which the opening that follows says as well
        return own, ""


def capacity_in_bytes(url: TierURL, capacity: Capacity) -> int:
    """A capacity in bytes, for the tier that a URL names. Raises `InvalidOptionError` for a share of no local disk."""
    path = Path(url.location)
    if capacity.bytes is None and not path.is_absolute():
        raise InvalidOptionError(f"{url}: there is no disk to take a share of: give the capacity in bytes")
    return capacity.resolve(next((place for place in (path, *path.parents) if place.exists()), path))


def _without(url: TierURL, *names: str) -> TierURL:
    return replace(url, raw_options={name: value for name, value in url.raw_options.items() if name not in names})


def _has_blocks(folder: Path) -> bool:
    """Whether namespaces stand in a local folder, of whose catalogue nothing is left."""
    return folder.is_absolute() and folder.is_dir() and any(is_namespace_name(path.name) for path in folder.iterdir())


def _untold(url: TierURL) -> str:
    return (
        f"{url}: which capacity the tier had cannot be told any more, so it is opened without one, and nothing is"
        " evicted: the next engine that opens it with capacity= gives it that"
    )


def _said(url: TierURL, wanted: Capacity) -> str:
    return f"capacity={url.raw_options[CAPACITY.name]} ({format_size(capacity_in_bytes(url, wanted), exact=True)})"


def _capacity(store: BlockStore) -> str:
    capacity = store.usage().capacity
    return "which has none" if capacity is None else format_size(capacity, exact=True)
