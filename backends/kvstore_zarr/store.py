"""`file://`: zarr blocks in local files, with O_DIRECT where the file system allows it, under a shared catalogue.

Here is only what every verb has in common: checks, the count of calls in progress, the process it belongs to. The work
is done in `put`, `get`, `deleting` and `purge`; the way from a URL to a `LocalTier` and back is in `opening`.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import lmdb

from kvstore.abc import REFUSE_S, BlockStore, Capabilities
from kvstore.catalog import addresses_of
from kvstore.compaction import is_worthwhile
from kvstore.errors import StoreAccessError, StoreClosedError, TierUnavailable
from kvstore.marks import MarkOutcome
from kvstore.objects.settings import REMOTE
from kvstore.repairing import examine_environment
from kvstore.residues import leftovers
from kvstore.retention import TTL, TTL_FROM, Allowance
from kvstore.scrub import SCRUB, scrubbed, start_scrub
from kvstore.sealing import SEALING
from kvstore.tombs import refused_until
from kvstore.types import GetOutcome, PutOutcome, ResealOutcome, Usage
from kvstore.url import CAPACITY, DURABILITY, IO, KEEP_FREE, MODE, READONLY, Option, TierURL, boolean, local_path
from kvstore_zarr import calls
from kvstore_zarr.abandoned import abandoned_folders
from kvstore_zarr.deleting import dropped_and_empty, has_files, remove
from kvstore_zarr.expiry import take_back, take_out
from kvstore_zarr.folders import occupied
from kvstore_zarr.format import PAGE
from kvstore_zarr.get import get_blocks
from kvstore_zarr.opening import close_tier, open_tier
from kvstore_zarr.purge import finish_purge, purge
from kvstore_zarr.put import put_blocks
from kvstore_zarr.reindex import reindex
from kvstore_zarr.repair import repair, write_documents
from kvstore_zarr.reseal import reseal_blocks
from kvstore_zarr.sealed import is_of_later_version_at, key_id_in
from kvstore_zarr.tier import CATALOGUE, INNER
from kvstore_zarr.unseen import purge_unseen, unseen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence

    import zarr

    from kvstore.doctor import Finding
    from kvstore.marks import Mark
    from kvstore.namespace import Namespace
    from kvstore.records import Entry
    from kvstore.repairing import Examination, Repaired
    from kvstore.scrub import Scrubbed
    from kvstore.snapshot import Snapshot
    from kvstore.types import BlockInfo, BlockKey, BlockRead, BlockWrite, Leftover, Residue, Unseen
    from kvstore_zarr.reindex import Progress, Reindexed
    from kvstore_zarr.tier import LocalTier

__all__ = ["LocalZarrStore"]

_PAGE_OF_SCAN = 1024


class LocalZarrStore(BlockStore):
    """Blocks as zarr chunks in local files, evicted in order of use under `capacity`.

    Any number of processes on one machine may have one directory open; all of them see one catalogue and one cap.
    `capacity` bounds everything in the tree: blocks, drafts, folders, metadata, catalogue.
    """

    options: ClassVar[tuple[Option[object], ...]] = (
        *(CAPACITY, KEEP_FREE, TTL, TTL_FROM, IO, DURABILITY, READONLY, MODE, REMOTE, SCRUB),
        *SEALING,
    )

    @classmethod
    def serving(cls, url: TierURL) -> type[BlockStore]:
        """With `remote=true` there is no catalogue, and a file is an object like any other."""
        try:
            remote = boolean(url.raw_options.get(REMOTE.name, False))
        except ValueError:  # said when the options are parsed
            return cls
        if not remote:
            return cls
        from kvstore_zarr.objects import DirectoryZarrStore

        return DirectoryZarrStore

    def __init__(self, url: TierURL) -> None:
        super().__init__(url)
        self._pid = os.getpid()
        self._idle = threading.Condition()
        self._active = 0
        self._allowance = Allowance()
        self._tier, reason = open_tier(url)
        self._closed = False
        self.capabilities = Capabilities(
            persistent=True,
            shared=True,
            can_hang=False,
            io="direct" if self._tier.device.direct else "buffered",
            alignment=PAGE if self._tier.device.direct else 1,
            notes=(
                *(() if reason is None else (f"I/O goes through the page cache: {reason}",)),
                f"client: {calls.how}",
                *self._tier.notes(),
            ),
            marks=True,
            uses=True,
            tombstones=True,
            sealed=self._tier.sealer is not None,
        )
        self._scrub = start_scrub(self, self._tier.catalog, self._tier.presence.directory, self._tier.mode)

    def namespaces(self) -> list[Namespace]:
        with self._using() as tier, tier.catalog.read() as snapshot:
            empty = set(dropped_and_empty(tier, snapshot)) if tier.dropped else ()
            spaces = (space for space in snapshot.namespaces() if space.fingerprint not in empty)
            return [space for space in spaces if not tier.is_aside(space.fingerprint)]

    def contains_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        with self._using() as tier:
            addresses = addresses_of(namespace, keys)
            if tier.is_aside(namespace.fingerprint):
                return [False] * len(addresses)
            with tier.catalog.read() as snapshot:
                return snapshot.alive(addresses)

    def put_many(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[PutOutcome]:
        return self._put(namespace, blocks, evict=True)

    def put_if_room(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[PutOutcome]:
        return self._put(namespace, blocks, evict=False)

    def _put(self, namespace: Namespace, blocks: Sequence[BlockWrite], *, evict: bool) -> list[PutOutcome]:
        with self._using() as tier:
            checked = [(block, namespace.check_write(block)) for block in blocks]
            if tier.readonly or tier.is_aside(namespace.fingerprint):
                return [PutOutcome.FAILED] * len(blocks)
            take_back(tier, self._allowance, namespace, [block.key for block in blocks])
            return put_blocks(tier, tier.tree(namespace), checked, evict=evict)

    def reseal_many(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[ResealOutcome]:
        with self._using() as tier:
            checked = [(block, namespace.check_write(block)) for block in blocks]
            if tier.readonly or tier.sealer is None or tier.is_aside(namespace.fingerprint):
                return [ResealOutcome.KEPT] * len(blocks)
            data_keys = tier.sealer.writing(block.tenant for block in blocks)
            return reseal_blocks(tier, tier.tree(namespace), checked, data_keys)

    def get_many_into(self, namespace: Namespace, blocks: Sequence[BlockRead]) -> list[GetOutcome]:
        return self._get(namespace, blocks, used=True)

    def check_many(self, namespace: Namespace, blocks: Sequence[BlockRead]) -> list[GetOutcome]:
        return self._get(namespace, blocks, used=False)

    def _get(self, namespace: Namespace, blocks: Sequence[BlockRead], *, used: bool) -> list[GetOutcome]:
        with self._using() as tier:
            checked = [(block.key, namespace.check_buffer(block.key, block.into, writable=True)) for block in blocks]
            if tier.is_aside(namespace.fingerprint):
                return [GetOutcome.MISS] * len(blocks)
            return get_blocks(tier, tier.tree(namespace), checked, used=used)

    def of_later_version(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        with self._using() as tier:
            addresses_of(namespace, keys)
            tree = tier.tree(namespace)
            return [is_of_later_version_at(f"{tier.root}/{tree.block(key)}") for key in keys]

    def delete_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        with self._using() as tier:
            addresses = addresses_of(namespace, keys)
            if tier.readonly or tier.is_aside(namespace.fingerprint):
                return [False] * len(addresses)
            return remove(tier, addresses)

    def purge_many(
        self, namespace: Namespace, keys: Sequence[BlockKey], *, refuse_s: float = REFUSE_S, overwrite: bool = True
    ) -> list[bool]:
        with self._using() as tier:
            addresses = addresses_of(namespace, keys)
            if tier.readonly or tier.is_aside(namespace.fingerprint):
                return [False] * len(addresses)
            return purge(tier, addresses, refused_until(refuse_s), overwriting=overwrite)

    def finish_purge(
        self, *, overwrite: bool = True, advance: Callable[[int], object] = lambda _: None
    ) -> list[Residue]:
        with self._using() as tier:
            return [] if tier.readonly else finish_purge(tier, advance, overwriting=overwrite)

    def leftovers(self, *, remove: bool = False) -> list[Leftover]:
        with self._using() as tier:
            removing = remove and not tier.readonly
            return [*leftovers(tier.catalog, remove=removing), *abandoned_folders(tier, remove=removing)]

    def scan(self, namespace: Namespace) -> Iterator[BlockInfo]:
        return self._scan(namespace, lambda snapshot, after: snapshot.scan(namespace.fingerprint, after))

    def scan_marked(self, namespace: Namespace, mark: Mark) -> Iterator[BlockInfo]:
        return self._scan(namespace, lambda snapshot, after: snapshot.scan_marked(namespace.fingerprint, mark, after))

    def _scan(
        self, namespace: Namespace, entries_after: Callable[[Snapshot, bytes], Iterator[Entry]]
    ) -> Iterator[BlockInfo]:
        """A page at a time: a tier may have millions of blocks, and pages freed meanwhile wait for whoever reads."""
        with self._using() as tier:
            if tier.is_aside(namespace.fingerprint):
                return iter(())
        return self._pages(entries_after)

    def _pages(self, entries_after: Callable[[Snapshot, bytes], Iterator[Entry]]) -> Iterator[BlockInfo]:
        after = b""
        while True:
            with self._using() as tier, tier.catalog.read() as snapshot:
                entries = list(islice(entries_after(snapshot, after), _PAGE_OF_SCAN))
            if not entries:
                return
            yield from (entry.info() for entry in entries)
            after = entries[-1].address

    def usage(self) -> Usage:
        with self._using() as tier, tier.catalog.read() as snapshot:
            totals = snapshot.totals()
        return Usage(totals.blocks, totals.used, totals.reserved, totals.overhead, totals.capacity, totals.pinned)

    def excess(self, capacity: int) -> int:
        """See `BlockStore.excess`. What the next opening gives back of the catalogue is not in the blocks' way."""
        with self._using() as tier, tier.catalog.read() as snapshot:
            usage, spare = self.usage(), 0
            if is_worthwhile(tier.environment, usage.capacity):
                live = tier.environment.live_pages(snapshot.txn) * PAGE
                spare = max(0, occupied(f"{tier.root}/{CATALOGUE}/data.mdb") - live)
        return usage.used + usage.reserved + usage.overhead - spare - capacity

    def touch_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
        with self._using() as tier:
            addresses = addresses_of(namespace, keys)
            if tier.catalog.retention:  # what has expired is not made young
                with tier.catalog.read() as snapshot:
                    alive = snapshot.alive(addresses)
                addresses = [address for address, there in zip(addresses, alive, strict=True) if there]
            if not tier.readonly and tier.catalog.note(addresses, hits=0):
                tier.catalog.settle_in_passing()

    def scan_ages(self, namespace: Namespace) -> Iterator[BlockInfo]:
        with self._using() as tier:
            if not tier.readonly:
                tier.catalog.settle()  # so that what this process used is dated
        return self.scan(namespace)

    def remove_unused(self, namespace: Namespace, infos: Sequence[BlockInfo]) -> list[bool]:
        with self._using() as tier:
            addresses = addresses_of(namespace, [info.key for info in infos])
            if tier.readonly or tier.is_aside(namespace.fingerprint):
                return [False] * len(infos)
            with tier.catalog.read() as snapshot:
                victims = snapshot.as_they_were(addresses, infos)
            gone = take_out(tier, victims)
            return [address in gone for address in addresses]

    def drop_namespace(self, namespace: Namespace, *, only_if_empty: bool = False) -> int:
        dropped = super().drop_namespace(namespace, only_if_empty=only_if_empty)
        with self._using() as tier:
            if not (tier.readonly or tier.is_aside(namespace.fingerprint) or has_files(tier, namespace.name)):
                tier.dropped.add(namespace.fingerprint)
        return dropped

    @classmethod
    def diagnose(cls, url: TierURL, usage: Usage | None) -> Iterable[Finding]:
        from kvstore_zarr.diagnosis import diagnose

        return diagnose(url, usage)

    def mark_many(self, namespace: Namespace, keys: Sequence[BlockKey], mark: Mark) -> list[MarkOutcome]:
        with self._using() as tier:
            addresses = addresses_of(namespace, keys)
            if tier.readonly or tier.is_aside(namespace.fingerprint):
                return [MarkOutcome.FAILED] * len(addresses)
            return tier.catalog.mark(addresses, mark)

    def unmark_many(self, namespace: Namespace, keys: Sequence[BlockKey], mark: Mark) -> list[bool]:
        with self._using() as tier:
            addresses = addresses_of(namespace, keys)
            if tier.readonly or tier.is_aside(namespace.fingerprint):
                return [False] * len(addresses)
            return tier.catalog.unmark(addresses, mark)

    def reindex(self, progress: Progress = lambda _: None) -> Reindexed:
        """Make the catalogue know blocks whose files came another way, as a copy, and forget those that are gone.

        May run while the tier is in use, here and elsewhere. Under a capacity the oldest blocks are evicted then, as
        ever. `progress` is told how many blocks more were compared. Raises `StoreAccessError` when the store is
        read-only.
        """
        if self._tier.readonly:
            raise StoreAccessError(f"{self.url}: a tier that was opened read-only cannot be reindexed")
        with self._using() as tier:
            return reindex(tier, progress=progress)

    def repair(self) -> list[Repaired]:
        with self._using() as tier:
            return [] if tier.readonly else repair(tier)

    def unseen(self) -> list[Unseen]:
        with self._using() as tier:
            return unseen(tier)

    def take_in(self, *, blocks: bool) -> None:
        with self._using() as tier:
            if not tier.readonly:
                write_documents(tier)
                if blocks:
                    reindex(tier, evicting=False)

    def purge_unseen(
        self, *, names: Collection[str], refuse_s: float = REFUSE_S, overwrite: bool = True
    ) -> list[Unseen]:
        with self._using() as tier:
            return [] if tier.readonly else purge_unseen(tier, names, refused_until(refuse_s), overwriting=overwrite)

    def scrubbed(self) -> Scrubbed | None:
        return scrubbed(self._tier.presence.directory)

    @classmethod
    def examine(cls, url: TierURL) -> Examination:
        root = local_path(url)
        return examine_environment(root / INNER, root / CATALOGUE)

    def sealed_with(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bytes | None]:
        with self._using() as tier:
            addresses_of(namespace, keys)
            tree = tier.tree(namespace)
            return [key_id_in(f"{tier.root}/{tree.block(key)}") for key in keys]

    def zarr_array(self, namespace: Namespace, key: BlockKey) -> zarr.Array[Any]:
        """The block as a zarr array of its layout's shape, which reads the stored chunk when values are asked for."""
        from kvstore_zarr.stock import block_array

        def read(path: str) -> bytes | None:
            with self._using() as tier:
                try:
                    return (tier.root / path).read_bytes()
                except (FileNotFoundError, NotADirectoryError):
                    return None

        namespace.check_key(key)
        with self._using() as tier:
            return block_array(tier.tree(namespace), key, read, str(self.url))

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        if self._scrub is not None:
            self._scrub.stop()
        with self._idle:
            if self._closed:
                return
            self._closed = True
            self._idle.wait_for(lambda: not self._active)
        with self._telling():
            close_tier(self._tier)

    def ensure_open(self) -> None:
        with self._using():
            pass

    @contextmanager
    def _using(self) -> Generator[LocalTier]:
        """The tier, for one verb; `close` waits for it to end."""
        if self._pid != os.getpid():
            raise StoreClosedError(f"{self.url} was opened by the process that this one was forked from: open it again")
        with self._idle:
            if self._closed:
                raise StoreClosedError(f"{self.url} was closed: open it again")
            self._active += 1
        try:
            with self._telling():
                self._tier.presence.check()
                yield self._tier
        finally:
            with self._idle:
                self._active -= 1
                if self._closed and not self._active:
                    self._idle.notify_all()

    @contextmanager
    def _telling(self) -> Generator[None]:
        """What LMDB or the device cannot do becomes `TierUnavailable`."""
        try:
            yield
        except TierUnavailable:
            raise
        except (OSError, lmdb.Error) as error:
            raise TierUnavailable(f"{self.url} cannot tell: {error}") from error
