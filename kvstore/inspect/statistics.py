"""What the numbers of each layer are like: the first thing to look at in KV that is suspected of something."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.inspect.axes import KV

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kvstore.inspect.axes import Axes

__all__ = ["LayerStatistics", "statistics_of"]


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """Over all tokens, heads and dimensions of one layer's keys or values, those left out that are no numbers.

    `layer` is None, and `kv` empty, where blocks have no such axis. Computed in float64, whatever is stored. Without
    any number in them all three are NaN.
    """

    layer: int | None
    kv: str
    absmax: float
    mean: float
    std: float
    nonfinite: int
    """Values that are NaN or infinite."""


def statistics_of(axes: Axes, blocks: Iterable[NDArray[np.uint8]]) -> list[LayerStatistics]:
    """Layer by layer, keys before values, over all `blocks` (their bytes), one of which is in memory at a time.

    Empty for blocks whose bytes cannot be told apart.
    """
    if axes.why_opaque:
        return []
    leading = [name for name in ("layer", "kv") if name in axes.dims]
    shape = tuple(axes.shape[axes.dims.index(name)] for name in leading)
    sums = _Sums(int(np.prod(shape)))
    for data in blocks:
        block = np.moveaxis(axes.decode(data), [axes.dims.index(name) for name in leading], range(len(leading)))
        sums.add(block.reshape(sums.rows, -1))
    layers = axes.layers if axes.layers is not None and "layer" in axes.dims else (None,)
    kinds = _kinds(axes)
    return [sums.row(number, *place) for number, place in enumerate((layer, kv) for layer in layers for kv in kinds)]


def _kinds(axes: Axes) -> tuple[str, ...]:
    if "kv" not in axes.dims:
        return ("",)
    count = axes.shape[axes.dims.index("kv")]
    return KV if count == len(KV) else tuple(map(str, range(count)))


class _Sums:
    """Sums of numbers, squares and so on, for each layer's keys and values."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._count = np.zeros(rows, np.int64)
        self._nonfinite = np.zeros(rows, np.int64)
        self._sum = np.zeros(rows)
        self._squares = np.zeros(rows)
        self._absmax = np.full(rows, -np.inf)

    def add(self, values: NDArray[Any]) -> None:
        """More values for each row, a row at a time: in float64 they take up to eight times the room."""
        for row in range(self.rows):
            numbers = values[row].astype(np.float64)
            finite = np.isfinite(numbers)
            if not finite.all():
                self._nonfinite[row] += len(numbers) - int(finite.sum())
                numbers = numbers[finite]
            self._count[row] += len(numbers)
            self._sum[row] += numbers.sum()
            self._squares[row] += numbers @ numbers
            self._absmax[row] = np.abs(numbers).max(initial=self._absmax[row])

    def row(self, number: int, layer: int | None, kv: str) -> LayerStatistics:
        """What they come to."""
        count = int(self._count[number])
        if not count:
            return LayerStatistics(layer, kv, np.nan, np.nan, np.nan, int(self._nonfinite[number]))
        mean = float(self._sum[number]) / count
        variance = max(0.0, float(self._squares[number]) / count - mean * mean)
        return LayerStatistics(
            layer, kv, float(self._absmax[number]), mean, variance**0.5, int(self._nonfinite[number])
        )
