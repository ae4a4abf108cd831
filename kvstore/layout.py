"""Shape, dtype and order of the bytes in a block, and views of a block as an array without a copy.

The canonical layout has all layers and all heads, as if tensor-parallel size were 1: what one topology wrote another
can read (`kvstore.shards` gives each rank its part). Which axes it has depends on the kind of attention:

    heads of keys and values (MHA, GQA, MQA)   (layer, kv, token, head, dim)    `BlockLayout.canonical`
    latent attention (MLA)                     (layer, token, latent)           `BlockLayout.latent`
    state space (no token axis)                e.g. (layer, head, dim, state)   `BlockLayout(dtype, axes, shape)`
    an engine's own secret                     (byte)                           `BlockLayout.opaque`

A model that mixes them has one layout per KV-cache group. `layer` counts the layers of the group; axes called `head`,
`latent` and `layer` mean the same in every layout, other names are the engine's. FP8 elements are stored as they are;
scales that are not part of the weights belong in `Namespace.extra`, or in a group of their own.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvstore.errors import InvalidBlockError
from kvstore.untrusted import entry, fields, members

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from numpy.typing import NDArray
    from typing_extensions import Buffer

__all__ = ["CANONICAL_AXES", "DTYPES", "LATENT_AXES", "MAX_BLOCK_BYTES", "BlockLayout", "as_bytes"]

CANONICAL_AXES = ("layer", "kv", "token", "head", "dim")
LATENT_AXES = ("layer", "token", "latent")

DTYPES: Mapping[str, int] = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Element types a block may have, with their size in bytes. Multi-byte elements are little-endian.

The names are those of torch, `ml_dtypes` and zarr (`float8_e4m3fn` as tensorstore has it: the registry of zarr
extensions does not list it).
"""

MAX_BLOCK_BYTES = 1 << 40
"""No block is as large as this, a thousand times the largest known: a manifest that says so is damaged."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """One KV-cache group's block: C order over `axes`, `shape` elements of `dtype`.

    Raises `ValueError` for a dtype that is not in `DTYPES`, axes that do not match the shape, or more bytes than
    `MAX_BLOCK_BYTES`.
    """

    dtype: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        # numpy's integers are no JSON, and 2.5 layers are no layers.
        object.__setattr__(self, "shape", tuple(operator.index(length) for length in self.shape))
        object.__setattr__(self, "axes", tuple(self.axes))
        if self.dtype not in DTYPES:
            raise ValueError(f"block dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if len(self.axes) != len(self.shape) or len(set(self.axes)) != len(self.axes):
            raise ValueError(f"axes {self.axes} do not name each dimension of shape {self.shape} once")
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"block shape {self.shape} has an empty dimension")
        if self.nbytes > MAX_BLOCK_BYTES:
            raise ValueError(f"a block of shape {self.shape} and {self.dtype} is larger than {MAX_BLOCK_BYTES} bytes")

    @classmethod
    def canonical(cls, *, layers: int, tokens: int, heads: int, head_dim: int, dtype: str) -> BlockLayout:
        """Keys and values of `tokens` tokens: axes (layer, kv, token, head, dim), kv 0 the keys and 1 the values."""
        return cls(dtype, CANONICAL_AXES, (layers, 2, tokens, heads, head_dim))

    @classmethod
    def latent(cls, *, layers: int, tokens: int, latent: int, dtype: str) -> BlockLayout:
        """Latent attention (MLA): per token and layer one vector of `latent` elements, its rotary part included."""
        return cls(dtype, LATENT_AXES, (layers, tokens, latent))

    @classmethod
    def opaque(cls, nbytes: int) -> BlockLayout:
        """`nbytes` bytes whose meaning only the engine knows."""
        return cls("uint8", ("byte",), (nbytes,))

    @property
    def nbytes(self) -> int:
        """Bytes in one block."""
        return math.prod(self.shape) * DTYPES[self.dtype]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The element type for numpy; bfloat16 and the FP8 types come from `ml_dtypes`."""
        if self.dtype.startswith(("bfloat", "float8")):
            import ml_dtypes

            extension: np.dtype[Any] = np.dtype(getattr(ml_dtypes, self.dtype))
            return extension
        return np.dtype(self.dtype).newbyteorder("<")

    def to_numpy(self, block: Buffer) -> NDArray[Any]:
        """`block` as an array of this shape, sharing its memory; writable if the buffer is."""
        return self._bytes(block).view(self.numpy_dtype).reshape(self.shape)

    def to_torch(self, block: Buffer) -> torch.Tensor:
        """`block` as a CPU tensor of this shape, sharing its memory.

        torch has no read-only tensors, so the buffer must be writable (`InvalidBlockError` if it is not).
        """
        import torch

        flat = self._bytes(block)
        if not flat.flags.writeable:
            raise InvalidBlockError("torch cannot view a read-only buffer: pass a writable one, or use to_numpy")
        return torch.as_tensor(flat).view(getattr(torch, self.dtype)).reshape(self.shape)

    def _bytes(self, block: Buffer) -> NDArray[np.uint8]:
        flat = as_bytes(block)
        if flat.nbytes != self.nbytes:
            raise InvalidBlockError(f"the buffer has {flat.nbytes} bytes, a block of this layout has {self.nbytes}")
        return flat

    def to_manifest(self) -> dict[str, Any]:
        """As JSON-ready values; `from_manifest` reads them back."""
        return {"dtype": self.dtype, "axes": list(self.axes), "shape": list(self.shape)}

    @classmethod
    def from_manifest(cls, manifest: object) -> BlockLayout:
        """The layout that `to_manifest` described. Raises `ValueError` for whatever is not one."""
        said = fields(manifest, "a layout")
        return cls(entry(said, "dtype", str), tuple(members(said, "axes", str)), tuple(members(said, "shape", int)))


def as_bytes(buffer: Buffer) -> NDArray[np.uint8]:
    """Any C-contiguous buffer as a flat uint8 array that shares its memory (and keeps it alive)."""
    if isinstance(buffer, np.ndarray):
        array = cast("NDArray[Any]", buffer)
        if not array.flags.c_contiguous:
            raise InvalidBlockError("the array is not C-contiguous: pass numpy.ascontiguousarray(array)")
        if array.dtype.hasobject:
            raise InvalidBlockError("an array of Python objects has no bytes to store: give it a numeric dtype")
        return array.reshape(-1).view(np.uint8)
    try:
        return np.frombuffer(memoryview(buffer), dtype=np.uint8)
    except (ValueError, TypeError, BufferError) as error:
        hint = " (of a torch tensor pass tensor.contiguous().view(torch.uint8).numpy())"
        raise InvalidBlockError(
            f"not C-contiguous bytes: {error}{hint if hasattr(buffer, 'data_ptr') else ''}"
        ) from error
