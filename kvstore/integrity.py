"""Checksums: every block is checked on every read, always.

CRC-32C because zarr's own codec of that name reads it, and because it costs almost nothing (25 GB/s on one core, GIL
released). It finds damage, not malice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import google_crc32c

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["crc32c"]

# The C extension takes bytes and arrays and releases the GIL; memoryviews it refuses.
_value = cast("Callable[[object], int]", google_crc32c.value)  # pyright: ignore[reportUnknownMemberType]
_extend = cast("Callable[[int, object], int]", google_crc32c.extend)  # pyright: ignore[reportUnknownMemberType]

if google_crc32c.implementation != "c":
    raise ImportError(
        "google-crc32c is installed without its C extension, which would check blocks at a hundredth of the device's"
        " speed: install a wheel for this platform (pip install --force-reinstall --only-binary :all: google-crc32c)"
    )


def crc32c(data: bytes | NDArray[np.uint8], start: int = 0) -> int:
    """CRC-32C (Castagnoli) of `data`, continuing from `start`; an unsigned 32-bit integer."""
    return _extend(start, data) if start else _value(data)
