"""What KV would lose in eight bits: rounded to FP8 and back, with a scale for each layer or each head, or none.

As vLLM and other engines do with `kv_cache_dtype=fp8`: x is stored as fp8(x / scale) and read as that times scale,
with the scale chosen so that the largest magnitude becomes the largest number of the format. What is too large for the
format becomes that number (they saturate). Blocks themselves are stored as they are: this is a look at what an engine
with FP8 KV would give up for half of the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.inspect.pictures._arrays import KV
from kvstore.inspect.pictures._paper import DARK, LABEL, MIDDLE, Picture, layer_axis, legend, note, sheet, tidy
from kvstore.inspect.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["FP8Errors", "fp8_cost", "fp8_errors"]

FORMATS = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
SCALES = {"none": "no scale", "tensor": "a scale per layer", "head": "a scale per head"}
_STYLES = {"none": ":", "tensor": "--", "head": "-"}
_SHADES = {"e4m3": DARK, "e5m2": MIDDLE}


@dataclass(frozen=True, slots=True)
class FP8Errors:
    """Relative errors of FP8, as root mean squares: |restored - exact| / |exact| over all tokens of a head.

    `relative` has the axes (format, scale, layer, kv, head) in the order of the names beside it. `saturated` counts the
    values that were too large, in the same axes. Values that are not finite are left out; `missing` counts them.
    """

    formats: tuple[str, ...]
    scales: tuple[str, ...]
    layers: tuple[int, ...]
    sides: tuple[str, ...]
    heads: tuple[int, ...]
    relative: NDArray[np.float64]
    saturated: NDArray[np.int64]
    missing: int = 0

    @property
    def bits(self) -> NDArray[np.float64]:
        """Effective bits: how often the error can be halved from the size of the values, -log2 of it."""
        with np.errstate(divide="ignore"):
            return -np.log2(self.relative)


def fp8_errors(
    kv: Any, *, formats: Sequence[str] = ("e4m3", "e5m2"), scales: Sequence[str] = ("none", "tensor", "head")
) -> FP8Errors:
    """Round `kv` (as in `values`) to each FP8 format with each scale, and compare.

    `scales`: `none` (1.0, as engines do without calibration), `tensor` (one for the keys and one for the values of each
    layer) or `head`. Raises `ValueError` for other names, and as the pictures of values do.
    """
    unknown = sorted({*formats} - {*FORMATS}) + sorted({*scales} - {*SCALES})
    if unknown or not formats or not scales:
        raise ValueError(
            f"formats are of {', '.join(FORMATS)}, scales of {', '.join(SCALES)}; not {', '.join(unknown) or 'none'}"
        )
    given = KV.of(kv)
    shape = (len(formats), len(scales), len(given.layers), len(given.sides), len(given.heads))
    relative, saturated, missing = np.zeros(shape), np.zeros(shape, np.int64), 0
    for index, values in enumerate(given):
        finite = np.isfinite(values)
        missing += int(np.sum(~finite))
        exact = np.where(finite, values, np.float32(0))
        for place, name in enumerate(formats):
            for scale, kind in enumerate(scales):
                found = _lost(exact, FORMATS[name], kind)
                relative[place, scale, index], saturated[place, scale, index] = found
    names = (tuple(formats), tuple(scales), tuple(given.layers), tuple(given.sides), tuple(given.heads))
    return FP8Errors(*names, relative, saturated, missing)


def fp8_cost(
    kv: Any, *, formats: Sequence[str] = ("e4m3", "e5m2"), scales: Sequence[str] = ("none", "tensor", "head")
) -> Picture:
    """The relative error of FP8 per layer, K and V apart: a line for each format and scale, a dot for each head.

    On the right the same as effective bits. `kv` may be `FP8Errors`, and otherwise what `fp8_errors` takes.
    """
    found = kv if isinstance(kv, FP8Errors) else fp8_errors(kv, formats=formats, scales=scales)
    picture, axes = sheet(
        "What FP8 costs, per layer", height=2.5 * len(found.sides) + 0.7, rows=len(found.sides), share=True
    )
    places = np.arange(len(found.layers))
    alone = "_" if len(places) == 1 else ""
    for canvas, side in zip(axes[:, 0], found.sides, strict=True):
        per_side = found.relative[:, :, :, found.sides.index(side)] * 100
        for name, by_scale in zip(found.formats, per_side, strict=True):
            for kind, errors in zip(found.scales, by_scale, strict=True):
                line = np.sqrt(np.mean(errors**2, -1))
                label, colour = f"{name}, {SCALES[kind]}", _SHADES[name]
                canvas.plot(
                    places,
                    line,
                    _STYLES[kind],
                    color=colour,
                    lw=1.3,
                    marker=alone,
                    ms=5,
                    label=label,
                    gid=f"{name} {kind}",
                )
                if len(found.heads) > 1:
                    canvas.plot(
                        np.repeat(places, len(found.heads)), errors.ravel(), ".", color=colour, ms=1.5, alpha=0.5
                    )
        canvas.set_ylabel(f"error of {side} (%)")
        canvas.set_ylim(bottom=0)
        layer_axis(canvas.xaxis, list(found.layers))
        canvas.set_xlim(-0.5, len(places) - 0.5)
        _bits_axis(canvas)
    legend(axes[0, 0], len(found.formats))
    axes[-1, 0].set_xlabel("layer")
    note(picture, _remarks(found))
    return picture


def _bits_axis(canvas: Any) -> None:
    """The same errors as powers of two, on the right."""
    right: Any = canvas.twinx()
    tidy(right)
    low, high = canvas.get_ylim()
    right.set_ylim(low, high)
    # Each is half as high as the one before: soon there is no room for another.
    bits = [number for number in range(1, 16) if high / 16 <= 2.0**-number * 100 <= high]
    right.set_yticks([2.0**-number * 100 for number in bits], [str(number) for number in bits])
    right.spines["right"].set_visible(True)
    right.spines["left"].set_visible(False)
    right.set_ylabel("effective bits", fontsize=LABEL)


def _remarks(found: FP8Errors) -> str:
    remarks = ["error: root mean square, relative to the values; a line for all heads, a dot for each"]
    lost = int(found.saturated.max(initial=0))
    if lost:
        worst = [
            f"{name} with {SCALES[kind]}: {int(found.saturated[place, scale].sum()):,}"
            for place, name in enumerate(found.formats)
            for scale, kind in enumerate(found.scales)
            if found.saturated[place, scale].any()
        ]
        remarks.append(f"too large for the format: {'; '.join(worst)}")
    if found.missing:
        remarks.append(f"{counted(found.missing, 'value')} left out: not a finite number")
    return "\n".join(remarks)


def _lost(exact: NDArray[np.float32], dtype: str, kind: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Relative error and saturated values of one layer: axes (kv, head)."""
    import ml_dtypes

    element: Any = getattr(ml_dtypes, dtype)
    largest = np.float32(_LARGEST[dtype])
    peak = np.abs(exact).max((1, 3) if kind == "head" else (1, 2, 3), keepdims=True)
    scale = np.where(peak > 0, peak / largest, np.float32(1)) if kind != "none" else np.ones_like(peak)
    scaled = exact / scale
    # Rounded to the format a peak may come out a hair above what it was scaled to.
    saturated = (np.abs(scaled) > largest * np.float32(1 + 1e-6)).sum((1, 3))
    restored = np.clip(scaled, -largest, largest).astype(element).astype(np.float32) * scale
    power = np.square(exact, dtype=np.float64).sum((1, 3))
    wrong = np.square(restored - exact, dtype=np.float64).sum((1, 3))
    return np.sqrt(np.divide(wrong, power, out=np.zeros_like(power), where=power > 0)), saturated
