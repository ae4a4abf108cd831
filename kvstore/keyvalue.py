"""Any store of names and values as a backend: a few hooks for one value each, and this class is the rest.

A stranger's key-value store (a folder, SQLite, Redis, RocksDB) is subclassed from `KeyValueStore` in about 40 lines;
`backends/README.md` has one in full. The built-in backends are not: what they do for speed and capacity (direct I/O,
one transaction for a batch, an order of use over processes) needs the whole contract, `kvstore.abc`.

The hooks are `kvstore.hooks`; what a name and a value look like is `kvstore.values`.
"""

from __future__ import annotations

import errno
import json
import re
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

from kvstore.abc import REFUSE_S, BlockStore
from kvstore.errors import (
    KVStoreError,
    NotAStoreError,
    StoreAccessError,
    StoreFullError,
    StoreNotFoundError,
    StoreOpenError,
    StoreSealedError,
    TierUnavailable,
)
from kvstore.graveyard import Graveyard
from kvstore.hooks import FULL, KeyValueHooks, Tombstones, if_there
from kvstore.inuse import InUse
from kvstore.namespace import Namespace
from kvstore.retention import TTL, TTL_FROM, Retention
from kvstore.sealing import PLAIN, SEALING, Unsealed, check_options, open_sealer
from kvstore.tombs import refused_until
from kvstore.types import GetOutcome, Leftover, PutOutcome, ResealOutcome, Residue, Unseen, Usage
from kvstore.url import READONLY
from kvstore.values import (
    FORMAT,
    HEAD_BYTES,
    MANIFEST,
    PURGED,
    SEALED,
    Facts,
    Reading,
    key_of,
    name_of,
    stored_bytes,
    value_of,
)
from kvstore.versions import FORMAT_VERSION, check_version

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator, Sequence
    from typing import TypeAlias

    from kvstore.sealing import Sealer
    from kvstore.types import BlockInfo, BlockKey, BlockRead, BlockWrite
    from kvstore.url import Option, TierURL

    Buffers: TypeAlias = Sequence[memoryview]

__all__ = ["KeyValueStore"]

T = TypeVar("T")

_BLOCK = re.compile("([0-9a-f]{32})-[0-9]+-[0-9a-f]+")

_HEADS_AT_ONCE = 256
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
        self._sealer: Sealer | None = None
        self._use = InUse(url)
        self._failures: tuple[type[Exception], ...] = (OSError, *self.errors)
        check_options(url)
        try:
            self.connect()
        except KVStoreError:
            raise
        except self._failures as error:
            raise _opening_error(error)(f"{url} cannot be opened: {error}") from error
        try:
            self._agree_on_format()
            self._sealer = self._open_sealer()
        except BaseException as error:
            self.close()
            if isinstance(error, KVStoreError) or not isinstance(error, self._failures):
                raise
            raise _opening_error(error)(f"{url} cannot be opened: {error}") from error
        self._graves = Graveyard(Tombstones(self), self.tombstones_seen_s)
        self.capabilities = replace(
            self.capabilities,
            tombstones=not self.readonly,
            tombstones_seen_s=self.tombstones_seen_s,
            sealed=self._sealer is not None,
        )

    def namespaces(self) -> list[Namespace]:
        with self._using():
            return [found for name in self.all_names(MANIFEST) if (found := self._manifest(name)) is not None]

    def contains_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        with self._using():
            names = _checked_names(namespace, keys)
            if not self._retention:
                there = list(self.exist_many(names))
            else:
                there = [facts is not None and not self._expired(facts) for facts in self._heads(namespace, keys)]
            purged = self._graves.refused(names)
            return [found and name not in purged for found, name in zip(there, names, strict=True)]

    def put_many(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[PutOutcome]:
        with self._using():
            checked = [(block, namespace.check_write(block)) for block in blocks]
            if self.readonly or not blocks:
                return [PutOutcome.FAILED] * len(blocks)
            kept = self._keep_manifest(namespace)
            if not kept.present:
                return [kept] * len(blocks)
            if self._retention:
                self._remove_expired(namespace, [block.key for block in blocks])
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
            return self._purge_names(names, until)

    def _purge_names(self, names: Sequence[str], until: int) -> list[bool]:
        removed = [False] * len(names)
        if until and not self._buried(names, until):
            removed = list(self.remove_many(names))  # where there was no room for tombstones, there is now
            self._graves.bury(list(dict.fromkeys(names)), until)
        return [one or other for one, other in zip(removed, self.remove_many(names), strict=True)]

    def _buried(self, names: Sequence[str], until: int) -> bool:
        """Bury blocks; False where there is no room for that."""
        try:
            self._graves.bury(list(dict.fromkeys(names)), until)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return False
        return True

    def finish_purge(
        self, *, overwrite: bool = True, advance: Callable[[int], object] = lambda _: None
    ) -> list[Residue]:
        with self._using():
            return super().finish_purge(overwrite=overwrite, advance=advance)

    def sealed_with(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bytes | None]:
        with self._using():
            _checked_names(namespace, keys)
            return [None if facts is None else facts.key_id or None for facts in self._heads(namespace, keys)]

    def reseal_many(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[ResealOutcome]:
        with self._using():
            checked = [(block, namespace.check_write(block)) for block in blocks]
            if self.readonly or self._sealer is None or type(self).replace is KeyValueHooks.replace:
                return [ResealOutcome.KEPT] * len(blocks)
            data_keys = self._sealer.writing(block.tenant for block in blocks)
            heads = self._heads(namespace, [block.key for block in blocks])
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
        """Blocks whose manifest is gone, as a device that evicts may take it, or damaged. Asks for every name."""
        with self._using():
            counts = Counter(names[1] for name in self.all_names("") if (names := _BLOCK.fullmatch(name)))
            manifests = {name.removeprefix(MANIFEST) for name in self.all_names(MANIFEST)}
            bad = {name for name in manifests if self._manifest(MANIFEST + name) is None}
        return [
            Unseen(
                name,
                f"namespace {name} has {'a damaged' if name in bad else 'no'} manifest: what is in it is found again"
                " when an engine stores into it; kvstore purge --all removes it",
                counts[name],
            )
            for name in sorted(bad | (counts.keys() - manifests))
        ]

    def purge_unseen(
        self, *, names: Collection[str], refuse_s: float = REFUSE_S, overwrite: bool = True
    ) -> list[Unseen]:
        del overwrite
        until = refused_until(refuse_s)
        gone = [] if self.readonly else [one for one in self.unseen() if one.namespace in names]
        with self._using():
            for one in gone:
                blocks = [name for name in self.all_names(f"{one.namespace}-") if _BLOCK.fullmatch(name)]
                self._purge_names(blocks, until)
                list(self.remove_many([MANIFEST + one.namespace]))
        return gone

    def scan(self, namespace: Namespace) -> Iterator[BlockInfo]:
        with self._using():
            keys = self._keys(namespace)
        return self._infos(namespace, keys)

    def drop_namespace(self, namespace: Namespace, *, only_if_empty: bool = False) -> int:
        dropped = super().drop_namespace(namespace, only_if_empty=only_if_empty)
        with self._using():
            if not self.readonly and not (only_if_empty and self._keys(namespace)):
                list(self.remove_many([MANIFEST + namespace.name]))
        return dropped

    def usage(self) -> Usage:
        """From names alone, in bytes of their values; override it where the device knows better."""
        with self._using():
            sizes = [self._stored_bytes(space, key) for space in self.namespaces() for key in self._keys(space)]
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
        if found is Unsealed.GOOD:
            if not self._retention or not self._expired(read.facts()):
                return GetOutcome.HIT
            self._discard(name_of(read.namespace, read.key))
            return GetOutcome.MISS
        self._discard(name_of(read.namespace, read.key))
        return GetOutcome.CORRUPT if found is Unsealed.DAMAGED else GetOutcome.MISS

    def _stored_bytes(self, namespace: Namespace, key: BlockKey) -> int:
        return stored_bytes(namespace, key, sealed=self._sealer is not None)

    def _expired(self, facts: Facts) -> bool:
        """Whether the block has; it is not known when it was last used."""
        return self._retention.has_expired(facts.created, facts.created, self._retention.cutoff())

    def _heads(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[Facts | None]:
        """What the head of each block says; None where there is no block."""
        heads = [bytearray(HEAD_BYTES) for _ in keys]
        reads = ((name_of(namespace, key), [memoryview(head)]) for key, head in zip(keys, heads, strict=True))
        counts = self.read_many_into(reads)
        return [
            None if count is None else Facts.unpacked(namespace, key, bytes(head)) or Facts.unknown()
            for key, head, count in zip(keys, heads, counts, strict=True)
        ]

    def _remove_expired(self, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
        heads = zip(keys, self._heads(namespace, keys), strict=True)
        expired = [name_of(namespace, key) for key, facts in heads if facts is not None and self._expired(facts)]
        if expired:
            list(self.remove_many(expired))

    def _discard(self, name: str) -> None:
        """Remove what is damaged; where that fails it is found damaged again."""
        if not self.readonly:
            with suppress(*self._failures):
                self.remove(name)

    def _keys(self, namespace: Namespace) -> list[BlockKey]:
        names = self.all_names(f"{namespace.name}-")
        return [key for name in names if (key := key_of(namespace, name)) is not None]

    def _infos(self, namespace: Namespace, keys: Sequence[BlockKey]) -> Iterator[BlockInfo]:
        for start in range(0, len(keys), _HEADS_AT_ONCE):
            some = [(key, bytearray(HEAD_BYTES)) for key in keys[start : start + _HEADS_AT_ONCE]]
            with self._using():
                reads = ((name_of(namespace, key), [memoryview(head)]) for key, head in some)
                counts = list(self.read_many_into(reads))
            for (key, head), count in zip(some, counts, strict=True):
                if count is not None:
                    # A damaged one is listed, too: whoever verifies a store reads what a scan lists.
                    facts = Facts.unpacked(namespace, key, bytes(head)) or Facts.unknown()
                    yield facts.info(key, self._stored_bytes(namespace, key))

    def _manifest(self, name: str) -> Namespace | None:
        """The namespace that the manifest of this name describes; None where there is none, or a damaged one."""
        try:
            found = Namespace.from_json(self.read_value(name) or b"")
        except (ValueError, LookupError):  # a hook may say in that way that there is no such value
            return None
        return found if name == MANIFEST + found.name else None

    def _agree_on_format(self) -> None:
        """That the values are of our version is said by one of its own, which is looked at before any other."""
        said = if_there(self.read_value, FORMAT)
        if said is None:
            if not self.readonly:
                outcome = self.write_checked(FORMAT, [memoryview(str(FORMAT_VERSION).encode())])
                if not outcome.present and outcome is not PutOutcome.FULL:  # a full one is read, purged, and evicts
                    raise OSError(errno.EROFS, f"the store refuses it: {outcome.value}", FORMAT)
            return
        found = said.decode("ascii", errors="replace")
        check_version(
            int(found) if found.isdecimal() else found,
            f"{self.url}: {FORMAT!r} says that it",
            "remove all its values, or name another place; it is a cache, and is filled anew",
        )

    def _open_sealer(self) -> Sealer | None:
        """What seals the blocks. That they are sealed is said by a value of its own, which the first opening stores."""
        said = (if_there(self.read_value, SEALED) or b"").decode("ascii", errors="replace")
        found = {said} if said else set[str]()
        if not found and check_options(self.url) is not None and self.all_names(MANIFEST):
            found = {PLAIN}
        sealer = open_sealer(self.url, found)
        if sealer is not None and not found and not self.readonly:
            self._sealer = sealer  # so that it is closed, should this fail
            self.write_value(SEALED, sealer.id.encode())
            if self.read_value(SEALED) != sealer.id.encode():
                raise StoreSealedError(f"{self.url} was just encrypted with another keyring: use the same everywhere")
        return sealer

    def _keep_manifest(self, namespace: Namespace) -> PutOutcome:
        """See to it that the manifest is there. Looked for each time: a device that evicts may take it, too."""
        name = MANIFEST + namespace.name
        if self._manifest(name) is not None:
            return PutOutcome.EXISTS
        parts = [memoryview(json.dumps(namespace.to_manifest()).encode())]
        outcome = self.write_checked(name, parts)
        if outcome is PutOutcome.EXISTS and self._manifest(name) is None:
            self._discard(name)
            outcome = self.write_checked(name, parts)
        return outcome


def _checked_names(namespace: Namespace, keys: Sequence[BlockKey]) -> list[str]:
    for key in keys:
        namespace.check_key(key)
    return [name_of(namespace, key) for key in keys]


def _opening_error(error: Exception) -> type[StoreOpenError]:
    """What a failure to connect is called."""
    if isinstance(error, FileNotFoundError):
        return StoreNotFoundError
    if isinstance(error, (FileExistsError, NotADirectoryError, IsADirectoryError)):
        return NotAStoreError
    return StoreFullError if isinstance(error, OSError) and error.errno in FULL else StoreAccessError
