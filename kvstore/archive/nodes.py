"""The zarr side of an archive: the `zarr.json` documents and the small arrays beside the blocks.

::

    <archive>/zarr.json            group; attributes: what the archive is; consolidated metadata of all below
    <archive>/g0/zarr.json         KV-cache group 0 over all tokens: (layer, kv, token, head, dim), or (block, byte)
    <archive>/g0/c/0/0/3/0/0       one shard of it
    <archive>/digests, positions, checksums, tokens      one chunk each: what the blocks are

Written as JSON, without zarr-python, whose import takes longer than listing archives may; tests hold it against both
zarr-python and xarray.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.integrity import crc32c
from kvstore.layout import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from kvstore.archive.packing import Packing
    from kvstore.layout import BlockLayout

__all__ = ["GridAxes", "block_document", "group_document", "small_array", "small_values"]

METADATA_NAME = "zarr.json"
_LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
_PLAIN = {"name": "bytes"}
_CRC32C = {"name": "crc32c"}
_DEFAULT_KEYS = {"name": "default", "configuration": {"separator": "/"}}
_CRC = struct.Struct("<I")


class GridAxes:
    """How the blocks of a layout lie along the axes of one array: along `token` where there is one, else a new axis."""

    def __init__(self, layout: BlockLayout) -> None:
        self.along_token = "token" in layout.axes
        self.axes = layout.axes if self.along_token else ("block", *layout.axes)
        self.block_shape = layout.shape if self.along_token else (1, *layout.shape)
        self.axis = self.axes.index("token" if self.along_token else "block")

    def shape(self, blocks: int) -> tuple[int, ...]:
        """Of so many blocks."""
        lengths = list(self.block_shape)
        lengths[self.axis] *= blocks
        return tuple(lengths)

    def chunk(self, group: int, number: int) -> str:
        """The path of shard `number`, relative to the archive."""
        index = [0] * len(self.axes)
        index[self.axis] = number
        return f"g{group}/c/{'/'.join(map(str, index))}"

    def index(self, block: int) -> tuple[slice, ...]:
        """Where block `block` stands in the array."""
        step = self.block_shape[self.axis]
        index = [slice(None)] * len(self.axes)
        index[self.axis] = slice(block * step, (block + 1) * step)
        return tuple(index)


def block_document(packing: Packing, blocks: int, lengths: dict[str, int]) -> dict[str, Any]:
    """The `zarr.json` of a KV-cache group's array.

    `lengths` are those of the axes named so far, and is added to: xarray wants one length for one name, so that an
    axis of another length is named after its group, too.
    """
    layout, grid = packing.layout, GridAxes(packing.layout)
    shape = grid.shape(blocks)
    names: list[str] = []
    for axis, length in zip(grid.axes, shape, strict=True):
        name = axis if lengths.setdefault(axis, length) == length else f"{axis}_g{packing.group}"
        lengths[name] = length
        names.append(name)
    endian = _PLAIN if DTYPES[layout.dtype] == 1 else _LITTLE
    sharding = {
        "chunk_shape": list(grid.block_shape),
        "codecs": [endian, *packing.compression.zarr_codec(layout), _CRC32C],
        "index_codecs": [_LITTLE, _CRC32C],
        "index_location": "end",
    }
    codecs = [{"name": "sharding_indexed", "configuration": sharding}]
    fill = "NaN" if "float" in layout.dtype else 0
    return _array(shape, grid.shape(packing.room), layout.dtype, fill, codecs, names)


def small_array(values: NDArray[Any], names: Sequence[str]) -> tuple[dict[str, Any], str, bytes]:
    """An array in one chunk: its document, the path of the chunk below it, and the chunk."""
    codecs = [_PLAIN if values.dtype.itemsize == 1 else _LITTLE, _CRC32C]
    document = _array(values.shape, values.shape, values.dtype.name, 0, codecs, names)
    raw = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).tobytes()
    return document, "c/" + "/".join("0" * values.ndim), raw + _CRC.pack(crc32c(raw))


def small_values(chunk: bytes, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """The values of a small array's chunk, whose bytes were checked. Raises `ValueError` where they are not so many."""
    return np.frombuffer(chunk[: -_CRC.size], np.dtype(dtype).newbyteorder("<")).reshape(shape)


def group_document(attributes: Mapping[str, Any], children: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The `zarr.json` of the archive, with those of all below it."""
    consolidated = {"kind": "inline", "must_understand": False, "metadata": dict(children)}
    return {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": dict(attributes),
        "consolidated_metadata": consolidated,
    }


def dump(document: Mapping[str, Any]) -> bytes:
    """As it is stored."""
    return json.dumps(document, indent=1).encode() + b"\n"


def _array(
    shape: Sequence[int], chunk: Sequence[int], dtype: str, fill: object, codecs: list[Any], names: Sequence[str]
) -> dict[str, Any]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": _DEFAULT_KEYS,
        "fill_value": fill,
        "codecs": codecs,
        "attributes": {},
        "dimension_names": list(names),
        "storage_transformers": [],
    }
