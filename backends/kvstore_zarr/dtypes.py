"""bfloat16 and FP8 for zarr-python: it knows neither, so with kvstore installed it learns them from here.

zarr-python finds these by entry point (group `zarr.data_type`), so opening such an array is all it takes; without
kvstore it refuses the array by name. The names are those of tensorstore, which knows them by itself; the numpy types
come from `ml_dtypes`. Bytes are taken in the machine's order, which is little-endian wherever kvstore runs.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, ClassVar

import ml_dtypes
import numpy as np
import zarr.dtype
import zarr.errors
from zarr.dtype import ZDType

if TYPE_CHECKING:
    from typing import Self

__all__ = ["BFloat16", "Float8E4M3FN", "Float8E5M2", "register"]

# It moved to `errors`, and its old place warns. zarr tells by this type which data type a document is not of.
_NotOfThisType: type[Exception] = (
    getattr(zarr.errors, "DataTypeValidationError", None) or zarr.dtype.DataTypeValidationError
)

_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


class _Float(ZDType[Any, Any]):
    """A floating-point type of `ml_dtypes`, without parameters. Zarr format 3 only."""

    scalar: ClassVar[type[Any]]

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        if not cls._check_native_dtype(dtype):
            raise _NotOfThisType(f"{dtype} is not {cls._zarr_v3_name}")
        return cls()

    def to_native_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.scalar)

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise _NotOfThisType(f"{data!r} is not {cls._zarr_v3_name}, which zarr format 2 does not have")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data != cls._zarr_v3_name:
            raise _NotOfThisType(f"{data!r} is not {cls._zarr_v3_name!r}")
        return cls()

    def to_json(self, zarr_format: int) -> Any:
        if zarr_format != 3:
            raise ValueError(f"zarr format {zarr_format} has no {self._zarr_v3_name}")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, int | float | np.number | self.scalar)

    def cast_scalar(self, data: object) -> Any:
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} is not a number, and so no {self._zarr_v3_name}")
        return self.scalar(data)

    def default_scalar(self) -> Any:
        return self.scalar(0)

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> Any:  # noqa: ARG002 - the same in every format
        if isinstance(data, str) and data.startswith("0x"):
            return np.frombuffer(bytes.fromhex(data[2:])[::-1], self.scalar)[0]
        if isinstance(data, str) and data not in _WORDS:
            raise TypeError(f"{data!r} is not how zarr writes a number")
        return self.cast_scalar(_WORDS[data] if isinstance(data, str) else data)

    def to_json_scalar(self, data: object, *, zarr_format: int) -> Any:  # noqa: ARG002 - the same in every format
        number = float(self.cast_scalar(data))
        by_bits = {struct.pack("<d", value): word for word, value in _WORDS.items()}
        return "NaN" if number != number else by_bits.get(struct.pack("<d", number), number)


class BFloat16(_Float):
    """`bfloat16`: 8 bits of exponent, 7 of mantissa."""

    scalar = ml_dtypes.bfloat16
    dtype_cls = type(np.dtype(ml_dtypes.bfloat16))
    _zarr_v3_name = "bfloat16"


class Float8E4M3FN(_Float):
    """`float8_e4m3fn`: 4 bits of exponent, 3 of mantissa, no infinities."""

    scalar = ml_dtypes.float8_e4m3fn
    dtype_cls = type(np.dtype(ml_dtypes.float8_e4m3fn))
    _zarr_v3_name = "float8_e4m3fn"


class Float8E5M2(_Float):
    """`float8_e5m2`: 5 bits of exponent, 2 of mantissa."""

    scalar = ml_dtypes.float8_e5m2
    dtype_cls = type(np.dtype(ml_dtypes.float8_e5m2))
    _zarr_v3_name = "float8_e5m2"


def register() -> None:
    """Make zarr-python know the three of them, in this process: 3.1 lists the entry points and never loads them."""
    kinds: dict[str, type[_Float]] = {
        "bfloat16": BFloat16,
        "float8_e4m3fn": Float8E4M3FN,
        "float8_e5m2": Float8E5M2,
    }
    for name, kind in kinds.items():
        zarr.dtype.data_type_registry.register(name, kind)
