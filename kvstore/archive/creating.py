"""Making an archive: blocks from a tier into shards, shards into objects, and last the manifest that makes it one.

::

    get_many_into ──► a shard in the making ──► put          two shards in memory: one filled, one on its way
    (side by side)    (`packing`)

What was interrupted is gone on with: shards that are there, whole and of the same plan, are not made again.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.archive.compression import Compression
from kvstore.archive.document import (
    DRAFT_NAME,
    MANIFEST_NAME,
    ArchiveInfo,
    Manifest,
    Stored,
    silent,
)
from kvstore.archive.errors import ArchiveExistsError, SelectionError
from kvstore.archive.nodes import METADATA_NAME, block_document, dump, group_document, small_array
from kvstore.archive.overlapping import check_apart, check_in_no_tier
from kvstore.archive.packing import ShardInMaking, page_memory
from kvstore.archive.places import ArchivePlace
from kvstore.archive.planning import planned
from kvstore.archive.removing import check_not_held, check_nothing_below, paths_below, sweep
from kvstore.errors import ConfigurationError
from kvstore.integrity import crc32c
from kvstore.layout import as_bytes
from kvstore.objects.faults import Kind, RequestFailed
from kvstore.objects.side import side_by_side
from kvstore.types import BlockRead, GetOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from kvstore.abc import BlockStore
    from kvstore.archive.planning import Shard, Work
    from kvstore.namespace import Namespace
    from kvstore.objects.client import ObjectClient
    from kvstore.types import BlockKey
    from kvstore.url import TierURL

__all__ = ["READERS", "create"]

READERS = 4
"""Calls to a tier side by side."""
PIECE_BYTES = 4 << 20
"""Of blocks that are compressed, in each of these calls: they need memory of their own."""

_MADE_MEANWHILE = "another process has just made an archive of this name"


def create(
    archive_url: str | Mapping[str, Any] | TierURL,
    store: BlockStore,
    namespace: Namespace,
    keys: Sequence[BlockKey],
    *,
    label: str | None = None,
    name: str | None = None,
    compression: str | None = None,
    tokens: Sequence[int] | None = None,
    keep_until: float | None = None,
    overwrite: bool = False,
    plaintext: bool = False,
    progress: Callable[[int], object] | None = None,
) -> ArchiveInfo:
    """Archive the blocks `keys` of `store`: a prefix from its first token on, in order, as `select` gives it.

    `archive_url` is where the archive will stand, or with `name` the folder that it will stand in. `compression` is
    `none`, `zstd` or `blosc`, or with a level `zstd:9`. `tokens` are the prompt's token ids, kept where given: they are
    the prompt. `keep_until` (seconds since the epoch) is when it may be removed, None at any time. `progress` is told
    of every number of blocks that are done. Memory: two shards, about 128 MiB or two blocks.

    An archive is never encrypted: of a store that is, one is made only with `plaintext` (`ConfigurationError` else).

    Atomic: there is no archive before all of it is. One that was interrupted is continued by the same call. An archive
    of the same blocks, label and times that is there already is left as it is.

    Raises `ArchiveExistsError` where something else stands, unless `overwrite` (which removes an archive first, not
    where another one stands below it, and raises `ArchiveHeldError` for one that is to be kept); `SelectionError` where
    the tier has not all of the blocks any more; a `ConfigurationError` or a `StoreOpenError` for the URL;
    `TierUnavailable`.
    """
    place = ArchivePlace.of(archive_url, name)
    check_apart(place, store.url)
    check_in_no_tier(place)
    if store.capabilities.sealed and not plaintext:
        raise ConfigurationError(
            f"{store.url} is encrypted, and archives are not: say --plaintext (plaintext=True) if its blocks may stand"
            f" as they are in {place}"
        )
    work = planned(place, store, namespace, keys, label or "", Compression.parse(compression), tokens, keep_until)
    with place.client(writes=True) as client:
        there = _standing(client, place)
        if there is not None:
            if not overwrite and _is_same(there, work.manifest):
                return there.info(str(place), place.name)
            if not overwrite:
                raise ArchiveExistsError(
                    f"{place}: an archive stands there, of other blocks or made otherwise: choose another name, remove"
                    " it, or overwrite it"
                )
            check_not_held(there, str(place))
            found = paths_below(client)
            check_nothing_below(found, str(place))
            sweep(client, found, keep={DRAFT_NAME})
        return _Creation(client, place, store, work, progress or silent).run()


def _standing(client: ObjectClient, place: ArchivePlace) -> Manifest | None:
    """The archive that is there; None where nothing is, or one in the making. Raises `ArchiveExistsError`."""
    data = client.get(MANIFEST_NAME)
    if data is not None:
        return Manifest.parse(bytes(data), str(place))
    if client.get(DRAFT_NAME) is None and any(entry for page in client.list() for entry in page):
        raise ArchiveExistsError(f"{place} is not empty, and what is there is no archive: choose another name")
    return None


def _is_same(there: Manifest, wanted: Manifest) -> bool:
    facts = ("plan", "label", "keep_until", "has_token_ids", "segments")
    return all(getattr(there, name) == getattr(wanted, name) for name in facts)


class _Creation:
    """One archive being made, by the calling thread with helpers."""

    def __init__(
        self,
        client: ObjectClient,
        place: ArchivePlace,
        store: BlockStore,
        work: Work,
        progress: Callable[[int], object],
    ) -> None:
        self._client, self._place, self._store, self._work, self._progress = client, place, store, work, progress
        self._batch = max(1, store.capabilities.batch_bytes)
        self._objects: dict[str, Stored] = {}
        self._crcs: dict[str, Mapping[int, int]] = {}

    def run(self) -> ArchiveInfo:
        """Another process that makes the same archive, and is done first, takes away what it takes for leftovers."""
        try:
            return self._run()
        except RequestFailed as failed:
            if failed.kind is Kind.MISSING and self._client.get(MANIFEST_NAME) is not None:
                raise ArchiveExistsError(f"{self._place}: {_MADE_MEANWHILE}") from failed
            raise

    def _run(self) -> ArchiveInfo:
        draft = dump({"plan": self._work.manifest.plan.hex(), "started": self._work.manifest.created})
        self._client.put(DRAFT_NAME, [np.frombuffer(draft, np.uint8)], new=False)
        todo = self._not_there_yet()
        self._write(todo)
        self._describe()
        manifest = replace(self._work.manifest, objects=self._objects)
        self._publish(manifest.dump())
        sweep(self._client, paths_below(self._client), keep={MANIFEST_NAME, *self._objects})
        return manifest.info(str(self._place), self._place.name)

    # Shards

    def _not_there_yet(self) -> list[Shard]:
        """The shards that have to be made; what the others are is noted."""
        sizes = {entry.path: entry.size for page in self._client.list() for entry in page}
        shards = list(self._work.shards())
        facts = side_by_side(lambda shard: self._look(shard, sizes.get(shard.path, 0)), shards)
        todo = [shard for shard, found in zip(shards, facts, strict=True) if not found]
        self._progress(sum(len(shard.keys) for shard, found in zip(shards, facts, strict=True) if found))
        return todo

    def _look(self, shard: Shard, size: int) -> bool:
        """Whether the shard is there; by its end, since objects are written in one step."""
        body = size - shard.packing.closing
        end = self._client.get(shard.path, body) if body > 0 else None
        if end is None:
            return False
        facts = shard.packing.facts(as_bytes(end), shard.number, body)
        if facts is None or len(facts.crcs) != len(shard.keys):
            return False
        self._note(shard, size, facts.crc, facts.crcs)
        return True

    def _note(self, shard: Shard, size: int, crc: int, crcs: Mapping[int, int]) -> None:
        self._objects[shard.path], self._crcs[shard.path] = Stored(size, crc), crcs

    def _write(self, shards: Sequence[Shard]) -> None:
        """Fill one shard while the one before it is written."""
        if not shards:
            return
        largest = max(shard.packing.memory_bytes for shard in shards)
        memories = [page_memory(largest) for _ in shards[:2]]
        pending: Future[None] | None = None
        with ThreadPoolExecutor(READERS) as readers, ThreadPoolExecutor(1) as writer:
            for number, shard in enumerate(shards):
                making = ShardInMaking(shard.packing, shard.number, memories[number % 2])
                self._fill(making, shard, readers)
                if pending is not None:
                    pending.result()
                pending = writer.submit(self._close, making, shard)
            if pending is not None:
                pending.result()

    def _close(self, making: ShardInMaking, shard: Shard) -> None:
        data, crc = making.close()
        self._client.put(shard.path, [data], new=False)
        self._note(shard, data.nbytes, crc, making.crcs)
        self._progress(len(shard.keys))

    def _fill(self, making: ShardInMaking, shard: Shard, readers: ThreadPoolExecutor) -> None:
        size = shard.packing.layout.nbytes
        if not shard.packing.compression.codec:
            for places in readers.map(
                partial(self._read, making.slot, shard),
                _cut(len(shard.keys), max(1, self._batch // size)),
            ):
                making.fill(places)
            return
        pieces = _cut(len(shard.keys), max(1, PIECE_BYTES // size))
        for start in range(0, len(pieces), READERS):  # no more of them at a time than there is memory for
            for piece in readers.map(partial(self._packed, shard), pieces[start : start + READERS]):
                for place, crc, packed in piece:
                    making.append(place, crc, packed)

    def _packed(self, shard: Shard, places: list[int]) -> list[tuple[int, int, NDArray[np.uint8]]]:
        size = shard.packing.layout.nbytes
        memory = page_memory(len(places) * size)
        blocks = {place: memory[index * size : (index + 1) * size] for index, place in enumerate(places)}
        self._read(blocks.__getitem__, shard, places)
        encode = shard.packing.compression.encode
        return [(place, crc32c(block), encode(block, shard.packing.layout)) for place, block in blocks.items()]

    def _read(self, slot: Callable[[int], NDArray[np.uint8]], shard: Shard, places: list[int]) -> list[int]:
        reads = [BlockRead(shard.keys[place], slot(place).data) for place in places]
        outcomes = self._store.get_many_into(self._work.manifest.namespace, reads)
        for place, outcome in zip(places, outcomes, strict=True):
            if outcome is not GetOutcome.HIT:
                raise SelectionError(
                    f"{self._store.url}: block {shard.number * shard.packing.room + place} of KV-cache group"
                    f" {shard.packing.group} ({shard.keys[place]!r}) is not there any more ({outcome.value}): have the"
                    f" engine read the prompt again, and repeat this; what is written at {self._place} is kept"
                )
        return places

    # What describes them

    def _describe(self) -> None:
        """The small arrays, and the documents for zarr."""
        manifest, lengths = self._work.manifest, dict[str, int]()
        documents: dict[str, dict[str, Any]] = {}
        small: dict[str, tuple[NDArray[Any], tuple[str, ...]]] = {}
        for packing, chain, segment in zip(self._work.packings, self._work.chains, manifest.segments, strict=True):
            if not chain:
                continue
            documents[f"g{packing.group}"] = block_document(packing, len(chain), lengths)
            block = "block" if lengths.setdefault("block", len(chain)) == len(chain) else f"block_g{packing.group}"
            digests = np.frombuffer(b"".join(key.digest for key in chain), np.uint8).reshape(len(chain), -1)
            small[f"g{packing.group}_digests"] = digests, (block, "digest_byte")
            small[f"g{packing.group}_positions"] = segment.start + np.arange(len(chain), dtype=np.int64), (block,)
            small[f"g{packing.group}_checksums"] = self._checksums(packing.group), (block,)
        if self._work.tokens is not None:
            count = len(self._work.tokens)
            small["tokens"] = self._work.tokens, ("token" if lengths.get("token", count) == count else "token_id",)
        for name, (values, names) in small.items():
            documents[name], path, chunk = small_array(values, names)
            self._put(f"{name}/{path}", chunk)
        for name, document in documents.items():
            self._put(f"{name}/{METADATA_NAME}", dump(document))
        self._put(METADATA_NAME, dump(group_document({"kvstore_archive": manifest.facts()}, documents)))

    def _checksums(self, group: int) -> NDArray[np.uint32]:
        shards = [shard for shard in self._work.shards() if shard.packing.group == group]
        crcs = [self._crcs[shard.path][place] for shard in shards for place in range(len(shard.keys))]
        return np.array(crcs, np.uint32)

    def _put(self, path: str, data: bytes) -> None:
        self._client.put(path, [np.frombuffer(data, np.uint8)], new=False)
        self._objects[path] = Stored(len(data), crc32c(data))

    def _publish(self, document: bytes) -> None:
        data = [np.frombuffer(document, np.uint8)]
        try:
            made = self._client.put(MANIFEST_NAME, data, new=self._client.takes_new)
        except RequestFailed as failed:
            if failed.kind is not Kind.UNSUPPORTED:
                raise
            made = self._client.put(MANIFEST_NAME, data, new=False)
        if not made:
            raise ArchiveExistsError(f"{self._place}: {_MADE_MEANWHILE}")


def _cut(count: int, most: int) -> list[list[int]]:
    """0 to `count` in pieces of at most `most`."""
    return [list(range(start, min(start + most, count))) for start in range(0, count, most)]
