"""When blocks came, and whether they came back: from a table of blocks.

A `Table` is what `NamespaceView.blocks()` gives, or any mapping of column names to equally long columns. Used here:
`stored_bytes`, `created`, `last_used` (moments in UTC, or seconds since the epoch), `hits`, and for `occupancy` the
column by which it is divided.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.ticker import FuncFormatter, MaxNLocator, StrMethodFormatter

from kvstore.inspect.pictures._paper import (
    DARK,
    LIGHT,
    MIDDLE,
    SMALL,
    Picture,
    Unit,
    byte_unit,
    duration_unit,
    legend,
    note,
    nothing,
    seconds,
    sheet,
)
from kvstore.inspect.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

__all__ = ["Table", "ages", "occupancy", "reuse"]

NEVER, AGAIN = "never loaded", "loaded at least once"
_EMPTY = "no blocks are stored"
_MOST_STEPS = 1000
_MOST_PARTS = 5
_LOG_SPAN, _MOST_SPAN = 50.0, 1e5
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0
_SCALE_NAMES = ("1 s", "10 s", "1 min", "10 min", "1 hour", "6 hours", "1 day", "7 days", "30 days", "1 year")
_SCALES = (1.0, 10.0, _MINUTE, 10 * _MINUTE, _HOUR, 6 * _HOUR, _DAY, 7 * _DAY, 30 * _DAY, 365 * _DAY)
_STEPS = (1, 2, 5, 10)
_PARTS = ("#1f3044", "#5b7c99", "#93adc4", "#c9d6e2", "#e4e4e4")


class Table(Protocol):
    """Columns by name: a pandas DataFrame, or a dict of lists or arrays."""

    def __getitem__(self, name: str, /) -> Any: ...


def ages(
    blocks: Table, *, by: str = "last_used", weight: str = "blocks", bins: int = 30, now: float | None = None
) -> Picture:
    """How long ago blocks were `created` or `last_used`: those that were loaded since, upon those that never were.

    `weight` is `blocks` or `bytes`, `now` seconds since the epoch. Where ages span more than a factor of 50, bins get
    wider with age. Raises `ValueError` for another `by` or `weight`, or for fewer than one bin.
    """
    if by not in ("last_used", "created") or weight not in ("blocks", "bytes"):
        raise ValueError(f"ages are of created or last_used, in blocks or bytes; not of {by!r} in {weight!r}")
    if bins < 1:
        raise ValueError(f"{bins} bins: a histogram has at least one")
    moments, hits, stored = seconds(blocks[by]), _numbers(blocks, "hits"), _numbers(blocks, "stored_bytes")
    since = {"last_used": "the last use", "created": "they were stored"}[by]
    picture, axes = sheet(f"Age of {counted(len(moments), 'block')} since {since}", height=2.8)
    canvas: Any = axes[0, 0]
    unit = byte_unit(float(stored.sum())) if weight == "bytes" else Unit("blocks", 1)
    canvas.set_ylabel("blocks" if weight == "blocks" else f"stored size ({unit.name})")
    canvas.set_xlabel(f"time since {since} (days)")
    if not len(moments):
        nothing(canvas, _EMPTY)
        return picture
    age = np.maximum((time.time() if now is None else now) - moments, 0.0)
    edges = _age_axis(canvas, age, bins, since)
    amounts = stored / unit.size if weight == "bytes" else np.ones(len(age))
    floor = np.zeros(bins)
    for chosen, name, face in ((hits == 0, NEVER, LIGHT), (hits > 0, AGAIN, MIDDLE)):
        heights, _ = np.histogram(np.clip(age[chosen], edges[0], edges[-1]), edges, weights=amounts[chosen])
        canvas.bar(
            edges[:-1], heights, np.diff(edges), floor, align="edge", color=face, edgecolor="white", lw=0.5, label=name
        )
        floor = floor + heights
    legend(canvas, 2)
    _whole_numbers(canvas, weight)
    return picture


def reuse(blocks: Table) -> Picture:
    """How many blocks were loaded how often, and how few of them answer most loads.

    On the left blocks by hits; on the right the share of all hits that the most used blocks have,
    against the share of the stored bytes that these take: how small a tier could be for the hits it has.
    """
    hits, stored = _numbers(blocks, "hits"), _numbers(blocks, "stored_bytes")
    total = int(hits.sum())
    picture, axes = sheet(f"Reuse: {counted(len(hits), 'block')}, {counted(total, 'hit')}", height=2.8, columns=2)
    count, share = axes[0]
    count.set(xlabel="hits of a block", ylabel="blocks")
    share.set(xlabel="stored bytes, most used blocks first (%)", ylabel="hits (%)")
    if not len(hits):
        nothing(count, _EMPTY)
        nothing(share, _EMPTY)
        return picture
    limits = _hit_limits(int(hits.max()))
    heights, _ = np.histogram(hits, limits)
    names = [_span(low, high - 1) for low, high in pairwise(limits)]
    count.bar(range(len(names)), heights, color=[LIGHT, *[MIDDLE] * (len(names) - 1)], width=0.85)
    slanted = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if len(names) > 5 else {}
    count.set_xticks(range(len(names)), names, **slanted)
    _whole_numbers(count, "blocks")
    if total == 0:
        nothing(share, "no block was loaded yet")
        return picture
    order = np.argsort(-hits / np.maximum(stored, 1), kind="stable")
    paid = np.concatenate(([0.0], np.cumsum(stored[order]))) / stored.sum() * 100
    gained = np.concatenate(([0.0], np.cumsum(hits[order]))) / total * 100
    share.plot(paid, gained, color=DARK, lw=1.4)
    share.plot([0, 100], [0, 100], color=MIDDLE, lw=0.7, ls=":")
    share.set(xlim=(0, 100), ylim=(0, 102))
    return picture


def occupancy(blocks: Table, *, by: str | None = None) -> Picture:
    """How what is stored now came together over time, and how much of it was still to be used.

    The upper line is the size of all blocks that were stored by then and are here still (what was evicted since is not
    known); the dark area those of them that were used at that time or later, so that the light one is what could have
    gone without anybody's noticing. With `by`, a column such as `group`, `labels` or `tenants`, the area is divided by
    it instead, the largest parts apart.
    """
    created, used, stored = seconds(blocks["created"]), seconds(blocks["last_used"]), _numbers(blocks, "stored_bytes")
    unit = byte_unit(float(stored.sum()))
    total = float(stored.sum())
    picture, axes = sheet(f"Stored now: {counted(len(stored), 'block')}, {unit.text(total)}", height=2.8)
    canvas: Any = axes[0, 0]
    canvas.set_ylabel(f"stored size ({unit.name})")
    canvas.set_xlabel("time (UTC)")
    if not len(stored):
        nothing(canvas, _EMPTY)
        return picture
    end = max(float(used.max()), float(created.max()))
    start = min(float(created.min()), end - 1.0)
    moments = _moments(start, end, created, used)
    dates = (moments * 1e6).astype("datetime64[us]")
    if by is None:
        parts = {"used again later": _used_later(moments, created, used, stored)}
        parts["not used any more"] = _arrived(moments, created, stored) - parts["used again later"]
        faces: tuple[str, ...] = (MIDDLE, LIGHT)
    else:
        named = _divided(blocks[by], stored)
        parts = {name: _arrived(moments, created[chosen], stored[chosen]) for name, chosen in named.items()}
        faces = _PARTS
    canvas.stackplot(
        dates,
        *(part / unit.size for part in parts.values()),
        labels=list(parts),
        colors=faces[: len(parts)],
        step="post",
        edgecolor="white",
        linewidth=0.3,
    )
    locator = cast("Any", AutoDateLocator)()
    canvas.xaxis.set_major_locator(locator)
    canvas.xaxis.set_major_formatter(cast("Any", ConciseDateFormatter)(locator))
    canvas.xaxis.get_offset_text().set_fontsize(SMALL)
    canvas.set_xlim(dates[0], dates[-1])
    canvas.set_ylim(0, total / unit.size * 1.05 or 1)
    legend(canvas, len(parts))
    note(picture, "blocks that were evicted or removed since are not counted")
    return picture


def _numbers(blocks: Table, name: str) -> NDArray[np.float64]:
    return np.asarray(blocks[name], np.float64)


def _whole_numbers(canvas: Any, weight: str) -> None:
    """There is no half a block."""
    if weight == "blocks":
        canvas.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=_STEPS))
        canvas.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def _hit_limits(most: int) -> list[int]:
    """Never, once, and then by factors of two, or of four where those would be too many bars."""
    factor = 2 if most < 256 else 4
    limits = [0, 1, 2]
    while limits[-1] <= most:
        limits.append(limits[-1] * factor)
    return limits


def _age_axis(canvas: Any, age: NDArray[np.float64], bins: int, since: str) -> NDArray[np.float64]:
    """The edges of the bins on an axis that has been set up for them."""
    oldest, youngest = max(float(age.max()), 1e-3), max(float(age.min()), 1e-3)
    if oldest / youngest > _LOG_SPAN:
        first = max(youngest, oldest / _MOST_SPAN)
        scales = zip(_SCALE_NAMES, _SCALES, strict=True)
        ticks = {name: length for name, length in scales if first <= length <= oldest}
        canvas.set_xscale("log")
        canvas.set_xticks(list(ticks.values()), list(ticks))
        canvas.minorticks_off()
        younger = "; the first has all that is younger" if first > youngest else ""
        canvas.set_xlabel(f"time since {since} (bins get wider{younger})")
        return np.geomspace(first, oldest, bins + 1)
    unit = duration_unit(oldest)
    canvas.xaxis.set_major_formatter(FuncFormatter(partial(_in_unit, unit)))
    canvas.set_xticks([tick for tick in _round_moments(oldest, unit) if tick <= oldest + unit.size])
    canvas.set_xlabel(f"time since {since} ({unit.name})")
    if oldest - youngest < unit.size / bins:
        return np.linspace(max(youngest - unit.size, 0.0), oldest + unit.size, bins + 1)
    return np.linspace(0.0, oldest, bins + 1)


def _in_unit(unit: Unit, value: float, _: int | None) -> str:
    return f"{value / unit.size:.3g}"


def _round_moments(longest: float, unit: Unit) -> list[float]:
    """Ticks at round numbers of a unit, in seconds."""
    return [
        float(tick) * unit.size for tick in MaxNLocator(nbins=7, steps=_STEPS).tick_values(0.0, longest / unit.size)
    ]


def _moments(start: float, end: float, created: NDArray[np.float64], used: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where something changes, or so many points that no more can be seen."""
    changes = np.unique(np.concatenate((created, used, [start, end])))
    return changes if len(changes) <= _MOST_STEPS else np.linspace(start, end, _MOST_STEPS)


def _arrived(
    moments: NDArray[np.float64], created: NDArray[np.float64], stored: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Bytes that were there at each moment."""
    order = np.argsort(created, kind="stable")
    sums = np.concatenate(([0.0], np.cumsum(stored[order])))
    return sums[np.searchsorted(created[order], moments, side="right")]


def _used_later(
    moments: NDArray[np.float64], created: NDArray[np.float64], used: NDArray[np.float64], stored: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Bytes that were there at each moment and used then or later."""
    used = np.maximum(used, created)
    order = np.argsort(used, kind="stable")
    sums = np.concatenate(([0.0], np.cumsum(stored[order])))
    return _arrived(moments, created, stored) - sums[np.searchsorted(used[order], moments, side="left")]


def _divided(column: Any, stored: NDArray[np.float64]) -> dict[str, NDArray[np.bool_]]:
    """Which blocks belong to each part: the largest ones by name, largest first, then all others."""
    names = np.array([_text(value) for value in column], dtype=object)
    sizes: dict[str, float] = {}
    for name, size in zip(names, stored, strict=True):
        sizes[name] = sizes.get(name, 0.0) + size
    ranked = sorted(sizes, key=lambda name: -sizes[name])
    apart = ranked if len(ranked) <= _MOST_PARTS else ranked[: _MOST_PARTS - 1]
    parts = {name: names == name for name in apart}
    rest = ~np.isin(names, apart)
    return parts | ({f"{len(ranked) - len(apart)} others": rest} if rest.any() else {})


def _text(value: Any) -> str:
    """A part's name in the legend; labels and tenants are tuples, of a group or a namespace there is one."""
    several = cast("Iterable[object]", value) if isinstance(value, tuple | list) else (value,)
    return ", ".join(map(str, several)) or "none"
