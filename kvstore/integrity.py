"""Checksums: every block is checked on every read, always.

CRC-32C because zarr's own codec of that name reads it, and because it costs almost nothing: one core reads 12 to 30
GB/s of memory that is not in its caches. It finds damage, not malice.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import google_crc32c
import numpy as np

from kvstore.native import extension

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["address_in_memory", "copied", "crc32c"]

# The C extension takes bytes and arrays; memoryviews it refuses.
_value = cast("Callable[[object], int]", google_crc32c.value)  # pyright: ignore[reportUnknownMemberType]
_extend = cast("Callable[[int, object], int]", google_crc32c.extend)  # pyright: ignore[reportUnknownMemberType]

if google_crc32c.implementation != "c":
    raise ImportError(
        "google-crc32c is installed without its C extension, which would check blocks at a hundredth of the device's"
        " speed: install a wheel for this platform (pip install --force-reinstall --only-binary :all: google-crc32c)"
    )

LARGE_BYTES = 64 << 10
"""From here on the GIL is released: a call that does so costs 2 µs more, as much as 64 KiB take."""


_Large: TypeAlias = "Callable[[bytes | NDArray[np.uint8], int], int]"
_Copy: TypeAlias = "Callable[[NDArray[np.uint8], bytes | memoryview | NDArray[np.uint8], int], int]"


def _with_wide_registers() -> _Large | None:
    """fastcrc's, where it is installed, and agrees: as fast as memory (30 GB/s to google's 12), without the GIL."""
    try:
        iscsi = cast("_Large", importlib.import_module("fastcrc.crc32").iscsi)
        sample = np.arange(LARGE_BYTES, dtype=np.uint16).view(np.uint8)
        return iscsi if iscsi(sample, 1) == _extend(1, sample) else None
    except (ImportError, AttributeError, TypeError):  # older ones take bytes alone
        return None


def _without_the_gil() -> _Large | None:
    """The function `crc32c_extend(start, address, nbytes)` of the C library behind google's extension.

    The extension itself keeps the GIL (1.9: 80 µs for 2 MiB, in which no other thread of the process runs), a call by
    ctypes lets go of it. Where the library cannot be reached so, checksums are as right, and less considerate.
    """
    try:
        extension = importlib.import_module("google_crc32c._crc32c")
        extend: Any = ctypes.CDLL(extension.__file__).crc32c_extend  # found in what the extension was linked with
    except (ImportError, OSError, AttributeError):
        return None
    extend.restype = ctypes.c_uint32
    extend.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)

    def large(data: bytes | NDArray[np.uint8], start: int) -> int:
        memory = np.frombuffer(data, np.uint8)  # keeps it where it is
        return cast("int", extend(start, address_in_memory(memory), memory.nbytes))

    return large


def _on_the_way() -> _Copy | None:
    """`copied` in C, where the extension is there, the processor is one for it, and it agrees."""
    if extension is None or not extension.SUMS:
        return None
    copy: _Copy = extension.copy
    sample = np.arange(1000, dtype=np.uint16).view(np.uint8)
    into = np.zeros_like(sample)
    return copy if copy(into, sample, 1) == _extend(1, sample) and np.array_equal(into, sample) else None


def address_in_memory(data: NDArray[np.uint8]) -> int:
    """Where `data` begins; valid for as long as the array is."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(data.data))  # a sixth of what `data.ctypes.data` takes
    except (TypeError, ValueError):  # read-only, or empty
        return data.ctypes.data


_large = _with_wide_registers() or _without_the_gil()
_copy = _on_the_way()


def crc32c(data: bytes | NDArray[np.uint8], start: int = 0) -> int:
    """CRC-32C (Castagnoli) of `data`, continuing from `start`; an unsigned 32-bit integer.

    `data` is contiguous. The GIL is released while `LARGE_BYTES` or more are read.
    """
    if _large is not None and len(data) >= LARGE_BYTES:
        return _large(data, start)
    return _extend(start, data) if start else _value(data)


def copied(into: NDArray[np.uint8], source: bytes | memoryview | NDArray[np.uint8], start: int = 0) -> int:
    """Copy `source` into `into`, both contiguous and of one length; the CRC-32C of what stands there now, continuing
    from `start`.

    In C (`kvstore.native`) the checksum is taken on the way, of the registers that are written, and costs next to
    nothing beside the copy. The GIL is released while `LARGE_BYTES` or more are copied. Raises ValueError for another
    length, and for memory that cannot be written to.
    """
    if _copy is not None:
        return _copy(into, source, start)
    data = np.frombuffer(source, np.uint8)
    if data.nbytes != into.nbytes:  # one byte would be written to all places
        raise ValueError(f"{data.nbytes} bytes do not fit into {into.nbytes}")
    np.copyto(into, data)
    return crc32c(into, start)
