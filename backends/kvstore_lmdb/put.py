"""A put into LMDB: what is there already, room for the rest, and one transaction for each chunk.

    put_many ──chunks──► Puts.put ──► evict, in a transaction before ──► the blocks and what the catalogue knows of them

No page may be free although there is room under the cap: LMDB uses pages again two commits after they were freed, and
not while a reader is older than that. So a put tries several times (`Puts.patiently`), and makes such commits itself.
"""

from __future__ import annotations

import errno
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import lmdb
import numpy as np

from kvstore.catalog import Entry, address_of
from kvstore.errors import TierUnavailable
from kvstore.growth import why_no_page
from kvstore.lmdb_free import ripen
from kvstore.sealing import SEAL_BYTES
from kvstore.types import NO_POSITION, BlockWrite, PutOutcome, ResealOutcome
from kvstore_lmdb.entry import HEADER_BYTES, Bytes, fill, place_of, stored_bytes
from kvstore_lmdb.opening import BLOCKS, Tier, evict, tree_bytes
from kvstore_lmdb.removal import TOGETHER
from kvstore_lmdb.seat import STORES, Seat

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from typing_extensions import Buffer

    from kvstore.catalog import Change, Totals
    from kvstore.namespace import Namespace
    from kvstore.sealing import DataKey, Sealer

__all__ = ["NoPageError", "Numbered", "Puts", "Staged", "chunks", "stage", "with_keys"]

T = TypeVar("T")

_ATTEMPTS = 7
"""How often a put makes room and tries, before it says FULL; 1, 2, 4, … ms lie between, for readers to end in."""

_SPARE = 8
"""Staging buffers kept for the next put, a chunk each."""

_OLDER_NS = 1_000_000_000
"""By how much a block's position makes it older than the block that begins its prefix, at most: a nanosecond each, and
a position may be any number."""

Numbered: TypeAlias = "Callable[[int], Sequence[Entry]]"
"""What the catalogue is to know of some blocks, numbered from a generation on."""


@dataclass(frozen=True, slots=True)
class Staged:
    """One block of a put; `place` is its index there, `size` what it will occupy."""

    place: int
    block: BlockWrite
    payload: Bytes
    address: bytes
    size: int
    data_key: DataKey | None = None
    """What it is to be sealed with."""

    @property
    def value_bytes(self) -> int:
        """How long its value is."""
        return HEADER_BYTES + self.payload.nbytes + (0 if self.data_key is None else SEAL_BYTES)


def stage(namespace: Namespace, blocks: Sequence[BlockWrite], *, sealed: bool) -> list[Staged]:
    """The blocks of a put, checked. Raises `InvalidBlockError`."""
    staged: list[Staged] = []
    for place, block in enumerate(blocks):
        payload = namespace.check_write(block)
        size = stored_bytes(payload.nbytes + (SEAL_BYTES if sealed else 0))
        staged.append(Staged(place, block, payload, address_of(namespace, block.key), size))
    return staged


def with_keys(sealer: Sealer, blocks: Sequence[Staged]) -> list[Staged]:
    """The blocks with what each is sealed with; those for whose tenant there is no key cannot be stored."""
    keys = sealer.writing(staged.block.tenant for staged in blocks)
    return [replace(staged, data_key=keys[staged.block.tenant]) for staged in blocks if staged.block.tenant in keys]


class NoPageError(TierUnavailable):
    """There is no page to write to, for as long as one waits for it."""


class Puts:
    """The puts of one open tier. Thread-safe. Every call raises OSError or `lmdb.Error` where the device cannot."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._blocks = tier.environment.databases[BLOCKS]
        self._spare: list[Bytes] = []

    def close(self) -> None:
        """Let go of memory."""
        self._spare.clear()

    def put(self, namespace: Namespace, blocks: list[Staged], now: int, *, evict: bool = True) -> list[PutOutcome]:
        """Put one chunk, whose blocks have been checked; one outcome each, in order. Not to `evict`: only what finds
        room as it is.
        """
        with Seat.of(STORES, max(block.payload.nbytes for block in blocks)) as seat:
            return self._put(namespace, blocks, now, seat, makes_room=evict)

    def _put(
        self, namespace: Namespace, blocks: list[Staged], now: int, seat: Seat, *, makes_room: bool
    ) -> list[PutOutcome]:
        catalog = self._tier.catalog
        try:
            with catalog.read() as snapshot:
                there = snapshot.contains([block.address for block in blocks])
                buried = snapshot.tombs.buried([block.address for block in blocks])
                totals = snapshot.totals()
            used = (block.address for block, known in zip(blocks, there, strict=True) if known)
            is_settling_due = catalog.note(used, hits=0)
            settled = [
                PutOutcome.EXISTS if known else PutOutcome.REFUSED if block.address in buried else None
                for block, known in zip(blocks, there, strict=True)
            ]
            fresh = [block for block, outcome in zip(blocks, settled, strict=True) if outcome is None]
            stored = iter(self._put_fresh(namespace, fresh, totals, now, seat, makes_room=makes_room) if fresh else ())
            if is_settling_due:
                seat.close()
                catalog.settle_in_passing()
        except OSError as error:
            failed = PutOutcome.FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else PutOutcome.FAILED
            return [failed] * len(blocks)
        return [outcome or next(stored) for outcome in settled]

    def _put_fresh(
        self, namespace: Namespace, blocks: list[Staged], totals: Totals, now: int, seat: Seat, *, makes_room: bool
    ) -> list[PutOutcome]:
        need = sum(block.size for block in blocks)
        if not self._can_fit(need, totals, makes_room=makes_room):
            if len(blocks) == 1:
                return [PutOutcome.FULL]
            middle = len(blocks) // 2
            first = self._put_fresh(namespace, blocks[:middle], totals, now, seat, makes_room=makes_room)
            with self._tier.catalog.read() as snapshot:
                totals = snapshot.totals()
            return first + self._put_fresh(namespace, blocks[middle:], totals, now, seat, makes_room=makes_room)
        with self._staging(sum(block.value_bytes for block in blocks)) as memory:
            values: list[Buffer] = []
            end = 0
            for block in blocks:
                if block.data_key is None and self._tier.sealer is not None:
                    raise ValueError(f"{block.block.key!r} is not sealed, and is not to be written into this tier")
                start, end = end, end + block.value_bytes
                value = memory[start:end]
                fill(value, namespace, block.block.key, block.payload, now, block.data_key)
                values.append(value.data)
            return self.publish(namespace, need, partial(_entries, blocks, now), values, seat, makes_room=makes_room)

    def publish(
        self,
        namespace: Namespace,
        need: int,
        numbered: Numbered,
        values: Sequence[Buffer],
        seat: Seat,
        *,
        makes_room: bool = True,
    ) -> list[PutOutcome]:
        """Store values that occupy `need` bytes, and what the catalogue is to know of each, with room made before
        (unless not `makes_room`); one outcome each. The `seat` is given up with the first commit.
        """
        won = self.patiently(
            partial(self._store_in_room, namespace, need, numbered, values, seat, makes_room=makes_room)
        )
        return [PutOutcome.FULL] * len(values) if won is None else won

    def _can_fit(self, need: int, totals: Totals, *, makes_room: bool) -> bool:
        """Whether `need` bytes find room, if need be after an eviction."""
        space = self._tier.current_space()
        with self._tier.environment.read() as txn:
            room = space.room(totals, tree_bytes(self._tier.catalog, txn))
        evictable = totals.evictable if space.evicts and makes_room else 0
        return room is None or need + space.slack(need, 0) <= room + evictable

    def patiently(self, act: Callable[[int], T | None]) -> T | None:
        """`act` with the number of the attempt, again while LMDB or the disk has no page or the result is None."""
        for attempt in range(_ATTEMPTS):
            try:
                result = act(attempt)
            except (lmdb.MapFullError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                ripen(self._tier.environment)
                time.sleep(0.001 * 2**attempt)
                continue
            if result is not None:
                return result
        return None

    def rewritten(self, act: Callable[[], T]) -> T:
        """`act`, a change to entries that are there, which needs pages to be free. Raises `NoPageError`."""
        errors: list[Exception] = []

        def tried(_: int) -> T:
            try:
                return act()
            except (lmdb.MapFullError, OSError) as error:
                errors.append(error)
                raise

        done = self.patiently(tried)
        if done is None:
            raise NoPageError(why_no_page(self._tier.environment, errors[-1])) from errors[-1]
        return done

    def some_at_a_time(self, count: int, act: Callable[[slice], list[bool]]) -> list[bool]:
        """What `act` says of `count` blocks, in transactions of bounded size: of one block, where no pages are free for
        more. Those that it frees may do for more then.
        """
        done: list[bool] = []
        together = TOGETHER
        while len(done) < count:
            try:
                done += self.rewritten(partial(act, slice(len(done), len(done) + together)))
            except NoPageError:
                if together == 1:
                    raise
                together = 1
                continue
            together = min(2 * together, TOGETHER)
        return done

    def _store_in_room(
        self,
        namespace: Namespace,
        need: int,
        numbered: Numbered,
        values: Sequence[Buffer],
        seat: Seat,
        attempt: int,
        *,
        makes_room: bool,
    ) -> list[PutOutcome] | None:
        space = self._tier.current_space()
        room = need + space.slack(need, attempt)
        while makes_room and evict(self._tier.catalog, space, room=room, most=max(need, space.chunk)):
            pass
        return self._store(namespace, need, numbered, values, seat)

    def _store(
        self, namespace: Namespace, need: int, numbered: Numbered, values: Sequence[Buffer], seat: Seat
    ) -> list[PutOutcome] | None:
        """The transaction of a put: what became of the blocks, or None if another process has taken the room."""
        with self._tier.catalog.write() as change, closing(seat):
            room = change.totals().room
            if room is not None and room < need:
                return None
            change.add_namespace(namespace)
            entries = numbered(change.generations(len(values)))
            won = change.publish(entries)
            found = zip(entries, values, won, strict=True)
            self._append(change, [(place_of(entry.generation), value) for entry, value, new in found if new])
            buried = set[bytes]() if all(won) else change.tombs.buried([entry.address for entry in entries])
            change.set_overhead(self._tier.space.overhead(tree_bytes(self._tier.catalog, change.txn)))
        lost = (PutOutcome.REFUSED if entry.address in buried else PutOutcome.EXISTS for entry in entries)
        return [PutOutcome.STORED if new else outcome for new, outcome in zip(won, lost, strict=True)]

    def reseal(self, namespace: Namespace, blocks: list[Staged]) -> list[ResealOutcome]:
        """Put one chunk of blocks, newly sealed, in place of what stands under their generations: one transaction."""
        with self._tier.catalog.read() as snapshot:
            found = zip(blocks, snapshot.find([block.address for block in blocks]), strict=True)
            there = [(block, entry) for block, entry in found if entry is not None]
        with self._staging(sum(block.value_bytes for block, _ in there)) as memory:
            values: list[Buffer] = []
            end = 0
            for block, entry in there:
                start, end = end, end + block.value_bytes
                value = memory[start:end]
                fill(value, namespace, block.block.key, block.payload, entry.created, block.data_key)
                values.append(value.data)
            entries = [entry for _, entry in there]
            replaced = self.patiently(partial(self._replace, entries, values))
        if replaced is None:
            return [ResealOutcome.KEPT] * len(blocks)
        return [ResealOutcome.RESEALED if block.address in replaced else ResealOutcome.GONE for block in blocks]

    def _replace(self, entries: Sequence[Entry], values: Sequence[Buffer], attempt: int) -> set[bytes]:
        """The transaction of it: the addresses whose entries are of the same copies still."""
        need, space = sum(entry.size for entry in entries), self._tier.current_space()
        room = need + space.slack(need, attempt)
        while attempt and evict(self._tier.catalog, space, room=room, most=max(need, space.chunk)):
            pass
        replaced: set[bytes] = set()
        with self._tier.catalog.write() as change:
            now = change.find([entry.address for entry in entries])
            for entry, value, known in zip(entries, values, now, strict=True):
                if known is not None and known.generation == entry.generation:
                    change.txn.put(place_of(entry.generation), value, db=self._blocks)
                    replaced.add(entry.address)
        return replaced

    def _append(self, change: Change, items: Sequence[tuple[bytes, Buffer]]) -> None:
        """Put values behind all others, which fills LMDB's pages."""
        _, added = change.txn.cursor(self._blocks).putmulti(items, append=True)
        if added < len(items):  # something stands behind them that no put has put there
            change.txn.cursor(self._blocks).putmulti(items)

    @contextmanager
    def _staging(self, nbytes: int) -> Generator[Bytes]:
        """Memory in which header and payload stand together, as LMDB wants them; kept for the next put."""
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = np.empty(0, np.uint8)
        if memory.nbytes < nbytes:
            memory = np.empty(nbytes, np.uint8)
        yield memory[:nbytes]
        if len(self._spare) < _SPARE:
            self._spare.append(memory)


def _entries(blocks: Sequence[Staged], now: int, first: int) -> list[Entry]:
    return [_entry(block, now, number) for number, block in enumerate(blocks, first)]


def _entry(staged: Staged, now: int, generation: int) -> Entry:
    """What the catalogue is to know. A prefix that came at once is to go from its end, for it is of use up to its first
    gap; blocks whose place is not known go in the order in which they came.
    """
    block = staged.block
    when = now + staged.place if block.position == NO_POSITION else now - min(block.position, _OLDER_NS)
    return Entry(staged.address, staged.size, when, when, generation, position=block.position, parent=block.parent)


def chunks(items: Iterable[T], most: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    """Items in order, some at a time: together at most `most` bytes or one item."""
    chunk: list[T] = []
    filled = 0
    for item in items:
        nbytes = size(item)
        if chunk and filled + nbytes > most:
            yield chunk
            chunk, filled = [], 0
        chunk.append(item)
        filled += nbytes
    if chunk:
        yield chunk
