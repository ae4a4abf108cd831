"""`s3://` and every other file system that fsspec knows: the blocks of `file://`, one object each.

There is no catalogue: the bucket is the truth, any number of processes on any number of machines share it without
coordination, and what one of them stored the others find. A block is put in one request that does not overwrite, read
in one, checked like a file, and removed in one.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from kvstore.abc import REFUSE_S, BlockStore, Capabilities
from kvstore.errors import InvalidOptionError, NotAStoreError, StoreOpenError
from kvstore.graveyard import Graveyard
from kvstore.layout import as_bytes
from kvstore.objects.faults import RequestFailed
from kvstore.objects.opening import opened
from kvstore.objects.settings import LOOKUP_TTL, OPTIONS, OPTIONS_OF_DIRECTORIES, SWEEP, Place
from kvstore.objects.side import side_by_side
from kvstore.retention import Retention
from kvstore.sealing import PLAIN, check_options, open_sealer
from kvstore.tombs import refused_until
from kvstore.types import BlockInfo, GetOutcome, Leftover, PutOutcome, ResealOutcome, Residue, Unseen, Usage
from kvstore.url import READONLY, Option, TierURL
from kvstore_zarr.metadata import METADATA_NAME
from kvstore_zarr.objects.ages import Ages
from kvstore_zarr.objects.block import OneBlock, info_of
from kvstore_zarr.objects.documents import Documents
from kvstore_zarr.objects.lookup import Lookup
from kvstore_zarr.objects.purge import FOLDER, TombObjects, residues, seen_s
from kvstore_zarr.objects.remains import drop, is_long_empty, retention_notes, stale, wanted_capacity
from kvstore_zarr.objects.sweep import SweepCounts, Sweeper, rules_of
from kvstore_zarr.objects.trees import Trees
from kvstore_zarr.objects.unseen import purge_folder, unseen
from kvstore_zarr.objects.use import AtWork

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from typing import TypeVar

    import numpy as np
    import zarr
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvstore.doctor import Finding
    from kvstore.namespace import Namespace
    from kvstore.objects.client import Listed, ObjectClient
    from kvstore.sealing import Sealer
    from kvstore.types import BlockKey, BlockRead, BlockWrite
    from kvstore_zarr.metadata import NamespaceTree

    K = TypeVar("K")
    R = TypeVar("R")

__all__ = ["DirectoryZarrStore", "ObjectZarrStore"]

BATCH_BYTES = 1 << 20
"""A block of usual size is a request, and the tier's threads make the requests side by side."""
TRANSFERS = 8
"""Blocks of one batch under way at a time, where it has several: small ones, mostly."""
ARCHIVE, ARCHIVED = "kvstore-archive.json", "g0"
"""An archive's manifest, and the folder of its first blocks."""
HEADS_AT_ONCE = 256
"""Blocks whose facts a scan reads at a time."""


class ObjectZarrStore(BlockStore):
    """Blocks as zarr chunks in objects. `requests()` counts what was sent.

    A delete in another process is seen by every get at once, by `contains_many` within `lookup_ttl`. `usage` and `scan`
    list the bucket; a scan reads the end of every object as well.
    """

    options: ClassVar[tuple[Option[object], ...]] = OPTIONS

    def __init__(self, url: TierURL) -> None:
        super().__init__(url)
        place = Place.of(url)
        if place.is_readonly and url.raw_options.get(READONLY.name) is not None and not url.option(READONLY):
            raise InvalidOptionError(f"{url}: over {place.scheme}:// nothing can be written: leave out readonly")
        self._readonly = url.option(READONLY) or place.is_readonly
        self._capacity = wanted_capacity(url)
        check_options(url)
        self._client, folders = opened(url, place)
        self._documents = Documents(url, self._client)
        self._ages = Ages(Retention.of(url))
        self._at_work = AtWork(url)
        self._lookup = Lookup(self._client, url.option(LOOKUP_TTL), self._ages, self._at_work)
        self._trees = Trees(url, self._client, self._documents)
        self._sealer: Sealer | None = None
        try:
            _check_no_archive(url, self._client, folders)
            found = self._trees.found(folders, must_be_some=self._readonly and not place.is_readonly)
            self._sealer = open_sealer(url, found, readonly=self._readonly)
            self._trees.seal = PLAIN if self._sealer is None else self._sealer.id
        except BaseException:
            self._client.close()
            raise
        self._one = OneBlock(self._client, self._documents, self._lookup, self._ages, url, readonly=self._readonly)
        # What is listed at the opening tells that there are none yet; what is read by HTTP has none at all.
        self._graves = Graveyard(
            TombObjects(self._client), seen_s(url.option(LOOKUP_TTL)), looked=FOLDER not in folders
        )
        self._may_be_purged = not place.is_readonly
        in_memory = place.scheme == "memory"
        self.capabilities = Capabilities(
            persistent=not in_memory,
            shared=not in_memory,
            can_hang=True,
            io="network",
            batch_bytes=BATCH_BYTES,
            notes=(
                *(f"client: {self._client.name}", *self._client.notes, *self._trees.aside.values()),
                *retention_notes(url, self._readonly),
            ),
            capacity_is_exact=False,
            sealed=self._sealer is not None,
            tombstones=not self._readonly and not self._client.keeps_copies,
            tombstones_seen_s=self._graves.seen_s,
        )
        self._sweeper: Sweeper | None = None
        if (interval := url.option(SWEEP)) is not None and not self._readonly:
            self._sweeper = Sweeper(self, self._client, interval, rules_of(url, self._capacity))

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
        return self._client.requests.snapshot()

    def namespaces(self) -> list[Namespace]:
        with self._at_work:
            return [tree.namespace for tree in self._trees.known()]

    def contains_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        with self._at_work:
            _check(namespace, keys)
            if namespace.name in self._trees.aside:
                return [False] * len(keys)
            tree = self._trees.of(namespace)
            refused = self._refused(tree, keys)
            present = self._lookup.present(tree, [key for key in keys if key not in refused])
            answers = iter(present)
            return [key not in refused and next(answers) for key in keys]

    def put_many(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[PutOutcome]:
        with self._at_work:
            first: dict[BlockKey, tuple[BlockWrite, NDArray[np.uint8]]] = {}
            for block in blocks:
                data = namespace.check_write(block)
                first.setdefault(block.key, (block, data))
            if self._readonly or (namespace.name in self._trees.aside and not self._trees.mend(namespace)):
                return [PutOutcome.FAILED] * len(blocks)
            tree = self._trees.of(namespace)
            outcomes = dict.fromkeys(self._refused(tree, first), PutOutcome.REFUSED)
            wanted = {key: one for key, one in first.items() if key not in outcomes}
            documents, refused = self._prepare(tree, wanted)
            if refused is not None:
                return [refused] * len(blocks)
            data_keys = None
            if self._sealer is not None:
                data_keys = self._sealer.writing({block.tenant for block, _ in wanted.values()})
            # Beside the blocks, not before them: kvstore finds a block without the documents of its folder.
            work = [
                *(partial(self._one.write_document, path, text) for path, text in documents.items()),
                *(partial(self._one.put, tree, data_keys, *one) for one in wanted.values()),
            ]
            results = side_by_side(lambda put: put(), work, TRANSFERS)
            outcomes.update(zip(wanted, results[len(documents) :], strict=True))
        return [
            PutOutcome.EXISTS
            if first[block.key][0] is not block and outcomes[block.key].present
            else outcomes[block.key]
            for block in blocks
        ]

    def get_many_into(self, namespace: Namespace, blocks: Sequence[BlockRead]) -> list[GetOutcome]:
        with self._at_work:
            checked = [(block.key, namespace.check_buffer(block.key, block.into, writable=True)) for block in blocks]
            if namespace.name in self._trees.aside:
                return [GetOutcome.MISS] * len(blocks)
            tree = self._trees.of(namespace)
            purged = self._refused(tree, [key for key, _ in checked], looking=False)
            ring = None if self._sealer is None else self._sealer.reading()
            return side_by_side(
                lambda read: GetOutcome.MISS if read[0] in purged else self._one.get(tree, ring, *read),
                checked,
                TRANSFERS,
            )

    def reseal_many(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[ResealOutcome]:
        """Tombstones are looked at after the blocks were written: whoever purged one meanwhile had buried it before,
        so what was written behind a removal is found, and goes again.
        """
        with self._at_work:
            checked = [(block, namespace.check_write(block)) for block in blocks]
            if self._readonly or self._sealer is None or namespace.name in self._trees.aside:
                return [ResealOutcome.KEPT] * len(blocks)
            tree = self._trees.of(namespace)
            data_keys = self._sealer.writing(block.tenant for block in blocks)
            outcomes = side_by_side(lambda one: self._one.reseal(tree, data_keys, *one), checked, TRANSFERS)
            buried = self._graves.refused([tree.block(block.key) for block in blocks], anew=True)
            self._remove(sorted(buried))
        return [
            ResealOutcome.GONE if tree.block(block.key) in buried else outcome
            for block, outcome in zip(blocks, outcomes, strict=True)
        ]

    def of_later_version(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        with self._at_work:
            _check(namespace, keys)
            tree = self._trees.of(namespace)
            return side_by_side(lambda key: self._one.is_of_later_version(tree.block(key)), keys, TRANSFERS)

    def delete_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        with self._at_work:
            _check(namespace, keys)
            if self._readonly or namespace.name in self._trees.aside:
                return [False] * len(keys)
            tree = self._trees.of(namespace)
            removed = self._each(lambda key: self._one.delete(tree.block(key)), list(dict.fromkeys(keys)))
        return [removed.pop(key, False) for key in keys]

    def purge_many(
        self, namespace: Namespace, keys: Sequence[BlockKey], *, refuse_s: float = REFUSE_S, overwrite: bool = True
    ) -> list[bool]:
        """The tombstones first, so that who learns of them in time stores nothing behind the removal."""
        until = refused_until(refuse_s)
        with self._at_work:
            _check(namespace, keys)
            if self._readonly or namespace.name in self._trees.aside:
                return [False] * len(keys)
            tree = self._trees.of(namespace)
            paths = {key: tree.block(key) for key in keys}
            if until:
                self._graves.bury(list(paths.values()), until)
            there = self._each(self._client.exists, list(paths.values()))
            gone = [path for path, is_there in there.items() if is_there]
            if overwrite:
                side_by_side(self._client.overwrite, gone, TRANSFERS)
            self._remove(gone)
        return [there.pop(paths[key], False) for key in keys]

    def finish_purge(
        self, *, overwrite: bool = True, advance: Callable[[int], object] = lambda _: None
    ) -> list[Residue]:
        del overwrite, advance
        with self._at_work:
            return [] if self._readonly else residues(self._client)

    def _refused(self, tree: NamespaceTree, keys: Iterable[BlockKey], *, looking: bool = True) -> set[BlockKey]:
        """Those of the blocks that were purged a short while ago, as far as is known here."""
        if not self._may_be_purged or not self._graves.knows_any(looking=looking):
            return set()
        paths = {tree.block(key): key for key in keys}
        return {paths[path] for path in self._graves.known(paths)}

    def scan(self, namespace: Namespace) -> Iterator[BlockInfo]:
        with self._at_work:
            pages = () if namespace.name in self._trees.aside else self._client.list(namespace.name)
        tree = self._trees.of(namespace)
        entries = ((entry, key) for page in pages for entry in page if (key := tree.key_at(entry.path)) is not None)
        return self._facts(tree, entries)

    def scan_ages(self, namespace: Namespace) -> Iterator[BlockInfo]:
        """From the listing alone: times are when an object was written, or this process used it."""
        with self._at_work:
            pages = iter(()) if namespace.name in self._trees.aside else self._client.list(namespace.name)
        return self._listed_ages(self._trees.of(namespace), pages)

    def _listed_ages(self, tree: NamespaceTree, pages: Iterator[Sequence[Listed]]) -> Iterator[BlockInfo]:
        undated: list[tuple[Listed, BlockKey]] = []
        while True:
            with self._at_work:
                page = next(pages, None)
            if page is None:
                break
            for entry in page:
                key = tree.key_at(entry.path)
                if key is not None and entry.modified:
                    yield BlockInfo(key, entry.size, entry.modified, self._ages.last_used(entry))
                elif key is not None:
                    undated.append((entry, key))
        yield from self._facts(tree, iter(undated))

    def remove_unused(self, namespace: Namespace, infos: Sequence[BlockInfo]) -> list[bool]:
        """Nobody knows who used a block meanwhile, nor whether it is another that was stored anew."""
        with self._at_work:
            _check(namespace, [info.key for info in infos])
            if self._readonly or namespace.name in self._trees.aside:
                return [False] * len(infos)
            tree = self._trees.of(namespace)
            self._remove([tree.block(info.key) for info in infos])
        return [True] * len(infos)

    def drop_namespace(self, namespace: Namespace, *, only_if_empty: bool = False) -> int:
        with self._at_work:
            if self._readonly or namespace.name in self._trees.aside:
                return 0
            tree = self._trees.of(namespace)
            if only_if_empty and not is_long_empty(tree, self._client):
                return 0
            dropped = drop(tree, self._client, self._remove)
            self._documents.forget(namespace.name)
            self._trees.forget(namespace.name)
        return dropped

    def leftovers(self, *, remove: bool = False) -> list[Leftover]:
        with self._at_work:
            found = stale(self._client)
            if remove and not self._readonly:
                self._remove([entry.path for entry in found])
            ended = self._graves.collect() if remove and not self._readonly else self._graves.ended()
        return [
            *(Leftover(entry.path, entry.size, entry.modified) for entry in found),
            *(Leftover(f"{FOLDER}/{name}", 0, 0.0) for name in ended),
        ]

    def _remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            self._lookup.forget(path)
        self._ages.forget(paths)
        self._client.delete_many(paths)

    def touch_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
        with self._at_work:
            _check(namespace, keys)
            tree = self._trees.of(namespace)
            self._ages.touched(tree.block(key) for key in keys)

    def usage(self) -> Usage:
        with self._at_work:
            blocks = used = overhead = 0
            for tree in self._trees.known():
                for entry in itertools.chain.from_iterable(self._client.list(tree.namespace.name)):
                    if tree.key_at(entry.path) is not None:
                        blocks, used = blocks + 1, used + entry.size
                    elif entry.path.endswith(METADATA_NAME):
                        overhead += entry.size
        return Usage(blocks, used, overhead=overhead, capacity=self._capacity)

    def unseen(self) -> list[Unseen]:
        with self._at_work:
            return unseen(self._trees, self._client)

    def purge_unseen(
        self, *, names: Collection[str], refuse_s: float = REFUSE_S, overwrite: bool = True
    ) -> list[Unseen]:
        until = refused_until(refuse_s)
        if self._readonly:
            return []
        with self._at_work:
            found = [one for one in unseen(self._trees, self._client) if one.namespace in names and not one.later]
            gone = [
                purge_folder(
                    self._client,
                    one,
                    bury=lambda paths: self._graves.bury(paths, until) if until else None,
                    overwrite=self._client.overwrite if overwrite else lambda _: None,
                    remove=self._remove,
                )
                for one in found
            ]
            for one in gone:
                self._documents.forget(one.namespace)
                self._trees.forget(one.namespace)
                self._trees.serve_again(one.namespace)
        return gone

    def sealed_with(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bytes | None]:
        def key_id(key: BlockKey) -> bytes | None:
            frame = tree.frames[key.group]
            data = self._client.get(tree.block(key), frame.whole)
            closing = as_bytes(b"" if data is None else data)
            facts = frame.facts(closing) if closing.nbytes == frame.closing else None
            return None if facts is None else facts.key_id or None

        with self._at_work:
            _check(namespace, keys)
            tree = self._trees.of(namespace)
            return side_by_side(key_id, keys, TRANSFERS)

    def zarr_array(self, namespace: Namespace, key: BlockKey) -> zarr.Array[Any]:
        """The block as a zarr array of its layout's shape, which reads the stored chunk when values are asked for."""
        from kvstore_zarr.stock import block_array

        def read(path: str) -> Buffer | None:
            with self._at_work:
                return self._client.get(path)

        _check(namespace, [key])
        return block_array(self._trees.of(namespace), key, read, str(self.url))

    def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.stop()
        if self._at_work.end():
            self._client.close()
            if self._sealer is not None:
                self._sealer.close()

    def ensure_open(self) -> None:
        with self._at_work:
            pass

    # One block

    def _prepare(self, tree: NamespaceTree, keys: Iterable[BlockKey]) -> tuple[dict[str, bytes], PutOutcome | None]:
        """The documents that want to be written beside the blocks; or what becomes of the blocks without a manifest."""
        try:
            return self._documents.prepare(tree, keys), None
        except RequestFailed as failed:
            refused = self._one.refused(failed)
            if refused is None:
                raise
            return {}, refused
        except StoreOpenError as error:
            self._trees.set_aside(tree.namespace.name, error)
            return {}, PutOutcome.FAILED

    def _facts(self, tree: NamespaceTree, entries: Iterator[tuple[Listed, BlockKey]]) -> Iterator[BlockInfo]:
        def read(found: tuple[Listed, BlockKey]) -> BlockInfo | None:
            entry, key = found
            data = self._client.get(entry.path, tree.frames[key.group].whole)
            return None if data is None else info_of(tree, entry, key, data)

        while True:
            with self._at_work:
                batch = list(itertools.islice(entries, HEADS_AT_ONCE))
                infos = side_by_side(read, batch)
            if not batch:
                return
            yield from (info for info in infos if info is not None)

    def _each(self, call: Callable[[K], R], keys: Sequence[K]) -> dict[K, R]:
        return dict(zip(keys, side_by_side(call, keys, TRANSFERS), strict=True))


def _check_no_archive(url: TierURL, client: ObjectClient, folders: Sequence[str]) -> None:
    """Raise where an archive stands, of which a tier would be a part. Asked only where its folders are."""
    if ARCHIVED in folders and client.exists(ARCHIVE):
        raise NotAStoreError(
            f"{url}: an archive stands there: choose a place beside it (kvstore archive restore --to …)"
        )


class DirectoryZarrStore(ObjectZarrStore):
    """`file://…?remote=true`: the same in a directory that machines share, each object a file of it."""

    options: ClassVar[tuple[Option[object], ...]] = OPTIONS_OF_DIRECTORIES


def _check(namespace: Namespace, keys: Sequence[BlockKey]) -> None:
    for key in keys:
        namespace.check_key(key)
