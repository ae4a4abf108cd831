"""An archive that is there: what it holds, its blocks checked, and archives side by side in a folder."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.archive.document import MANIFEST_NAME, ArchiveInfo, Manifest, silent
from kvstore.archive.errors import ArchiveDamagedError, NoArchiveError
from kvstore.archive.nodes import GridAxes, small_values
from kvstore.archive.packing import Packing, ShardFacts
from kvstore.archive.places import ArchivePlace
from kvstore.errors import KVStoreError
from kvstore.integrity import crc32c
from kvstore.layout import as_bytes
from kvstore.objects.side import side_by_side
from kvstore.types import BlockKey, GetOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    import xarray
    from numpy.typing import NDArray

    from kvstore.namespace import Namespace
    from kvstore.objects.client import ObjectClient
    from kvstore.types import BlockRead
    from kvstore.url import TierURL

__all__ = ["Archive", "LoadedShard", "Shard", "Verification", "catalogue", "open_archive"]

Damaged = Callable[[str, KVStoreError], object]
"""Is told the URL of an archive that cannot be read, and why."""


def open_archive(url: str | Mapping[str, Any] | TierURL) -> Archive:
    """The archive at `url`, for reading; the caller closes it (it is a context manager).

    Raises `NoArchiveError` where none is, or one in the making; `ArchiveDamagedError`; a `ConfigurationError`, a
    `StoreOpenError` or `TierUnavailable` for the place.
    """
    place = ArchivePlace.of(url)
    client = place.connected()
    try:
        with place.explained():
            data = client.get(MANIFEST_NAME)
        if data is None:
            raise NoArchiveError(f"{place}: there is no archive (or one whose creation has not ended)")
        return Archive(place, client, Manifest.parse(bytes(data), str(place)))
    except BaseException:
        client.close()
        raise


def catalogue(url: str | Mapping[str, Any] | TierURL, *, damaged: Damaged | None = None) -> list[ArchiveInfo]:
    """The archives that stand directly in the folder or bucket `url`, by name; or the one that stands there itself.

    One that cannot be read is told to `damaged`, and raised where that is None. Raises as `open_archive` does for the
    place.
    """
    place = ArchivePlace.of(url)
    with place.client() as client:
        folders = list(client.folders())
        manifests = side_by_side(client.get, [MANIFEST_NAME, *(f"{name}/{MANIFEST_NAME}" for name in folders)])
    found: list[ArchiveInfo] = []
    for one, data in zip([place, *map(place.child, folders)], manifests, strict=True):
        if data is None:
            continue
        try:
            found.append(Manifest.parse(bytes(data), str(one)).info(str(one), one.name))
        except KVStoreError as error:
            if damaged is None:
                raise
            damaged(str(one), error)
    return sorted(found, key=lambda info: info.name)


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard of an archive: the blocks of `keys`, consecutive in KV-cache group `group` from index `start` on."""

    group: int
    number: int
    path: str
    start: int
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class Verification:
    """What `Archive.verify` found: blocks that are intact, those that are not, and every object that is damaged."""

    intact: int
    corrupt: tuple[BlockKey, ...]
    damaged_objects: tuple[str, ...]
    nbytes: int

    @property
    def ok(self) -> bool:
        """Whether all of the archive is as it was written."""
        return not self.corrupt and not self.damaged_objects


@dataclass(slots=True)
class LoadedShard:
    """A shard in memory. `facts` is None where not even its end is intact."""

    data: NDArray[np.uint8]
    facts: ShardFacts | None
    whole: bool


class Archive:
    """One archive. Every block is checked on every read.

    Thread-safe. `info` and `namespace` say what it is; `keys` are its blocks, group by group, in order.
    """

    KEPT = 2
    """Shards that stay in memory for who reads block by block."""

    def __init__(self, place: ArchivePlace, client: ObjectClient, manifest: Manifest) -> None:
        self.info = manifest.info(str(place), place.name)
        self.namespace: Namespace = manifest.namespace
        self.manifest = manifest
        self.place, self._client = place, client
        self.packings = tuple(
            Packing(layout, group, segment.room, manifest.plan, manifest.compression)
            for group, (layout, segment) in enumerate(zip(self.namespace.layouts, manifest.segments, strict=True))
        )
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, LoadedShard] = OrderedDict()

    # What it holds

    @cached_property
    def keys(self) -> list[BlockKey]:
        """The blocks, group by group, each group in the order of the prompt. Raises `ArchiveDamagedError`."""
        return [key for chain in self.chains for key in chain]

    @cached_property
    def chains(self) -> tuple[tuple[BlockKey, ...], ...]:
        """The keys of each KV-cache group, in order. Raises `ArchiveDamagedError`."""
        size = self.namespace.digest_bytes
        return tuple(
            tuple(
                BlockKey(row.tobytes(), group)
                for row in self._small(f"g{group}_digests/c/0/0", "u1", (segment.blocks, size))
            )
            if segment.blocks
            else ()
            for group, segment in enumerate(self.manifest.segments)
        )

    @cached_property
    def _crcs(self) -> tuple[NDArray[np.uint32], ...]:
        return tuple(
            self._small(f"g{group}_checksums/c/0", "u4", (segment.blocks,)) if segment.blocks else np.empty(0, "u4")
            for group, segment in enumerate(self.manifest.segments)
        )

    @property
    def token_ids(self) -> NDArray[np.int64] | None:
        """The prompt's token ids, where they were kept. Raises `ArchiveDamagedError`."""
        return self._small("tokens/c/0", "i8", (self.info.tokens,)) if self.info.has_token_ids else None

    def position(self, group: int, index: int) -> tuple[int, bytes]:
        """Where the block `index` of a group stands in its prefix, and the digest of the block before it."""
        segment = self.manifest.segments[group]
        parent = self.chains[group][index - 1].digest if index else segment.parent
        return segment.start + index, parent

    def shards(self) -> Iterator[Shard]:
        """All of them, in the order of the prompt, group by group."""
        for packing, chain in zip(self.packings, self.chains, strict=True):
            grid = GridAxes(packing.layout)
            for number, start in enumerate(range(0, len(chain), packing.room)):
                path = grid.chunk(packing.group, number)
                yield Shard(packing.group, number, path, start, chain[start : start + packing.room])

    def _small(self, path: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        data = self._checked(path)
        if data is None:
            raise ArchiveDamagedError(f"{self.place}: {path} is damaged or missing: remove it, and archive anew")
        return small_values(data, dtype, shape)

    def _checked(self, path: str) -> bytes | None:
        """An object whose bytes are those that were written; None where they are not."""
        stored = self.manifest.objects.get(path)
        with self.place.explained():
            data = self._client.get(path)
        if stored is None or data is None:
            return None
        raw = bytes(data)
        return raw if len(raw) == stored.size and crc32c(raw) == stored.crc else None

    # Blocks

    def load(self, shard: Shard) -> LoadedShard:
        """Read one shard into memory: `blocks` gives what is intact of it."""
        with self.place.explained():
            data = self._client.get(shard.path)
        raw = np.frombuffer(b"", np.uint8) if data is None else as_bytes(data)
        stored = self.manifest.objects.get(shard.path)
        whole = stored is not None and raw.nbytes == stored.size and crc32c(raw) == stored.crc
        return LoadedShard(raw, self.packings[shard.group].split(raw, shard.number), whole)

    def block(self, loaded: LoadedShard, shard: Shard, place: int) -> NDArray[np.uint8] | None:
        """A block of a shard that was loaded; None where it is damaged, or is not what the archive says it is."""
        facts = loaded.facts
        if facts is None or facts.crcs.get(place) != int(self._crcs[shard.group][shard.start + place]):
            return None
        return self.packings[shard.group].block(loaded.data, facts, place, checked=loaded.whole)

    def read_many_into(self, blocks: Sequence[BlockRead]) -> list[GetOutcome]:
        """As `BlockStore.get_many_into`: HIT, MISS or CORRUPT for each, in order; buffers are the caller's.

        Reads whole shards: ask for neighbours together. The last two stay in memory until `close`.
        """
        checked = [self.namespace.check_buffer(block.key, block.into, writable=True) for block in blocks]
        return [self._read(block.key, into) for block, into in zip(blocks, checked, strict=True)]

    @cached_property
    def _places(self) -> dict[BlockKey, tuple[Shard, int]]:
        return {key: (shard, place) for shard in self.shards() for place, key in enumerate(shard.keys)}

    @cached_property
    def _by_path(self) -> dict[str, Shard]:
        return {shard.path: shard for shard in self.shards()}

    def _read(self, key: BlockKey, into: NDArray[np.uint8]) -> GetOutcome:
        found = self._places.get(key)
        if found is None:
            return GetOutcome.MISS
        shard, place = found
        block = self.block(self._loaded(shard), shard, place)
        if block is None:
            return GetOutcome.CORRUPT
        np.copyto(into, block)
        return GetOutcome.HIT

    def _loaded(self, shard: Shard) -> LoadedShard:
        with self._lock:
            loaded = self._kept.pop(shard.path, None) or self.load(shard)
            self._kept[shard.path] = loaded
            if len(self._kept) > self.KEPT:
                self._kept.popitem(last=False)
        return loaded

    # The whole

    def verify(self, *, progress: Callable[[int], object] | None = None) -> Verification:
        """Read all of it and compare every byte's checksum. `progress` is told of numbers of blocks that are done.

        Raises `TierUnavailable`. What is damaged is no exception but in the result.
        """
        tell = progress or silent
        damaged = [
            path for path in sorted(self.manifest.objects) if not self._is_shard(path) and not self._checked(path)
        ]
        corrupt: list[BlockKey] = []
        intact = 0
        try:
            shards, _ = list(self.shards()), self._crcs
        except ArchiveDamagedError:  # which blocks there are cannot be told
            return Verification(0, (), tuple(damaged), 0)
        for shard in shards:
            loaded = self.load(shard)
            if not loaded.whole:
                damaged.append(shard.path)
            bad = [key for place, key in enumerate(shard.keys) if self.block(loaded, shard, place) is None]
            corrupt += bad
            intact += len(shard.keys) - len(bad)
            tell(len(shard.keys))
        return Verification(intact, tuple(corrupt), tuple(damaged), self.info.stored_bytes)

    @staticmethod
    def _is_shard(path: str) -> bool:
        name, _, rest = path.partition("/")
        return rest.startswith("c/") and name.removeprefix("g").isdecimal()

    def xarray(self) -> xarray.Dataset:
        """The archive as a lazy dataset: `g0` is the KV of the first group, with named dimensions.

        What it loads is checked as a block is. Valid until `close`. Raises `MissingDependencyError` without xarray.
        """
        from kvstore.archive.looking import dataset

        return dataset(self)

    def object(self, path: str, span: slice = slice(None)) -> bytes | None:
        """Part of an object, all of which was checked; None where there is none. Raises `ArchiveDamagedError`."""
        if path not in self.manifest.objects:
            return None
        if not self._is_shard(path):
            data = self._checked(path)
            data = None if data is None else data[span]
        else:
            shard = self._by_path[path]
            loaded = self._loaded(shard)
            data = loaded.data[span].tobytes() if loaded.whole else None
        if data is None:
            raise ArchiveDamagedError(f"{self.place}: {path} is damaged or missing")
        return data

    def close(self) -> None:
        """Let go of the connection and of what is in memory. A second call does nothing."""
        with self._lock:
            self._kept.clear()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Archive {self.place}>"
