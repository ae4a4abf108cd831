"""What the files of a tier say of their blocks: for a catalogue that is made anew (`rebuild`) or brought up to date
(`reindex`).

A block's tail lies at its file's end, so each file costs an opening and a read of a page. Where nothing of that is in
memory, after a restart of the machine, a device answers many such reads in the time of one: several threads ask.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from kvstore.catalog import Entry, address_of
from kvstore.files import NotAFileError, open_file
from kvstore_zarr.format import is_left_alone

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


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A file that has the name of a block."""

    key: BlockKey
    path: str


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


def block_files(root: Path, tree: NamespaceTree, group: int, folder: str) -> dict[bytes, BlockFile]:
    """All files in one folder that have the name of a block, by its address."""
    found: dict[bytes, BlockFile] = {}
    try:
        with os.scandir(root / tree.group_folder(group) / folder) as entries:
            for entry in entries:
                try:
                    key = tree.key(group, folder, entry.name)
                except (ValueError, OverflowError):
                    continue
                found[address_of(tree.namespace, key)] = BlockFile(key, entry.path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    return found


class TailReader:
    """Threads that read tails, within a `with`."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="kvstore-tails")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)

    def read(self, tree: NamespaceTree, files: Sequence[BlockFile]) -> list[Tail]:
        """What each file says, in order. Raises OSError where the device fails."""
        parts = (files[start : start + _TOGETHER] for start in range(0, len(files), _TOGETHER))
        return list(chain.from_iterable(self._threads.map(partial(_read, tree), parts)))


def _read(tree: NamespaceTree, files: Sequence[BlockFile]) -> list[Tail]:
    tails: list[Tail] = []
    for file in files:
        try:
            tails.append(_tail(tree, file))
        except (FileNotFoundError, NotADirectoryError):
            tails.append(Tail(file, gone=True))
    return tails


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
        fd = open_file(file.path, os.O_RDONLY)
    except NotAFileError:
        return Tail(file)
    try:
        entry = _entry(tree, file.key, fd)
        return Tail(file, entry, foreign=entry is None and _is_foreign(fd))
    finally:
        os.close(fd)


def _entry(tree: NamespaceTree, key: BlockKey, fd: int) -> Entry | None:
    frame, status = tree.frames[key.group], os.fstat(fd)
    occupied = status.st_blocks * 512
    if status.st_size != frame.file_bytes or occupied < frame.file_bytes:
        return None
    closing = np.frombuffer(os.pread(fd, frame.closing, frame.whole), dtype=np.uint8)
    facts = frame.facts(closing)
    if facts is None or facts.key != key or facts.fingerprint != tree.namespace.fingerprint:
        return None
    return Entry(
        address_of(tree.namespace, key), occupied, facts.created, facts.created, facts.generation,
        position=facts.position, parent=facts.parent,
    )  # fmt: skip
