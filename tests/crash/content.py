"""The bytes that belong to a block, derived from where it stands. Needs no kvstore: the checker derives them too."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def content(fingerprint: bytes, group: int, digest: bytes, nbytes: int) -> NDArray[np.uint8]:
    """`nbytes` bytes in which each 8-byte word belongs to one place of one block and to no other.

    A torn block, a page of another block, or a page in the wrong place shows in a plain comparison.
    """
    seed = hashlib.sha256(fingerprint + bytes([group]) + digest).digest()
    start, step = (int.from_bytes(seed[:8], "little"), int.from_bytes(seed[8:16], "little") | 1)
    words = np.arange(-(-nbytes // 8), dtype=np.uint64)
    words *= np.uint64(step)
    words += np.uint64(start)
    return words.view(np.uint8)[:nbytes]
