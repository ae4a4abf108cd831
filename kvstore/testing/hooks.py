"""What the author of a backend fills in for the suite, and what the suite asks a store before it expects something."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.registry import backend_class, open_store
from kvstore.url import CAPACITY, TierURL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.types import BlockKey

__all__ = ["StoreHooks", "knows_capacity"]


def knows_capacity(url: str) -> bool:
    """Whether the backend of `url` takes a cap, and so evicts."""
    return CAPACITY in backend_class(TierURL.parse(url)).options


class StoreHooks:
    """Override `url`; and `raw_get` and `raw_set` where blocks can be reached past the store."""

    @pytest.fixture
    def url(self) -> str:
        """A URL of the backend at which there is nothing yet, another one for each test."""
        raise NotImplementedError(f"{type(self).__name__} has to override the fixture `url`: a URL with nothing there")

    def raw_get(self, url: str, namespace: Namespace, key: BlockKey) -> bytes:
        """All that the device has of one block, framing included, read past the store (which is open meanwhile)."""
        raise NotImplementedError

    def raw_set(self, url: str, namespace: Namespace, key: BlockKey, data: bytes | None) -> None:
        """Have `data` there in the block's place, where there may be none, past the store; None takes it away."""
        raise NotImplementedError

    # What follows is not for overriding.

    @pytest.fixture
    def store(self, url: str) -> Iterator[BlockStore]:
        """An open, empty store."""
        with open_store(url) as opened:
            yield opened

    @pytest.fixture
    def persistent_url(self, url: str) -> str:
        """The URL, where blocks outlive the process."""
        with open_store(url) as opened:
            if not opened.capabilities.persistent:
                pytest.skip("not persistent, as its capabilities say")
        return url

    @pytest.fixture
    def shared_url(self, url: str) -> str:
        """The URL, where several processes may have it open."""
        with open_store(url) as opened:
            if not opened.capabilities.shared:
                pytest.skip("not shared between processes, as its capabilities say")
        return url

    @pytest.fixture
    def bounded_url(self, url: str) -> str:
        """The URL, where the backend knows `capacity`, and so evicts."""
        if not knows_capacity(url):
            pytest.skip("it has no option `capacity`")
        with open_store(url) as opened:
            if not opened.capabilities.capacity_is_exact:
                pytest.skip("no put keeps its capacity, as its capabilities say")
        return url
