"""Sealed blocks in and out of files: one pass over the bytes each way, between the caller's buffer and staging memory.

::

    put     the caller's buffer ──AES-GCM──► staging: header | ciphertext | tag | closing ──pwritev──► file
    get     file ──preadv──► staging ──AES-GCM──► the caller's buffer

The tag speaks for every byte of the sealed block, so a get computes no checksum over it, unless the key is missing.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.files import open_file
from kvstore.sealing import SealHeader, Unsealed, seal_into, unseal_into
from kvstore.sealing.seal import HEADER_BYTES
from kvstore_zarr.format import is_left_alone

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.sealing import DataKey, Ring
    from kvstore.types import BlockKey
    from kvstore_zarr.format import BlockFacts, BlockFrame
    from kvstore_zarr.metadata import NamespaceTree

__all__ = ["is_of_later_version", "is_of_later_version_at", "key_id_in", "seal_file", "unseal_file"]


def seal_file(
    file: NDArray[np.uint8], frame: BlockFrame, payload: NDArray[np.uint8], facts: BlockFacts, data_key: DataKey
) -> None:
    """Fill `file`, which has `frame.file_bytes` and no byte in common with `payload`, with the sealed block."""
    sealed = file[: frame.payload_bytes]
    seal_into(sealed, payload, data_key, facts.fingerprint, facts.key)
    frame.seal(file[frame.whole :], sealed, replace(facts, payload_bytes=frame.payload_bytes, key_id=data_key.id))


def unseal_file(
    file: NDArray[np.uint8], tree: NamespaceTree, key: BlockKey, into: NDArray[np.uint8], ring: Ring
) -> Unsealed:
    """Open the sealed block in `file`, all of whose bytes these are, into `into`, and hold everything it says against
    what was asked for. After anything but `GOOD` the contents of `into` are undefined.
    """
    frame, fingerprint = tree.frames[key.group], tree.namespace.fingerprint
    closing, sealed = file[frame.whole :], file[: frame.payload_bytes]
    facts = frame.facts(closing) if file.nbytes == frame.file_bytes else None
    if facts is None or (facts.key, facts.fingerprint) != (key, fingerprint):
        return Unsealed.DAMAGED
    found = unseal_into(ring, sealed, into, fingerprint, key, key_id=facts.key_id)
    if found is not Unsealed.GOOD and not frame.payload_is_intact(closing, sealed):
        return Unsealed.DAMAGED
    return found


def is_of_later_version(size: int, read: Callable[[int, int], bytes]) -> bool:
    """Whether a file of `size` bytes that is neither damaged nor a block for us is one that a later kvstore wrote, or
    that is sealed as a later one seals. `read` as for `is_left_alone`.
    """
    return is_left_alone(size, read) or SealHeader.is_foreign(read(0, HEADER_BYTES))


def is_of_later_version_at(path: str) -> bool:
    """The same, of what stands at `path`."""
    with suppress(OSError):
        fd = open_file(path, os.O_RDONLY)
        try:
            return is_of_later_version(os.fstat(fd).st_size, lambda offset, length: os.pread(fd, length, offset))
        finally:
            os.close(fd)
    return False


def key_id_in(path: str) -> bytes | None:
    """The id of the data key that the file `path` says its block is sealed with; None where it says nothing."""
    with suppress(OSError):
        file = open_file(path, os.O_RDONLY)
        try:
            header = SealHeader.unpacked(os.pread(file, HEADER_BYTES, 0))
        finally:
            os.close(file)
        return None if header is None else header.key_id
    return None
