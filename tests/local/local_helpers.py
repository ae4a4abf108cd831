"""What tests of local tiers share: outcomes by short names, where a tier keeps its files, a use of every verb."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore import BlockLayout, GetOutcome, Namespace, PutOutcome, open_store
from kvstore.errors import StoreDamagedError, TierUnavailable
from kvstore.testing.supply import SPACE, get, key, keys, writes
from kvstore_zarr.metadata import NamespaceTree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HIT, MISS, CORRUPT = GetOutcome.HIT, GetOutcome.MISS, GetOutcome.CORRUPT
STORED, EXISTS, FULL, FAILED = PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.FULL, PutOutcome.FAILED
REFUSED = PutOutcome.REFUSED
TINY = Namespace("tiny", "revision-1", (BlockLayout.opaque(64),), block_tokens=1)


def file_of(root: Path, number: int, space: Namespace = SPACE) -> Path:
    return root / NamespaceTree(space).block(key(number))


def occupied(root: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in (root, *root.rglob("*")))


def catalogue_of(root: Path) -> Path:
    return next(root.rglob("data.mdb"))


def use(url: str) -> list[str]:
    """Each error that every verb in turn raises, by the verb's name; what is not of kvstore's tree fails the caller."""
    try:
        store = open_store(url)
    except StoreDamagedError as error:
        return [f"open: {error}"]
    said: list[str] = []
    verbs: dict[str, Callable[[], object]] = {
        "put": lambda: store.put_many(TINY, writes(range(5000, 5050), TINY)),
        "get": lambda: get(store, range(0, 300, 10), TINY),
        "contains": lambda: store.contains_many(TINY, keys(range(0, 300, 10))),
        "scan": lambda: list(store.scan(TINY)),
        "usage": store.usage,
        "namespaces": store.namespaces,
        "touch": lambda: store.touch_many(TINY, keys(range(300))),
        "delete": lambda: store.delete_many(TINY, keys(range(20))),
        "close": store.close,
    }
    for name, verb in verbs.items():
        try:
            verb()
        except TierUnavailable as error:
            said.append(f"{name}: {error}")
    return said
