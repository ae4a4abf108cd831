"""Jobs that are handed in and asked for, as an engine does: what `kvstore.bench.steps` drives a contestant by.

A tier is driven through its `SecondaryTier`, vLLM's through its manager (`kvstore.bench.vllm_fs`); whoever has only
blocking calls gets as many threads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvstore.bench.contestant import Contestant, Traffic
from kvstore.errors import TierUnavailable
from kvstore.tiering import SecondaryTier
from kvstore.tiering.primary import Slot
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.types import BlockKey

__all__ = ["BlockingCalls", "ThroughTheTier"]

_CLOSE_S = 30.0


class BlockingCalls(Traffic):
    """Calls of a contestant's `store` and `load` on threads."""

    def __init__(self, contestant: Contestant, threads: int) -> None:
        self._contestant = contestant
        self._pool = ThreadPoolExecutor(threads)
        self._under_way: dict[Future[None], int] = {}

    def submit(self, job: int, keys: Sequence[BlockKey], rows: NDArray[np.uint8], *, is_store: bool) -> None:
        blocks = [row.data for row in rows]
        moving = (
            self._pool.submit(self._contestant.store, keys, blocks)
            if is_store
            else self._pool.submit(self._contestant.load, keys, blocks)
        )
        self._under_way[moving] = job

    def ended(self) -> list[int]:
        done = [future for future in self._under_way if future.done()]
        for future in done:
            future.result()
        return [self._under_way.pop(future) for future in done]

    def close(self) -> None:
        self._pool.shutdown()


class ThroughTheTier(Traffic):
    """A store behind its `SecondaryTier`, as an engine has it; that of a URL in a process of its own."""

    def __init__(
        self, tier: TierURL | BlockStore, namespace: Namespace, threads: int, memory: NDArray[np.uint8]
    ) -> None:
        apart = isinstance(tier, TierURL)
        self._tier = SecondaryTier(tier, namespace, threads=threads, io_process=apart, memory=memory.data)
        self._url = self._tier.url
        self._left: dict[int, int] = {}

    def submit(self, job: int, keys: Sequence[BlockKey], rows: NDArray[np.uint8], *, is_store: bool) -> None:
        self._left[job] = len(keys)
        for key, row in zip(keys, rows, strict=True):
            slot = Slot(job, key, row)
            if not is_store:
                self._tier.load(slot)
            elif not self._tier.store(slot):
                raise TierUnavailable(f"{self._url}: a store was shed")
        self._tier.submit()

    def ended(self) -> list[int]:
        report = self._tier.poll()
        if report.failed or report.overdue or report.dropped:
            raise TierUnavailable(f"{self._url}: not every block was moved: raise capacity or make room")
        for slot in (*report.loaded, *report.released):
            self._left[slot.index] -= 1
        done = [job for job, left in self._left.items() if not left]
        for job in done:
            del self._left[job]
        return done

    def close(self) -> None:
        self._tier.cancel()
        self._tier.close(_CLOSE_S)
