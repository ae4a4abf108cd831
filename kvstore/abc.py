"""The contract of a backend: one abstract class, eight verbs, all of them batches.

What holds for every verb of every store:

- **Blocking.** A verb returns when its work is done. Who must not wait calls it from a transfer thread
  (`kvstore.tiering`), never from a scheduler.
- **Threads.** Any number of threads may call any verbs at once. The GIL is released while bytes move.
- **Processes.** A store belongs to the process that opened it; in a forked child every verb raises `StoreClosedError`.
  Whether several processes may open one location is `Capabilities.shared`.
- **Buffers** are the caller's. A put only reads them, a get writes straight into them, and once the call has
  returned, however it ended, nobody touches them.
- **One outcome per block**, in the order given. One bad block never fails its batch. A miss is a value.
- **Errors.** `InvalidBlockError` when a key or a buffer does not fit the namespace (before anything is done),
  `StoreClosedError` after `close`, `TierUnavailable` when the store cannot tell at all. Nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from kvstore.marks import MarkOutcome
from kvstore.repairing import Examination
from kvstore.types import PutOutcome, ResealOutcome, Residue

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from types import TracebackType
    from typing import Self

    from kvstore.doctor import Finding
    from kvstore.marks import Mark
    from kvstore.namespace import Namespace
    from kvstore.repairing import Repaired
    from kvstore.scrub import Scrubbed
    from kvstore.types import (
        BlockInfo,
        BlockKey,
        BlockRead,
        BlockWrite,
        GetOutcome,
        Leftover,
        Unseen,
        Usage,
    )
    from kvstore.url import Option, TierURL

__all__ = ["BlockStore", "Capabilities"]

DROPPED_AT_ONCE = 1000
"""Blocks of a namespace that is dropped, in one `delete_many`."""

REFUSE_S = 600.0
"""How long purged blocks are not stored again, unless who purges says otherwise: an engine that still has them in its
memory would put them right back."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do here, found out when it was opened: on this device, with these options."""

    persistent: bool
    """Blocks outlive the process."""
    shared: bool
    """Several processes may have the same location open."""
    can_hang: bool
    """A call may wait for a network; callers lend it only memory that they can afford to lose for a while."""
    io: str
    """How bytes move: `memory`, `direct` (O_DIRECT), `buffered` (through the page cache), `mmap`, `network`."""
    alignment: int = 1
    """Address alignment in bytes at which buffers are used without an extra copy."""
    batch_bytes: int = 16 << 20
    """Bytes per call that suit the store; a caller with more splits it, and runs the calls side by side."""
    notes: tuple[str, ...] = ()
    """What an operator should know, e.g. why O_DIRECT is not in use."""
    marks: bool = False
    """Labels, pins and tenants are kept (`BlockStore.mark_many`)."""
    uses: bool = False
    """It keeps when a block was last used (`BlockInfo.last_used`), over restarts where it is persistent: `ttl` counts
    from there, and puts take back some of what has expired. False: from when a block was stored."""
    capacity_is_exact: bool = True
    """A put makes room under the option `capacity`. False: the store may exceed it until somebody collects what is over
    (`kvstore gc`, a sweep)."""
    tombstones: bool = False
    """Purged blocks are not stored again for a while (`BlockStore.purge_many`)."""
    tombstones_seen_s: float = 0.0
    """Within how many seconds other processes come to know of a purge. 0: at once."""
    sealed: bool = False
    """Blocks are encrypted before they are stored (the option `encryption`), each under its tenant's data key."""


class BlockStore(ABC):
    """Blocks by namespace and key, at one URL. Open one with `kvstore.open_store(url)`.

    A subclass is constructed with its parsed, validated `TierURL`, sets `capabilities`, lists its `options`, and
    raises a `StoreOpenError` when the location cannot be used. It creates the location unless `readonly=true`.
    """

    options: ClassVar[tuple[Option[object], ...]] = ()
    """The URL options this backend understands; any other is an error before the constructor runs."""

    remote: ClassVar[bool] = False
    """Blocks come over a network, as `Capabilities.can_hang` says of one that is open: an engine lets a process of its
    own (`kvstore.apart`) wait for them.
    """

    keeps_size: ClassVar[str] = ""
    """Where its files keep the size of their greatest day, whatever goes: what makes them smaller, in a clause."""

    capabilities: Capabilities

    def __init__(self, url: TierURL) -> None:
        self.url = url

    @abstractmethod
    def namespaces(self) -> list[Namespace]:
        """The namespaces of which something was ever put, from their stored manifests."""

    @abstractmethod
    def contains_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each block is believed to be there. Cheap: no payload is read, so a True may still be a MISS."""

    @abstractmethod
    def put_many(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[PutOutcome]:
        """Store each block that is not there yet.

        Atomicity: a block is visible whole or not at all, to every thread and process, whatever dies in between.
        Durability at return: survives this process; survives a power loss only with `durability=fsync`. A block
        that is there is never overwritten: the digest says that it has the same content; `EXISTS` counts as a use.
        Capacity: makes room by evicting the least recently used blocks; `FULL` when that is not possible.
        The first put into a namespace also stores its manifest. Of two writes of one key in a batch the second is
        `EXISTS`. A block that was purged a short while ago is `REFUSED` (`purge_many`).
        On a read-only store every outcome is `FAILED`.
        """

    @abstractmethod
    def get_many_into(self, namespace: Namespace, blocks: Sequence[BlockRead]) -> list[GetOutcome]:
        """Read each block into its buffer and verify it: checksum, key, namespace, size.

        A HIT counts as a use: it makes the block young for eviction. Of the blocks of one batch, which are given in the
        order of their prefix, the first is the youngest then: a prefix is of use up to its first gap. A CORRUPT block
        is removed, so that the next put replaces it, unless the store is read-only.
        """

    @abstractmethod
    def delete_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        """Remove each block; True where one was. Afterwards no get in any process finds it, until it is put anew."""

    @abstractmethod
    def scan(self, namespace: Namespace) -> Iterator[BlockInfo]:
        """What is known of each block, in no particular order. Blocks put or removed meanwhile may appear or not."""

    @abstractmethod
    def usage(self) -> Usage:
        """How full the store is, over all namespaces and, where the store is shared, all processes."""

    def excess(self, capacity: int) -> int:
        """How many bytes have to go for what is stored to fit into `capacity`, as if that were the tier's; where there
        is room, less than 0. Space that blocks to come will use counts for nothing. May look at more than `usage`.
        """
        usage = self.usage()
        return usage.used + usage.reserved + usage.overhead - capacity

    @abstractmethod
    def close(self) -> None:
        """Finish what was started, release what is held. A second call does nothing.

        Raises `TierUnavailable` where the device cannot do what is left to be done, the last writes say: they may be
        lost then, and what was held is released all the same.
        """

    def ensure_open(self) -> None:  # noqa: B027 - for those that take the defaults below
        """Raise `StoreClosedError` after `close`, and in a forked child. The defaults of verbs ask it, so that a store
        which defines it refuses them as it does the others.
        """

    def put_if_room(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[PutOutcome]:
        """`put_many`, for which nothing goes that is there: a block for which something would have to is `FULL`.

        This default goes by `usage` and by the blocks' bytes: where a store under a capacity keeps more than those of a
        block, something may go for the rest.
        """
        can = self.capabilities
        usage = self.usage() if can.capacity_is_exact and not can.can_hang else None
        if usage is None or usage.capacity is None:
            return self.put_many(namespace, blocks)
        room = usage.capacity - usage.used - usage.reserved - usage.overhead
        there = self.contains_many(namespace, [block.key for block in blocks])
        outcomes = [PutOutcome.FULL] * len(blocks)
        admitted: list[int] = []
        for place, (block, known) in enumerate(zip(blocks, there, strict=True)):
            need = 0 if known else namespace.block_bytes(block.key.group)
            if need <= room:
                room -= need
                admitted.append(place)
        put = self.put_many(namespace, [blocks[place] for place in admitted]) if admitted else []
        for place, outcome in zip(admitted, put, strict=True):
            outcomes[place] = outcome
        return outcomes

    def check_many(self, namespace: Namespace, blocks: Sequence[BlockRead]) -> list[GetOutcome]:
        """`get_many_into`, for who only looks after blocks: where a store keeps when blocks were used, this is no use.

        A CORRUPT block is removed, as there. This default is a get.
        """
        return self.get_many_into(namespace, blocks)

    def of_later_version(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        """Of blocks that are there and that `check_many` finds missing: whether a later kvstore wrote what is there.

        Such a block is left alone. Looks at each once more. This default knows of none.
        """
        del namespace
        self.ensure_open()
        return [False] * len(keys)

    def touch_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
        """Make blocks young for eviction without reading them, the first the youngest, as in `get_many_into`; unknown
        keys are passed over.

        Recency is told, not guessed: the hottest prefix lives in memory above and is never read from here. May
        take effect later (with the next put). A store that evicts nothing does nothing.
        """
        del namespace, keys
        self.ensure_open()

    def mark_many(self, namespace: Namespace, keys: Sequence[BlockKey], mark: Mark) -> list[MarkOutcome]:
        """Say something of blocks that are there; what was said of them before stays.

        Marks are kept for as long as the block is and survive a restart; a block that went and is stored anew has none.
        A pinned block is evicted by nobody; deleted, or found damaged, it goes like any other. Under a capacity no more
        than one part in `kvstore.marks.PINNABLE` of it can be pinned: of a batch the first blocks are, the others have
        the mark without its pin and are `UNPINNED`. A store without `Capabilities.marks` says `MISSING` of each.
        """
        del namespace, mark
        self.ensure_open()
        return [MarkOutcome.MISSING] * len(keys)

    def unmark_many(self, namespace: Namespace, keys: Sequence[BlockKey], mark: Mark) -> list[bool]:
        """Take back what `mark` stands for: marks with their pins or, if it is pinned, their pins alone; True for each
        block that had any. Without its last pin a block is as young for eviction as its last use says.
        """
        del namespace, mark
        self.ensure_open()
        return [False] * len(keys)

    def scan_marked(self, namespace: Namespace, mark: Mark) -> Iterator[BlockInfo]:
        """`scan`, of the blocks alone that have a mark which `mark` stands for. `Mark()`: any mark."""
        return (info for info in self.scan(namespace) if any(mark.names(one) for one in info.marks))

    def scan_ages(self, namespace: Namespace) -> Iterator[BlockInfo]:
        """`scan`, as cheaply as keys, sizes, times and pins can be had: all the rest may be missing.

        For who counts blocks, or removes old ones. The times are those that the store knows; see `Capabilities.notes`.
        """
        return self.scan(namespace)

    def remove_unused(self, namespace: Namespace, infos: Sequence[BlockInfo]) -> list[bool]:
        """Remove each block that is still as `scan_ages` said; True for each removed.

        One that was used, pinned or stored anew since stays, as far as the store can tell.
        """
        return self.delete_many(namespace, [info.key for info in infos])

    def drop_namespace(self, namespace: Namespace, *, only_if_empty: bool = False) -> int:
        """Remove a namespace as a whole: all its blocks, pinned ones as well, then its manifest. How many blocks.

        A block that is put meanwhile stays, or goes with the rest; the next put into it makes the namespace anew. An
        unknown or empty one is no error. Nothing happens on a read-only store. Where others have the tier open, the
        manifest may stay until a later call. `only_if_empty`: nothing, unless it has no block and, where that could do
        harm to who puts the first one just now, had none for a while. This default removes blocks, and no manifest.
        """
        dropped, scan = 0, self.scan_ages(namespace)
        while not only_if_empty and (some := [info.key for info in islice(scan, DROPPED_AT_ONCE)]):
            dropped += sum(self.delete_many(namespace, some))
        return dropped

    def purge_many(
        self, namespace: Namespace, keys: Sequence[BlockKey], *, refuse_s: float = REFUSE_S, overwrite: bool = True
    ) -> list[bool]:
        """Remove each block for good; True where one was.

        With `Capabilities.tombstones` no get finds it any more and a put of it is `REFUSED`, whether it was there or
        not, for `refuse_s` seconds: in this process at once, in others within `tombstones_seen_s`. 0: it may be
        stored again at once. Tombstones are bounded in number; beyond the bound (`kvstore.tombs`) blocks are removed
        without one. `overwrite`: the bytes as well, where the store can, now or in `finish_purge`. Nothing happens on
        a read-only store.
        """
        del refuse_s, overwrite
        return self.delete_many(namespace, keys)

    def finish_purge(
        self, *, overwrite: bool = True, advance: Callable[[int], object] = lambda _: None
    ) -> list[Residue]:
        """After `purge_many`: overwrite what removed blocks left behind, as far as the store can; and say what is left.

        `advance` is called with each number of bytes that were overwritten. May take as long as the removed blocks are
        large; others go on meanwhile. Raises `TierUnavailable` while something that was purged, now or before, is there
        still: an I/O error, say, kept it from being overwritten.
        """
        del overwrite, advance
        self.ensure_open()
        return [Residue("bytes of removed blocks, wherever this store keeps what it was told to remove")]

    def sealed_with(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bytes | None]:
        """The id of the data key that each block is sealed with, as its first or last bytes say, unchecked; None where
        there is no block, or none that is sealed.
        """
        del namespace
        self.ensure_open()
        return [None] * len(keys)

    def reseal_many(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[ResealOutcome]:
        """Seal each block anew, under its tenant's newest data key, in place of the one that is there; `blocks` have
        the bytes that were just read of it.

        Readers find the one or the other at every moment, whatever dies in between. Marks and ages stay as they are,
        as far as the store keeps them. A block that was removed or purged meanwhile stays away. Under a capacity the
        least recently used blocks may go for the second copies. This default replaces none.
        """
        del namespace
        self.ensure_open()
        return [ResealOutcome.KEPT] * len(blocks)

    def leftovers(self, *, remove: bool = False) -> list[Leftover]:  # noqa: ARG002 - for stores that have some
        """What writers that died left in the tier, and nothing takes away by itself; `remove` takes it away."""
        self.ensure_open()
        return []

    def repair(self) -> list[Repaired]:
        """Put right what the store's own records and documents lack or have too much; what that was, if anything.

        The blocks' bytes are not read: `check_many` does that. Nothing happens on a read-only store.
        """
        self.ensure_open()
        return []

    def unseen(self) -> list[Unseen]:
        """What of ours stands in the tier and in none of `namespaces` and their scans, looked for anew.

        Whoever says of a tier as a whole that it was copied, checked, or is gone, has to say it of these, too. May take
        as long as a listing of the tier.
        """
        self.ensure_open()
        return []

    def take_in(self, *, blocks: bool) -> None:
        """Have scans list what they can of `unseen`, without reading it: documents that follow from the store's own
        records are written anew, and with `blocks` files that the records do not know are entered into them; nothing is
        evicted for that. Nothing happens on a read-only store.
        """
        del blocks
        self.ensure_open()

    def purge_unseen(
        self, *, names: Collection[str], refuse_s: float = REFUSE_S, overwrite: bool = True
    ) -> list[Unseen]:
        """Remove for good what `unseen` tells of the namespaces with these names, but for what is `later`; what that
        was, counted as it went or before.

        Only what has our names goes. Blocks are `REFUSED` afterwards, as after `purge_many`, where their addresses are
        known. Nothing happens on a read-only store.
        """
        self.ensure_open()
        del names, refuse_s, overwrite
        return []

    def scrubbed(self) -> Scrubbed | None:
        """What the tier's scrub has done, by whichever process; None where none ever ran."""
        return None

    @classmethod
    def examine(cls, url: TierURL) -> Examination:  # noqa: ARG003 - for backends that look
        """What is wrong with the records of the tier that the validated `url` names, looked at without opening it.

        For records that could end the process of who relies on them. Changes nothing. Raises a `StoreOpenError`.
        """
        return Examination()

    @classmethod
    def salvage(cls, url: TierURL) -> list[Repaired]:  # noqa: ARG003 - for backends that can
        """Make a tier in which `examine` found something wrong one that can be opened, with what can still be trusted.

        What an opening makes anew by itself is left to it. Raises a `StoreOpenError`.
        """
        return []

    @classmethod
    def serving(cls, url: TierURL) -> type[BlockStore]:  # noqa: ARG003 - for backends that look
        """The class that serves `url`, whose options are not parsed yet: another one where an option decides."""
        return cls

    @classmethod
    def diagnose(cls, url: TierURL, usage: Usage | None) -> Iterable[Finding]:  # noqa: ARG003 - for backends that look
        """What `kvstore doctor` should say of the place that the validated `url` names; optional.

        `usage` is how full the tier is, None where it cannot be opened. Whether it can be, and that blocks come back,
        the doctor itself looks at. Changes nothing and creates nothing. Whatever it raises of `OSError` or
        `KVStoreError` becomes a finding. A tier in a local folder takes its checks from `kvstore.doctor.LocalPlace`.
        """
        return ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"
