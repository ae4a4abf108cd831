"""Opening a tier to look at it: for notebooks (`kvstore.inspect.open`) and for the commands that only look."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.errors import CapacityMismatchError, InvalidOptionError, StoreFullError, StoreNotFoundError
from kvstore.registry import backend_class, open_store
from kvstore.url import READONLY, format_size

if TYPE_CHECKING:
    from kvstore.abc import BlockStore
    from kvstore.url import TierURL

__all__ = ["open_to_look"]


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


def _capacity(store: BlockStore) -> str:
    capacity = store.usage().capacity
    return "which has none" if capacity is None else format_size(capacity, exact=True)
