"""What a secondary tier is told beside transfers: blocks that were used, and what requests say of blocks.

Noted on the manager's thread, handed to the transfer threads when those have nothing better to do, one call of each
kind at a time. Both are of use and neither is needed: what a busy tier cannot take is dropped, and nobody waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.marks import MarkOutcome
from kvstore.tiering.jobs import TierJob, Touch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.abc import BlockStore
    from kvstore.marks import Mark
    from kvstore.namespace import Namespace
    from kvstore.tiering.counters import Counters
    from kvstore.tiering.transfer import TransferPool
    from kvstore.types import BlockKey

__all__ = ["MAX_HINTS", "Hints", "Marking"]

MAX_HINTS = 65536
"""Keys noted of each kind while the tier is busy; more are dropped."""


class Marking(TierJob):
    """Say of blocks what was said of them; `said` are marks, each with the blocks that it is for."""

    def __init__(
        self, store: BlockStore, namespace: Namespace, said: Sequence[tuple[Mark, Sequence[BlockKey]]]
    ) -> None:
        super().__init__(store, namespace)
        self.said = said
        self.outcomes: list[MarkOutcome] = []

    def work(self) -> None:
        for mark, keys in self.said:
            self.outcomes += self.store.mark_many(self.namespace, keys, mark)


class Hints:
    """For one store. Threads: one, the manager's, makes all calls. `under_way` are its calls, by kind."""

    def __init__(self, store: BlockStore, namespace: Namespace, counters: Counters) -> None:
        self._store, self._namespace, self._counters = store, namespace, counters
        self._touched: dict[BlockKey, None] = {}
        self._marked: dict[Mark, dict[BlockKey, None]] = {}
        self._marked_keys = 0
        self.under_way: dict[type[TierJob], TierJob] = {}

    @property
    def idle(self) -> bool:
        """Nothing is noted or under way."""
        return not (self._touched or self._marked or self.under_way)

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """They were used; of several the last is the oldest."""
        if len(self._touched) < MAX_HINTS:
            self._touched.update(dict.fromkeys(keys))

    def mark(self, keys: Sequence[BlockKey], mark: Mark) -> None:
        """This is said of them."""
        if not self._store.capabilities.marks:
            self._counters.tell("marks", "this store keeps no labels, pins and tenants; what is said of blocks is lost")
        elif self._marked_keys + len(keys) > MAX_HINTS:
            self._counters.add(marks_dropped=len(keys))
            self._counters.tell("marks", "labels and pins are dropped; those of %d blocks wait", self._marked_keys)
        else:
            self._marked.setdefault(mark, {}).update(dict.fromkeys(keys))
            self._marked_keys += len(keys)

    def submit(self, pool: TransferPool[TierJob]) -> None:
        """Hand over what was noted, unless a call of that kind is under way."""
        if self._touched and Touch not in self.under_way:
            self._start(pool, Touch(self._store, self._namespace, list(self._touched)))
            self._touched.clear()
        if self._marked and Marking not in self.under_way:
            said = [(mark, list(keys)) for mark, keys in self._marked.items()]
            self._start(pool, Marking(self._store, self._namespace, said))
            self._marked.clear()
            self._marked_keys = 0

    def _start(self, pool: TransferPool[TierJob], hint: TierJob) -> None:
        self.under_way[type(hint)] = hint
        pool.submit(hint)

    def settle(self, hint: TierJob) -> None:
        """It has ended."""
        self.under_way.pop(type(hint), None)
        if hint.error is not None:
            self._counters.failed("touch" if isinstance(hint, Touch) else "mark", hint.error)
        if isinstance(hint, Marking) and hint.outcomes:
            unpinned = hint.outcomes.count(MarkOutcome.UNPINNED)
            self._counters.add(marked=hint.outcomes.count(MarkOutcome.MARKED) + unpinned, pins_refused=unpinned)
            if unpinned:
                self._counters.tell("pins", "%d blocks were not pinned: no more of the capacity may be", unpinned)

    def cancel(self, pool: TransferPool[TierJob]) -> None:
        """Forget what was noted and what has not begun."""
        self._touched.clear()
        self._marked.clear()
        self._marked_keys = 0
        for kind, hint in list(self.under_way.items()):
            if pool.cancel(hint):
                del self.under_way[kind]
