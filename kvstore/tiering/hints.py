"""What a secondary tier is told beside transfers: blocks that were used, and what requests say of blocks.

Noted on the manager's thread, handed to the transfer threads when those have nothing better to do, one call of each
kind at a time; only there is any key looked at. Both are of use and neither is needed: what a tier cannot take that is
busy, closed or left alone is dropped, and nobody waits. Uses are forgotten silently, since each later one says the same
again. What was said of blocks is counted: a pin that got lost is something that its owner should know.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from kvstore.marks import MarkOutcome
from kvstore.tiering.jobs import Marking, TierJob, Touch

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvstore.abc import BlockStore
    from kvstore.marks import Mark
    from kvstore.namespace import Namespace
    from kvstore.tiering.counters import Counters
    from kvstore.tiering.pool import Jobs
    from kvstore.types import BlockKey

__all__ = ["MAX_HINTS", "Hints"]

T = TypeVar("T")

MAX_HINTS = 65536
"""Keys noted of each kind while the tier is busy; beyond, the oldest notes are dropped."""


class _Notes(Generic[T]):
    """Notes in order, each about a number of keys."""

    def __init__(self) -> None:
        self.notes: deque[tuple[T, int]] = deque()
        self.keys = 0

    def add(self, note: T, count: int) -> int:
        """Note it; how many keys of older notes, or of this one, were dropped for that."""
        self.notes.append((note, count))
        self.keys += count
        before = self.keys
        while self.keys > MAX_HINTS:
            self.keys -= self.notes.popleft()[1]
        return before - self.keys

    def take(self) -> list[T]:
        """All of them."""
        taken = [note for note, _ in self.notes]
        self.clear()
        return taken

    def clear(self) -> int:
        """Forget them; how many keys they were about."""
        keys, self.keys = self.keys, 0
        self.notes.clear()
        return keys


class Hints:
    """For one store. Threads: one, the manager's, makes all calls. `under_way` are its calls, by kind."""

    def __init__(self, store: BlockStore, namespace: Namespace, counters: Counters) -> None:
        self._store, self.namespace, self._counters = store, namespace, counters
        self._used: _Notes[Collection[BlockKey]] = _Notes()
        self._said: _Notes[tuple[Mark, Collection[BlockKey]]] = _Notes()
        self.under_way: dict[type[TierJob], TierJob] = {}

    @property
    def idle(self) -> bool:
        """Nothing is noted or under way."""
        return not (self._used.notes or self._said.notes or self.under_way)

    def touch(self, keys: Collection[BlockKey]) -> None:
        """They were used, after those of earlier calls; of several the last is the oldest."""
        if keys:
            self._used.add(keys, len(keys))

    def mark(self, keys: Collection[BlockKey], mark: Mark) -> None:
        """This is said of them."""
        if not keys:
            return
        if not self._store.capabilities.marks:
            self._counters.tell("marks", "this store keeps no labels, pins and tenants; what is said of blocks is lost")
            return
        dropped = self._said.add((mark, keys), len(keys))
        if dropped:
            self._counters.add(marks_dropped=dropped)
            self._counters.tell("marks", "labels and pins are dropped: more than %d wait to be written", MAX_HINTS)

    def submit(self, pool: Jobs[TierJob]) -> None:
        """Hand over what was noted, unless a call of that kind is under way."""
        if self._used.notes and Touch not in self.under_way:
            self._start(pool, Touch(self._store, self.namespace, self._used.take()))
        if self._said.notes and Marking not in self.under_way:
            self._start(pool, Marking(self._store, self.namespace, self._said.take()))

    def _start(self, pool: Jobs[TierJob], hint: TierJob) -> None:
        self.under_way[type(hint)] = hint
        pool.submit(hint)

    def settle(self, hint: TierJob) -> None:
        """It has ended."""
        self.under_way.pop(type(hint), None)
        if hint.error is not None:
            self._counters.failed("touch" if isinstance(hint, Touch) else "mark", hint.error)
        if isinstance(hint, Marking) and hint.error is not None:
            self._counters.add(marks_dropped=hint.blocks)
        elif isinstance(hint, Marking):
            unpinned = hint.outcomes.count(MarkOutcome.UNPINNED)
            self._counters.add(marked=hint.outcomes.count(MarkOutcome.MARKED) + unpinned, pins_refused=unpinned)
            if unpinned:
                self._counters.tell("pins", "%d blocks were not pinned: no more of the capacity may be", unpinned)

    def cancel(self, pool: Jobs[TierJob]) -> None:
        """Forget what was noted and what has not begun."""
        self._used.clear()
        dropped = self._said.clear()
        for kind, hint in list(self.under_way.items()):
            if pool.cancel(hint):
                del self.under_way[kind]
                dropped += hint.blocks if isinstance(hint, Marking) else 0
        if dropped:
            self._counters.add(marks_dropped=dropped)
