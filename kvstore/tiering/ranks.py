"""Stores into blocks of which every rank writes its own part: a block counts when the last part has arrived.

Stands between an engine with several ranks and the manager's `prepare_store` and `complete_store`, which know of one
writer. Lookups and loads need nothing of the kind: a block that was published is whole.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from kvstore.types import NO_PARENT, NO_POSITION

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.shards import Shards
    from kvstore.tiering.manager import TieringManager
    from kvstore.tiering.primary import Slot
    from kvstore.types import BlockKey

__all__ = ["ShardedStores"]


@dataclass(slots=True)
class _Store:
    """One block that is being written."""

    slot: Slot
    owing: set[int]
    deadline: float
    given_up: bool = False


class ShardedStores:
    """Slots for blocks that several ranks fill, and who of them still owes his part.

    `shards` has one `Shards` per KV-cache group of the manager's namespace. A block whose ranks have not all reported
    `timeout` seconds after its slot was given is given up.

    A block that is given up (a rank failed, is lost, or is late) is not stored: requests behind it are released to
    recompute at once. Its slot is given back when no rank can be writing into it any more, and until then the key is
    not stored again. Nobody but the rank knows whether its copy is still under way: one that never reports has to be
    declared lost (`rank_lost`).

    Raises `ValueError` when `shards` are not those of the namespace's layouts.
    Threads: the manager's.
    """

    def __init__(self, manager: TieringManager, shards: Sequence[Shards], *, timeout: float = 30.0) -> None:
        if tuple(part.layout for part in shards) != manager.namespace.layouts:
            raise ValueError("shards have to be those of the namespace's layouts, one per KV-cache group, in order")
        self._manager = manager
        self._writers = [part.writers for part in shards]
        self._timeout = timeout
        self._stores: dict[BlockKey, _Store] = {}  # in the order of their deadlines
        self.given_up = 0
        """Blocks that were not stored because a rank failed, was lost or was late."""

    @property
    def waiting(self) -> int:
        """Blocks of which some rank still owes its part, given up or not."""
        return len(self._stores)

    def prepare_store(
        self, keys: Sequence[BlockKey], *, position: int = NO_POSITION, parent: bytes = NO_PARENT, tenant: str = ""
    ) -> list[NDArray[np.uint8] | None]:
        """As `TieringManager.prepare_store`; each rank of `Shards.writers` writes its part of a view, and no other.

        A view stays valid until all of them have reported.
        """
        views = self._manager.prepare_store(keys, position=position, parent=parent, tenant=tenant)
        deadline = time.monotonic() + self._timeout
        for number, key in enumerate(keys):
            slot = self._manager.primary.get(key)
            if views[number] is None or slot is None:
                continue
            if key in self._stores:  # given up, and some rank may be about to report that one
                self._manager.complete_store([key], success=False)
                views[number] = None
                continue
            self._stores[key] = _Store(slot, set(self._writers[key.group]), deadline)
        return views

    def complete_store(self, keys: Sequence[BlockKey], rank: int, *, success: bool = True) -> None:
        """`rank` has written its parts of `keys`, or failed to and will not touch them again.

        The last rank's report makes a block a HIT, and it cascades. Raises `ValueError` for a rank that owes nothing of
        a block: it is not among the writers, reported twice, or was declared lost.
        """
        for key in keys:
            store = self._stores.get(key)
            if store is None or rank not in store.owing:
                raise ValueError(f"{key!r}: rank {rank} has no part to write, or has reported it, or was declared lost")
            self._reported(store, rank, success=success)

    def rank_lost(self, rank: int) -> None:
        """`rank` is gone and writes nothing any more: blocks that wait for it are given up, their slots given back."""
        for store in [store for store in self._stores.values() if rank in store.owing]:
            self._reported(store, rank, success=False)

    def step(self) -> None:
        """Once per scheduler step: give up blocks whose ranks are late."""
        now = time.monotonic()
        for store in list(takewhile(lambda store: store.deadline <= now, self._stores.values())):
            self._give_up(store)

    def _reported(self, store: _Store, rank: int, *, success: bool) -> None:
        store.owing.remove(rank)
        if not success:
            self._give_up(store)
        if store.owing:
            return
        key = store.slot.key
        del self._stores[key]
        if store.given_up:
            self._manager.primary.unpin(store.slot)
        else:
            self._manager.complete_store([key])

    def _give_up(self, store: _Store) -> None:
        """Take the key away, and keep the memory until nobody writes into it."""
        if store.given_up:
            return
        store.given_up = True
        self.given_up += 1
        self._manager.primary.pin(store.slot)
        self._manager.complete_store([store.slot.key], success=False)
        self._manager.primary.discard(store.slot)
