"""`lmdb:///path/kv.lmdb`: blocks as entries of one LMDB environment, which any number of processes share.

The URL names a directory with `data.mdb`, `lock.mdb` and the files of `kvstore.presence`. In the environment stand the
catalogue (`kvstore.catalog`) and one more database, `blocks`: generation to header and payload (`kvstore_lmdb.entry`).
In `info` there may be a record `tick`: eight bytes without a meaning, written where a commit is needed for itself.
A put is one transaction for each 4 MiB, with room made in an earlier one; a get is one short read transaction for
each MiB: every block is copied out and checked there. The cap is a bound that LMDB itself keeps (`kvstore_lmdb.space`).
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, TypeVar

import lmdb

from kvstore.abc import REFUSE_S, BlockStore, Capabilities
from kvstore.catalog import Entry, address_of, addresses_of
from kvstore.environment import PAGE
from kvstore.errors import StoreClosedError, TierUnavailable
from kvstore.marks import MarkOutcome
from kvstore.repairing import examine_environment
from kvstore.residues import leftovers
from kvstore.retention import TTL, TTL_FROM, Allowance, now_ns
from kvstore.scrub import SCRUB, scrubbed, start_scrub
from kvstore.sealing import SEAL_BYTES, SEALING
from kvstore.tombs import refused_until
from kvstore.types import (
    BlockInfo,
    BlockKey,
    BlockRead,
    BlockWrite,
    GetOutcome,
    Leftover,
    PutOutcome,
    ResealOutcome,
    Residue,
    Unseen,
    Usage,
)
from kvstore.url import CAPACITY, DURABILITY, KEEP_FREE, MODE, READONLY, Option, TierURL, local_path
from kvstore_lmdb.entry import key_id_in, stored_bytes
from kvstore_lmdb.get import get_blocks
from kvstore_lmdb.opening import Tier, open_tier
from kvstore_lmdb.purge import finish_purge
from kvstore_lmdb.put import Puts, Staged, chunks, stage, with_keys
from kvstore_lmdb.removal import purge_blocks, remove_as_read, remove_blocks, take_back
from kvstore_lmdb.repair import is_of_later_version, repair
from kvstore_lmdb.whole import addresses_in, excess, unseen, usage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence

    from kvstore.catalog import Snapshot
    from kvstore.doctor import Finding
    from kvstore.marks import Mark
    from kvstore.namespace import Namespace
    from kvstore.repairing import Examination, Repaired
    from kvstore.scrub import Scrubbed

__all__ = ["LMDBStore"]

T = TypeVar("T")

_PAGE_OF_SCAN = 1000
"""Entries read in one transaction of a scan."""


class LMDBStore(BlockStore):
    """Blocks in one LMDB environment, evicted in order of use under `capacity`.

    With `durability=fsync` every transaction is on disk when a put returns; otherwise a power loss may take what was
    written since, or all (see `kvstore_lmdb.opening`). Of several processes with different `durability` the weakest
    counts. Reads never wait for writers; a put waits while another process writes.
    """

    options: ClassVar[tuple[Option[object], ...]] = (
        *(CAPACITY, KEEP_FREE, TTL, TTL_FROM, DURABILITY, READONLY, MODE, SCRUB),
        *SEALING,
    )
    keeps_size: ClassVar[str] = (
        "whoever opens the tier alone with a capacity below its size, which is the tier's from then on, has what is"
        " left written to a new file"
    )

    def __init__(self, url: TierURL) -> None:
        super().__init__(url)
        self._tier: Tier = open_tier(url)
        self._readonly = url.option(READONLY)
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._closed = False
        self._puts = Puts(self._tier)
        self._allowance = Allowance()
        self._sealer = self._tier.sealer
        self._longer = 0 if self._sealer is None else SEAL_BYTES
        self._purged_small = False
        self.capabilities = Capabilities(
            persistent=True,
            shared=True,
            can_hang=False,
            io="mmap",
            batch_bytes=self._tier.space.chunk,
            notes=self._tier.notes,
            marks=True,
            uses=True,
            tombstones=True,
            sealed=self._sealer is not None,
        )
        self._scrub = start_scrub(self, self._tier.catalog, self._tier.directory, self._tier.mode)

    def namespaces(self) -> list[Namespace]:
        with self._telling(), self._tier.catalog.read() as snapshot:
            return snapshot.namespaces()

    def contains_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        addresses = self._addresses(namespace, keys)
        with self._telling(), self._tier.catalog.read() as snapshot:
            return snapshot.alive(addresses)

    def put_many(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[PutOutcome]:
        return self._put(namespace, blocks, evict=True)

    def put_if_room(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[PutOutcome]:
        return self._put(namespace, blocks, evict=False)

    def _put(self, namespace: Namespace, blocks: Sequence[BlockWrite], *, evict: bool) -> list[PutOutcome]:
        staged = self._staged(namespace, blocks)
        outcomes = [PutOutcome.FAILED] * len(blocks)
        now = now_ns()
        if not self._readonly:
            if self._sealer is not None:
                staged = with_keys(self._sealer, staged)
            with self._telling():
                take_back(self._tier, self._allowance, [member.address for member in staged])
            for chunk in self._chunks(staged):
                with self._telling():
                    stored = self._puts.put(namespace, chunk, now, evict=evict)
                for member, outcome in zip(chunk, stored, strict=True):
                    outcomes[member.place] = outcome
        return outcomes

    def _staged(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[Staged]:
        staged = stage(namespace, blocks, sealed=self._sealer is not None)
        self._tier.environment.ensure_open()
        return staged

    def _chunks(self, staged: list[Staged]) -> Iterator[list[Staged]]:
        with self._telling():
            chunk_bytes = self._tier.current_space().chunk * 9 // 8  # blocks of 32 KiB and more with their headers
        return chunks(staged, chunk_bytes, lambda member: member.size)

    def reseal_many(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[ResealOutcome]:
        staged = self._staged(namespace, blocks)
        outcomes = [ResealOutcome.KEPT] * len(blocks)
        if self._sealer is not None and not self._readonly:
            for chunk in self._chunks(with_keys(self._sealer, staged)):
                with self._telling():
                    resealed = self._puts.reseal(namespace, chunk)
                for member, outcome in zip(chunk, resealed, strict=True):
                    outcomes[member.place] = outcome
        return outcomes

    def get_many_into(self, namespace: Namespace, blocks: Sequence[BlockRead]) -> list[GetOutcome]:
        outcomes = self.check_many(namespace, blocks)
        if not self._readonly:
            catalog, found = self._tier.catalog, zip(blocks, outcomes, strict=True)
            hits = (address_of(namespace, block.key) for block, outcome in found if outcome is GetOutcome.HIT)
            if catalog.note(hits):  # or others would take these blocks for unused, or for expired
                catalog.settle_in_passing()
        return outcomes

    def check_many(self, namespace: Namespace, blocks: Sequence[BlockRead]) -> list[GetOutcome]:
        checked = [
            (address_of(namespace, block.key), namespace.check_buffer(block.key, block.into, writable=True))
            for block in blocks
        ]
        self._tier.environment.ensure_open()
        with self._telling():
            return get_blocks(self._tier, checked, readonly=self._readonly)

    def of_later_version(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        with self._telling():
            return [is_of_later_version(self._tier, address) for address in self._addresses(namespace, keys)]

    def delete_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        addresses = self._addresses(namespace, keys)
        if self._readonly:
            return [False] * len(addresses)
        return self._some_at_a_time(len(addresses), lambda some: remove_blocks(self._tier, addresses[some]))

    def purge_many(
        self, namespace: Namespace, keys: Sequence[BlockKey], *, refuse_s: float = REFUSE_S, overwrite: bool = True
    ) -> list[bool]:
        del overwrite  # what is free is overwritten by `finish_purge`
        addresses = self._addresses(namespace, keys)
        if self._readonly:
            return [False] * len(addresses)
        until = refused_until(refuse_s)
        smallest = min(map(namespace.block_bytes, range(len(namespace.layouts))))
        self._purged_small |= stored_bytes(smallest + self._longer) == PAGE
        return self._purge(addresses, until)

    def _purge(self, addresses: Sequence[bytes], until: int) -> list[bool]:
        return self._some_at_a_time(len(addresses), lambda some: purge_blocks(self._tier, addresses[some], until))

    def finish_purge(
        self, *, overwrite: bool = True, advance: Callable[[int], object] = lambda _: None
    ) -> list[Residue]:
        self._tier.environment.ensure_open()
        if self._readonly:
            return []
        with self._telling():
            small, self._purged_small = self._purged_small, False
            return finish_purge(self._tier, overwrite=overwrite, small=small, advance=advance)

    def leftovers(self, *, remove: bool = False) -> list[Leftover]:
        with self._telling():
            return leftovers(self._tier.catalog, remove=remove and not self._readonly)

    def scan(self, namespace: Namespace) -> Iterator[BlockInfo]:
        self._tier.environment.ensure_open()
        return self._scan(lambda snapshot, after: snapshot.scan(namespace.fingerprint, after))

    def scan_marked(self, namespace: Namespace, mark: Mark) -> Iterator[BlockInfo]:
        self._tier.environment.ensure_open()
        return self._scan(lambda snapshot, after: snapshot.scan_marked(namespace.fingerprint, mark, after))

    def _scan(self, entries_after: Callable[[Snapshot, bytes], Iterator[Entry]]) -> Iterator[BlockInfo]:
        after = b""
        while True:
            with self._telling(), self._tier.catalog.read() as snapshot:
                entries = list(islice(entries_after(snapshot, after), _PAGE_OF_SCAN))
            if not entries:
                return
            yield from (entry.info() for entry in entries)
            after = entries[-1].address

    def usage(self) -> Usage:
        with self._telling():
            return usage(self._tier)

    def excess(self, capacity: int) -> int:
        with self._telling():
            return excess(self._tier, capacity)

    def touch_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
        addresses = self._addresses(namespace, keys)
        if self._readonly:
            return
        with self._telling():
            if self._tier.catalog.retention:  # what has expired is not made young
                with self._tier.catalog.read() as snapshot:
                    alive = snapshot.alive(addresses)
                addresses = [address for address, there in zip(addresses, alive, strict=True) if there]
            if self._tier.catalog.note(addresses, hits=0):
                self._tier.catalog.settle_in_passing()

    def scan_ages(self, namespace: Namespace) -> Iterator[BlockInfo]:
        self._tier.environment.ensure_open()
        if not self._readonly:
            with self._telling():
                self._tier.catalog.settle()  # so that what this process used is dated
        return self.scan(namespace)

    def remove_unused(self, namespace: Namespace, infos: Sequence[BlockInfo]) -> list[bool]:
        addresses = self._addresses(namespace, [info.key for info in infos])
        if self._readonly:
            return [False] * len(infos)
        return self._some_at_a_time(len(infos), lambda some: remove_as_read(self._tier, addresses[some], infos[some]))

    def drop_namespace(self, namespace: Namespace, *, only_if_empty: bool = False) -> int:
        dropped = super().drop_namespace(namespace, only_if_empty=only_if_empty)
        if not self._readonly:
            with self._telling(), self._tier.catalog.write() as change:
                change.drop_namespace(namespace.fingerprint)
        return dropped

    def repair(self) -> list[Repaired]:
        if self._readonly:
            return []
        with self._telling():
            return repair(self._tier)

    def unseen(self) -> list[Unseen]:
        with self._telling():
            return unseen(self._tier)

    def purge_unseen(
        self, *, names: Collection[str], refuse_s: float = REFUSE_S, overwrite: bool = True
    ) -> list[Unseen]:
        del overwrite  # what is free is overwritten by `finish_purge`
        gone = [] if self._readonly else [one for one in self.unseen() if one.namespace in names]
        until = refused_until(refuse_s)
        self._purged_small |= bool(gone)  # also where the rest of it fails
        for one in gone:
            with self._telling():
                addresses = addresses_in(self._tier, one)
            self._purge(addresses, until)
            with self._telling(), self._tier.catalog.write() as change:
                change.drop_namespace(bytes.fromhex(one.namespace))
        return gone

    def scrubbed(self) -> Scrubbed | None:
        return scrubbed(self._tier.directory)

    @classmethod
    def examine(cls, url: TierURL) -> Examination:
        return examine_environment(local_path(url), local_path(url))

    @classmethod
    def salvage(cls, url: TierURL) -> list[Repaired]:
        from kvstore_lmdb.salvage import salvage

        return salvage(url)

    def sealed_with(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bytes | None]:
        found: list[bytes | None] = []
        with self._telling():
            for address in self._addresses(namespace, keys):
                with self._tier.environment.read() as txn:
                    _, value = self._tier.value(txn, address)
                    found.append(None if value is None else key_id_in(value))
        return found

    @classmethod
    def diagnose(cls, url: TierURL, usage: Usage | None) -> Iterable[Finding]:
        from kvstore_lmdb.diagnosis import diagnose

        return diagnose(url, usage)

    def mark_many(self, namespace: Namespace, keys: Sequence[BlockKey], mark: Mark) -> list[MarkOutcome]:
        addresses = self._addresses(namespace, keys)
        if self._readonly:
            return [MarkOutcome.FAILED] * len(addresses)
        return self._rewritten(partial(self._tier.catalog.mark, addresses, mark))

    def unmark_many(self, namespace: Namespace, keys: Sequence[BlockKey], mark: Mark) -> list[bool]:
        addresses = self._addresses(namespace, keys)
        if self._readonly:
            return [False] * len(addresses)
        return self._rewritten(partial(self._tier.catalog.unmark, addresses, mark))

    def _some_at_a_time(self, count: int, act: Callable[[slice], list[bool]]) -> list[bool]:
        """What `act` says of `count` blocks, in transactions of bounded size."""
        with self._telling():
            return self._puts.some_at_a_time(count, act)

    def _rewritten(self, act: Callable[[], list[T]]) -> list[T]:
        """A change to entries that are there, which needs pages to be free."""
        with self._telling():
            return self._puts.rewritten(act)

    def close(self) -> None:
        with self._closing:
            if self._closed or self._pid != os.getpid():
                return
            self._closed = True
        if self._scrub is not None:
            self._scrub.stop()
        tier = self._tier
        try:
            with self._told(), tier.presence.closing() as last:
                with suppress(OSError, lmdb.Error):  # notes of use are no loss to fail for
                    tier.catalog.settle()
                tier.catalog.close(tier.presence, last=last)
        finally:
            tier.environment.close()
            self._puts.close()
            if self._sealer is not None:
                self._sealer.close()

    def ensure_open(self) -> None:
        self._tier.environment.ensure_open()

    def _addresses(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bytes]:
        addresses = addresses_of(namespace, keys)
        self._tier.environment.ensure_open()
        return addresses

    @contextmanager
    def _telling(self) -> Generator[None]:
        """`_told`, for what is done in the tier's directory."""
        with self._told():
            self._tier.presence.check()
            yield

    @contextmanager
    def _told(self) -> Generator[None]:
        """What LMDB or the device cannot do becomes `TierUnavailable`."""
        try:
            yield
        except (TierUnavailable, StoreClosedError):
            raise
        except (OSError, lmdb.Error) as error:
            raise TierUnavailable(f"{self.url} cannot tell: {error}") from error
