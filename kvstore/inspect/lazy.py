"""Labelled arrays whose values are read when somebody asks for them: xarray over blocks that stay in their tier.

An index is cut at the borders of the blocks, so that only blocks that have a share in it are read, through the reader
of the inspection, which keeps the last ones. Without dask: xarray's own lazy indexing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray
from xarray.backends import BackendArray
from xarray.core import indexing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from kvstore.inspect.axes import Axes

    ReadEach = Callable[[Sequence[int]], Iterator[NDArray[np.uint8]]]
    Part = slice | NDArray[np.intp] | int

__all__ = ["Blocks", "data_array"]


class Blocks(BackendArray):
    """`count` blocks of one layout as one array: side by side along the axis `along`.

    `read_each(numbers)` gives the bytes of blocks by their number, which rises. `dtype` is what values are turned into.
    """

    def __init__(self, axes: Axes, count: int, along: int, read_each: ReadEach, dtype: np.dtype[Any]) -> None:
        self._axes, self._read_each, self._along = axes, read_each, along
        self._step = axes.shape[along]
        self.dtype = dtype
        self.shape = (*axes.shape[:along], count * self._step, *axes.shape[along + 1 :])

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        untyped: Any = indexing
        if not isinstance(key, indexing.VectorizedIndexer):
            return self._outer(key.tuple)  # as it is: the adapter cannot turn an empty slice round
        return untyped.explicit_indexing_adapter(key, self.shape, untyped.IndexingSupport.OUTER, self._outer)

    def _outer(self, key: tuple[Part, ...]) -> NDArray[Any]:
        """Values at the outer product of slices, index arrays and numbers, one for each axis. The caller's own."""
        places = [_places(part, length) for part, length in zip(key, self.shape, strict=True)]
        out = np.empty([len(part) for part in places], self.dtype)
        blocks, inside = np.divmod(places[self._along], self._step)
        numbers = np.unique(blocks)
        for number, data in zip(numbers.tolist(), self._read_each(numbers.tolist()), strict=True):
            here = np.flatnonzero(blocks == number)
            places[self._along] = inside[here]
            out[(slice(None),) * self._along + (_run(here),)] = _taken(self._axes.decode(data), places)
        return out[tuple(0 if isinstance(part, int | np.integer) else slice(None) for part in key)]


def data_array(
    values: Blocks,
    dims: Sequence[str],
    coords: Mapping[str, Any],
    attrs: Mapping[str, Any],
    name: str,
) -> xarray.DataArray:
    """A labelled array over `values`; nothing is read before its values are asked for."""
    variable = xarray.Variable(tuple(dims), indexing.LazilyIndexedArray(values), dict(attrs))
    return xarray.DataArray(variable, coords=dict(coords), name=name)


def _places(part: Part, length: int) -> NDArray[np.intp]:
    """The places that a part of an index names, none of them negative."""
    places = np.arange(*part.indices(length)) if isinstance(part, slice) else np.atleast_1d(np.asarray(part))
    return np.where(places < 0, places + length, places)


def _run(places: NDArray[np.intp]) -> slice | NDArray[np.intp]:
    """The same places as a slice, where they follow each other: numpy copies these without looking at each."""
    if len(places) and places[-1] - places[0] == len(places) - 1 and bool((np.diff(places) == 1).all()):
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


def _taken(array: NDArray[Any], places: Sequence[NDArray[np.intp]]) -> NDArray[Any]:
    """`array` at the outer product of the places; runs of them first, because they copy nothing."""
    runs = [_run(each) for each in places]
    array = array[tuple(each if isinstance(each, slice) else slice(None) for each in runs)]
    for axis, each in enumerate(runs):
        if not isinstance(each, slice):
            array = array.take(each, axis=axis)
    return array
