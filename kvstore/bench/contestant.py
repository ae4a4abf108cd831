"""The contract of a contestant: it stores and loads batches of blocks of one size, from many threads at once.

A new way to move blocks (another cache's file format, a checksum alone, a bare object-store client) is one subclass
here and one name in `kvstore.cli.bench`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from kvstore.interrupts import uninterrupted

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.bench.workload import Lap, Workload
    from kvstore.types import BlockKey

__all__ = ["Contestant", "Traffic"]


class Traffic(ABC):
    """Jobs of one contestant that are handed in and asked for by one thread, neither of which waits."""

    @abstractmethod
    def submit(self, job: int, keys: Sequence[BlockKey], rows: NDArray[np.uint8], *, is_store: bool) -> None:
        """Begin to move blocks from or into `rows` (blocks by bytes), which are the job's until it has ended."""

    @abstractmethod
    def ended(self) -> list[int]:
        """Jobs that have ended since the last call. Raises `TierUnavailable` where one did not move every block."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is under way, and end its threads."""


class Contestant(ABC):
    """Stores and loads blocks of `block_bytes` bytes; a context manager that leaves nothing behind.

    Buffers are page-aligned and stay the caller's. `store` and `load` are called from many threads at once, the rest
    from one. They raise when a block did not move whole: a figure for work that was not done would be worthless.
    """

    name: ClassVar[str]
    """How reports call it."""

    notes: list[str]
    """What a reader must know to judge its figures: how bytes move, what was not possible here."""

    @abstractmethod
    def store(self, keys: Sequence[BlockKey], sources: Sequence[memoryview]) -> None:
        """Write the blocks; done when their bytes are where a later load finds them."""

    @abstractmethod
    def load(self, keys: Sequence[BlockKey], targets: Sequence[memoryview]) -> None:
        """Read the blocks into `targets`."""

    @abstractmethod
    def clear(self, keys: Sequence[BlockKey]) -> None:
        """Remove the blocks. Not timed."""

    @abstractmethod
    def close(self) -> None:
        """Remove whatever is left of this contestant's own; the second call does nothing."""

    def lend(self, memory: NDArray[np.uint8]) -> None:  # noqa: B027 - optional
        """Every buffer that it will be given is (the beginning of) a row of `memory`: blocks by bytes, whole pages.
        Called once, before everything else; not timed.
        """

    def expect(self, keys: Sequence[BlockKey]) -> None:  # noqa: B027 - optional
        """These are stored next: have there whatever one that has been in use for long has there. Not timed."""

    @contextmanager
    def cooling(self) -> Generator[None]:
        """While the page cache is dropped: hold nothing that keeps pages in memory. Not timed."""
        yield

    def warm_elsewhere(self, load: Workload, keys: Sequence[BlockKey], passes: int) -> list[Lap]:
        """Time `passes` loads of all blocks, warm, somewhere else: for who would be flattered by what this process has
        mapped. An empty list: `load` is timed here.
        """
        del load, keys, passes
        return []

    def traffic(self, memory: NDArray[np.uint8], threads: int) -> Traffic:
        """What an engine would hand its jobs to, in place of `lend`; every job's rows are rows of `memory`. `threads`:
        transfers side by side, for whom that is not its own affair.
        """
        from kvstore.bench.traffic import BlockingCalls

        self.lend(memory)
        return BlockingCalls(self, threads)

    def files(self) -> list[Path]:
        """Where its bytes are, for advising them out of the page cache one file at a time."""
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with uninterrupted():
            self.close()
