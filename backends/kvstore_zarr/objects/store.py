"""`s3://` and every other file system that fsspec knows: the blocks of `file://`, one object each.

There is no catalogue: the bucket is the truth, any number of processes on any number of machines share it without
coordination, and what one of them stored the others find. A block is put in one request that does not overwrite, read
in one, checked like a file, and removed in one.

Here every verb's arguments are checked, and the tier is at work for as long as it takes; what it does is in `putting`,
`reading`, `scanning` and `removing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from kvstore.abc import REFUSE_S, BlockStore
from kvstore.objects.settings import OPTIONS, OPTIONS_OF_DIRECTORIES, SWEEP
from kvstore.tombs import refused_until
from kvstore.types import GetOutcome, Leftover, PutOutcome, ResealOutcome
from kvstore_zarr.objects.opening import capabilities_of, open_tier
from kvstore_zarr.objects.purge import FOLDER, purge_drafts, residues
from kvstore_zarr.objects.putting import put_blocks, reseal_blocks
from kvstore_zarr.objects.reading import are_there, get_blocks, ids_of_keys, is_later
from kvstore_zarr.objects.remains import drop, empty_folders, is_long_empty, nameless_in, stale
from kvstore_zarr.objects.removing import delete_blocks, purge_blocks, purge_folders
from kvstore_zarr.objects.scanning import measure, scan_blocks, scan_listing
from kvstore_zarr.objects.sweep import SweepCounts, Sweeper, rules_of
from kvstore_zarr.objects.unseen import unseen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    import zarr
    from typing_extensions import Buffer

    from kvstore.doctor import Finding
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo, BlockKey, BlockRead, BlockWrite, Residue, Unseen, Usage
    from kvstore.url import Option, TierURL

__all__ = ["DirectoryZarrStore", "ObjectZarrStore"]


class ObjectZarrStore(BlockStore):
    """Blocks as zarr chunks in objects. `requests()` counts what was sent.

    A delete in another process is seen by every get at once, by `contains_many` within `lookup_ttl`. `usage` and `scan`
    list the bucket; a scan reads the end of every object as well.
    """

    options: ClassVar[tuple[Option[object], ...]] = OPTIONS
    remote = True

    def __init__(self, url: TierURL) -> None:
        super().__init__(url)
        self._tier = tier = open_tier(url)
        self.capabilities = capabilities_of(tier, url)
        self._sweeper: Sweeper | None = None
        if (interval := url.option(SWEEP)) is not None and not tier.readonly:
            self._sweeper = Sweeper(self, tier.client, interval, rules_of(url, tier.capacity))

    @classmethod
    def diagnose(cls, url: TierURL, usage: Usage | None) -> Iterable[Finding]:
        from kvstore_zarr.objects.diagnosis import diagnose

        del usage
        return diagnose(url)

    @property
    def sweeps(self) -> SweepCounts:
        """What this store has swept, with the option `sweep`; another process may hold the lease."""
        return SweepCounts() if self._sweeper is None else self._sweeper.counts

    def requests(self) -> dict[str, int]:
        """How many requests of each kind this store has sent: GET, PUT, HEAD, DELETE, LIST."""
        return self._tier.client.requests.snapshot()

    def namespaces(self) -> list[Namespace]:
        with self._tier as tier:
            return [tree.namespace for tree in tier.trees.known()]

    def contains_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        with self._tier as tier:
            _check(namespace, keys)
            if tier.is_aside(namespace):
                return [False] * len(keys)
            return are_there(tier, tier.trees.of(namespace), keys)

    def put_many(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[PutOutcome]:
        with self._tier as tier:
            checked = [(block, namespace.check_write(block)) for block in blocks]
            if tier.readonly or (tier.is_aside(namespace) and not tier.trees.mend(namespace)):
                return [PutOutcome.FAILED] * len(blocks)
            return put_blocks(tier, tier.trees.of(namespace), checked)

    def get_many_into(self, namespace: Namespace, blocks: Sequence[BlockRead]) -> list[GetOutcome]:
        with self._tier as tier:
            checked = [(block.key, namespace.check_buffer(block.key, block.into, writable=True)) for block in blocks]
            if tier.is_aside(namespace):
                return [GetOutcome.MISS] * len(blocks)
            return get_blocks(tier, tier.trees.of(namespace), checked)

    def reseal_many(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[ResealOutcome]:
        with self._tier as tier:
            checked = [(block, namespace.check_write(block)) for block in blocks]
            if tier.sealer is None or tier.takes_none(namespace):
                return [ResealOutcome.KEPT] * len(blocks)
            return reseal_blocks(tier, tier.sealer, tier.trees.of(namespace), checked)

    def of_later_version(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        with self._tier as tier:
            _check(namespace, keys)
            return is_later(tier, tier.trees.of(namespace), keys)

    def delete_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        with self._tier as tier:
            _check(namespace, keys)
            if tier.takes_none(namespace):
                return [False] * len(keys)
            return delete_blocks(tier, tier.trees.of(namespace), keys)

    def purge_many(
        self, namespace: Namespace, keys: Sequence[BlockKey], *, refuse_s: float = REFUSE_S, overwrite: bool = True
    ) -> list[bool]:
        until = refused_until(refuse_s)
        with self._tier as tier:
            _check(namespace, keys)
            if tier.takes_none(namespace):
                return [False] * len(keys)
            return purge_blocks(tier, tier.trees.of(namespace), keys, until, overwriting=overwrite)

    def finish_purge(
        self, *, overwrite: bool = True, advance: Callable[[int], object] = lambda _: None
    ) -> list[Residue]:
        del advance
        with self._tier as tier:
            if tier.readonly:
                return []
            return [*purge_drafts(tier.client, overwrite=overwrite), *residues(tier.client)]

    def scan(self, namespace: Namespace) -> Iterator[BlockInfo]:
        return scan_blocks(self._tier, namespace)

    def scan_ages(self, namespace: Namespace) -> Iterator[BlockInfo]:
        """From the listing alone: times are when an object was written, or this process used it."""
        return scan_listing(self._tier, namespace)

    def remove_unused(self, namespace: Namespace, infos: Sequence[BlockInfo]) -> list[bool]:
        """Nobody knows who used a block meanwhile, nor whether it is another that was stored anew."""
        with self._tier as tier:
            _check(namespace, [info.key for info in infos])
            if tier.takes_none(namespace):
                return [False] * len(infos)
            tree = tier.trees.of(namespace)
            tier.remove([tree.block(info.key) for info in infos])
        return [True] * len(infos)

    def drop_namespace(self, namespace: Namespace, *, only_if_empty: bool = False) -> int:
        with self._tier as tier:
            if tier.takes_none(namespace):
                return 0
            tree = tier.trees.of(namespace)
            if only_if_empty and not is_long_empty(tree, tier.client):
                return 0
            dropped = drop(tree, tier.client, tier.remove)
            tier.forget(namespace.name)
        return dropped

    def leftovers(self, *, remove: bool = False) -> list[Leftover]:
        with self._tier as tier:
            removing = remove and not tier.readonly
            nameless = nameless_in(tier.client)
            found, folders = stale(tier.client, nameless), empty_folders(tier.client, nameless)
            if removing:
                tier.remove([entry.path for entry in found])
                gone = {entry.path.partition("/")[0] for entry in (*found, *folders)}
                for name in gone.intersection(nameless):
                    tier.client.remove_folder(name)
            ended = tier.graves.collect() if removing else tier.graves.ended()
        return [
            *(Leftover(entry.path, entry.size, entry.modified) for entry in (*found, *folders)),
            *(Leftover(f"{FOLDER}/{name}", 0, 0.0) for name in ended),
        ]

    def touch_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
        with self._tier as tier:
            _check(namespace, keys)
            tree = tier.trees.of(namespace)
            tier.ages.touched(tree.block(key) for key in keys)

    def usage(self) -> Usage:
        return measure(self._tier)

    def unseen(self) -> list[Unseen]:
        with self._tier as tier:
            return unseen(tier.trees, tier.client)

    def purge_unseen(
        self, *, names: Collection[str], refuse_s: float = REFUSE_S, overwrite: bool = True
    ) -> list[Unseen]:
        until = refused_until(refuse_s)
        with self._tier as tier:
            return [] if tier.readonly else purge_folders(tier, names, until, overwriting=overwrite)

    def sealed_with(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bytes | None]:
        with self._tier as tier:
            _check(namespace, keys)
            return ids_of_keys(tier, tier.trees.of(namespace), keys)

    def zarr_array(self, namespace: Namespace, key: BlockKey) -> zarr.Array[Any]:
        """The block as a zarr array of its layout's shape, which reads the stored chunk when values are asked for."""
        from kvstore_zarr.stock import block_array

        def read(path: str) -> Buffer | None:
            with self._tier as tier:
                return tier.client.get(path)

        _check(namespace, [key])
        return block_array(self._tier.trees.of(namespace), key, read, str(self.url))

    def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.stop()
        self._tier.close()

    def ensure_open(self) -> None:
        with self._tier:
            pass


class DirectoryZarrStore(ObjectZarrStore):
    """`file://…?remote=true`: the same in a directory that machines share, each object a file of it."""

    options: ClassVar[tuple[Option[object], ...]] = OPTIONS_OF_DIRECTORIES


def _check(namespace: Namespace, keys: Sequence[BlockKey]) -> None:
    for key in keys:
        namespace.check_key(key)
