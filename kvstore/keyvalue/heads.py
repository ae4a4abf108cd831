"""Blocks of a store of names and values by the heads of their values, which say all but the bytes.

For the verbs that count, list and date blocks (`store`), and for what a `ttl` removes before a put. The head's format
is `kvstore.values`'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.values import HEAD_BYTES, Facts, key_of, name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.keyvalue.hooks import KeyValueHooks
    from kvstore.namespace import Namespace
    from kvstore.retention import Retention
    from kvstore.types import BlockKey

__all__ = ["Heads"]


class Heads:
    """Of one store, through its hooks; raises what they raise. Thread-safe as they are."""

    def __init__(self, store: KeyValueHooks, retention: Retention) -> None:
        self._store, self._retention = store, retention

    def keys(self, namespace: Namespace) -> list[BlockKey]:
        """Of all its blocks, by their names alone."""
        names = self._store.all_names(f"{namespace.name}-")
        return [key for name in names if (key := key_of(namespace, name)) is not None]

    def read(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[Facts | None]:
        """What the head of each block says; None where there is no block, `Facts.unknown()` for a damaged one."""
        heads = [bytearray(HEAD_BYTES) for _ in keys]
        reads = ((name_of(namespace, key), [memoryview(head)]) for key, head in zip(keys, heads, strict=True))
        counts = self._store.read_many_into(reads)
        return [
            None if count is None else Facts.unpacked(namespace, key, bytes(head)) or Facts.unknown()
            for key, head, count in zip(keys, heads, counts, strict=True)
        ]

    def has_expired(self, facts: Facts) -> bool:
        """Whether the block has; it is not known when it was last used."""
        return self._retention.has_expired(facts.created, facts.created, self._retention.cutoff())

    def alive(self, namespace: Namespace, keys: Sequence[BlockKey]) -> Iterable[bool]:
        """Whether each block is there and has not expired."""
        if not self._retention:
            return self._store.exist_many([name_of(namespace, key) for key in keys])
        return [facts is not None and not self.has_expired(facts) for facts in self.read(namespace, keys)]

    def remove_expired(self, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
        """Those of the blocks that have."""
        if not self._retention:
            return
        heads = zip(keys, self.read(namespace, keys), strict=True)
        expired = [name_of(namespace, key) for key, facts in heads if facts is not None and self.has_expired(facts)]
        if expired:
            list(self._store.remove_many(expired))
