"""One location for one store, for tests that go past the store to the disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore import open_store
from kvstore.url import TierURL

if TYPE_CHECKING:
    from kvstore import BlockStore


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
