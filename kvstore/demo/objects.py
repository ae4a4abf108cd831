"""What the demo does to a tier on an object store behind its back: flip one byte of one block, wherever it lies."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from kvstore.objects import connect
from kvstore.objects.settings import STORAGE_OPTIONS
from kvstore.registry import backend_class
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.objects.client import ObjectClient

__all__ = ["flip_byte_of_an_object"]


def flip_byte_of_an_object(url: str, payload: bytes) -> int:
    """Flip one bit in the middle of a block's payload in every object that has it; how many that were.

    As `disk.flip_byte`: the block is found by its content; 0 where the tier is no object store, or lies compressed.
    """
    parsed = TierURL.parse(url)
    backend = backend_class(parsed)
    if STORAGE_OPTIONS not in backend.options:
        return 0
    return _flip_in(connect(parsed.validated(backend.options)), payload)


def _flip_in(client: ObjectClient, payload: bytes) -> int:
    with closing(client):
        found = 0
        for path, at, content in _places(client, payload):
            content[at + len(payload) // 2] ^= 1
            client.put(path, [content], new=False)
            found += 1
        return found


def _places(
    client: ObjectClient, payload: bytes
) -> Iterator[tuple[str, int, np.ndarray[tuple[int], np.dtype[np.uint8]]]]:
    """Path, offset and content of each object that has the payload."""
    for page in client.list():
        for entry in page:
            if entry.size < len(payload):
                continue
            content = bytes(client.get(entry.path) or b"")
            at = content.find(payload)
            if at >= 0:
                yield entry.path, at, np.frombuffer(bytearray(content), np.uint8)
