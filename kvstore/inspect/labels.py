"""Coordinates and attributes: what a labelled array says of its values, of one block and of a prefix alike."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.inspect.axes import KV, TOKEN
from kvstore.inspect.lazy import Blocks, data_array
from kvstore.inspect.wording import moment, short
from kvstore.layout import DTYPES, BlockLayout
from kvstore.types import NO_POSITION

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray
    from numpy.typing import NDArray

    from kvstore.inspect.axes import Axes
    from kvstore.inspect.block import BlockView
    from kvstore.inspect.prefix import PrefixView
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo

__all__ = ["block_array", "prefix_array"]

ADDED = 2
"""How numpy says that a type is not one of its own (`dtype.isbuiltin`)."""

BLOCK = "block"
"""The axis of a prefix whose blocks have no tokens."""


def block_array(view: BlockView, dtype: str | None) -> xarray.DataArray:
    """See `BlockView.xarray`."""
    values = Blocks(view.axes, 1, 0, view.read_each, _dtype(view.axes, dtype))
    coords = _coords(view.axes) | _token_coords(view.axes, [view.info])
    attrs = _attrs(view.namespace, view.axes, view.group, view.source) | {
        "digest": view.digest,
        "position": _position(view.info),
        "created": moment(view.info.created),
    }
    return data_array(values, view.axes.dims, coords, attrs, f"block {short(view.digest)}")


def prefix_array(view: PrefixView, dtype: str | None) -> xarray.DataArray:
    """See `PrefixView.xarray`."""
    axes, along = view.axes, view.axes.token_axis
    if along is None:
        axes, along = _stacked(axes), 0
    values = Blocks(axes, len(view.infos), along, view.read_each, _dtype(axes, dtype))
    coords = _coords(axes) | _token_coords(axes, view.infos)
    attrs = _attrs(view.namespace, axes, view.group, view.source) | {
        "digest": view.digest,
        "blocks": len(view.infos),
        "complete": int(view.complete),
    }
    return data_array(values, axes.dims, coords, attrs, f"prefix {short(view.digest)}")


def _stacked(axes: Axes) -> Axes:
    """The same with an axis of blocks before the others, of which each block has one."""

    def decode(data: NDArray[np.uint8]) -> NDArray[Any]:
        return axes.decode(data)[np.newaxis]

    return replace(axes, dims=(BLOCK, *axes.dims), shape=(1, *axes.shape), decode=decode)


def _dtype(axes: Axes, name: str | None) -> np.dtype[Any]:
    """What values are turned into: xarray computes with no type that others added to numpy's own."""
    if name is None:
        return np.dtype(np.float32) if axes.dtype.isbuiltin == ADDED else axes.dtype
    return BlockLayout(name, ("byte",), (1,)).numpy_dtype if name in DTYPES else np.dtype(name)


def _coords(axes: Axes) -> dict[str, Any]:
    coords: dict[str, Any] = {}
    if axes.layers is not None and "layer" in axes.dims:
        coords["layer"] = ("layer", np.array(axes.layers), {"long_name": "layer of the model"})
        if axes.layer_names:
            coords["layer_name"] = ("layer", np.array(axes.layer_names))
    if "kv" in axes.dims and axes.shape[axes.dims.index("kv")] == len(KV):
        coords["kv"] = ("kv", np.array(KV))
    return coords


def _token_coords(axes: Axes, infos: Sequence[BlockInfo]) -> dict[str, Any]:
    """Where each value is in the prompt, and in which block of it; nothing where a position is not known."""
    positions = np.array([info.position for info in infos])
    if (positions == NO_POSITION).any():
        return {}
    if axes.tokens is None:
        return (
            {BLOCK: (BLOCK, positions, {"long_name": "position of the block in its prefix"})}
            if (BLOCK in axes.dims)
            else {}
        )
    places = (positions[:, np.newaxis] * axes.tokens + np.arange(axes.tokens)).ravel()
    return {
        TOKEN: (TOKEN, places, {"long_name": "place in the prompt", "units": "tokens"}),
        BLOCK: (TOKEN, np.repeat(positions, axes.tokens), {"long_name": "position of the block in its prefix"}),
    }


def _attrs(namespace: Namespace, axes: Axes, group: int, source: str) -> dict[str, Any]:
    attrs = {
        "units": "1",
        "long_name": "keys and values" if "kv" in axes.dims else "stored KV cache",
        "model": namespace.model,
        "revision": namespace.revision,
        "namespace": namespace.name,
        "group": group,
        "dtype": axes.dtype_name,
        "source": source,
    }
    return attrs | ({"why_opaque": axes.why_opaque} if axes.why_opaque else {})


def _position(info: BlockInfo) -> int | str:
    return "unknown" if info.position == NO_POSITION else info.position
