"""A new block on its way into its file: its draft is written, and put in place.

For `put.py`, which has found room for it, and names for both. Nothing here decides whether a block is stored.
"""

# ruff: noqa: PTH104, PTH119 - plain strings: a Path costs more than the system call it is made for

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvstore.catalog import Entry
from kvstore.retention import now_ns
from kvstore.types import PutOutcome
from kvstore_zarr import steps
from kvstore_zarr.calls import rename_all
from kvstore_zarr.format import BlockFacts
from kvstore_zarr.removal import erase, overwrite, release
from kvstore_zarr.sealed import seal_file

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.sealing import DataKey
    from kvstore.types import BlockWrite
    from kvstore_zarr.calls import BlockFile
    from kvstore_zarr.format import BlockFrame
    from kvstore_zarr.metadata import NamespaceTree
    from kvstore_zarr.tier import LocalTier

__all__ = ["NewBlock", "give_up", "make_folder", "outcome_of", "put_in_place", "write"]


@dataclass(slots=True, eq=False)
class NewBlock:
    """One block on its way. `outcome` is None until it is settled; `size` what its file came to occupy."""

    tree: NamespaceTree
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

    @property
    def file_bytes(self) -> int:
        """How large its file will be."""
        return self.tree.frames[self.write.key.group].file_bytes

    def entry(self) -> Entry:
        """What the catalogue says of it, once it is written."""
        return Entry(
            self.address, self.size, self.created, self.created, self.generation,
            position=self.write.position, parent=self.write.parent,
        )  # fmt: skip


def make_folder(tier: LocalTier, block: NewBlock, *, again: bool = False) -> None:
    """The folder that a block belongs into, with its documents; `again`: also if we have made it before."""
    unique = f"{os.path.basename(block.draft)}-document"
    tier.folders.make(block.tree, block.write.key, unique=unique, again=again)


def write(tier: LocalTier, blocks: Sequence[NewBlock], recycled: dict[str, int]) -> None:
    """Write the drafts of blocks: over a file of `recycled` (descriptors by draft, which are taken from there), or,
    where there is none, make it, and its folder. Where that fails, nothing of it is left, and `outcome` says so.
    """
    files: list[tuple[NewBlock, BlockFile]] = []
    try:
        for block in blocks:
            file = tier.device.create(block.draft, tier.mode, recycled.pop(block.draft, -1))
            files.append((block, file))
            if file.fd < 0:
                with _settling(block, file):
                    make_folder(tier, block)
        _fill(tier, [one for one in files if one[0].outcome is None])
        lost = [(block, file) for block, file in files if file.error == errno.ENOENT and block.outcome is None]
        for block, file in lost:  # somebody removed the folder behind our back
            with _settling(block, file):
                make_folder(tier, block, again=True)
        _fill(tier, [one for one in lost if one[0].outcome is None])
        for block, file in files:
            if block.outcome is None:
                with _settling(block, file):
                    if file.error:
                        raise file.failure()
                    block.size = tier.device.finish(file, tier.mode)
            steps.checkpoint("written")
    finally:
        for _, file in files:
            if file.fd >= 0:
                release(file.fd)


@contextmanager
def _settling(block: NewBlock, file: BlockFile) -> Generator[None]:
    """A draft of which an error is raised is taken back."""
    try:
        yield
    except OSError as error:
        fd, file.fd = file.fd, -1
        _take_back(fd, block.draft)
        block.outcome = outcome_of(error)


def _fill(tier: LocalTier, files: Sequence[tuple[NewBlock, BlockFile]]) -> None:
    """Write what is in the files; each `file.error` says what became of it."""
    plain: list[tuple[BlockFile, BlockFrame, NDArray[np.uint8], Callable[[NDArray[np.uint8]], object]]] = []
    for block, file in files:
        frame = block.tree.frames[block.write.key.group]
        block.created = now_ns()
        facts = BlockFacts(
            block.tree.namespace.fingerprint, block.write.key, block.payload.nbytes, block.generation, block.created,
            block.write.position, block.write.parent,
        )  # fmt: skip
        if block.data_key is None:
            plain.append((file, frame, block.payload, partial(frame.fill, payload=block.payload, facts=facts)))
        else:
            sealed = tier.device.staging(frame)
            seal_file(sealed, frame, block.payload, facts, block.data_key)
            with suppress(OSError):
                tier.device.write_file(file, sealed, sync=tier.durable)
    tier.device.write_all(plain, sync=tier.durable)


def give_up(block: NewBlock, lost: PutOutcome) -> None:
    """Take a draft away that is not wanted: another was there first (`EXISTS`), or it was purged (`REFUSED`)."""
    if lost is PutOutcome.REFUSED:
        overwrite(block.draft)
    erase(block.draft)
    block.outcome = lost


def put_in_place(blocks: Sequence[NewBlock]) -> None:
    """Give drafts their blocks' names, whose locks are held. Whatever cannot have it goes, and `outcome` says so."""
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
            block.outcome = outcome_of(failure)


def _take_back(fd: int, path: str) -> None:
    """A draft that could not be written; `fd` is -1 if it could not even be made."""
    if fd >= 0:
        os.ftruncate(fd, 0)
        release(fd)
    erase(path)


def outcome_of(error: OSError) -> PutOutcome:
    """What a put says of a block for which the system had an error."""
    return PutOutcome.FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else PutOutcome.FAILED
