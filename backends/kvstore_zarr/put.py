"""A put: plan, reserve, make room, write, publish. A kill between any two steps leaves no torn block and leaks nothing.

1. **plan**, in a read transaction: what is there already, what the rest will occupy, whom to evict for it;
2. **reserve**, one short write transaction: the victims' entries go, the space is taken, an intent names it all;
3. **remove**: the victims' files are overwritten in place or go;
4. **write** each block under a draft's name, in its folder (`drafts.py`);
5. **publish**, under the names' locks: rename each draft into place, then one transaction enters them and drops the
   intent. Whoever lost a race for a name finds the winner's entry there, and drops its draft.

Reserved is the larger of what will be written and what is being freed, until step 5: both may be on the disk at once.
"""

# ruff: noqa: PTH120 - plain strings: a Path costs more than the system call it is made for

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.catalog import address_of
from kvstore.files import sync_folder
from kvstore.types import BlockWrite, PutOutcome
from kvstore_zarr import drafts, eviction, steps
from kvstore_zarr.descriptors import descriptors
from kvstore_zarr.drafts import NewBlock, outcome_of
from kvstore_zarr.format import PAGE
from kvstore_zarr.intents import Undertaking, reclaim_if_due
from kvstore_zarr.removal import release

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.catalog import Change, Victim
    from kvstore.sealing import Sealer
    from kvstore_zarr.descriptors import Share
    from kvstore_zarr.eviction import Held
    from kvstore_zarr.metadata import NamespaceTree
    from kvstore_zarr.tier import LocalTier

__all__ = ["PutJob", "make_room", "put_blocks"]

JOB_BYTES = 16 << 20
"""The most that one job reserves at a time; and a 32nd of the capacity, so that several find room beside each other."""
DISK_HEADROOM = 1 << 20
"""What puts leave free on the disk, in bytes: the catalogue needs pages to take blocks out, too."""
FOR_THE_DISK = 4
"""How much a job evicts beyond its need, where a neighbour has filled the disk: the tier gives way in steps."""
RECLAIM_INTERVAL_S = 1.0
"""How often a process that puts looks for what dead ones left; ten times as often while it finds no room."""
PATIENCE_S = 0.2
"""How long a put waits for room that other puts hold, before a block is `FULL`."""


def put_blocks(
    tier: LocalTier, tree: NamespaceTree, writes: Sequence[tuple[BlockWrite, NDArray[np.uint8]]], *, evict: bool = True
) -> list[PutOutcome]:
    """Put blocks of one namespace, whose buffers have been checked; one outcome each, in order. Not to `evict`: only
    what finds room as it is.
    """
    blocks: dict[bytes, NewBlock] = {}
    order = [address_of(tree.namespace, write.key) for write, _ in writes]
    for address, (write, payload) in zip(order, writes, strict=True):
        if address not in blocks:
            blocks[address] = _block(tier, tree, address, write, payload)
    if tier.sealer is not None:
        _give_keys(tier.sealer, list(blocks.values()))
    reclaim_if_due(tier, RECLAIM_INTERVAL_S)
    _run(tier, tree, [block for block in blocks.values() if block.outcome is None], evict=evict)
    outcomes: list[PutOutcome] = []
    for address in order:
        outcome = blocks[address].outcome or PutOutcome.FULL
        outcomes.append(outcome)
        if outcome.present:
            blocks[address].outcome = PutOutcome.EXISTS  # for a second write of the key
    return outcomes


def _block(
    tier: LocalTier, tree: NamespaceTree, address: bytes, write: BlockWrite, payload: NDArray[np.uint8]
) -> NewBlock:
    folder = tree.folder(write.key)
    file_bytes = tree.frames[write.key.group].file_bytes
    cost = file_bytes + PAGE + tier.folders.growth(folder)  # a page for the extents of a fragmented file
    return NewBlock(tree, write, payload, address, folder, f"{tier.root}/{tree.block(write.key)}", cost)


def _give_keys(sealer: Sealer, blocks: Sequence[NewBlock]) -> None:
    """Say what each block is sealed with; one for whose tenant there is no key cannot be stored."""
    keys = sealer.writing(block.write.tenant for block in blocks)
    for block in blocks:
        block.data_key = keys.get(block.write.tenant)
        if block.data_key is None:
            block.outcome = PutOutcome.FAILED


def _run(tier: LocalTier, tree: NamespaceTree, waiting: list[NewBlock], *, evict: bool) -> None:
    most = min(2 * JOB_BYTES, _attainable(tier) // 32)
    deadline = 0.0
    while waiting:
        batch = _first(waiting, most)
        moved = PutJob(tier, tree, batch, evict=evict).run()
        waiting = [block for block in waiting if block.outcome is None]
        if moved:
            deadline = 0.0
            continue
        now = time.monotonic()
        deadline = deadline or now + PATIENCE_S
        if now > deadline or tier.catalog.is_held_up_for_long:
            return
        reclaim_if_due(tier, RECLAIM_INTERVAL_S / 10)
        time.sleep(0.001)


def _attainable(tier: LocalTier) -> int:
    """What the tier may come to occupy, under its capacity and on its disk, in bytes."""
    bound, free = tier.capacity or sys.maxsize, max(0, tier.free_on_disk() - tier.keep_free)
    if free < 32 * JOB_BYTES:
        with tier.catalog.read() as snapshot:
            bound = min(bound, free + snapshot.totals().used)
    return bound


def _first(waiting: list[NewBlock], most: int) -> list[NewBlock]:
    """Those of one job: what they may cost is at most `most`, and they are no more bytes than one call is to have."""
    cost = nbytes = 0
    for number, block in enumerate(waiting):
        cost, nbytes = cost + block.cost, nbytes + block.payload.nbytes
        if number and (cost > most or nbytes > JOB_BYTES):
            return waiting[:number]
    return waiting


def make_room(tier: LocalTier) -> None:
    """Evict until the tier is within its capacity: for one that was lowered, or a tree that came over it."""
    while PutJob(tier, None, []).run():
        pass


class PutJob:
    """One pass over a batch of blocks that fits a reservation. For one thread, once."""

    def __init__(
        self, tier: LocalTier, tree: NamespaceTree | None, blocks: Sequence[NewBlock], *, evict: bool = True
    ) -> None:
        self._tier = tier
        self._tree = tree
        self._blocks = blocks
        self._evicts = evict
        self._task = Undertaking(tier)
        self._notes_are_due = False

    def run(self) -> bool:
        """Settle as many blocks as find room; whether anything was moved, in or out.

        What an error ends is settled, too: as `FULL` where the disk is, else as `FAILED`. Raises `TierUnavailable` or
        OSError where that was not begun: the catalogue cannot be read, or no victim can be opened.
        """
        with descriptors() as share:
            return self._run(self._plan(share))

    def _run(self, held: list[Held]) -> bool:
        tier = self._tier
        steps.checkpoint("planned")
        concerned = self._blocks
        try:
            with self._task:
                try:
                    concerned, taken = self._reserve_or_sacrifice(held)
                    going = set(map(id, taken))
                    eviction.let_go(tier, [one for one in held if id(one) not in going])
                    if self._task.intent is None:
                        return any(block.outcome is not None for block in self._blocks)
                    steps.checkpoint("reserved")
                    self._carry_out(concerned, taken)
                except BaseException:
                    eviction.let_go(tier, held)  # before the intent is settled, which takes their files
                    raise
        except OSError as error:
            self._settle([block for block in concerned if block.outcome is None], outcome_of(error))
            return bool(self._blocks)
        return True

    def _open(self) -> list[NewBlock]:
        return [block for block in self._blocks if block.outcome is None]

    @staticmethod
    def _settle(blocks: Sequence[NewBlock], outcome: PutOutcome) -> None:
        for block in blocks:
            block.outcome = outcome

    def _plan(self, share: Share) -> list[Held]:
        victims, shortage = self._look()
        if self._notes_are_due:
            self._tier.catalog.settle_in_passing()
        return eviction.choose(self._tier, victims, shortage, share)

    def _look(self) -> tuple[list[Victim], int]:
        """Settle what needs no room; the oldest blocks, and how many bytes of them would have to go."""
        tier = self._tier
        with tier.catalog.read() as snapshot:
            self._find_present(snapshot.contains([block.address for block in self._blocks]))
            self._refuse(snapshot.tombs.buried([block.address for block in self._blocks]))
            room, totals = tier.room(snapshot), snapshot.totals()
            if room is None and not tier.keep_free:
                return [], 0
            if room is not None:
                most = room + (totals.evictable if self._evicts else 0) + totals.reserved
                self._settle([block for block in self._open() if block.cost > most], PutOutcome.FULL)
            if not self._evicts:
                return [], 0
            need = sum(block.cost for block in self._open())
            shortage = 0 if room is None else need - room
            if self._blocks:
                on_disk = need - self._disk_budget(totals.reserved)
                shortage = max(shortage, min(on_disk, FOR_THE_DISK * max(need, DISK_HEADROOM)))
            return eviction.oldest(tier, snapshot, shortage), shortage

    def _find_present(self, present: Sequence[bool]) -> None:
        there = [block for block, is_there in zip(self._blocks, present, strict=True) if is_there]
        if there:
            self._settle(there, PutOutcome.EXISTS)
            self._notes_are_due = self._tier.catalog.note([block.address for block in there], hits=0)

    def _refuse(self, buried: set[bytes]) -> None:
        if buried:
            self._settle([block for block in self._open() if block.address in buried], PutOutcome.REFUSED)

    def _reserve(self, held: Sequence[Held]) -> tuple[list[NewBlock], list[Held]]:
        tier, wanted = self._tier, self._open()
        if not (wanted or held) or (wanted and tier.catalog.is_held_up()):
            return [], []
        with self._task.recording() as change:
            gone = {victim.address for victim in change.evict([one.victim for one in held])}
            taken = [one for one in held if one.victim.address in gone]
            freed = sum(one.victim.size for one in taken)
            admitted = _admitted(wanted, freed, tier.room(change))
            admitted = self._that_fit_the_disk(admitted, freed, change.totals().reserved)
            if admitted or taken:
                self._record(change, admitted, taken, max(freed, sum(block.cost for block in admitted)))
            tier.account(change)
        return admitted, taken

    def _reserve_or_sacrifice(self, held: Sequence[Held]) -> tuple[list[NewBlock], list[Held]]:
        """Reserve; where the disk has no page for the catalogue, the first victim's file goes before its entry does."""
        try:
            return self._reserve(held)
        except OSError as error:
            if outcome_of(error) is not PutOutcome.FULL or not eviction.sacrifice(self._tier, held):
                raise
        return self._reserve(held)

    def _disk_budget(self, reserved: int) -> int:
        return self._tier.free_on_disk() - reserved - max(DISK_HEADROOM, self._tier.keep_free)

    def _that_fit_the_disk(self, admitted: list[NewBlock], freed: int, reserved: int) -> list[NewBlock]:
        fitting = _admitted(admitted, 0, self._disk_budget(reserved) + freed)
        if not fitting:  # else the rest is tried again, beside what these came to occupy
            self._settle(admitted, PutOutcome.FULL)
        return fitting

    def _record(self, change: Change, admitted: Sequence[NewBlock], taken: Sequence[Held], reserved: int) -> None:
        addresses = [block.address for block in admitted] + [one.victim.address for one in taken]
        intent = self._task.begin(change, reserved, addresses)
        if admitted and self._tree is not None:
            generation = change.generations(len(admitted))
            for number, block in enumerate(admitted):
                block.generation = generation + number
                block.draft = self._tier.draft(intent, number, block.address)
            self._tier.name_in(change, self._tree.namespace)

    def _carry_out(self, admitted: Sequence[NewBlock], taken: Sequence[Held]) -> None:
        tier = self._tier
        heirs = eviction.heirs_among(taken, ((block.file_bytes, block.draft) for block in admitted))
        inherited = {held.victim.address for held, _ in heirs}
        eviction.clear_away(tier, [held for held in taken if held.victim.address not in inherited])
        with suppress(OSError):  # where the disk is full, a file is not handed on but goes, and there is room then
            for block in admitted:
                drafts.make_folder(tier, block)
        recycled = eviction.hand_on(tier, heirs)
        steps.checkpoint("removed")
        try:
            drafts.write(tier, admitted, recycled)
        finally:
            for fd in recycled.values():
                release(fd)
        self._publish([block for block in admitted if block.outcome is None])

    def _publish(self, written: Sequence[NewBlock]) -> None:
        tier = self._tier
        addresses = [block.address for block in written]
        with tier.names.hold(addresses):
            with tier.catalog.read() as snapshot:
                present = snapshot.contains(addresses)
                buried = snapshot.tombs.buried(addresses)  # a purge lays them under the names' locks
            for block, there in zip(written, present, strict=True):
                if there or block.address in buried:
                    drafts.give_up(block, PutOutcome.EXISTS if there else PutOutcome.REFUSED)
            drafts.put_in_place([block for block in written if block.outcome is None])
            mine = [block for block in written if block.outcome is None]
            if tier.durable:
                for folder in {os.path.dirname(block.path) for block in mine}:
                    sync_folder(folder)
            steps.checkpoint("renamed")
            measured = tier.folders.measure({block.folder for block in self._blocks if block.draft})
            with tier.catalog.write() as change:
                change.publish([block.entry() for block in mine])
                self._task.end(change)
                if measured:
                    tier.folders.record(change.txn, measured)
                    tier.account(change)
            self._settle(mine, PutOutcome.STORED)
        if self._tree is not None:
            tier.recorded.add(self._tree.namespace.fingerprint)
        steps.checkpoint("published")


def _admitted(wanted: Sequence[NewBlock], freed: int, room: int | None) -> list[NewBlock]:
    """The first blocks that fit, where a job occupies the larger of what it frees and what it writes."""
    if room is None:
        return list(wanted)
    admitted: list[NewBlock] = []
    total = 0
    for block in wanted:
        total += block.cost
        if max(total, freed) > room:
            break
        admitted.append(block)
    return admitted
