"""The bare device: one file per block, one `pwritev` and one `preadv` each, O_DIRECT, no checks, no catalogue.

One file per block, because that is what any store of separate blocks does to the file system; on ext4 it was also a
little faster than slices of one large file.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kvstore.bench.contestant import Contestant
from kvstore.errors import StoreAccessError, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from kvstore.types import BlockKey

__all__ = ["RawFiles"]

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)


class RawFiles(Contestant):
    """Files in a folder of its own under `directory`, which must exist."""

    name: ClassVar[str] = "raw"

    def __init__(self, directory: Path, block_bytes: int) -> None:
        self.notes = []
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=".kvstore-bench-", dir=directory))
        except OSError as error:
            raise StoreAccessError(f"{directory}: no folder for the raw files can be made here: {error}") from error
        self._flags = self._probe(block_bytes)

    def _probe(self, block_bytes: int) -> int:
        """Whether O_DIRECT works here, by trying: some file systems refuse at open, others at the first write."""
        if block_bytes % mmap.PAGESIZE:
            self.notes.append(f"raw: buffered, O_DIRECT wants multiples of {mmap.PAGESIZE} bytes")
            return 0
        probe = self._folder / "probe"
        page = memoryview(mmap.mmap(-1, mmap.PAGESIZE))
        try:
            self._write(probe, page, _O_DIRECT)
        except TierUnavailable as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                self.close()
                raise
            self.notes.append("raw: buffered, this file system refuses O_DIRECT; writes may still be in memory")
            return 0
        finally:
            probe.unlink(missing_ok=True)
        self.notes.append("raw: direct (O_DIRECT), one file per block, no checks")
        return _O_DIRECT

    def store(self, keys: Sequence[BlockKey], sources: Sequence[memoryview]) -> None:
        for key, source in zip(keys, sources, strict=True):
            self._write(self._path(key), source, self._flags)

    def load(self, keys: Sequence[BlockKey], targets: Sequence[memoryview]) -> None:
        for key, target in zip(keys, targets, strict=True):
            with self._opened(self._path(key), os.O_RDONLY | self._flags) as descriptor:
                _whole(os.preadv(descriptor, [target], 0), target)

    def clear(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def files(self) -> list[Path]:
        return list(self._folder.iterdir())

    def _path(self, key: BlockKey) -> Path:
        return self._folder / key.digest.hex()

    def _write(self, path: Path, source: memoryview, flags: int) -> None:
        with self._opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags) as descriptor:
            _whole(os.pwritev(descriptor, [source], 0), source)

    @contextmanager
    def _opened(self, path: Path, flags: int) -> Generator[int]:
        try:
            descriptor = os.open(path, flags, 0o600)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            raise TierUnavailable(error.errno, f"the raw files in {self._folder}: {error.strerror}") from error


def _whole(moved: int, buffer: memoryview) -> None:
    if moved != buffer.nbytes:
        raise OSError(errno.EIO, f"{moved} of {buffer.nbytes} bytes were moved")
