"""What stands in keys and values: how long the vectors are, where outliers sit, how values spread, what two share.

`kv` is an xarray DataArray with axes of (layer, kv, token, head, dim) or (layer, token, latent), a view of
`kvstore.inspect` (whatever has `.xarray()`), or a numpy array in that order; in any element type that a block has.
Selections are fine: `kv.sel(layer=slice(0, 8))`. All raise `ValueError` for other axes or without values, `TypeError`
for what holds no numbers. Values that are no finite numbers are left out and counted under the picture.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator

from kvstore.inspect.pictures._arrays import KV
from kvstore.inspect.pictures._paper import (
    COLOURS,
    DARK,
    LABEL,
    NOTE,
    Picture,
    colour_bar,
    layer_axis,
    legend,
    named_by,
    note,
    readable_on,
    scale_of,
    sheet,
)
from kvstore.inspect.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["channels", "distributions", "norms", "outliers", "similarity"]

_BANDS = (("all values", 0.0), ("99.8 % of them", 0.1), ("90 %", 5.0), ("50 %", 25.0))
_BAND_COLOURS = ("#e3eaf1", "#c0d0df", "#8fabc5", "#5b7c99")
_MOST_WRITTEN = 200
"""Cells of a table with their numbers in them."""
_SAMPLE = 1 << 20


def norms(kv: Any) -> Picture:
    """The length (L2 norm) of each key and value vector, averaged over tokens: per layer and head, K and V apart."""
    given = KV.of(kv)
    found = _Cells(given)
    for layer in given:
        found.add(layer, lambda values: _mean(np.sqrt(np.nansum(values**2, -1)), 1))
    return _tables(given, found, "Lengths of vectors", "mean L2 norm per token")


def outliers(kv: Any) -> Picture:
    """The largest magnitude in units of the root mean square, per layer and head, K and V apart.

    It is what an eight-bit number with one scale per head must span: 3 to 5 is what normally distributed values have,
    where it is 20, most of them share a few steps of that scale.
    """
    given = KV.of(kv)
    found = _Cells(given)
    for layer in given:
        found.add(layer, _crest)
    return _tables(given, found, "Outliers", "largest magnitude / root mean square")


def channels(kv: Any) -> Picture:
    """The root mean square of each channel over all tokens, per layer: heads one after the other, K and V apart.

    Vertical stripes are channels that are large in every layer's keys: outliers that stay where they are.
    """
    given = KV.of(kv)
    rms = [_rms(layer, 1).reshape(layer.shape[0], -1) for layer in given]
    cells = np.stack(rms, 1)
    picture, axes = sheet(
        f"Channels: {given.said()}", height=_table_height(len(given.layers)), columns=len(given.sides), share=True
    )
    for canvas, side, table in zip(axes[0], given.sides, cells, strict=True):
        dim = table.shape[1] // len(given.heads)
        image = _image(canvas, table, given.layers)
        canvas.set_title(side, fontsize=LABEL, color=DARK)
        canvas.set_xlabel(f"head · channel ({counted(len(given.heads), 'head')} of {dim})")
        canvas.set_xticks([dim * index - 0.5 for index in range(len(given.heads) + 1)])
        canvas.set_xticklabels([str(dim * index) for index in range(len(given.heads) + 1)])
        colour_bar(picture, canvas, image, "root mean square" if side == given.sides[-1] else "")
    axes[0, 0].set_ylabel("layer")
    _say_what_is_missing(picture, sum(int(np.sum(~np.isfinite(layer))) for layer in given))
    return picture


def distributions(kv: Any) -> Picture:
    """How values spread in each layer, K and V apart: the bands that hold all, 99.8, 90 and 50 % of them."""
    given = KV.of(kv)
    limits = [percent for _, low in _BANDS for percent in (low, 100.0 - low)]
    missing = 0
    found: list[NDArray[np.float64]] = []
    for layer in given:
        missing += int(np.sum(~np.isfinite(layer)))
        found.append(np.stack([_percentiles(side, limits) for side in layer]))
    bands = np.stack(found, 1)
    picture, axes = sheet(
        f"Values: {given.said()}", height=2.2 * len(given.sides) + 0.6, rows=len(given.sides), share=False
    )
    places = np.arange(len(given.layers))
    for canvas, side, values in zip(axes[:, 0], given.sides, bands, strict=True):
        for index, ((name, _), colour) in enumerate(zip(_BANDS, _BAND_COLOURS, strict=True)):
            low, high = values[:, 2 * index], values[:, 2 * index + 1]
            canvas.bar(places, high - low, 0.86, low, color=colour, label=name, lw=0)
        canvas.use_sticky_edges = False  # a bar that ends on the axis looks cut off
        canvas.axhline(0, color=DARK, lw=0.5)
        canvas.set_ylabel(f"value of {side}")
        layer_axis(canvas.xaxis, given.layers)
        canvas.set_xlim(-0.7, len(places) - 0.3)
    legend(axes[0, 0], len(_BANDS))
    axes[-1, 0].set_xlabel("layer")
    _say_what_is_missing(picture, missing)
    return picture


def similarity(one: Any, other: Any, *, names: tuple[str, str] = ("one", "other")) -> Picture:
    """Cosine between two blocks or prefixes of one shape, token by token, averaged: per layer and head, K and V apart.

    Tokens where either vector is zero have no direction and are left out. Raises `ValueError` for different shapes.
    """
    first, second = KV.of(one), KV.of(other)
    if first.array.shape != second.array.shape or first.sides != second.sides:
        raise ValueError(
            f"{names[0]} has {first.array.shape} {first.sides}, {names[1]} {second.array.shape} {second.sides} along"
            " (layer, kv, token, head, dim): only what has one shape can be compared"
        )
    found = _Cells(first)
    with np.errstate(invalid="ignore", divide="ignore"):
        for left, right in zip(first, second, strict=True):
            found.add(left + right, partial(_cosine, left, right))
    title = f"Similarity of {names[0]} and {names[1]}"
    return _tables(first, found, title, "mean cosine per token", whole=(0.0, 1.0))


@dataclass(slots=True)
class _Cells:
    """One number for each layer, side and head, gathered layer by layer."""

    given: KV
    layers: list[NDArray[Any]] = field(default_factory=list)
    missing: int = 0

    def add(self, layer: NDArray[np.float32], measure: Callable[[NDArray[np.float32]], NDArray[Any]]) -> None:
        """`measure` gets the layer with NaN for whatever is not finite, and answers with (kv, head)."""
        bad = ~np.isfinite(layer)
        if bad.any():
            self.missing += int(bad.sum())
            layer = np.where(bad, np.float32(np.nan), layer)
        self.layers.append(measure(layer))

    def table(self) -> NDArray[np.float64]:
        """Axes (kv, layer, head)."""
        return np.stack(self.layers, 1).astype(np.float64)


def _tables(given: KV, found: _Cells, title: str, measure: str, whole: tuple[float, float] | None = None) -> Picture:
    """A table of coloured cells for K and one for V, each on a scale of its own, or on one that spans `whole`."""
    cells = found.table()
    height = _table_height(len(given.layers))
    picture, axes = sheet(f"{title}: {given.said()}", height=height, columns=len(given.sides), share=True)
    finite = cells[np.isfinite(cells)]
    norm = None if whole is None else Normalize(finite.min(initial=whole[0]), finite.max(initial=whole[1]))
    for canvas, side, table in zip(axes[0], given.sides, cells, strict=True):
        image = _image(canvas, table, given.layers, norm)
        canvas.set_title(side, fontsize=LABEL, color=DARK)
        canvas.set_xlabel("head")
        canvas.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, min_n_ticks=1))
        canvas.xaxis.set_major_formatter(named_by(given.heads))
        _write_numbers(canvas, table, image)
        colour_bar(picture, canvas, image, measure if side == given.sides[-1] else "")
    axes[0, 0].set_ylabel("layer")
    _say_what_is_missing(picture, found.missing)
    return picture


def _table_height(layers: int) -> float:
    return min(max(1.3 + 0.16 * layers, 2.0), 8.0)


def _image(canvas: Any, table: NDArray[Any], layers: list[int], norm: Normalize | None = None) -> Any:
    image = canvas.imshow(table, cmap=COLOURS, norm=norm or scale_of(table), aspect="auto", interpolation="nearest")
    for spine in canvas.spines.values():
        spine.set_visible(False)
    layer_axis(canvas.yaxis, layers)
    return image


def _write_numbers(canvas: Any, table: NDArray[np.float64], image: Any) -> None:
    """The numbers themselves, where there are few enough to be read."""
    if table.size > _MOST_WRITTEN or table.shape[1] > 8:
        return
    largest = float(np.abs(table[np.isfinite(table)]).max(initial=0.0))
    digits = 2 if largest < 10 else 1 if largest < 100 else 0
    for (row, column), value in np.ndenumerate(table):
        if np.isfinite(value):
            text = f"{round(float(value), digits) + 0.0:,.{digits}f}"  # + 0.0: no -0.00
            colour = readable_on(COLOURS(image.norm(value)))
            canvas.text(column, row, text, ha="center", va="center", fontsize=NOTE, color=colour)


def _say_what_is_missing(picture: Picture, missing: int) -> None:
    if missing:
        note(picture, f"{counted(missing, 'value')} left out: not a finite number")


def _cosine(left: NDArray[np.float32], right: NDArray[np.float32], _: object) -> NDArray[Any]:
    lengths = np.sqrt(np.sum(left**2, -1)) * np.sqrt(np.sum(right**2, -1))
    return _mean(np.sum(left * right, -1) / lengths, 1)


def _crest(values: NDArray[np.float32]) -> NDArray[Any]:
    peak = np.fmax.reduce(np.abs(values), axis=(1, 3))
    return _divided(peak, _rms(values, (1, 3)))


def _rms(values: NDArray[np.float32], axis: int | tuple[int, ...]) -> NDArray[Any]:
    finite = np.isfinite(values)
    squares = np.square(np.where(finite, values, 0), dtype=np.float64)
    means: NDArray[Any] = np.sqrt(_divided(squares.sum(axis), finite.sum(axis)))
    return means


def _mean(values: NDArray[Any], axis: int) -> NDArray[Any]:
    finite = np.isfinite(values)
    return _divided(np.where(finite, values, 0).sum(axis, dtype=np.float64), finite.sum(axis))


def _divided(above: NDArray[Any], below: NDArray[Any]) -> NDArray[Any]:
    """NaN where there is nothing to divide by."""
    found = np.full(above.shape, np.nan)
    np.divide(above, below, out=found, where=below > 0)
    return found


def _percentiles(values: NDArray[np.float32], percents: list[float]) -> NDArray[np.float64]:
    """Of the finite values; of a great many the inner ones from every nth, the extremes from all."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return np.full(len(percents), np.nan)
    some = finite[:: max(1, finite.size // _SAMPLE)]
    found = np.percentile(some, percents).astype(np.float64)
    found[0], found[1] = finite.min(), finite.max()
    return found
