"""For people who have no scheduler: the manager's calls, put together into calls that wait.

They call `step` themselves, wait with a time-out, and need nothing but the manager's own interface.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from kvstore.types import LookupResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvstore.namespace import Namespace
    from kvstore.tiering.primary import PrimaryTier
    from kvstore.types import BlockKey, BlockWrite

__all__ = ["BlockingCalls"]

LOOK_AHEAD = 256
"""Blocks of a prefix that are asked for at once; a lookup costs about a microsecond each."""
STEP_BYTES = 16 << 20
"""Bytes copied into slots before the tiers are set to work on them."""


class BlockingCalls(ABC):
    """`store`, `load_prefix` and `prefetch`. Threads: the manager's, like every other call."""

    primary: PrimaryTier
    namespace: Namespace

    @abstractmethod
    def lookup(self, keys: Sequence[BlockKey]) -> list[LookupResult]: ...

    @abstractmethod
    def prepare_store(
        self, keys: Sequence[BlockKey], *, position: int = ..., parent: bytes = ..., tenant: str = ...
    ) -> list[NDArray[np.uint8] | None]: ...

    @abstractmethod
    def complete_store(self, keys: Sequence[BlockKey], *, success: bool = True) -> None: ...

    @abstractmethod
    def prepare_load(self, keys: Sequence[BlockKey]) -> list[NDArray[np.uint8] | None]: ...

    @abstractmethod
    def complete_load(self, keys: Sequence[BlockKey]) -> None: ...

    @abstractmethod
    def forget(self, keys: Sequence[BlockKey]) -> None: ...

    @abstractmethod
    def finish_request(self, keys: Sequence[BlockKey]) -> None: ...

    @abstractmethod
    def _turn(self, budget: float = float("inf")) -> None: ...

    @abstractmethod
    def _rest(self) -> None:
        """Hand over what was asked for, and collect what ends next."""

    @property
    @abstractmethod
    def room_for_stores(self) -> bool: ...

    def store(self, blocks: Sequence[BlockWrite], *, timeout: float = 30.0) -> int:
        """Copy `blocks` into the primary tier, from where they cascade; returns how many are there or were before.

        Waits for slots, and for tiers that fall behind, up to `timeout` seconds; after that, blocks without a slot are
        passed over, and tiers that are still behind miss what comes (counted as shed). On return the source buffers
        are the caller's again; the tiers may still be writing: `drain` waits
        for them. Raises `InvalidBlockError` when a block does not fit the namespace.
        """
        checked = [self.namespace.check_buffer(block.key, block.data) for block in blocks]
        deadline = time.monotonic() + timeout
        present = copied = 0
        for block, data in zip(blocks, checked, strict=True):
            view = self._wait_for_slot(block, deadline)
            if view is not None:
                np.copyto(view, data)
                self.complete_store([block.key])
                copied += data.nbytes
            present += self.primary.get(block.key) is not None
            if copied >= STEP_BYTES:
                self._turn()
                copied = 0
        self._turn()
        return present

    def load_prefix(
        self,
        keys: Sequence[BlockKey],
        into: Sequence[Buffer] | Callable[[int, NDArray[np.uint8]], None],
        *,
        timeout: float = 30.0,
    ) -> int:
        """Load the longest stored prefix of `keys`; returns the number of blocks loaded, from the front.

        `into` is one writable buffer per key, or a function called as `into(index, view)` in the order of `keys`,
        whose view (uint8, of the group's block size) is valid during the call only. Works block by block, so the
        prefix may be larger than the primary tier.

        Ends at the first block that no tier has, or after `timeout` seconds without a block. Buffers behind the number
        returned are untouched. For models with several KV-cache groups there is `kvstore.tiering.load_groups`.
        """
        deliver = into if callable(into) else _copying(into, keys, self.namespace)
        self.forget(keys)
        loaded = 0
        try:
            for loaded in self._arrivals(keys, deliver, timeout):  # noqa: B007 - the last one counts
                pass
        finally:
            self.finish_request(keys[:loaded])
            self.forget(keys[loaded:])
        return loaded

    def prefetch(self, keys: Sequence[BlockKey], *, timeout: float = 30.0) -> int:
        """Promote the front of `keys` into the primary tier; returns how many leading blocks are there on return.

        At most as many as there are slots.
        """
        wanted = keys[: self.primary.slots]
        self.forget(wanted)
        deadline = time.monotonic() + timeout
        while True:
            answers = self.lookup(wanted)
            here = _leading_hits(answers)
            if here == len(wanted) or answers[here] is LookupResult.MISS or time.monotonic() > deadline:
                return here
            self._rest()

    def _wait_for_slot(self, block: BlockWrite, deadline: float) -> NDArray[np.uint8] | None:
        """A view to write the block into; None where it is here already, or nothing became free in time."""
        while self.primary.get(block.key) is None:
            late = time.monotonic() > deadline
            if late or self.room_for_stores:
                view = self.prepare_store(
                    [block.key], position=block.position, parent=block.parent, tenant=block.tenant
                )[0]
                if late or view is not None:
                    return view
            self._rest()
        return None

    def _arrivals(
        self, keys: Sequence[BlockKey], deliver: Callable[[int, NDArray[np.uint8]], None], timeout: float
    ) -> Iterator[int]:
        """Deliver blocks as they arrive; yields how many were, each time that it is more."""
        loaded = 0
        deadline = time.monotonic() + timeout
        while loaded < len(keys):
            answers = self.lookup(keys[loaded : loaded + LOOK_AHEAD])
            arrived = self._deliver(keys, loaded, loaded + _leading_hits(answers), deliver)
            if arrived > loaded:
                loaded = arrived
                deadline = time.monotonic() + timeout
                yield loaded
                self._turn()
            elif answers[0] is LookupResult.MISS or time.monotonic() > deadline:
                return
            else:
                self._rest()

    def _deliver(
        self, keys: Sequence[BlockKey], start: int, stop: int, deliver: Callable[[int, NDArray[np.uint8]], None]
    ) -> int:
        """Hand out blocks that were HITs, each while it is pinned; returns where that ended."""
        for index in range(start, stop):
            view = self.prepare_load([keys[index]])[0]
            if view is None:
                return index
            try:
                deliver(index, view)
            finally:
                self.complete_load([keys[index]])
        return stop


def _leading_hits(answers: Sequence[LookupResult]) -> int:
    return sum(1 for _ in takewhile(lambda answer: answer is LookupResult.HIT, answers))


def _copying(
    into: Sequence[Buffer], keys: Sequence[BlockKey], namespace: Namespace
) -> Callable[[int, NDArray[np.uint8]], None]:
    targets = [namespace.check_buffer(key, buffer) for key, buffer in zip(keys, into, strict=True)]
    return lambda index, view: np.copyto(targets[index], view)
