"""The verbs of the contract on top of hooks for one value each: what every such backend would write, once.

::

    contract ──► KeyValueStore: blocks checked, heads, checksums, damage, errors ──► hooks ──► a stranger's client
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from kvstore.abc import REFUSE_S, BlockStore
from kvstore.errors import (
    KVStoreError,
    NotAStoreError,
    StoreAccessError,
    StoreFullError,
    StoreNotFoundError,
    StoreOpenError,
    TierUnavailable,
)
from kvstore.graveyard import Graveyard
from kvstore.inuse import InUse
from kvstore.keyvalue.books import Books
from kvstore.keyvalue.heads import Heads
from kvstore.keyvalue.hooks import FULL, KeyValueHooks, Tombstones, if_there
from kvstore.keyvalue.purging import purge_names, purge_unseen, unseen
from kvstore.retention import TTL, TTL_FROM, Retention
from kvstore.sealing import SEALING, Unsealed, check_options
from kvstore.tombs import refused_until
from kvstore.types import GetOutcome, Leftover, PutOutcome, ResealOutcome, Residue, Unseen, Usage
from kvstore.url import READONLY
from kvstore.values import PURGED, Reading, name_of, stored_bytes, value_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator, Sequence
    from typing import TypeAlias

    from kvstore.namespace import Namespace
    from kvstore.sealing import Sealer
    from kvstore.types import BlockInfo, BlockKey, BlockRead, BlockWrite
    from kvstore.url import Option, TierURL

    Buffers: TypeAlias = Sequence[memoryview]

__all__ = ["KeyValueStore"]

HEADS_AT_ONCE = 256
"""How many heads a scan reads at a time."""


class KeyValueStore(KeyValueHooks, BlockStore):
    """A backend made of hooks: override `connect`, `write`, `remove`, `names`, and `read` or `read_into`.

    What every hook may rely on: it is called with checked arguments, between `connect` and `disconnect`, in the process
    that opened the store, and not to change anything when `readonly`. What it must allow: calls from several threads
    at once. What it may raise: `FileNotFoundError` for what is not there, `FileExistsError` for what is, any other
    `OSError` when the device fails, whatever `errors` lists when the client does; kvstore makes of it what the
    contract says. It neither keeps nor changes a buffer after it has returned.

    There is no capacity: an order of use that outlives the process, and holds for all that share the store, has to be
    kept where the blocks are, which names and values alone do not give. Let the device evict, where it can. A `ttl`
    there is, from when a block was stored: a get removes what has expired, and so does `kvstore gc`.

    Tombstones of purged blocks are values of their own, which every opener looks for each `tombstones_seen_s` seconds.
    """

    tombstones_seen_s: ClassVar[float] = 10.0
    """How often a store looks whether others have purged something: one `exists`, and `names` only if they have."""

    options: ClassVar[tuple[Option[object], ...]] = (READONLY, TTL, TTL_FROM, *SEALING)

    def __init__(self, url: TierURL) -> None:
        super().__init__(url)
        self.readonly = url.option(READONLY)
        self._retention = Retention.of(url)
        self._books, self._heads = Books(self), Heads(self, self._retention)
        self._sealer: Sealer | None = None
        self._use = InUse(url)
        self._failures: tuple[type[Exception], ...] = (OSError, *self.errors)
        check_options(url)
        try:
            self.connect()
        except KVStoreError:
            raise
        except self._failures as error:
            raise _opening_error(error)(f"{url} cannot be opened: {_said(error)}") from error
        try:
            self._books.agree_on_format()
            self._sealer = self._books.open_sealer()
        except BaseException as error:
            self.close()
            if isinstance(error, KVStoreError) or not isinstance(error, self._failures):
                raise
            raise _opening_error(error)(f"{url} cannot be opened: {_said(error)}") from error
        self._graves = Graveyard(Tombstones(self), self.tombstones_seen_s)
        self.capabilities = replace(
            self.capabilities,
            tombstones=not self.readonly,
            tombstones_seen_s=self.tombstones_seen_s,
            sealed=self._sealer is not None,
        )

    def namespaces(self) -> list[Namespace]:
        with self._using():
            return [found for found in self._books.manifests().values() if found is not None]

    def contains_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        with self._using():
            names = _checked_names(namespace, keys)
            there = list(self._heads.alive(namespace, keys))
            purged = self._graves.refused(names)
            return [found and name not in purged for found, name in zip(there, names, strict=True)]

    def put_many(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[PutOutcome]:
        with self._using():
            checked = [(block, namespace.check_write(block)) for block in blocks]
            if self.readonly or not blocks:
                return [PutOutcome.FAILED] * len(blocks)
            kept = self._books.keep_manifest(namespace)
            if not kept.present:
                return [kept] * len(blocks)
            self._heads.remove_expired(namespace, [block.key for block in blocks])
            names = [name_of(namespace, block.key) for block, _ in checked]
            keys = None if self._sealer is None else self._sealer.writing(block.tenant for block in blocks)
            keyless = {
                name for name, block in zip(names, blocks, strict=True) if keys is not None and block.tenant not in keys
            }
            purged = self._graves.refused(names)
            # One after another, so that a payload is still in the processor's cache when it is written.
            values = (
                (name, value_of(namespace, block, data, None if keys is None else keys[block.tenant]))
                for name, (block, data) in zip(names, checked, strict=True)
                if name not in purged and name not in keyless
            )
            outcomes = iter(self.write_many(values))
            return [
                PutOutcome.REFUSED if name in purged else PutOutcome.FAILED if name in keyless else next(outcomes)
                for name in names
            ]

    def get_many_into(self, namespace: Namespace, blocks: Sequence[BlockRead]) -> list[GetOutcome]:
        with self._using():
            checked = [(block.key, namespace.check_buffer(block.key, block.into, writable=True)) for block in blocks]
            purged = self._graves.known(name_of(namespace, key) for key, _ in checked)
            ring = None if self._sealer is None else self._sealer.reading()
            reads = [Reading(namespace, key, into, ring) for key, into in checked]
            counts = self.read_many_into((name_of(namespace, read.key), read.buffers) for read in reads)
            verdicts = [self._verdict(read, count) for read, count in zip(reads, counts, strict=True)]
            return [
                GetOutcome.MISS if purged and name_of(namespace, read.key) in purged else verdict
                for read, verdict in zip(reads, verdicts, strict=True)
            ]

    def of_later_version(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        with self._using():
            names = _checked_names(namespace, keys)
            ring = None if self._sealer is None else self._sealer.reading()
            buffers = (namespace.check_buffer(key, bytearray(namespace.block_bytes(key.group))) for key in keys)
            reads = [Reading(namespace, key, into, ring) for key, into in zip(keys, buffers, strict=True)]
            counts = self.read_many_into(zip(names, (read.buffers for read in reads), strict=True))
            return [
                count is not None and read.opened(count) is Unsealed.UNKNOWN and read.is_foreign()
                for read, count in zip(reads, counts, strict=True)
            ]

    def delete_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        with self._using():
            names = _checked_names(namespace, keys)
            return [False] * len(names) if self.readonly else list(self.remove_many(names))

    def purge_many(
        self, namespace: Namespace, keys: Sequence[BlockKey], *, refuse_s: float = REFUSE_S, overwrite: bool = True
    ) -> list[bool]:
        del overwrite  # what a device keeps of what it removed is its own affair
        until = refused_until(refuse_s)
        with self._using():
            names = _checked_names(namespace, keys)
            if self.readonly:
                return [False] * len(names)
            return purge_names(self, self._graves, names, until)

    def finish_purge(
        self, *, overwrite: bool = True, advance: Callable[[int], object] = lambda _: None
    ) -> list[Residue]:
        with self._using():
            return super().finish_purge(overwrite=overwrite, advance=advance)

    def sealed_with(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bytes | None]:
        with self._using():
            _checked_names(namespace, keys)
            return [None if facts is None else facts.key_id or None for facts in self._heads.read(namespace, keys)]

    def reseal_many(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[ResealOutcome]:
        with self._using():
            checked = [(block, namespace.check_write(block)) for block in blocks]
            if self.readonly or self._sealer is None or type(self).replace is KeyValueHooks.replace:
                return [ResealOutcome.KEPT] * len(blocks)
            data_keys = self._sealer.writing(block.tenant for block in blocks)
            heads = self._heads.read(namespace, [block.key for block in blocks])
            outcomes: list[ResealOutcome] = []
            for (block, data), facts in zip(checked, heads, strict=True):
                data_key = data_keys.get(block.tenant)
                if facts is None or data_key is None:
                    outcomes.append(ResealOutcome.KEPT if facts else ResealOutcome.GONE)
                    continue
                parts = value_of(namespace, block, data, data_key, created=facts.created)
                outcomes.append(self._replaced(name_of(namespace, block.key), parts))
            return outcomes

    def _replaced(self, name: str, parts: Buffers) -> ResealOutcome:
        try:
            return ResealOutcome.RESEALED if if_there(self.replace, name, parts) else ResealOutcome.GONE
        except OSError as error:
            if error.errno not in FULL:
                raise
            return ResealOutcome.KEPT

    def leftovers(self, *, remove: bool = False) -> list[Leftover]:
        """Tombstones that have ended."""
        with self._using():
            ended = self._graves.collect() if remove and not self.readonly else self._graves.ended()
        return [Leftover(PURGED + name, 0, 0.0) for name in ended]

    def unseen(self) -> list[Unseen]:
        """Asks for every name."""
        with self._using():
            return unseen(self, self._books)

    def purge_unseen(
        self, *, names: Collection[str], refuse_s: float = REFUSE_S, overwrite: bool = True
    ) -> list[Unseen]:
        del overwrite
        until = refused_until(refuse_s)
        with self._using():
            gone = [] if self.readonly else [one for one in self.unseen() if one.namespace in names]
            purge_unseen(self, self._books, self._graves, gone, until)
        return gone

    def scan(self, namespace: Namespace) -> Iterator[BlockInfo]:
        with self._using():
            keys = self._heads.keys(namespace)
        return self._infos(namespace, keys)

    def drop_namespace(self, namespace: Namespace, *, only_if_empty: bool = False) -> int:
        dropped = super().drop_namespace(namespace, only_if_empty=only_if_empty)
        with self._using():
            if not self.readonly and not (only_if_empty and self._heads.keys(namespace)):
                self._books.drop_manifest(namespace.name)
        return dropped

    def usage(self) -> Usage:
        """From names alone, in bytes of their values; override it where the device knows better."""
        with self._using():
            sizes = [self._stored_bytes(space, key) for space in self.namespaces() for key in self._heads.keys(space)]
        return Usage(len(sizes), sum(sizes))

    def close(self) -> None:
        if self._use.end():
            with suppress(*self._failures):  # what was put is there, and nothing is left to be done about it
                self.disconnect()
            if self._sealer is not None:
                self._sealer.close()

    def ensure_open(self) -> None:
        with self._use:
            pass

    @contextmanager
    def _using(self) -> Generator[None]:
        with self._use:
            try:
                yield
            except KVStoreError:
                raise
            except self._failures as error:
                raise TierUnavailable(f"{self.url} cannot tell: {error}") from error

    def _verdict(self, read: Reading, count: int | None) -> GetOutcome:
        if count is None:
            return GetOutcome.MISS
        found = read.opened(count)
        if found is Unsealed.UNKNOWN:
            return GetOutcome.MISS
        if found is Unsealed.GOOD and not (self._retention and self._heads.has_expired(read.facts())):
            return GetOutcome.HIT
        self.discard(name_of(read.namespace, read.key))
        return GetOutcome.CORRUPT if found is Unsealed.DAMAGED else GetOutcome.MISS

    def _stored_bytes(self, namespace: Namespace, key: BlockKey) -> int:
        return stored_bytes(namespace, key, sealed=self._sealer is not None)

    def _infos(self, namespace: Namespace, keys: Sequence[BlockKey]) -> Iterator[BlockInfo]:
        for start in range(0, len(keys), HEADS_AT_ONCE):
            some = keys[start : start + HEADS_AT_ONCE]
            with self._using():
                heads = self._heads.read(namespace, some)
            for key, facts in zip(some, heads, strict=True):
                if facts is not None:  # a damaged one, too: whoever verifies a store reads what a scan lists
                    yield facts.info(key, self._stored_bytes(namespace, key))


def _checked_names(namespace: Namespace, keys: Sequence[BlockKey]) -> list[str]:
    for key in keys:
        namespace.check_key(key)
    return [name_of(namespace, key) for key in keys]


def _said(error: Exception) -> str:
    """What a hook raised, in words also where it gave nothing but a path."""
    if isinstance(error, OSError) and error.strerror is None:
        why = next((words for kind, words in _WHY.items() if isinstance(error, kind)), "")
        return f"{error} {why}" if why else str(error)
    return str(error)


_WHY: dict[type[OSError], str] = {
    FileNotFoundError: "does not exist",
    NotADirectoryError: "is something other than such a tier",
    FileExistsError: "is something other than such a tier",
    PermissionError: "may not be used by this user",
}


def _opening_error(error: Exception) -> type[StoreOpenError]:
    """What a failure to connect is called."""
    if isinstance(error, FileNotFoundError):
        return StoreNotFoundError
    if isinstance(error, (FileExistsError, NotADirectoryError, IsADirectoryError)):
        return NotAStoreError
    return StoreFullError if isinstance(error, OSError) and error.errno in FULL else StoreAccessError
