"""What all pictures share: a sheet of paper, its type sizes, units of bytes and of time, and what is said of nothing.

Everything is set on the objects themselves. `rcParams` would be shared with whatever else the notebook draws. Axes are
`Any` throughout: matplotlib types few of its keyword arguments.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from kvstore.errors import MissingDependencyError

try:
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize, SymLogNorm, to_rgb
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator, StrMethodFormatter
except ImportError as missing:
    raise MissingDependencyError(
        f'kvstore.inspect.pictures needs matplotlib ({missing}): pip install "kvstore-tiers[inspect]"'
    ) from missing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

__all__ = [
    "COLOURS",
    "DARK",
    "FAINT",
    "LIGHT",
    "MIDDLE",
    "NOTE",
    "SMALL",
    "WIDTH",
    "Picture",
    "Unit",
    "byte_unit",
    "colour_bar",
    "duration_unit",
    "layer_axis",
    "legend",
    "named_by",
    "note",
    "nothing",
    "readable_on",
    "scale_of",
    "seconds",
    "sheet",
    "since",
    "tidy",
]

WIDTH: Final = 7.0
"""Inches: the text of a page of A4 with its margins."""
DPI: Final = 144
TITLE, LABEL, SMALL, NOTE = 10.0, 8.5, 7.5, 7.0
"""Type sizes in points. Nothing is smaller than the last."""
DARK, MIDDLE, LIGHT, FAINT = "#222222", "#5b7c99", "#c9d6e2", "#e9e9e9"
COLOURS: Final = LinearSegmentedColormap.from_list(
    "paper to ink", ["#dde7f0", "#adc4d8", "#6f97ba", "#37618c", "#173457", "#08131f"]
)
"""One hue that only gets darker: the same in grey, for everybody's eyes, and little ink where there is little."""


class Picture(Figure):
    """A `matplotlib.figure.Figure` that notebooks show; `savefig` writes it as PDF, SVG or PNG."""

    def _repr_png_(self) -> bytes:
        """What a notebook asks for. Without metadata, so that equal pictures are equal files."""
        out = io.BytesIO()
        cast("Any", self).savefig(
            out, format="png", dpi=DPI, metadata={"Software": None}, pil_kwargs={"optimize": True}
        )
        return out.getvalue()


def sheet(title: str, *, height: float, rows: int = 1, columns: int = 1, share: bool = False) -> tuple[Picture, Any]:
    """An empty picture, `height` inches high, and its axes: an array of shape (rows, columns)."""
    picture = Picture(figsize=(WIDTH, height), layout="constrained", facecolor="white")
    drawn: Any = picture
    drawn.suptitle(title, fontsize=TITLE, color=DARK, x=0.01, ha="left")
    axes = drawn.subplots(rows, columns, squeeze=False, sharey=share, sharex=share)
    for one in axes.flat:
        tidy(one)
    return picture, axes


def tidy(axes: Any) -> None:
    """Type that can be read in print; no frame but the two axes."""
    axes.set_facecolor("white")
    axes.tick_params(labelsize=SMALL, colors=DARK, length=3, width=0.6)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(DARK)
        spine.set_linewidth(0.6)
    axes.xaxis.label.set_fontsize(LABEL)
    axes.yaxis.label.set_fontsize(LABEL)


def nothing(axes: Any, text: str) -> None:
    """Say in the middle of empty axes why they are."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=LABEL, color=DARK)
    axes.set_xticks([])
    axes.set_yticks([])


def note(picture: Any, text: str) -> None:
    """A line under the picture: what a reader must know to judge it."""
    picture.supxlabel(text, fontsize=NOTE, color=DARK, x=0.01, ha="left")


def colour_bar(picture: Any, axes: Any, drawn: Any, label: str) -> None:
    """What the colours of `drawn` mean, along the right side of `axes`."""
    share = axes.get_position().width * WIDTH
    beside = axes.inset_axes((1.0 + 0.07 / share, 0.0, 0.1 / share, 1.0))
    bar = picture.colorbar(drawn, cax=beside)
    bar.set_label(label, fontsize=LABEL, color=DARK)
    bar.ax.tick_params(labelsize=SMALL, colors=DARK, length=3, width=0.6)
    bar.outline.set_visible(False)
    bar.minorticks_off()
    bar.formatter = StrMethodFormatter("{x:,.6g}")
    bar.update_ticks()


def layer_axis(axis: Any, layers: Sequence[int]) -> None:
    """Places 0, 1, 2, … along an axis bear the numbers that the model gives its layers."""
    axis.set_major_locator(MaxNLocator(integer=True, nbins=16, min_n_ticks=1, steps=(1, 2, 5, 10)))
    axis.set_major_formatter(named_by(layers))


def named_by(names: Sequence[int]) -> FuncFormatter:
    """Writes what stands at a place on an axis; nothing between and beside them."""

    def name(place: float, _: int | None) -> str:
        index = round(place)
        return str(names[index]) if 0 <= index < len(names) and abs(place - index) < 1e-6 else ""

    return FuncFormatter(name)


def legend(axes: Any, names: int) -> None:
    """Above the axes, where it covers nothing."""
    axes.legend(fontsize=SMALL, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=names, borderaxespad=0.2)


def readable_on(face: Any) -> str:
    """Black or white, whichever can be read on this colour (sRGB luminance by ITU-R BT.709)."""
    red, green, blue = to_rgb(face)
    return DARK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5 else "white"


@dataclass(frozen=True, slots=True)
class Unit:
    """`name` is what an axis says, `size` how many bytes, or seconds, one of it is."""

    name: str
    size: float

    def text(self, amount: float) -> str:
        """`1.5 GiB`: three digits, for people."""
        value = amount / self.size
        digits = 0 if value >= 99.5 or value == int(value) else 1 if value >= 9.95 else 2
        return f"{value:,.{digits}f} {self.name}"


_BYTES = (Unit("TiB", 1 << 40), Unit("GiB", 1 << 30), Unit("MiB", 1 << 20), Unit("KiB", 1 << 10), Unit("B", 1))
_TIMES = (Unit("days", 86400), Unit("hours", 3600), Unit("minutes", 60), Unit("seconds", 1))


def byte_unit(largest: float) -> Unit:
    """The unit in which up to `largest` bytes are easily read."""
    return next((unit for unit in _BYTES if largest >= unit.size), _BYTES[-1])


def duration_unit(longest: float) -> Unit:
    """The unit in which up to `longest` seconds are easily read."""
    return next((unit for unit in _TIMES if longest >= 2 * unit.size), _TIMES[-1])


def seconds(times: object) -> NDArray[np.float64]:
    """Moments as seconds since the epoch: UTC datetimes of Python, numpy or pandas, or such seconds already."""
    array = np.asarray(times)
    if array.dtype.kind in "fiu":
        return array.astype(np.float64)
    if array.dtype == object and array.size and isinstance(array.flat[0], float | int):
        return array.astype(np.float64)
    if array.dtype == object and isinstance(times, datetime):
        return np.asarray(since(times))
    if array.dtype == object and not hasattr(times, "dtype"):
        return np.array([since(moment) for moment in array.flat], np.float64).reshape(array.shape)
    # A pandas column in UTC converts itself, and as a whole.
    return np.asarray(times, dtype="datetime64[us]").astype(np.int64) / 1e6


def since(moment: Any) -> float:
    """One moment as seconds since the epoch; a datetime without a zone is UTC."""
    if isinstance(moment, datetime):
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if isinstance(moment, np.datetime64):
        return float(moment.astype("datetime64[us]").astype(np.int64)) / 1e6
    return float(moment)


def scale_of(values: ArrayLike) -> Normalize:
    """Colours for `values`: by powers of ten where they span more than two of them and none is negative.

    Nothing at all is then one step lighter than the least of something.
    """
    array = np.asarray(values, np.float64)
    array = array[np.isfinite(array)]
    low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 1.0)
    least = float(array[array > 0].min(initial=np.inf))
    if low >= 0 and high > 100 * least:
        if low > 0:
            return LogNorm(low, high, clip=True)
        return SymLogNorm(least, linscale=0.5, vmin=0.0, vmax=high, base=10, clip=True)
    return Normalize(low, high if high > low else low + 1.0, clip=True)
