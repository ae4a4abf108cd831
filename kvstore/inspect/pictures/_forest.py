"""A prefix tree as flat lists, with the sums that drawings of it need; and rectangles of given areas.

Nothing here recurses: a chain of prefixes that branches at every block is thousands of runs deep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

__all__ = ["Box", "Forest", "Run", "squarify"]

Box = tuple[float, float, float, float]
"""Left, bottom, width, height."""


class Run(Protocol):
    """Blocks in a row that nothing branches off from: one node of `kvstore.inspect`'s `PrefixTree`.

    `start` is the position of the first block in its prefix; sums are over the run's own blocks; times are moments
    as `BlockInfo` or `blocks()` have them.
    """

    @property
    def start(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def stored_bytes(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def last_used(self) -> Any: ...
    @property
    def labels(self) -> Iterable[str]: ...
    @property
    def children(self) -> Iterable[Any]: ...


@dataclass(frozen=True, slots=True)
class Forest:
    """Runs in an order in which parents stand before their children, as the tree has these.

    `parent` is -1 for a root. `own` is each run's own size, `total` with all that continues it, `depth` the number of
    runs before it.
    """

    runs: list[Run]
    parent: NDArray[np.int64]
    own: NDArray[np.float64]
    total: NDArray[np.float64]
    depth: NDArray[np.int64]
    descendants: NDArray[np.int64]
    """Runs, itself included."""

    @classmethod
    def of(cls, roots: Iterable[Run], size: str) -> Forest:
        """`size` is `bytes` or `tokens`. Raises `ValueError` for anything else."""
        if size not in ("bytes", "tokens"):
            raise ValueError(f"a prefix can be drawn as large as its bytes or its tokens, not its {size!r}")
        runs: list[Run] = []
        parents: list[int] = []
        depths: list[int] = []
        waiting: list[tuple[Run, int, int]] = [(root, -1, 0) for root in [*roots][::-1]]
        while waiting:
            run, parent, depth = waiting.pop()
            waiting += [(child, len(runs), depth + 1) for child in [*run.children][::-1]]
            runs.append(run)
            parents.append(parent)
            depths.append(depth)
        own = np.array([run.stored_bytes if size == "bytes" else run.tokens for run in runs], np.float64)
        total, descendants = own.copy(), np.ones(len(runs), np.int64)
        for index in range(len(runs) - 1, -1, -1):
            if parents[index] >= 0:
                total[parents[index]] += total[index]
                descendants[parents[index]] += descendants[index]
        return cls(runs, np.array(parents, np.int64), own, total, np.array(depths, np.int64), descendants)

    def children(self) -> list[list[int]]:
        """Of each run, the largest first; those of -1, the roots, stand at the end."""
        found: list[list[int]] = [[] for _ in range(len(self.runs) + 1)]
        for index in np.argsort(-self.total, kind="stable"):
            found[self.parent[index]].append(int(index))
        return found

    def column(self, name: str) -> NDArray[Any]:
        """One attribute of all runs."""
        return np.array([getattr(run, name) for run in self.runs])


def squarify(sizes: Sequence[float], box: Box) -> list[Box]:
    """Rectangles that fill `box` with areas in proportion to `sizes` (descending), none thinner than need be.

    Bruls, Huizing and van Wijk, "Squarified Treemaps" (2000): rows along the shorter side, each as long as that makes
    its worst rectangle squarer.
    """
    left, bottom, width, height = box
    total = sum(sizes)
    if total <= 0:
        return [(left, bottom, 0.0, 0.0)] * len(sizes)
    areas = [size / total * width * height for size in sizes]
    boxes: list[Box] = []
    start = 0
    while start < len(areas):
        short = min(width, height)
        stop, row = _row(areas, start, short)
        thick = row / short if short > 0 else 0.0
        along = 0.0
        for area in areas[start:stop]:
            length = area / thick if thick > 0 else 0.0
            if width >= height:
                boxes.append((left, bottom + height - along - length, thick, length))
            else:
                boxes.append((left + along, bottom + height - thick, length, thick))
            along += length
        if width >= height:
            left, width = left + thick, max(width - thick, 0.0)
        else:
            height = max(height - thick, 0.0)
        start = stop
    return boxes


def _row(areas: Sequence[float], start: int, short: float) -> tuple[int, float]:
    """Where the row that begins at `start` ends, and its area."""
    row = areas[start]
    worst = _worst(row, areas[start], areas[start], short)
    stop = start + 1
    while stop < len(areas):
        longer = _worst(row + areas[stop], areas[start], areas[stop], short)
        if longer > worst:
            break
        row, worst, stop = row + areas[stop], longer, stop + 1
    return stop, row


def _worst(row: float, largest: float, smallest: float, short: float) -> float:
    """The aspect ratio of the thinnest rectangle of a row."""
    if row <= 0 or smallest <= 0 or short <= 0:
        return float("inf")
    square = (row / short) ** 2
    return max(square / smallest, largest / square)
