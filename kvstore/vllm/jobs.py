"""vLLM's jobs, taken apart into slots for `kvstore.tiering` and put together again for the report.

A job lends rows of primary memory until it is reported, whole and once. Its slots come back one by one, in whatever
batches the tier made of them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvstore.vllm._compat import job_result
from kvstore.vllm.lookups import offload_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.tiering.primary import Slot
    from kvstore.vllm._compat import JobResult, TransferJob

__all__ = ["Jobs"]


class _Open:
    """A job of which something is still out."""

    __slots__ = ("arrived", "began", "job", "left", "nbytes", "slots")

    def __init__(self, job: TransferJob) -> None:
        self.job = job
        self.began = time.monotonic()
        self.slots = self.left = self.nbytes = 0
        self.arrived: list[bytes] = []


class Jobs:
    """Which slot belongs to which job. Threads: one at a time makes all calls."""

    def __init__(self) -> None:
        self.storing = 0
        """Rows that stores hold: vLLM can give them to nobody else until they come back."""
        self._open: dict[Slot, _Open] = {}
        self._finished: list[JobResult] = []

    def __len__(self) -> int:
        """Slots that are out."""
        return len(self._open)

    def start(self, job: TransferJob, slots: Iterable[Slot]) -> None:
        """These slots, all there are of `job`, are out from now on."""
        entry = _Open(job)
        for slot in slots:
            self._open[slot] = entry
            entry.slots += 1
        entry.left = entry.slots
        if not job.is_promotion:
            self.storing += entry.slots
        if not entry.left:
            self._report(entry)

    def came_back(self, slots: Iterable[Slot], *, success: bool) -> None:
        """Nobody touches them any more; each was transferred, or was not. Those that are not out are passed over."""
        for slot in slots:
            entry = self._open.pop(slot, None)
            if entry is None:
                continue
            if success:
                entry.arrived.append(offload_key(slot.key))
                entry.nbytes += slot.view.nbytes
            entry.left -= 1
            if not entry.job.is_promotion:
                self.storing -= 1
            if not entry.left:
                self._report(entry)

    def finished(self) -> list[JobResult]:
        """Reports since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _report(self, entry: _Open) -> None:
        self._finished.append(
            job_result(
                entry.job,
                succeeded=tuple(entry.arrived),
                success=len(entry.arrived) == entry.slots,
                seconds=time.monotonic() - entry.began,
                nbytes=entry.nbytes,
            )
        )
