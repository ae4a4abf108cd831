"""The calls that a secondary tier makes on its transfer threads: one backend verb each, for a batch of blocks.

Made and settled on the manager's thread; `work` runs on a transfer thread and touches nothing but the job itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.tiering.transfer import Job
from kvstore.types import BlockRead, BlockWrite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.tiering.primary import Slot
    from kvstore.types import BlockKey, GetOutcome, PutOutcome

__all__ = ["Load", "Lookup", "Store", "TierJob", "Touch", "Transfer"]


class TierJob(Job):
    """A call to `store` about blocks of `namespace`."""

    def __init__(self, store: BlockStore, namespace: Namespace) -> None:
        super().__init__()
        self.store = store
        self.namespace = namespace
        self.given_up = False


class Lookup(TierJob):
    """Which of `keys` are there."""

    def __init__(self, store: BlockStore, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
        super().__init__(store, namespace)
        self.keys = keys
        self.found: list[bool] = []

    def work(self) -> None:
        found = self.store.contains_many(self.namespace, self.keys)
        _check_length(found, self.keys)
        self.found = found


class Touch(TierJob):
    """Make `keys` young."""

    def __init__(self, store: BlockStore, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
        super().__init__(store, namespace)
        self.keys = keys

    def work(self) -> None:
        self.store.touch_many(self.namespace, self.keys)


class Transfer(TierJob):
    """Bytes between the slots of the primary tier and the store; each slot is pinned for as long as this lives."""

    def __init__(self, store: BlockStore, namespace: Namespace, slots: Sequence[Slot]) -> None:
        super().__init__(store, namespace)
        self.slots = slots
        self.nbytes = sum(slot.view.nbytes for slot in slots)


class Load(Transfer):
    """From the store into the slots."""

    urgent = True
    outcomes: Sequence[GetOutcome] = ()

    def work(self) -> None:
        outcomes = self.store.get_many_into(
            self.namespace, [BlockRead(slot.key, slot.view.data) for slot in self.slots]
        )
        _check_length(outcomes, self.slots)
        self.outcomes = outcomes


class Store(Transfer):
    """From the slots into the store."""

    outcomes: Sequence[PutOutcome] = ()

    def work(self) -> None:
        outcomes = self.store.put_many(
            self.namespace, [BlockWrite(slot.key, slot.view.data, slot.position, slot.parent) for slot in self.slots]
        )
        _check_length(outcomes, self.slots)
        self.outcomes = outcomes


def _check_length(answers: Sequence[object], questions: Sequence[object]) -> None:
    """A third party's backend may break the contract; its tier then counts a failed call."""
    if len(answers) != len(questions):
        raise RuntimeError(f"the backend gave {len(answers)} answers about {len(questions)} blocks")
