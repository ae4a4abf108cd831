"""Blocks read on behalf of a view: through the store's checks, each once as long as there is room to keep it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import DamagedBlockError, NotStoredError
from kvstore.types import BlockRead, GetOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.types import BlockKey

__all__ = ["KEPT_BYTES", "BlockReader"]

KEPT_BYTES = 256 << 20
"""What a reader keeps of the blocks that were read last."""


class BlockReader:
    """Reads blocks of `store`, which messages call `source`, and keeps the last of them. Thread-safe; two threads may
    read one block twice.
    """

    def __init__(self, store: BlockStore, source: str, kept_bytes: int = KEPT_BYTES) -> None:
        self.store = store
        self.source = source
        self._most = kept_bytes
        self._kept: OrderedDict[tuple[bytes, BlockKey], NDArray[np.uint8]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def read(self, namespace: Namespace, key: BlockKey) -> NDArray[np.uint8]:
        """The block as flat uint8, read-only and shared with whoever else asks.

        Raises `NotStoredError` where it is gone, `DamagedBlockError` where it fails its checks, `TierUnavailable`.
        """
        return next(self.read_each(namespace, [key]))

    def read_each(self, namespace: Namespace, keys: Sequence[BlockKey]) -> Iterator[NDArray[np.uint8]]:
        """As `read`, of each key in order, with no more in memory at a time than suits the store and is kept."""
        for batch in self._batches(namespace, keys):
            found = {key: self._find(namespace, key) for key in batch}
            missing = [key for key, data in found.items() if data is None]
            found.update(self._load(namespace, missing))
            for key in batch:
                data = found[key]
                assert data is not None
                yield data

    def _batches(self, namespace: Namespace, keys: Sequence[BlockKey]) -> Iterator[list[BlockKey]]:
        room = self.store.capabilities.batch_bytes
        batch: list[BlockKey] = []
        for key in keys:
            nbytes = namespace.block_bytes(key.group)
            if batch and nbytes > room:
                yield batch
                batch, room = [], self.store.capabilities.batch_bytes
            batch.append(key)
            room -= nbytes
        if batch:
            yield batch

    def _load(self, namespace: Namespace, keys: Sequence[BlockKey]) -> dict[BlockKey, NDArray[np.uint8]]:
        if not keys:
            return {}
        buffers = {key: np.empty(namespace.block_bytes(key.group), np.uint8) for key in keys}
        outcomes = self.store.get_many_into(namespace, [BlockRead(key, into.data) for key, into in buffers.items()])
        for (key, into), outcome in zip(buffers.items(), outcomes, strict=True):
            if outcome is not GetOutcome.HIT:
                raise self._failed(namespace, key, outcome)
            into.flags.writeable = False
            self._keep((namespace.fingerprint, key), into)
        return buffers

    def _failed(self, namespace: Namespace, key: BlockKey, outcome: GetOutcome) -> NotStoredError | DamagedBlockError:
        block = f"{self.source}: block {key.digest.hex()} of group {key.group} in namespace {namespace.name}"
        if outcome is GetOutcome.CORRUPT:
            return DamagedBlockError(
                f"{block} fails its checks, so nothing of it can be shown. `kvstore verify` finds all such blocks; who"
                " asks the tier for one takes it for a miss, computes it again and replaces it"
            )
        return NotStoredError(
            f"{block} is not there any more, or its data is: it was evicted or removed since the tier was looked at"
            " (refresh() looks again)"
        )

    def _find(self, namespace: Namespace, key: BlockKey) -> NDArray[np.uint8] | None:
        with self._lock:
            data = self._kept.get((namespace.fingerprint, key))
            if data is not None:
                self._kept.move_to_end((namespace.fingerprint, key))
        return data

    def _keep(self, name: tuple[bytes, BlockKey], data: NDArray[np.uint8]) -> None:
        with self._lock:
            before = self._kept.pop(name, None)
            self._kept[name] = data
            self._bytes += data.nbytes - (0 if before is None else before.nbytes)
            while self._bytes > self._most and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
