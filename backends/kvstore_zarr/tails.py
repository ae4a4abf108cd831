"""What the files of a tier say of their blocks: for a catalogue that is made anew (`rebuild`) or brought up to date
(`reindex`).

A block's tail lies at its file's end, so each file costs an opening and a read of a page. Where nothing of that is in
memory, after a restart of the machine, a device answers many such reads in the time of one: several threads ask. Where
all is, they would cost twice the CPU, waiting for each other: so they do only while the device is read from.
"""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from resource import RUSAGE_THREAD, getrusage
from typing import TYPE_CHECKING

import numpy as np

from kvstore.catalog import Entry, address_of
from kvstore.files import NotAFileError, open_file, open_unchecked
from kvstore_zarr.format import PAGE, is_left_alone
from kvstore_zarr.tier import is_draft

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from kvstore.types import BlockKey
    from kvstore_zarr.metadata import NamespaceTree

__all__ = ["BlockFile", "Tail", "TailReader", "block_files", "block_folders", "is_foreign"]

READERS = 8
"""Files read side by side."""
_TOGETHER = 32
"""Files that a thread reads in one go."""
_AT_A_TIME = 2 * READERS * _TOGETHER
"""Files that all of them read before it is asked again whether they should."""
_COLD = 4
"""Several threads are worth their while from one page of so many files on that comes from the device."""


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A file that has the name of a block."""

    key: BlockKey
    path: str
    address: bytes


@dataclass(frozen=True, slots=True)
class Tail:
    """What was found in a file: its block's `entry`, None where it can be no whole block of that key. `gone`: nothing
    stands there any more. `foreign`: a later kvstore's block does, which is left alone.
    """

    file: BlockFile
    entry: Entry | None = None
    gone: bool = False
    foreign: bool = False

    @property
    def bad(self) -> bool:
        """Whether the file is nobody's block."""
        return self.entry is None and not self.gone and not self.foreign


def block_folders(tree: NamespaceTree) -> Iterator[tuple[int, str]]:
    """The KV-cache group and the name of each folder that can hold blocks, in the order of addresses."""
    yield from ((group, f"{first:02x}") for group in range(len(tree.frames)) for first in range(256))


def block_files(root: Path, tree: NamespaceTree, group: int, folder: str) -> tuple[dict[bytes, BlockFile], list[str]]:
    """All files in one folder that have the name of a block, by its address; and the paths of drafts."""
    found: dict[bytes, BlockFile] = {}
    drafts: list[str] = []
    try:
        with os.scandir(root / tree.group_folder(group) / folder) as entries:
            for entry in entries:
                try:
                    key = tree.key(group, folder, entry.name)
                except (ValueError, OverflowError):
                    if is_draft(entry.name):
                        drafts.append(entry.path)
                    continue
                address = address_of(tree.namespace, key)
                found[address] = BlockFile(key, entry.path, address)
    except (FileNotFoundError, NotADirectoryError):
        pass
    return found, drafts


class TailReader:
    """Threads that read tails, within a `with`."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="kvstore-tails")
        self._waiting = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)

    def read(self, tree: NamespaceTree, files: Sequence[BlockFile]) -> list[Tail]:
        """What each file says, in order. Raises OSError where the device fails."""
        tails: list[Tail] = []
        while len(tails) < len(files):
            several = files[len(tails) : len(tails) + (_AT_A_TIME if self._waiting else _TOGETHER)]
            parts = [several[start : start + _TOGETHER] for start in range(0, len(several), _TOGETHER)]
            if self._waiting:
                read = list(self._threads.map(partial(_read, tree), parts))
            else:
                read = [_read(tree, part) for part in parts]
            tails += chain.from_iterable(some for some, _ in read)
            self._waiting = sum(pages for _, pages in read) * _COLD > len(several)
        return tails


def _read(tree: NamespaceTree, files: Sequence[BlockFile]) -> tuple[list[Tail], int]:
    """What the files say, and how many pages had to come from the device for it."""
    before = getrusage(RUSAGE_THREAD).ru_inblock
    tails: list[Tail] = []
    for file in files:
        try:
            tails.append(_tail(tree, file))
        except (FileNotFoundError, NotADirectoryError):
            tails.append(Tail(file, gone=True))
    return tails, (getrusage(RUSAGE_THREAD).ru_inblock - before) * 512 // PAGE


def is_foreign(path: str) -> bool:
    """Whether what stands at `path` is a block that a later kvstore wrote: to be left alone."""
    try:
        fd = open_file(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return _is_foreign(fd)
    except OSError:
        return False
    finally:
        os.close(fd)


def _is_foreign(fd: int) -> bool:
    return is_left_alone(os.fstat(fd).st_size, lambda offset, length: os.pread(fd, length, offset))


def _tail(tree: NamespaceTree, file: BlockFile) -> Tail:
    try:
        fd = open_unchecked(file.path, os.O_RDONLY)
    except NotAFileError:
        return Tail(file)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return Tail(file)
        entry = _entry(tree, file, fd, status)
        return Tail(file, entry, foreign=entry is None and _is_foreign(fd))
    finally:
        os.close(fd)


def _entry(tree: NamespaceTree, file: BlockFile, fd: int, status: os.stat_result) -> Entry | None:
    frame = tree.frames[file.key.group]
    occupied = status.st_blocks * 512
    if status.st_size != frame.file_bytes or occupied < frame.file_bytes:
        return None
    closing = np.frombuffer(os.pread(fd, frame.closing, frame.whole), dtype=np.uint8)
    facts = frame.facts(closing)
    if facts is None or facts.key != file.key or facts.fingerprint != tree.namespace.fingerprint:
        return None
    return Entry(
        file.address, occupied, facts.created, facts.created, facts.generation,
        position=facts.position, parent=facts.parent,
    )  # fmt: skip
