"""The calls that a secondary tier makes on its transfer threads: one backend verb each, for a batch of blocks.

Made and settled on the manager's thread. Its `calls` are made elsewhere, one after the other: on a transfer thread, or
in the process that has the store (`pool_apart.py`). They touch nothing but the job itself and the memory that it was
given. What memory that is depends on whether the call can hang:

::

    local      Load:         store ──► slots                        Store:  slots ──► store
    can hang   StagedLoad:   store ──► staging ──if wanted──► slots
               CopyOut:      slots ──► staging, then the slots are free
               StagedStore:  staging ──► store

A local call that hangs in the kernel keeps its slots for as long as it hangs. The call of a `StagedLoad` or a
`StagedStore` has no slot to keep. What touches slots there are copies in memory, which end by themselves.

**A `StagedLoad` that lands while it is being cancelled.** "Is it still wanted?" and the copy into the slots have to be
one step for whoever cancels: a flag looked at before the copy lets a cancellation, and the slots' next owners, in
between the two. A lock around both would let the scheduler wait for the copy, or for a thread that lost its CPU in
the middle of it. So there is one token, and who takes it decides for good. The transfer thread takes it to copy: the
slots are then kept, as for a local load, until it has, which is a matter of microseconds. Or the manager's thread takes
it (`withdraw`): nothing of this job will ever touch a slot then, and the slots are free at once.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.tiering.batches import STORE_BATCH_BYTES
from kvstore.tiering.pool import Job, Once
from kvstore.types import BlockRead, BlockWrite, GetOutcome

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from kvstore.abc import BlockStore
    from kvstore.marks import Mark, MarkOutcome
    from kvstore.namespace import Namespace
    from kvstore.tiering.primary import Slot
    from kvstore.tiering.staging import Buffer
    from kvstore.types import BlockKey, PutOutcome

__all__ = [
    "Calls",
    "Copy",
    "CopyOut",
    "Load",
    "Lookup",
    "Marking",
    "StagedLoad",
    "StagedStore",
    "Store",
    "TierJob",
    "Touch",
    "Transfer",
    "Verb",
]


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of a store, with its arguments: the namespace and the blocks first."""

    name: str
    arguments: tuple[Any, ...]

    def made(self, store: BlockStore) -> Any:
        """Its answer, from `store`."""
        return getattr(store, self.name)(*self.arguments)


@dataclass(frozen=True, slots=True)
class Copy(Verb):
    """Blocks copied from staging memory into slots, or the other way: `arguments` are pairs, into and from."""

    def made(self, store: BlockStore) -> None:
        del store
        for into, source in self.arguments[0]:
            np.copyto(into, source)


FEW = 8
"""Blocks of a call that a scheduler's thread can put into a message: some 5 µs each."""

Calls = Generator[Verb, Any]
"""Yields a call, and is sent its answer; one that fails ends the job."""


class TierJob(Job):
    """Calls to `store` about blocks of `namespace`."""

    def __init__(self, store: BlockStore, namespace: Namespace) -> None:
        super().__init__()
        self.store = store
        self.namespace = namespace
        self.given_up = False

    @abstractmethod
    def calls(self) -> Calls:
        """What is to be called, one after the other, and what is made of the answers."""

    def work(self) -> None:
        calls = self.calls()
        with contextlib.suppress(StopIteration):
            call = next(calls)
            while True:
                call = calls.send(call.made(self.store))

    def verb(self, name: str, blocks: Sequence[object], *more: object) -> Verb:
        """A call about blocks of the job's namespace."""
        return Verb(name, (self.namespace, blocks, *more))


class Lookup(TierJob):
    """Which of `keys` are there."""

    def __init__(self, store: BlockStore, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
        super().__init__(store, namespace)
        self.keys = keys
        self.found: list[bool] = []
        self.about = len(keys)

    def calls(self) -> Calls:
        found = yield self.verb("contains_many", self.keys)
        _check_length(found, self.keys)
        self.found = found


class Touch(TierJob):
    """Make blocks young: those of a later one of `uses` younger, and within each the first the youngest."""

    def __init__(self, store: BlockStore, namespace: Namespace, uses: Sequence[Iterable[BlockKey]]) -> None:
        super().__init__(store, namespace)
        self.uses = uses

    def calls(self) -> Calls:
        keys = dict.fromkeys(chain.from_iterable(reversed(self.uses)))
        yield self.verb("touch_many", list(keys))


class Marking(TierJob):
    """Say of blocks what was said of them; `said` are marks, each with the blocks that it is for."""

    def __init__(
        self, store: BlockStore, namespace: Namespace, said: Sequence[tuple[Mark, Collection[BlockKey]]]
    ) -> None:
        super().__init__(store, namespace)
        self.said = said
        self.blocks = sum(len(keys) for _, keys in said)
        self.outcomes: list[MarkOutcome] = []

    def calls(self) -> Calls:
        by_mark: dict[Mark, dict[BlockKey, None]] = {}
        for mark, keys in self.said:
            by_mark.setdefault(mark, {}).update(dict.fromkeys(keys))
        for mark, keys in by_mark.items():
            self.outcomes += yield self.verb("mark_many", list(keys), mark)


class Transfer(TierJob):
    """Bytes on their way between the primary tier and the store.

    `slots` are those that it may touch: each is pinned until the job has ended or was withdrawn. `keys` and `sizes` are
    those of its blocks, slots or no slots. `buffers` are staging memory lent to it, until it has ended.
    """

    def __init__(self, store: BlockStore, namespace: Namespace, slots: Sequence[Slot]) -> None:
        super().__init__(store, namespace)
        self.slots = slots
        self.keys = [slot.key for slot in slots]
        self.marks = {slot.key: slot.mark for slot in slots if slot.mark is not None}
        self.buffers: Sequence[Buffer] = ()
        self.sizes = [slot.view.nbytes for slot in slots]
        self.nbytes = sum(self.sizes)
        self.about = len(slots)

    def withdraw(self) -> bool:
        """Of a job that has begun: True if it will not touch its slots from now on, and has not yet."""
        return False


class Load(Transfer):
    """From the store into the slots."""

    urgent = True
    outcomes: Sequence[GetOutcome] = ()
    hangs = False
    """Its call is under way for longer than it may be."""

    def calls(self) -> Calls:
        yield from self.read([BlockRead(slot.key, slot.view.data) for slot in self.slots])

    def read(self, blocks: Sequence[BlockRead]) -> Calls:
        """The call itself."""
        outcomes = yield self.verb("get_many_into", blocks)
        _check_length(outcomes, blocks)
        self.outcomes = outcomes


class StagedLoad(Load):
    """From the store into staging, and from there into the slots if somebody still wants it."""

    def __init__(self, store: BlockStore, namespace: Namespace, slots: Sequence[Slot]) -> None:
        super().__init__(store, namespace, slots)
        self._landing = Once()

    def calls(self) -> Calls:
        pairs = zip(self.keys, self.buffers, strict=True)
        yield from self.read([BlockRead(key, buffer.memory.data) for key, buffer in pairs])
        if self._landing():
            yield self.copy()

    def copy(self) -> Copy:
        """Into the slots: of blocks that arrived, and of no others."""
        arrived = zip(self.slots, self.buffers, self.outcomes, strict=True)
        hits = [(slot.view, buffer.memory) for slot, buffer, outcome in arrived if outcome is GetOutcome.HIT]
        return Copy("copy_many", (hits,))

    def withdraw(self) -> bool:
        return self._landing()


class Store(Transfer):
    """From the slots into the store, together with stores that wait behind it: a local store commits twice a call."""

    outcomes: Sequence[PutOutcome] = ()

    def takes_along(self, others: Sequence[Job], another: Job) -> bool:
        if type(self) is not Store or type(another) is not Store or another.namespace is not self.namespace:
            return False
        along = sum(other.nbytes for other in others if isinstance(other, Store))
        return self.nbytes + along + another.nbytes <= STORE_BATCH_BYTES

    def calls(self) -> Calls:
        stores = [self, *(job for job in self.others if isinstance(job, Store))]
        slots = [slot for store in stores for slot in store.slots]
        blocks = [BlockWrite(slot.key, slot.view.data, slot.position, slot.parent, slot.tenant) for slot in slots]
        yield from self.write(blocks)
        outcomes = iter(self.outcomes)
        for store in stores:
            store.outcomes = list(islice(outcomes, len(store.slots)))

    def write(self, blocks: Sequence[BlockWrite]) -> Calls:
        """The call itself."""
        outcomes = yield self.verb("put_many", blocks)
        _check_length(outcomes, blocks)
        self.outcomes = outcomes


class CopyOut(Transfer):
    """From the slots into staging. Urgent, because it frees slots and ends soon: it runs while stores hang."""

    urgent = True
    blocks: Sequence[BlockWrite] = ()

    def calls(self) -> Calls:
        pairs = zip(self.slots, self.buffers, strict=True)
        yield Copy("copy_many", ([(buffer.memory, slot.view) for slot, buffer in pairs],))
        self.blocks = [
            BlockWrite(slot.key, buffer.memory.data, slot.position, slot.parent, slot.tenant)
            for slot, buffer in zip(self.slots, self.buffers, strict=True)
        ]


class StagedStore(Store):
    """What a `CopyOut` has copied, from staging into the store."""

    def __init__(self, copied: CopyOut) -> None:
        super().__init__(copied.store, copied.namespace, ())
        self.keys, self.sizes, self.nbytes, self.about = copied.keys, copied.sizes, copied.nbytes, copied.about
        self.marks = copied.marks
        self.buffers = copied.buffers
        self._blocks = copied.blocks

    def calls(self) -> Calls:
        yield from self.write(self._blocks)


def _check_length(answers: Sequence[object], questions: Sequence[object]) -> None:
    """A third party's backend may break the contract; its tier then counts a failed call."""
    if len(answers) != len(questions):
        raise RuntimeError(f"the backend gave {len(answers)} answers about {len(questions)} blocks")
