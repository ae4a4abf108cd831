"""KV with names on its axes, as pictures of values want it: whatever it came as, a layer at a time, in float32.

A layer at a time, because a prefix of a large model is gigabytes, and float32 would be twice or four times those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["KV", "SIDES"]

_AXES = ("layer", "kv", "token", "head", "dim")
_LATENT = ("layer", "token", "latent")
SIDES = {"0": "K", "1": "V", "k": "K", "v": "V", "key": "K", "value": "V", "keys": "K", "values": "V"}


@dataclass(frozen=True, slots=True)
class KV:
    """`array` has the axes (layer, kv, token, head, dim) and any type of `kvstore.layout.DTYPES`; it is only read.

    `layers` are the numbers of the layers as the model counts them, `sides` what stands along kv: `K` and `V`, or
    `latent` alone; `heads` the numbers of the heads.
    """

    array: NDArray[Any]
    layers: list[int]
    sides: list[str]
    heads: list[int]

    @classmethod
    def of(cls, given: Any) -> KV:
        """From an xarray DataArray or what has `.xarray()`, in any order of its axes; or an array in the canonical one.

        A selection may have lost axes (one layer, one head, keys alone); latent KV has a single head. Raises
        `ValueError` for other axes, or without a single value; `TypeError` for what holds no numbers.
        """
        if hasattr(given, "xarray"):
            given = given.xarray()
        if hasattr(given, "dims"):
            return cls._named(given)
        array = np.asarray(given)
        if array.ndim != len(_AXES):
            raise ValueError(
                f"an array of shape {array.shape} is no KV: it has the axes ({', '.join(_AXES)}), or names of its own"
                " (an xarray DataArray)"
            )
        if array.shape[1] not in (1, 2):
            raise ValueError(f"the second axis, kv, has length {array.shape[1]}: keys and values are two")
        names = ["K", "V"] if array.shape[1] == 2 else ["KV"]
        return cls(_numbers(array), list(range(array.shape[0])), names, list(range(array.shape[3])))

    @classmethod
    def _named(cls, given: Any) -> KV:
        dims = tuple(map(str, given.dims))
        unknown = sorted(set(dims) - set(_AXES) - set(_LATENT))
        if unknown or not {"dim", "latent"} & set(dims):
            why = given.attrs.get("why_opaque") or f"those of KV are {_AXES} or {_LATENT}"
            raise ValueError(f"an array of axes {dims} is no KV: {why}")
        axes = [axis for axis in (*_AXES[:-1], "dim" if "dim" in dims else "latent") if axis in dims]
        array = np.asarray(given.transpose(*axes).data)
        for place, axis in enumerate(_AXES):
            if axis not in dims and not (axis == "dim" and "latent" in dims):
                array = np.expand_dims(array, place)
        layers = _labels(given, "layer", array.shape[0])
        heads = _labels(given, "head", array.shape[3])
        sides = ["latent"] if "latent" in dims else _sides(given, array.shape[1])
        return cls(_numbers(array), [int(layer) for layer in layers], sides, [int(head) for head in heads])

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        """Each layer as float32, axes (kv, token, head, dim)."""
        return (layer.astype(np.float32) for layer in self.array)

    @property
    def tokens(self) -> int:
        """How many."""
        return int(self.array.shape[2])

    def said(self) -> str:
        """What it is, for a title: `30 layers, 512 tokens, float32`."""
        layers = f"layer {self.layers[0]}" if len(self.layers) == 1 else f"{len(self.layers)} layers"
        return f"{layers}, {self.tokens:,} token{'' if self.tokens == 1 else 's'}, {self.array.dtype}"


def _numbers(array: NDArray[Any]) -> NDArray[Any]:
    if array.size == 0:
        raise ValueError(f"KV of shape {array.shape} has no values to look at")
    # The types of `ml_dtypes` are of numpy's kind V, as records are.
    if array.dtype.kind not in "fiuV" or array.dtype.names is not None:
        raise TypeError(f"KV is numbers, and an array of {array.dtype} holds none")
    return array


def _labels(given: Any, axis: str, length: int) -> list[Any]:
    """The numbers along an axis: its coordinates where there are any (after a selection they do not count from 0)."""
    coordinates = given.coords
    if axis not in coordinates:
        return list(range(length))
    labels: list[Any] = np.atleast_1d(np.asarray(coordinates[axis].data)).tolist()
    return labels


def _sides(given: Any, length: int) -> list[str]:
    found = [SIDES.get(str(side).lower(), str(side)) for side in _labels(given, "kv", length)]
    return found if len(found) == 2 or "kv" in given.coords else ["KV"]
