"""Which prefixes are stored: drawn as a tree along their tokens or bytes, or as a map of areas.

Both take the roots of a tree of runs (`Run`): a `PrefixTree` of `kvstore.inspect`, or any sequence of such nodes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.collections import PolyCollection

from kvstore.inspect.pictures._forest import Box, Forest, Run, squarify
from kvstore.inspect.pictures._paper import (
    COLOURS,
    FAINT,
    NOTE,
    WIDTH,
    Picture,
    Unit,
    byte_unit,
    colour_bar,
    duration_unit,
    note,
    nothing,
    readable_on,
    scale_of,
    seconds,
    sheet,
)
from kvstore.inspect.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

__all__ = ["prefix_tree", "treemap"]

_TOKENS = Unit("tokens", 1)
_ROW_INCHES = 0.17
_CANVAS = 0.82
"""Of the picture's width, what is left to the axes beside the colour bar: for guessing which texts fit."""
_LETTER_INCHES, _LINE_INCHES = 0.058, 0.14
_MOST_OUTLINED, _MOST_LABELS = 3000, 200
_POSITION = "position in the prompt (tokens)"
_ENDS = "a row for each end"


def prefix_tree(
    tree: Iterable[Run],
    *,
    width: str = "tokens",
    colour: str = "hits",
    most_rows: int = 40,
    now: float | None = None,
    title: str = "",
) -> Picture:
    """The tree of prefixes, from the first token on the left to the last on the right.

    A bar is a run of blocks that nothing branches off from, as long as its `width` (`tokens`, or `bytes` as stored),
    and as high as the rows of all that continue it. `colour` is `hits` (per block) or `age` (since the last use, as of
    `now`, in seconds since the epoch). Of more than `most_rows` ends (at least two) the largest subtrees are drawn;
    what else continues a run is one grey bar behind it, as long as the longest of them. Raises `ValueError` for another
    `width` or `colour`.
    """
    forest = Forest.of(_roots(tree), width)
    shade = _Shade.of(forest, colour, now)
    if not forest.runs:
        return _empty(title or "Prefixes", _POSITION if width == "tokens" else "stored size (B)")
    drawn = _Icicle.of(forest, max(most_rows, 2))
    right, rows = max(bar.right for bar in drawn.bars), int(drawn.bottom.max())
    unit = byte_unit(right) if width == "bytes" else _TOKENS
    picture, axes = sheet(title or f"Prefixes: {_summary(forest)}", height=1.3 + _ROW_INCHES * max(rows, 6))
    canvas: Any = axes[0, 0]
    corners = drawn.corners(unit.size)
    whole = np.array([bar.run for bar in drawn.bars])
    faces = PolyCollection([corners[index] for index in np.flatnonzero(whole >= 0)], gid="runs")
    faces.set(array=shade.values[whole[whole >= 0]], cmap=COLOURS, norm=shade.norm, edgecolor="white", linewidth=0.7)
    folded = PolyCollection([corners[index] for index in np.flatnonzero(whole < 0)], gid="folded")
    folded.set(facecolor=FAINT, edgecolor="white", linewidth=0.7)
    canvas.add_collection(faces)
    canvas.add_collection(folded)
    canvas.set_xlim(0, right / unit.size or 1)
    canvas.set_ylim(rows, 0)
    canvas.set_yticks([])
    canvas.spines["left"].set_visible(False)
    canvas.set_xlabel(_POSITION if width == "tokens" else f"stored size ({unit.name})")
    canvas.set_ylabel(_ENDS)
    _tree_labels(canvas, forest, drawn, unit, shade)
    colour_bar(picture, canvas, faces, shade.label)
    if (whole < 0).any():
        note(picture, "grey: more continuations than there is room for; as long as the longest of them")
    return picture


def treemap(
    tree: Iterable[Run], *, size: str = "bytes", colour: str = "hits", now: float | None = None, title: str = ""
) -> Picture:
    """Every run as a rectangle whose area is its `size` (`bytes` as stored, or `tokens`), inside of what it continues.

    A prefix that others continue is one rectangle beside those of its continuations; a heavy white line is around a
    prefix with all of them. `colour` and `now` as for `prefix_tree`. Raises `ValueError` for another `size` or
    `colour`.
    """
    forest = Forest.of(_roots(tree), size)
    shade = _Shade.of(forest, colour, now)
    if not forest.runs:
        return _empty(title or "Prefixes", f"area: {size}")
    picture, axes = sheet(title or f"Prefixes by {size}: {_summary(forest)}", height=4.2)
    canvas: Any = axes[0, 0]
    frame: Box = (0.0, 0.0, WIDTH * _CANVAS, 3.6)  # about inches, so that squares are squares
    own, whole = _nested(forest, frame)
    faces = PolyCollection(_corners(own), gid="runs", linewidths=0)
    faces.set(array=shade.values, cmap=COLOURS, norm=shade.norm)
    canvas.add_collection(faces)
    _outlines(canvas, forest, whole, own)
    canvas.set(xlim=(0, frame[2]), ylim=(0, frame[3]), xticks=[], yticks=[])
    for spine in canvas.spines.values():
        spine.set_visible(False)
    total = float(forest.own.sum())
    unit = byte_unit(total) if size == "bytes" else _TOKENS
    _map_labels(canvas, forest, own, unit, shade)
    colour_bar(picture, canvas, faces, shade.label)
    note(picture, f"the whole area is {unit.text(total)}{'' if size == 'tokens' else ' as stored'}")
    return picture


# What both have


def _roots(tree: Any) -> Iterable[Run]:
    roots: Iterable[Run] = getattr(tree, "roots", tree)
    return roots


def _empty(title: str, axis: str) -> Picture:
    picture, axes = sheet(title, height=1.8)
    nothing(axes[0, 0], "no blocks are stored")
    axes[0, 0].set_xlabel(axis)
    return picture


def _summary(forest: Forest) -> str:
    blocks = int(forest.column("blocks").sum())
    stored = float(forest.column("stored_bytes").sum())
    ends = len(forest.runs) - len(set(forest.parent.tolist()) - {-1})
    return f"{counted(blocks, 'block')}, {byte_unit(stored).text(stored)}, {counted(ends, 'end')}"


@dataclass(frozen=True, slots=True)
class _Shade:
    """What the colour of each run says."""

    values: NDArray[np.float64]
    norm: Any
    label: str

    @classmethod
    def of(cls, forest: Forest, colour: str, now: float | None) -> _Shade:
        if colour == "hits":
            values = forest.column("hits") / np.maximum(forest.column("blocks"), 1)
            return cls(values, scale_of(values), "hits per block")
        if colour != "age":
            raise ValueError(f"prefixes are coloured by hits or by age, not by {colour!r}")
        used = seconds([run.last_used for run in forest.runs])
        ages = np.maximum((time.time() if now is None else now) - used, 0.0)
        unit = duration_unit(float(ages.max(initial=0.0)))
        return cls(ages / unit.size, scale_of(ages / unit.size), f"{unit.name} since the last use")

    def face(self, run: int) -> Any:
        """The colour of one run, as red, green, blue."""
        colours: Any = COLOURS
        return colours(self.norm(float(self.values[run])))


# The tree


@dataclass(frozen=True, slots=True)
class _Bar:
    """`run` is -1 for what is folded: `hidden` runs, of `size` together. `parent` is the bar before it, or -1."""

    run: int
    parent: int
    left: float
    right: float
    hidden: int = 0
    size: float = 0.0


@dataclass(frozen=True, slots=True)
class _Icicle:
    """Bars in an order in which parents stand before their continuations, and the rows that each spans."""

    bars: list[_Bar]
    top: NDArray[np.int64]
    bottom: NDArray[np.int64]

    @classmethod
    def of(cls, forest: Forest, most_rows: int) -> _Icicle:
        bars = _unfolded(forest, most_rows)
        parents = np.array([bar.parent for bar in bars])
        leaf = np.ones(len(bars), bool)
        leaf[parents[parents >= 0]] = False
        # The rows of a bar begin with its first end, which is the next in this order.
        top = np.cumsum(leaf) - leaf
        rows = leaf.astype(np.int64)
        for index in range(len(bars) - 1, 0, -1):
            if parents[index] >= 0:
                rows[parents[index]] += rows[index]
        return cls(bars, top, top + rows)

    def corners(self, unit: float) -> list[NDArray[np.float64]]:
        edges = zip(self.bars, self.top, self.bottom, strict=True)
        return _corners([(bar.left / unit, top, (bar.right - bar.left) / unit, low - top) for bar, top, low in edges])


def _unfolded(forest: Forest, most_rows: int) -> list[_Bar]:
    children, shown = forest.children(), _shown(forest, most_rows)
    left, right, reach = _extents(forest)
    bars: list[_Bar] = []
    waiting: list[tuple[int, int]] = []

    def push(run: int, bar: int) -> None:
        missing = [child for child in children[run] if not shown[child]]
        if missing:
            count, size = int(forest.descendants[missing].sum()), float(forest.total[missing].sum())
            folded.append(_Bar(-1, bar, left[missing[0]], float(reach[missing].max()), count, size))
            waiting.append((-len(folded), bar))
        waiting.extend((child, bar) for child in reversed(children[run]) if shown[child])

    folded: list[_Bar] = []
    push(-1, -1)
    while waiting:
        run, parent = waiting.pop()
        if run < 0:
            bars.append(folded[-run - 1])
            continue
        bars.append(_Bar(run, parent, left[run], right[run]))
        push(run, len(bars) - 1)
    return bars


def _shown(forest: Forest, most_rows: int) -> NDArray[np.bool_]:
    """The largest subtrees, as many as there are rows for; a row is an end, or what is folded behind a run."""
    shown = np.zeros(len(forest.runs) + 1, bool)
    hidden = np.array([len(found) for found in forest.children()])
    drawn = np.zeros_like(hidden)
    rows = 1
    for run in np.argsort(-forest.total, kind="stable"):
        parent = forest.parent[run]
        # The first continuation takes the row of what is folded, the last one leaves nothing folded.
        more = int(drawn[parent] > 0 or hidden[parent] > 1) - int(drawn[parent] > 0 and hidden[parent] == 1)
        if rows + more > most_rows and shown.any():
            break
        rows += more
        drawn[parent] += 1
        hidden[parent] -= 1
        shown[run] = True
    return shown


def _extents(forest: Forest) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Where each run begins and ends, and the end of the longest of all that continue it.

    A root whose predecessors are gone begins where they would have ended, were their blocks as large as its own.
    """
    left, right = np.zeros(len(forest.runs)), forest.own.copy()
    for index, (run, parent) in enumerate(zip(forest.runs, forest.parent, strict=True)):
        left[index] = right[parent] if parent >= 0 else max(run.start, 0) * forest.own[index] / max(run.blocks, 1)
        right[index] += left[index]
    reach = right.copy()
    for index in range(len(forest.runs) - 1, -1, -1):
        parent = forest.parent[index]
        if parent >= 0:
            reach[parent] = max(reach[parent], reach[index])
    return left, right, reach


def _tree_labels(canvas: Any, forest: Forest, drawn: _Icicle, unit: Unit, shade: _Shade) -> None:
    """What a bar is, where that fits: inside, or behind an end with nothing to its right."""
    right = canvas.get_xlim()[1]
    inches = WIDTH * _CANVAS / right
    for bar, top, bottom in zip(drawn.bars, drawn.top, drawn.bottom, strict=True):
        if bar.run < 0:
            texts = [f"{counted(bar.hidden, 'more run')}, {unit.text(bar.size)}", f"+ {bar.hidden:,}"]
        else:
            texts = _texts(forest, bar.run, unit)
        length = (bar.right - bar.left) / unit.size
        text = next((text for text in texts if len(text) * _LETTER_INCHES < length * inches), None)
        if text is not None:
            face = shade.face(bar.run) if bar.run >= 0 else FAINT
            where = ((bar.left / unit.size) + 0.05 / inches, (top + bottom) / 2)
            canvas.annotate(text, where, fontsize=NOTE, color=readable_on(face), va="center", clip_on=True)


def _texts(forest: Forest, run: int, unit: Unit) -> list[str]:
    """From the longest to the shortest."""
    size, name = unit.text(forest.own[run]), ", ".join(forest.runs[run].labels)
    return [f"{name}: {size}", name, size] if name else [size]


# The map


def _nested(forest: Forest, frame: Box) -> tuple[list[Box], list[Box]]:
    """Of each run: the rectangle of its own blocks, and that of all that continues it."""
    children = forest.children()
    own: list[Box] = [(0.0, 0.0, 0.0, 0.0)] * len(forest.runs)
    whole = list(own)
    for run, box in zip(children[-1], squarify([forest.total[root] for root in children[-1]], frame), strict=True):
        whole[run] = box
    for run in range(len(forest.runs)):
        parts = sorted(
            [(forest.own[run], -1), *((forest.total[child], child) for child in children[run])], reverse=True
        )
        for (_, part), box in zip(parts, squarify([size for size, _ in parts], whole[run]), strict=True):
            if part < 0:
                own[run] = box
            else:
                whole[part] = box
    return own, whole


def _corners(boxes: Iterable[Box]) -> list[NDArray[np.float64]]:
    return [np.array([(x, y), (x + w, y), (x + w, y + h), (x, y + h)], np.float64) for x, y, w, h in boxes]


def _outlines(canvas: Any, forest: Forest, whole: list[Box], own: list[Box]) -> None:
    """Thin lines around each run, thicker ones the fewer runs stand before; none where they would cover everything."""
    small = len(forest.runs) > _MOST_OUTLINED
    if not small:
        canvas.add_collection(PolyCollection(_corners(own), facecolors="none", edgecolors="white", linewidths=0.4))
    for depth, line in ((1, 1.0), (0, 2.2)):
        chosen = [whole[index] for index in np.flatnonzero(forest.depth == depth)]
        if 0 < len(chosen) <= _MOST_OUTLINED:
            canvas.add_collection(
                PolyCollection(_corners(chosen), facecolors="none", edgecolors="white", linewidths=line)
            )


def _map_labels(canvas: Any, forest: Forest, own: list[Box], unit: Unit, shade: _Shade) -> None:
    inches = WIDTH * _CANVAS / canvas.get_xlim()[1]
    largest: list[int] = np.argsort(-forest.own, kind="stable")[:_MOST_LABELS].tolist()
    for index in largest:
        left, bottom, width, height = own[index]
        texts = [text.replace(": ", "\n") for text in _texts(forest, index, unit)]
        for text in texts:
            lines = text.split("\n")
            if max(map(len, lines)) * _LETTER_INCHES < width * inches and len(lines) * _LINE_INCHES < height * inches:
                colour = readable_on(shade.face(index))
                where = (left + 0.05 / inches, bottom + height - 0.05 / inches)
                canvas.annotate(text, where, fontsize=NOTE, color=colour, va="top")
                break
