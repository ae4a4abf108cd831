"""Blocks as zarr arrays: the stored chunk itself where the tier keeps zarr, else an array in memory."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kvstore.inspect.needs import needed

if TYPE_CHECKING:
    import zarr

    from kvstore.inspect.block import BlockView
    from kvstore.namespace import Namespace
    from kvstore.types import BlockKey

__all__ = ["zarr_array"]


@runtime_checkable
class _KeepsZarr(Protocol):
    """A store whose blocks are zarr chunks."""

    def zarr_array(self, namespace: Namespace, key: BlockKey) -> zarr.Array[Any]:
        """The block `key` as an array of the layout's shape, whose values stock zarr reads when they are asked for."""
        ...


def zarr_array(view: BlockView) -> zarr.Array[Any]:
    """See `BlockView.zarr`."""
    zarr_api = needed("zarr")
    as_stored = view.axes.dims == view.namespace.layouts[view.group].axes  # a row of vLLM's is stored as bytes
    if as_stored and isinstance(view.store, _KeepsZarr):
        return view.store.zarr_array(view.namespace, view.key)
    importlib.import_module("kvstore_zarr.dtypes").register()  # a room of zarr's, not of a tier
    values = view.numpy()
    array: zarr.Array[Any] = zarr_api.create_array(
        {},
        shape=values.shape,
        dtype=values.dtype,
        chunks=values.shape,
        compressors=None,
        dimension_names=view.axes.dims,
    )
    array[...] = values
    return array
