"""Blocks of a store of names and values that are not to come back, also those that no manifest names.

For the verbs of `store`, within one of them; the tombstones are `kvstore.graveyard`'s, on the shelf of `hooks`.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from kvstore.keyvalue.hooks import FULL
from kvstore.types import Unseen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.graveyard import Graveyard
    from kvstore.keyvalue.books import Books
    from kvstore.keyvalue.hooks import KeyValueHooks

__all__ = ["purge_names", "purge_unseen", "unseen"]

_BLOCK = re.compile("([0-9a-f]{32})-[0-9]+-[0-9a-f]+")


def purge_names(store: KeyValueHooks, graves: Graveyard, names: Sequence[str], until: int) -> list[bool]:
    """Remove the blocks of these names; whether there was one. They are refused `until` then: ns since the epoch, or 0.

    The tombstones first, so that who learns of them in time stores nothing behind the removal.
    """
    removed = [False] * len(names)
    if until and not _buried(graves, names, until):
        removed = list(store.remove_many(names))  # where there was no room for tombstones, there is now
        graves.bury(list(dict.fromkeys(names)), until)
    return [one or other for one, other in zip(removed, store.remove_many(names), strict=True)]


def _buried(graves: Graveyard, names: Sequence[str], until: int) -> bool:
    """Bury blocks; False where there is no room for that."""
    try:
        graves.bury(list(dict.fromkeys(names)), until)
    except OSError as error:
        if error.errno not in FULL:
            raise
        return False
    return True


def unseen(store: KeyValueHooks, books: Books) -> list[Unseen]:
    """Blocks whose manifest is gone, as a device that evicts may take it, or damaged. Asks for every name."""
    counts = Counter(names[1] for name in store.all_names("") if (names := _BLOCK.fullmatch(name)))
    manifests = books.manifests()
    bad = {name for name, space in manifests.items() if space is None}
    return [
        Unseen(
            name,
            f"namespace {name} has {'a damaged' if name in bad else 'no'} manifest: what is in it is found again"
            " when an engine stores into it; kvstore purge --all removes it",
            counts[name],
        )
        for name in sorted(bad | (counts.keys() - manifests.keys()))
    ]


def purge_unseen(store: KeyValueHooks, books: Books, graves: Graveyard, gone: Sequence[Unseen], until: int) -> None:
    """Purge what `unseen` told of, blocks and manifests."""
    for one in gone:
        blocks = [name for name in store.all_names(f"{one.namespace}-") if _BLOCK.fullmatch(name)]
        purge_names(store, graves, blocks, until)
        books.drop_manifest(one.namespace)
