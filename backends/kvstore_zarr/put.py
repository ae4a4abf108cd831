"""A put: plan, reserve, make room, write, publish. A kill between any two steps leaves no torn block and leaks nothing.

1. **plan**, in a read transaction: what is there already, what the rest will occupy, whom to evict for it;
2. **reserve**, one short write transaction: the victims' entries go, the space is taken, an intent names it all;
3. **remove**: the victims' files are overwritten in place or go;
4. **write** each block under a draft's name, in its folder;
5. **publish**, under the names' locks: rename each draft into place, then one transaction enters them and drops the
   intent. Whoever lost a race for a name finds the winner's entry there, and drops its draft.

Reserved is the larger of what will be written and what is being freed, until step 5: both may be on the disk at once.
"""

# ruff: noqa: PTH104, PTH119, PTH120 - plain strings: a Path costs more than the system call it is made for

from __future__ import annotations

import errno
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.catalog import Entry, address_of
from kvstore.files import sync_folder
from kvstore.retention import now_ns
from kvstore.types import BlockWrite, PutOutcome
from kvstore_zarr import eviction, steps
from kvstore_zarr.calls import rename_all
from kvstore_zarr.descriptors import descriptors
from kvstore_zarr.format import PAGE, BlockFacts
from kvstore_zarr.intents import Undertaking, reclaim_if_due
from kvstore_zarr.removal import erase, overwrite, release
from kvstore_zarr.sealed import seal_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.catalog import Change, Victim
    from kvstore.sealing import DataKey, Sealer
    from kvstore_zarr.calls import BlockFile
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


@dataclass(slots=True, eq=False)
class _Block:
    """One block on its way. `outcome` is None until it is settled; `size` what its file came to occupy."""

    write: BlockWrite
    payload: NDArray[np.uint8]
    address: bytes
    folder: str
    path: str
    cost: int
    data_key: DataKey | None = None
    draft: str = ""
    created: int = 0
    generation: int = 0
    size: int = 0
    outcome: PutOutcome | None = None


def put_blocks(
    tier: LocalTier, tree: NamespaceTree, writes: Sequence[tuple[BlockWrite, NDArray[np.uint8]]], *, evict: bool = True
) -> list[PutOutcome]:
    """Put blocks of one namespace, whose buffers have been checked; one outcome each, in order. Not to `evict`: only
    what finds room as it is.
    """
    blocks: dict[bytes, _Block] = {}
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
) -> _Block:
    folder = tree.folder(write.key)
    file_bytes = tree.frames[write.key.group].file_bytes
    cost = file_bytes + PAGE + tier.folders.growth(folder)  # a page for the extents of a fragmented file
    return _Block(write, payload, address, folder, f"{tier.root}/{tree.block(write.key)}", cost)


def _give_keys(sealer: Sealer, blocks: Sequence[_Block]) -> None:
    """Say what each block is sealed with; one for whose tenant there is no key cannot be stored."""
    keys = sealer.writing(block.write.tenant for block in blocks)
    for block in blocks:
        block.data_key = keys.get(block.write.tenant)
        if block.data_key is None:
            block.outcome = PutOutcome.FAILED


def _run(tier: LocalTier, tree: NamespaceTree, waiting: list[_Block], *, evict: bool) -> None:
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


def _first(waiting: list[_Block], most: int) -> list[_Block]:
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
        self, tier: LocalTier, tree: NamespaceTree | None, blocks: Sequence[_Block], *, evict: bool = True
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
            self._settle([block for block in concerned if block.outcome is None], _outcome_of(error))
            return bool(self._blocks)
        return True

    def _open(self) -> list[_Block]:
        return [block for block in self._blocks if block.outcome is None]

    @staticmethod
    def _settle(blocks: Sequence[_Block], outcome: PutOutcome) -> None:
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

    def _reserve(self, held: Sequence[Held]) -> tuple[list[_Block], list[Held]]:
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

    def _reserve_or_sacrifice(self, held: Sequence[Held]) -> tuple[list[_Block], list[Held]]:
        """Reserve; where the disk has no page for the catalogue, the first victim's file goes before its entry does."""
        try:
            return self._reserve(held)
        except OSError as error:
            if _outcome_of(error) is not PutOutcome.FULL or not eviction.sacrifice(self._tier, held):
                raise
        return self._reserve(held)

    def _disk_budget(self, reserved: int) -> int:
        return self._tier.free_on_disk() - reserved - max(DISK_HEADROOM, self._tier.keep_free)

    def _that_fit_the_disk(self, admitted: list[_Block], freed: int, reserved: int) -> list[_Block]:
        fitting = _admitted(admitted, 0, self._disk_budget(reserved) + freed)
        if not fitting:  # else the rest is tried again, beside what these came to occupy
            self._settle(admitted, PutOutcome.FULL)
        return fitting

    def _record(self, change: Change, admitted: Sequence[_Block], taken: Sequence[Held], reserved: int) -> None:
        addresses = [block.address for block in admitted] + [one.victim.address for one in taken]
        intent = self._task.begin(change, reserved, addresses)
        if admitted and self._tree is not None:
            generation = change.generations(len(admitted))
            for number, block in enumerate(admitted):
                block.generation = generation + number
                block.draft = self._tier.draft(intent, number, block.address)
            if self._tree.namespace.fingerprint not in self._tier.recorded:
                change.add_namespace(self._tree.namespace)

    def _carry_out(self, admitted: Sequence[_Block], taken: Sequence[Held]) -> None:
        tier = self._tier
        heirs = eviction.heirs_among(taken, ((self._file_bytes(block), block.draft) for block in admitted))
        inherited = {held.victim.address for held, _ in heirs}
        eviction.clear_away(tier, [held for held in taken if held.victim.address not in inherited])
        with suppress(OSError):  # where the disk is full, a file is not handed on but goes, and there is room then
            for block in admitted:
                self._make_folder(block)
        recycled = eviction.hand_on(tier, heirs)
        steps.checkpoint("removed")
        try:
            for block in admitted:
                self._write(block, recycled.pop(block.draft, -1))
        finally:
            for fd in recycled.values():
                release(fd)
        self._publish([block for block in admitted if block.outcome is None])

    def _file_bytes(self, block: _Block) -> int:
        tree = self._tree
        return -1 if tree is None else tree.frames[block.write.key.group].file_bytes

    def _make_folder(self, block: _Block, *, again: bool = False) -> None:
        if self._tree is not None:
            unique = f"{os.path.basename(block.draft)}-document"
            self._tier.folders.make(self._tree, block.write.key, unique=unique, again=again)

    def _write(self, block: _Block, fd: int) -> None:
        """Write a block's draft, over the recycled file `fd` if there is one, or make it, and its folder."""
        tier = self._tier
        file = tier.device.create(block.draft, tier.mode, fd)
        try:
            if fd < 0:
                self._make_folder(block)
            try:
                self._fill(block, file)
            except FileNotFoundError:  # somebody removed the folder behind our back
                self._make_folder(block, again=True)
                self._fill(block, file)
            block.size = tier.device.finish(file, tier.mode)
        except OSError as error:
            fd, file.fd = file.fd, -1
            erase_draft(fd, block.draft)
            block.outcome = _outcome_of(error)
        finally:
            if file.fd >= 0:
                release(file.fd)
        steps.checkpoint("written")

    def _fill(self, block: _Block, file: BlockFile) -> None:
        tier, tree, key = self._tier, self._tree, block.write.key
        if tree is None:
            return
        frame = tree.frames[key.group]
        block.created = now_ns()
        facts = BlockFacts(
            tree.namespace.fingerprint, key, block.payload.nbytes, block.generation, block.created,
            block.write.position, block.write.parent,
        )  # fmt: skip
        if block.data_key is None:
            tier.device.write(
                file, frame, block.payload, lambda closing, crc: frame.seal(closing, block.payload, facts, crc),
                sync=tier.durable,
            )  # fmt: skip
        else:
            sealed = tier.device.staging(frame)
            seal_file(sealed, frame, block.payload, facts, block.data_key)
            tier.device.write_file(file, sealed, sync=tier.durable)

    def _publish(self, written: Sequence[_Block]) -> None:
        tier = self._tier
        addresses = [block.address for block in written]
        with tier.names.hold(addresses):
            with tier.catalog.read() as snapshot:
                present = snapshot.contains(addresses)
                buried = snapshot.tombs.buried(addresses)  # a purge lays them under the names' locks
            for block, there in zip(written, present, strict=True):
                if there or block.address in buried:
                    self._give_up(block, PutOutcome.EXISTS if there else PutOutcome.REFUSED)
            self._put_in_place([block for block in written if block.outcome is None])
            mine = [block for block in written if block.outcome is None]
            if tier.durable:
                for folder in {os.path.dirname(block.path) for block in mine}:
                    sync_folder(folder)
            steps.checkpoint("renamed")
            measured = tier.folders.measure({block.folder for block in self._blocks if block.draft})
            with tier.catalog.write() as change:
                change.publish([_entry(block) for block in mine])
                self._task.end(change)
                if measured:
                    tier.folders.record(change.txn, measured)
                    tier.account(change)
            self._settle(mine, PutOutcome.STORED)
        if self._tree is not None:
            tier.recorded.add(self._tree.namespace.fingerprint)
        steps.checkpoint("published")

    @staticmethod
    def _give_up(block: _Block, lost: PutOutcome) -> None:
        if lost is PutOutcome.REFUSED:
            overwrite(block.draft)
        erase(block.draft)
        block.outcome = lost

    @staticmethod
    def _put_in_place(blocks: Sequence[_Block]) -> None:
        errors = rename_all([block.draft for block in blocks], [block.path for block in blocks])
        for block, error in zip(blocks, errors, strict=True):
            if not error:
                continue
            try:
                if error != errno.EISDIR:
                    raise OSError(error, os.strerror(error), block.path)
                erase(block.path)
                os.rename(block.draft, block.path)
            except OSError as failure:
                erase(block.draft)
                block.outcome = _outcome_of(failure)


def _admitted(wanted: Sequence[_Block], freed: int, room: int | None) -> list[_Block]:
    """The first blocks that fit, where a job occupies the larger of what it frees and what it writes."""
    if room is None:
        return list(wanted)
    admitted: list[_Block] = []
    total = 0
    for block in wanted:
        total += block.cost
        if max(total, freed) > room:
            break
        admitted.append(block)
    return admitted


def erase_draft(fd: int, path: str) -> None:
    """Take a draft that could not be written back; `fd` is -1 if it could not even be made."""
    if fd >= 0:
        os.ftruncate(fd, 0)
        release(fd)
    erase(path)


def _entry(block: _Block) -> Entry:
    created = block.created
    return Entry(
        block.address, block.size, created, created, block.generation,
        position=block.write.position, parent=block.write.parent,
    )  # fmt: skip


def _outcome_of(error: OSError) -> PutOutcome:
    return PutOutcome.FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else PutOutcome.FAILED
