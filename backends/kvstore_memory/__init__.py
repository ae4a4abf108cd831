"""`memory://name`: blocks in this process's memory. For tests, and the reference for what a backend must do.

Two stores with the same name share their blocks; they are gone when the last of them is closed.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakValueDictionary

from kvstore.abc import REFUSE_S, BlockStore, Capabilities
from kvstore.errors import InvalidOptionError, StoreClosedError, StoreNotFoundError
from kvstore.integrity import copied, crc32c
from kvstore.marks import MOST_MARKS, PINNABLE, MarkOutcome, with_mark, without_mark
from kvstore.retention import TTL, TTL_FROM, Allowance, Retention, now_ns
from kvstore.tombs import Remembered, refused_until
from kvstore.types import BlockInfo, BlockKey, BlockRead, BlockWrite, GetOutcome, PutOutcome, Residue, Usage
from kvstore.url import CAPACITY, READONLY, Capacity, Option, TierURL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

    from kvstore.marks import Mark
    from kvstore.namespace import Namespace

__all__ = ["MemoryStore"]


@dataclass(slots=True)
class _Entry:
    data: bytes
    crc32c: int
    info: BlockInfo

    @property
    def pinned_bytes(self) -> int:
        return len(self.data) if self.info.pinned else 0

    def used(self, *, hits: int = 0) -> None:
        """It was used now."""
        self.info = replace(self.info, hits=self.info.hits + hits, last_used=now_ns() / 1e9)

    def has_expired(self, retention: Retention, cutoff: int) -> bool:
        """By the rule of one opener."""
        created, last_used = int(self.info.created * 1e9), int(self.info.last_used * 1e9)
        return retention.has_expired(created, last_used, cutoff) and not self.info.pinned


@dataclass(slots=True, weakref_slot=True)
class _Shelf:
    """The blocks of one name: entries in order of use, oldest first."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    namespaces: dict[bytes, Namespace] = field(default_factory=dict["bytes", "Namespace"])
    entries: OrderedDict[tuple[bytes, BlockKey], _Entry] = field(
        default_factory=OrderedDict["tuple[bytes, BlockKey]", _Entry]
    )
    by_birth: dict[tuple[bytes, BlockKey], None] = field(default_factory=dict["tuple[bytes, BlockKey]", None])
    """The addresses in the order in which the blocks were stored."""
    buried: Remembered[tuple[bytes, BlockKey]] = field(default_factory=Remembered["tuple[bytes, BlockKey]"])
    used: int = 0
    pinned: int = 0

    def remove(self, address: tuple[bytes, BlockKey]) -> bool:
        """Take a block away; whether it was there. Under the lock."""
        entry = self.entries.pop(address, None)
        if entry is not None:
            del self.by_birth[address]
            self.used -= len(entry.data)
            self.pinned -= entry.pinned_bytes
        return entry is not None

    def oldest(self) -> tuple[bytes, BlockKey]:
        """The least recently used block that may go: there is one whenever more is used than is pinned."""
        return next(address for address, entry in self.entries.items() if not entry.info.pinned)

    def take_back(self, retention: Retention, most: int) -> None:
        """Remove what has expired, at most so many blocks, the oldest first."""
        cutoff = retention.cutoff()
        order = self.by_birth if retention.from_stored else self.entries
        unpinned = (address for address in order if not self.entries[address].info.pinned)
        expired = takewhile(lambda address: self.entries[address].has_expired(retention, cutoff), unpinned)
        for address in list(islice(expired, most)):
            self.remove(address)

    def set_marks(self, entry: _Entry, marks: tuple[Mark, ...]) -> None:
        """Put `marks` in place of those that it has."""
        self.pinned -= entry.pinned_bytes
        entry.info = replace(entry.info, marks=marks)
        self.pinned += entry.pinned_bytes


_shelves: WeakValueDictionary[str, _Shelf] = WeakValueDictionary()
_shelves_lock = threading.Lock()


class MemoryStore(BlockStore):
    """Blocks in a dictionary, evicted in order of use under `capacity`."""

    options: ClassVar[tuple[Option[object], ...]] = (CAPACITY, TTL, TTL_FROM, READONLY)

    def __init__(self, url: TierURL) -> None:
        super().__init__(url)
        self.capabilities = Capabilities(
            persistent=False, shared=False, can_hang=False, io="memory", marks=True, uses=True, tombstones=True
        )
        self._pid = os.getpid()
        self._readonly = url.option(READONLY)
        capacity: Capacity | None = url.option(CAPACITY)
        if capacity is not None and capacity.bytes is None:
            raise InvalidOptionError(f"{url}: there is no disk to take a share of: give the capacity in bytes")
        self._capacity = capacity.bytes if capacity else None
        self._retention, self._allowance = Retention.of(url), Allowance()
        with _shelves_lock:
            if self._readonly and url.location not in _shelves:
                raise StoreNotFoundError(
                    f"{url}: nothing of that name is open in this process, and it was to be read only"
                )
            self._shelf: _Shelf | None = _shelves.setdefault(url.location, _Shelf())

    def namespaces(self) -> list[Namespace]:
        shelf = self._open()
        with shelf.lock:
            return list(shelf.namespaces.values())

    def contains_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        shelf = self._open()
        for key in keys:
            namespace.check_key(key)
        with shelf.lock:
            cutoff = self._retention.cutoff()
            entries = [shelf.entries.get((namespace.fingerprint, key)) for key in keys]
            return [entry is not None and not entry.has_expired(self._retention, cutoff) for entry in entries]

    def put_many(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[PutOutcome]:
        return self._put_all(namespace, blocks, evict=True)

    def put_if_room(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[PutOutcome]:
        return self._put_all(namespace, blocks, evict=False)

    def _put_all(self, namespace: Namespace, blocks: Sequence[BlockWrite], *, evict: bool) -> list[PutOutcome]:
        shelf = self._open()
        checked = [(block, namespace.check_write(block)) for block in blocks]
        if self._readonly:
            return [PutOutcome.FAILED] * len(blocks)
        with shelf.lock:
            shelf.namespaces.setdefault(namespace.fingerprint, namespace)
            if self._retention:
                shelf.take_back(self._retention, self._allowance.take(len(blocks)))
            return [
                self._put(shelf, (namespace.fingerprint, block.key), block, data.tobytes(), evict=evict)
                for block, data in checked
            ]

    def _put(
        self, shelf: _Shelf, address: tuple[bytes, BlockKey], block: BlockWrite, data: bytes, *, evict: bool
    ) -> PutOutcome:
        there = shelf.entries.get(address)
        if there is None and address in shelf.buried:
            return PutOutcome.REFUSED
        if there is not None and there.has_expired(self._retention, self._retention.cutoff()):
            shelf.remove(address)
        elif there is not None:
            shelf.entries.move_to_end(address)
            there.used()
            return PutOutcome.EXISTS
        if self._capacity is not None:
            if (shelf.pinned if evict else shelf.used) + len(data) > self._capacity:
                return PutOutcome.FULL
            while shelf.used + len(data) > self._capacity:
                shelf.remove(shelf.oldest())
        now = now_ns() / 1e9
        info = BlockInfo(block.key, len(data), now, now, 0, block.position, block.parent)
        shelf.entries[address] = _Entry(data, crc32c(data), info)
        shelf.by_birth[address] = None
        shelf.used += len(data)
        return PutOutcome.STORED

    def get_many_into(self, namespace: Namespace, blocks: Sequence[BlockRead]) -> list[GetOutcome]:
        shelf = self._open()
        checked = [(block.key, namespace.check_buffer(block.key, block.into, writable=True)) for block in blocks]
        found = [self._get(shelf, (namespace.fingerprint, key), into) for key, into in reversed(checked)]
        return found[::-1]

    def _get(self, shelf: _Shelf, address: tuple[bytes, BlockKey], into: np.ndarray) -> GetOutcome:
        with shelf.lock:
            entry = shelf.entries.get(address)
            if entry is None or entry.has_expired(self._retention, self._retention.cutoff()):
                return GetOutcome.MISS
            if len(entry.data) != into.nbytes or copied(into, entry.data) != entry.crc32c:
                if not self._readonly:
                    shelf.remove(address)
                return GetOutcome.CORRUPT
            if not self._readonly:  # who only looks makes nothing younger
                shelf.entries.move_to_end(address)
                entry.used(hits=1)
        return GetOutcome.HIT

    def delete_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        shelf = self._open()
        for key in keys:
            namespace.check_key(key)
        with shelf.lock:
            return [not self._readonly and shelf.remove((namespace.fingerprint, key)) for key in keys]

    def purge_many(
        self, namespace: Namespace, keys: Sequence[BlockKey], *, refuse_s: float = REFUSE_S, overwrite: bool = True
    ) -> list[bool]:
        del overwrite  # `bytes` cannot be
        shelf = self._open()
        for key in keys:
            namespace.check_key(key)
        if self._readonly:
            return [False] * len(keys)
        with shelf.lock:
            shelf.buried.add(((namespace.fingerprint, key) for key in keys), refused_until(refuse_s))
            return [shelf.remove((namespace.fingerprint, key)) for key in keys]

    def finish_purge(
        self, *, overwrite: bool = True, advance: Callable[[int], object] = lambda _: None
    ) -> list[Residue]:
        del overwrite, advance
        self._open()
        return [Residue("memory of this process, until something else is written there", None, "end the process")]

    def scan(self, namespace: Namespace) -> Iterator[BlockInfo]:
        shelf = self._open()
        with shelf.lock:
            found = [entry.info for (space, _), entry in shelf.entries.items() if space == namespace.fingerprint]
        return iter(found)

    def usage(self) -> Usage:
        shelf = self._open()
        return Usage(len(shelf.entries), shelf.used, capacity=self._capacity, pinned=shelf.pinned)

    def touch_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
        shelf = self._open()
        for key in keys:
            namespace.check_key(key)
        with shelf.lock:
            for key in reversed(keys):  # the first is to be the youngest
                entry = shelf.entries.get((namespace.fingerprint, key))
                if entry is not None and not entry.has_expired(self._retention, self._retention.cutoff()):
                    shelf.entries.move_to_end((namespace.fingerprint, key))
                    entry.used()

    def remove_unused(self, namespace: Namespace, infos: Sequence[BlockInfo]) -> list[bool]:
        shelf = self._open()
        for info in infos:
            namespace.check_key(info.key)
        with shelf.lock:
            found = [((namespace.fingerprint, info.key), info) for info in infos]
            return [
                not self._readonly
                and (entry := shelf.entries.get(address)) is not None
                and (entry.info.last_used, entry.info.pinned) == (info.last_used, False)
                and shelf.remove(address)
                for address, info in found
            ]

    def drop_namespace(self, namespace: Namespace, *, only_if_empty: bool = False) -> int:
        shelf = self._open()
        if self._readonly:
            return 0
        with shelf.lock:
            gone = [address for address in shelf.entries if address[0] == namespace.fingerprint]
            if gone and only_if_empty:
                return 0
            for address in gone:
                shelf.remove(address)
            shelf.namespaces.pop(namespace.fingerprint, None)
        return len(gone)

    def mark_many(self, namespace: Namespace, keys: Sequence[BlockKey], mark: Mark) -> list[MarkOutcome]:
        shelf = self._open()
        for key in keys:
            namespace.check_key(key)
        if self._readonly:
            return [MarkOutcome.FAILED] * len(keys)
        with shelf.lock:
            return [self._mark(shelf, shelf.entries.get((namespace.fingerprint, key)), mark) for key in keys]

    def _mark(self, shelf: _Shelf, entry: _Entry | None, mark: Mark) -> MarkOutcome:
        if entry is None:
            return MarkOutcome.MISSING
        pins = mark.pinned and not entry.info.pinned
        refused = pins and self._capacity is not None and shelf.pinned + len(entry.data) > self._capacity // PINNABLE
        marks = with_mark(entry.info.marks, replace(mark, pinned=False) if refused else mark)
        if len(marks) > MOST_MARKS:
            return MarkOutcome.FAILED
        shelf.set_marks(entry, marks)
        return MarkOutcome.UNPINNED if refused else MarkOutcome.MARKED

    def unmark_many(self, namespace: Namespace, keys: Sequence[BlockKey], mark: Mark) -> list[bool]:
        shelf = self._open()
        for key in keys:
            namespace.check_key(key)
        if self._readonly:
            return [False] * len(keys)
        with shelf.lock:
            return [self._unmark(shelf, shelf.entries.get((namespace.fingerprint, key)), mark) for key in keys]

    @staticmethod
    def _unmark(shelf: _Shelf, entry: _Entry | None, mark: Mark) -> bool:
        if entry is None:
            return False
        before = entry.info.marks
        shelf.set_marks(entry, without_mark(before, mark))
        return entry.info.marks != before

    def close(self) -> None:
        self._shelf = None

    def ensure_open(self) -> None:
        self._open()

    def _open(self) -> _Shelf:
        if self._shelf is None or self._pid != os.getpid():
            raise StoreClosedError(f"{self.url} was closed, or opened by another process: open it again")
        return self._shelf
