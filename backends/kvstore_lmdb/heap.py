"""The memory of pages that LMDB writes: kept from one commit to the next.

LMDB allocates each page that a transaction writes and frees them all at its end. glibc's malloc gives what is free at
the end of a heap back to the kernel from 128 KiB on, and has each piece above that from the kernel alone: every commit
would begin with pages that come by a fault and are cleared, one by one, which is half of what a store of 64 KiB blocks
costs (`docs/performance.md`).
"""

from __future__ import annotations

import numpy as np

__all__ = ["keep_freed_memory"]

KEPT_BYTES = 16 << 20
"""The thresholds follow the largest buffer that was freed (mallopt(3), M_MMAP_THRESHOLD): pieces up to this size are
reused from then on, and up to twice as much stays at the end of each heap, of which threads that store have one.
"""


def keep_freed_memory() -> None:
    """Have this process keep what LMDB frees, as it would anyway once anybody has freed a buffer of `KEPT_BYTES`.

    Thresholds that the operator has set (`MALLOC_TRIM_THRESHOLD_` and the like) stay as they are; other allocators go
    on as they do.
    """
    buffer = np.empty(KEPT_BYTES, np.uint8)  # not touched: no page comes
    del buffer
