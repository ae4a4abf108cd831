"""One location for one store, for tests that go past the store to the disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import raw

from kvstore import open_store
from kvstore.testing.elsewhere import in_another_process
from kvstore.testing.hooks import StoreHooks
from kvstore.url import TierURL

if TYPE_CHECKING:
    from kvstore import BlockKey, BlockStore, Namespace


@dataclass(frozen=True)
class Tier:
    """A URL and, where it is on disk, its path. Opened as often, and from as many processes, as a test needs."""

    url: str
    path: Path | None = None

    @classmethod
    def at(cls, url: str) -> Tier:
        """The local tier of that URL."""
        return cls(url, Path(TierURL.parse(url).location))

    def open(self, **options: Any) -> BlockStore:
        """A store of its own on this location, with further URL options."""
        return open_store(self.url, **options)


class PastTheStore(StoreHooks):
    """What the device has of a block, read and written in another process."""

    def raw_get(self, url: str, namespace: Namespace, key: BlockKey) -> bytes:
        return in_another_process(raw.read, Tier.at(url), (namespace, key))

    def raw_set(self, url: str, namespace: Namespace, key: BlockKey, data: bytes | None) -> None:
        if data is None:
            in_another_process(raw.remove, Tier.at(url), (namespace, key))
        else:
            in_another_process(raw.put, Tier.at(url), (namespace, key), data)
