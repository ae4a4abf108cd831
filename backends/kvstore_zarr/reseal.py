"""Blocks sealed anew where they are: a new file takes the old one's name, and the catalogue's entry stays as it is.

1. **reserve**, one short write transaction: room for the second copies is taken, an intent names drafts and blocks;
2. **write** each block under a draft's name, with generation and times of the copy that is there;
3. **replace**, under the names' locks: where the entry is of that copy still, rename the draft over the file;
4. **end**: the old files' space is free, and a transaction drops the intent.

A kill leaves one whole file or the other under every name, both of which the entry describes; drafts go with the
intent. An eviction that holds the old file finds another under its name and no entry, and takes that (`eviction`).
"""

# ruff: noqa: PTH104, PTH120 - plain strings: a Path costs more than the system call it is made for

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.catalog import Entry, Victim, address_of
from kvstore.files import NotAFileError, open_file, sync_folder
from kvstore.types import ResealOutcome
from kvstore_zarr import steps
from kvstore_zarr.expiry import take_out
from kvstore_zarr.format import PAGE, BlockFacts
from kvstore_zarr.intents import Undertaking
from kvstore_zarr.put import DISK_HEADROOM, JOB_BYTES
from kvstore_zarr.removal import AT_ONCE, Patience, cut, erase
from kvstore_zarr.sealed import seal_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.catalog import Intent
    from kvstore.sealing import DataKey
    from kvstore.types import BlockKey, BlockWrite
    from kvstore_zarr.metadata import NamespaceTree
    from kvstore_zarr.tier import LocalTier

__all__ = ["reseal_blocks"]


@dataclass(slots=True, eq=False)
class _Block:
    """One block on its way. `size` is what its new file came to occupy."""

    key: BlockKey
    payload: NDArray[np.uint8]
    data_key: DataKey
    address: bytes
    path: str
    entry: Entry
    draft: str = ""
    size: int = 0
    outcome: ResealOutcome = ResealOutcome.KEPT


def reseal_blocks(
    tier: LocalTier,
    tree: NamespaceTree,
    writes: Sequence[tuple[BlockWrite, NDArray[np.uint8]]],
    data_keys: Mapping[str, DataKey],
) -> list[ResealOutcome]:
    """Reseal blocks of one namespace, whose buffers have been checked; one outcome each, in order."""
    addresses = [address_of(tree.namespace, write.key) for write, _ in writes]
    with tier.catalog.read() as snapshot:
        found = dict(zip(addresses, snapshot.find(addresses), strict=True))
    blocks: dict[bytes, _Block] = {}
    for address, (write, payload) in zip(addresses, writes, strict=True):
        entry, data_key = found[address], data_keys.get(write.tenant)
        if entry is not None and data_key is not None:
            path = f"{tier.root}/{tree.block(write.key)}"
            blocks[address] = _Block(write.key, payload, data_key, address, path, entry)
    for job in _jobs(tier, blocks.values()):
        _Job(tier, tree, job).run()
    return [
        ResealOutcome.GONE if found[address] is None
        else blocks[address].outcome if address in blocks
        else ResealOutcome.KEPT
        for address in addresses
    ]  # fmt: skip


def _jobs(tier: LocalTier, blocks: Iterable[_Block]) -> Iterator[list[_Block]]:
    """As many at a time as a put would reserve for."""
    most = min(JOB_BYTES, (tier.capacity or sys.maxsize) // 32)
    job: list[_Block] = []
    for block in blocks:
        if job and sum(one.payload.nbytes for one in job) + block.payload.nbytes > most:
            yield job
            job = []
        job.append(block)
    if job:
        yield job


class _Job:
    """One pass over blocks that are reserved for together. For one thread, once."""

    def __init__(self, tier: LocalTier, tree: NamespaceTree, blocks: Sequence[_Block]) -> None:
        self._tier, self._tree, self._blocks = tier, tree, blocks
        growth = {block.address: tier.folders.growth(tree.folder(block.key)) for block in blocks}
        self._need = sum(tree.frames[one.key.group].file_bytes + PAGE + growth[one.address] for one in blocks)

    def run(self) -> None:
        """Settle the blocks; they are `KEPT` where there is no room. Raises `TierUnavailable` or OSError when the
        catalogue cannot be written.
        """
        self._make_room()
        with Undertaking(self._tier) as task:
            intent = self._reserve(task)
            if intent is None:
                return
            steps.checkpoint("reserved")
            for number, block in enumerate(self._blocks):
                block.draft = self._tier.draft(intent, number, block.address)
                self._write(block)
            written, patience = [block for block in self._blocks if block.size], Patience()
            for start in range(0, len(written), AT_ONCE):
                self._replace(written[start : start + AT_ONCE], patience)
            steps.checkpoint("renamed")
            self._end(task)
            steps.checkpoint("published")

    def _make_room(self) -> None:
        """Evict until the second copies fit under the capacity. What they took is free again for the next ones."""
        tier, ours = self._tier, {block.address for block in self._blocks}
        victims: list[Victim] = []
        with tier.catalog.read() as snapshot:
            shortage = self._need - (room if (room := tier.room(snapshot)) is not None else sys.maxsize)
            for victim in snapshot.oldest() if shortage > 0 else ():
                if victim.address not in ours and not tier.is_aside(victim.address):
                    victims.append(victim)
                    shortage -= victim.size
                if shortage <= 0:
                    break
        if shortage <= 0:  # else they are not to go for nothing
            take_out(tier, victims)

    def _reserve(self, task: Undertaking) -> Intent | None:
        tier = self._tier
        with suppress(OSError), task.recording() as change:
            room, reserved = tier.room(change), change.totals().reserved
            on_disk = tier.free_on_disk() - reserved - max(DISK_HEADROOM, tier.keep_free)
            if min(on_disk, sys.maxsize if room is None else room) < self._need:
                return None
            return task.begin(change, self._need, [block.address for block in self._blocks])
        return None

    def _write(self, block: _Block) -> None:
        """Write the draft; one that cannot be written is taken back, and its block left as it is."""
        tier, entry, frame = self._tier, block.entry, self._tree.frames[block.key.group]
        facts = BlockFacts(
            self._tree.namespace.fingerprint, block.key, block.payload.nbytes, entry.generation, entry.created,
            entry.position, entry.parent,
        )  # fmt: skip
        sealed = tier.device.staging(frame)
        seal_file(sealed, frame, block.payload, facts, block.data_key)
        file = tier.device.create(block.draft, tier.mode)
        try:
            tier.device.write_file(file, sealed, sync=tier.durable)
            block.size = tier.device.finish(file, tier.mode)
        except OSError:
            erase(block.draft)
        finally:
            if file.fd >= 0:
                os.close(file.fd)
        steps.checkpoint("written")

    def _replace(self, written: Sequence[_Block], patience: Patience) -> None:
        """Put the drafts in place; whoever evicts, removes or purges a block looks at its name under its lock, too."""
        tier, addresses = self._tier, [block.address for block in written]
        old: list[int] = []
        try:
            with tier.names.hold(addresses):
                with tier.catalog.read() as snapshot:
                    now = snapshot.find(addresses)
                for block, entry in zip(written, now, strict=True):
                    if entry is None or entry.generation != block.entry.generation:
                        erase(block.draft)
                        block.outcome = ResealOutcome.GONE
                    else:
                        old += _put_in_place(block)
                if tier.durable:
                    for folder in {os.path.dirname(block.path) for block in written}:
                        sync_folder(folder)
        finally:
            for fd in old:
                cut(fd, patience)

    def _end(self, task: Undertaking) -> None:
        resealed = [block for block in self._blocks if block.outcome is ResealOutcome.RESEALED]
        measured = self._tier.folders.measure({self._tree.folder(block.key) for block in self._blocks})
        with self._tier.catalog.write() as change:
            for block in resealed:
                if block.size != block.entry.size:
                    change.resize(block.address, block.entry.generation, block.size)
            task.end(change)
            if measured:
                self._tier.folders.record(change.txn, measured)
                self._tier.account(change)


def _put_in_place(block: _Block) -> list[int]:
    """Rename the draft over the block's file; a descriptor of what stood there, if it was a file."""
    fds: list[int] = []
    try:
        with suppress(FileNotFoundError, NotADirectoryError, NotAFileError):
            fds.append(open_file(block.path, os.O_RDWR))
        os.rename(block.draft, block.path)
    except OSError as error:
        for fd in fds:
            os.close(fd)
        erase(block.draft)
        block.outcome = ResealOutcome.GONE if error.errno == errno.ENOENT else ResealOutcome.KEPT
        return []
    block.outcome = ResealOutcome.RESEALED
    return fds
