"""One block of an object store, by one request each way: framed and put, read and held against what was asked for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from kvstore.integrity import crc32c
from kvstore.layout import as_bytes
from kvstore.objects.faults import Kind, RequestFailed
from kvstore.retention import now_ns
from kvstore.sealing import Unsealed
from kvstore.types import BlockInfo, GetOutcome, PutOutcome, ResealOutcome
from kvstore_zarr.format import BlockFacts, is_left_alone
from kvstore_zarr.sealed import is_of_later_version, seal_file, unseal_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvstore.objects.client import Listed, ObjectClient
    from kvstore.sealing import DataKey, Ring
    from kvstore.types import BlockKey, BlockWrite
    from kvstore.url import TierURL
    from kvstore_zarr.format import BlockFrame
    from kvstore_zarr.metadata import NamespaceTree
    from kvstore_zarr.objects.ages import Ages
    from kvstore_zarr.objects.documents import Documents
    from kvstore_zarr.objects.lookup import Lookup

__all__ = ["OneBlock", "info_of"]

_log = logging.getLogger("kvstore.objects")


class OneBlock:
    """What a store does with single blocks. Thread-safe; raises `RequestFailed` where the store cannot tell."""

    def __init__(
        self,
        client: ObjectClient,
        documents: Documents,
        lookup: Lookup,
        ages: Ages,
        url: TierURL,
        *,
        readonly: bool,
    ) -> None:
        self._client, self._documents, self._lookup, self._ages = client, documents, lookup, ages
        self._url, self._readonly = url, readonly
        self._told: set[Kind] = set()

    def write_document(self, path: str, text: bytes) -> PutOutcome:
        """Put a `zarr.json`; what became of it."""
        try:
            self._documents.write(path, text)
        except RequestFailed as failed:
            refused = self.refused(failed)
            if refused is None:
                raise
            return refused
        return PutOutcome.STORED

    def put(
        self, tree: NamespaceTree, data_keys: Mapping[str, DataKey] | None, block: BlockWrite, data: NDArray[np.uint8]
    ) -> PutOutcome:
        """Put one block, whose bytes are `data`, unless one that has not expired is there. `data_keys`: those that the
        tenants of an encrypted tier have.
        """
        path, frame = tree.block(block.key), tree.frames[block.key.group]
        refuses = self._documents.refuses_to_overwrite
        facts = BlockFacts(
            fingerprint=tree.namespace.fingerprint,
            key=block.key,
            payload_bytes=frame.payload_bytes,
            generation=0,  # numbered in tiers with a catalogue
            created=now_ns(),
            position=block.position,
            parent=block.parent,
        )
        data_key = None if data_keys is None else data_keys.get(block.tenant)
        if data_key is None and data_keys is not None:
            return PutOutcome.FAILED
        parts = _parts(frame, data, facts, data_key)
        try:
            if (not refuses or self._lookup.believes(path)) and self._client.exists(path):
                outcome = PutOutcome.EXISTS
            else:
                stored = self._client.put(path, parts, new=refuses)
                outcome = PutOutcome.STORED if stored else PutOutcome.EXISTS
            if outcome is PutOutcome.EXISTS and self._ages and self._has_expired(path):
                self._client.put(path, parts, new=False)
                outcome = PutOutcome.STORED
        except RequestFailed as failed:
            refused = self.refused(failed)
            if refused is None:
                raise
            return refused
        self._lookup.remember([path])
        self._ages.used(path)
        return outcome

    def reseal(
        self, tree: NamespaceTree, data_keys: Mapping[str, DataKey], block: BlockWrite, data: NDArray[np.uint8]
    ) -> ResealOutcome:
        """Write one block over the one that is there, whose bytes are `data`."""
        path, frame = tree.block(block.key), tree.frames[block.key.group]
        data_key, closing = data_keys.get(block.tenant), self._client.get(path, frame.whole)
        if closing is None:
            return ResealOutcome.GONE
        facts = frame.facts(as_bytes(closing)) if memoryview(closing).nbytes == frame.closing else None
        if facts is None or data_key is None:
            return ResealOutcome.KEPT
        try:
            self._client.put(path, _parts(frame, data, facts, data_key), new=False)
        except RequestFailed as failed:
            if self.refused(failed) is None:
                raise
            return ResealOutcome.KEPT
        return ResealOutcome.RESEALED

    def _has_expired(self, path: str) -> bool:
        entry = self._client.look(path)
        return entry is not None and not self._ages.alive(entry)

    def refused(self, failed: RequestFailed) -> PutOutcome | None:
        """What a store that does answer says of one put; None for what says nothing of the block."""
        if failed.kind not in (Kind.FULL, Kind.DENIED, Kind.REFUSED, Kind.UNSUPPORTED):
            return None
        if failed.kind not in self._told:
            self._told.add(failed.kind)
            _log.warning("%s: a block cannot be stored, and this is said once: %s", self._url, failed)
        return PutOutcome.FULL if failed.kind is Kind.FULL else PutOutcome.FAILED

    def get(self, tree: NamespaceTree, ring: Ring | None, key: BlockKey, into: NDArray[np.uint8]) -> GetOutcome:
        """Read one block into `into`; one that is damaged, and still is when it is read again, is removed. `ring`: the
        data keys of an encrypted tier.
        """
        path = tree.block(key)
        found = self._read(tree, ring, key, path, into)
        if found is Unsealed.DAMAGED:  # once more: it may have been damaged on its way, and be whole there
            found = self._read(tree, ring, key, path, into)
        if found is Unsealed.DAMAGED and self._is_foreign(path):
            found = Unsealed.UNKNOWN
        if found is Unsealed.UNKNOWN:  # another process may have the key, or be a later kvstore
            return GetOutcome.MISS
        if found in (Unsealed.DAMAGED, Unsealed.DESTROYED):
            self._lookup.forget(path)
            if not self._readonly:
                self._client.delete(path)
            return GetOutcome.CORRUPT if found is Unsealed.DAMAGED else GetOutcome.MISS
        if (
            found is None
            or isinstance(found, Unsealed)
            or (self._ages and not self._ages.alive_since(path, found.created))
        ):
            self._lookup.forget(path)
            return GetOutcome.MISS
        self._lookup.remember([path])
        self._ages.used(path)
        return GetOutcome.HIT

    def _read(
        self, tree: NamespaceTree, ring: Ring | None, key: BlockKey, path: str, into: NDArray[np.uint8]
    ) -> BlockFacts | Unsealed | None:
        """Bring the block into the caller's buffer, and hold everything against what was asked for; else why not. None
        where there is none.
        """
        frame = tree.frames[key.group]
        if ring is not None:
            return self._read_sealed(tree, key, path, into, ring)
        closing = np.empty(frame.closing, np.uint8)
        arrived = self._client.get_into(path, [into[: frame.whole], closing] if frame.whole else [closing])
        if arrived is None:
            return None
        facts = frame.facts(closing) if arrived.nbytes == frame.file_bytes else None
        if facts is None or facts.key != key or facts.fingerprint != tree.namespace.fingerprint:
            return Unsealed.DAMAGED
        into[frame.whole :] = closing[: frame.rest]
        crc = crc32c(closing[: frame.rest], arrived.crc) if frame.whole and arrived.crc is not None else None
        return facts if frame.payload_is_intact(closing, into, crc) else Unsealed.DAMAGED

    def _read_sealed(
        self, tree: NamespaceTree, key: BlockKey, path: str, into: NDArray[np.uint8], ring: Ring
    ) -> BlockFacts | Unsealed | None:
        frame = tree.frames[key.group]
        file = np.empty(frame.file_bytes, np.uint8)
        arrived = self._client.get_into(path, [file])
        if arrived is None:
            return None
        whole = arrived.nbytes == frame.file_bytes
        found = unseal_file(file, tree, key, into, ring) if whole else Unsealed.DAMAGED
        return (frame.facts(file[frame.whole :]) or Unsealed.DAMAGED) if found is Unsealed.GOOD else found

    def _is_foreign(self, path: str) -> bool:
        """Whether what stands there is a block that a later kvstore wrote."""
        view = self._whole(path)
        return is_left_alone(view.nbytes, lambda offset, length: bytes(view[offset : offset + length]))

    def is_of_later_version(self, path: str) -> bool:
        """The same, or that what is sealed in it is a later kvstore's; of a block that was not found to be damaged."""
        view = self._whole(path)
        return is_of_later_version(view.nbytes, lambda offset, length: bytes(view[offset : offset + length]))

    def _whole(self, path: str) -> memoryview:
        data = self._client.get(path)
        return memoryview(b"" if data is None else data).cast("B")

    def delete(self, path: str) -> bool:
        """Remove the object at `path`; whether there was one."""
        self._lookup.forget(path)
        there = self._client.exists(path)
        if there:
            self._client.delete(path)
        return there


def _parts(
    frame: BlockFrame, data: NDArray[np.uint8], facts: BlockFacts, data_key: DataKey | None
) -> list[NDArray[np.uint8]]:
    """The bytes of the object."""
    if data_key is not None:
        file = np.empty(frame.file_bytes, np.uint8)
        seal_file(file, frame, data, facts, data_key)
        return [file]
    closing = np.empty(frame.closing, np.uint8)
    frame.seal(closing, data, facts)
    return [data[: frame.whole], closing] if frame.whole else [closing]


def info_of(tree: NamespaceTree, entry: Listed, key: BlockKey, data: Buffer) -> BlockInfo:
    """What the end of the block says of it; of one that is damaged, or a later kvstore's, what the listing says."""
    frame, closing = tree.frames[key.group], as_bytes(data)
    facts = frame.facts(closing) if closing.nbytes == frame.closing else None
    if facts is None or facts.key != key:
        modified = entry.modified or now_ns() / 1e9
        return BlockInfo(key, entry.size, modified, modified, dated=bool(entry.modified))
    made = facts.created / 1e9
    return BlockInfo(key, entry.size, made, made, position=facts.position, parent=facts.parent)
