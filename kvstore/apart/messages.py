"""What a process that asks and one that serves a store say to each other: frames on a stream socket, pickled.

Both run the same kvstore and trust each other as two threads do. Requests are tuples that begin with a word:

    open     a TierURL                                       answered as ticket 0: the store's URL and capabilities
    lend     number, nbytes, offset in the file              with the file's descriptor
    name     number, a Namespace                             which calls name by its number
    call     ticket, verb, arguments                         answered

and answers are `(ticket, value, error)`. Blocks go as plain tuples, their bytes as a place in memory that both have
mapped. Memory that is not lent (a probe's, a test's) goes along instead: its region is `ALONG`, and a read comes back
with the bytes.
"""

from __future__ import annotations

import pickle
import struct
from typing import TYPE_CHECKING, Any

from kvstore.errors import TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.apart.memory import Lent
    from kvstore.namespace import Namespace
    from kvstore.types import BlockKey, BlockRead, BlockWrite

__all__ = [
    "ALONG",
    "KEYS",
    "READS",
    "SCANS",
    "WRITES",
    "Frames",
    "Place",
    "frame",
    "keys",
    "places",
    "portable",
    "reads",
    "writes",
]

READS = frozenset({"get_many_into", "check_many"})
WRITES = frozenset({"put_many", "put_if_room", "reseal_many"})
KEYS = frozenset({"contains_many", "of_later_version", "touch_many", "delete_many"})
"""Verbs about keys that are asked often enough for tuples in place of objects."""
SCANS = frozenset({"next", "drop"})
"""What is asked of a scan that was begun, by its number."""

ALONG = -1

Place = tuple[int, int, int]
"""Region, offset and bytes."""

_LENGTH = struct.Struct("<Q")


def frame(message: object) -> bytes:
    """As it goes over the socket."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Puts messages together again from whatever a socket delivers."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, received: bytes) -> Iterator[Any]:
        """The messages that are complete with that."""
        self._bytes += received
        start = 0
        while len(self._bytes) >= start + _LENGTH.size:
            stop = start + _LENGTH.size + _LENGTH.unpack_from(self._bytes, start)[0]
            if len(self._bytes) < stop:
                break
            yield pickle.loads(bytes(self._bytes[start + _LENGTH.size : stop]))
            start = stop
        del self._bytes[:start]


def portable(error: BaseException) -> BaseException:
    """The error itself, or what can be said of one that does not survive the way."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return TierUnavailable(f"{type(error).__name__}: {error}")
    return error


def keys(blocks: Sequence[BlockKey]) -> list[tuple[bytes, int]]:
    """Keys, for a message."""
    return [(key.digest, key.group) for key in blocks]


def reads(lent: Lent, namespace: Namespace, blocks: Sequence[BlockRead]) -> tuple[list[Any], list[NDArray[np.uint8]]]:
    """Reads, for a message, and their buffers. Raises `InvalidBlockError`."""
    buffers = [namespace.check_buffer(block.key, block.into, writable=True) for block in blocks]
    return [
        (block.key.digest, block.key.group, *(lent.place(buffer) or (ALONG, 0)), buffer.nbytes)
        for block, buffer in zip(blocks, buffers, strict=True)
    ], buffers


def writes(lent: Lent, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[Any]:
    """Writes, for a message. Raises `InvalidBlockError`."""
    message: list[Any] = []
    for block in blocks:
        data = namespace.check_write(block)
        place = lent.place(data)
        where = (*place, data.nbytes) if place else (ALONG, 0, data.tobytes())
        message.append((block.key.digest, block.key.group, *where, block.position, block.parent, block.tenant))
    return message


def places(lent: Lent, memory: Sequence[NDArray[np.uint8]]) -> list[Place]:
    """Of memory that is lent. Raises `ValueError` for any other."""
    found: list[Place] = []
    for one in memory:
        place = lent.place(one)
        if place is None:
            raise ValueError(f"{one.nbytes} bytes of memory are not lent to the I/O process")
        found.append((*place, one.nbytes))
    return found
