"""Memory that two processes have mapped: where a buffer lies in it, said so that the other process finds it too.

A region is a file without a name (`memfd_create`, or one in /dev/shm that was unlinked), mapped shared. Whoever made
it, with whatever library: a buffer's address leads to its mapping (/proc/self/maps), and the file's number to a
descriptor (/proc/self/fd; CPython's `mmap` keeps one). The descriptor is what the other process is given.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
from bisect import bisect_right
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import ConfigurationError
from kvstore.integrity import address_in_memory
from kvstore.layout import as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from typing_extensions import Buffer

__all__ = ["Lent", "Region", "is_shareable", "shared_memory"]

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (....) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+)")


def shared_memory(nbytes: int) -> NDArray[np.uint8]:
    """Memory on whole pages that another process can be given; it is mapped for as long as the array or a view of it
    is there, and gone with the last process that has it mapped. Raises `OSError` or `MemoryError`.
    """
    descriptor = os.memfd_create("kvstore", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        area = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)
    finally:
        os.close(descriptor)
    with contextlib.suppress(OSError):  # a kernel without huge pages: only slower
        area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, dtype=np.uint8)


def is_shareable(memory: Buffer) -> bool:
    """Whether another process can be given `memory`: `shared_memory` is, and so is what vLLM makes for its workers."""
    flat = as_bytes(memory)
    lent = Lent()
    try:
        lent.add(flat)
    except ConfigurationError:
        return False
    lent.clear()
    return True


@dataclass(frozen=True, slots=True)
class Region:
    """`nbytes` at `address` of this process, which are those at `offset` of the file that `descriptor` is open on."""

    number: int
    address: int
    nbytes: int
    descriptor: int
    offset: int
    memory: NDArray[np.uint8]
    """Keeps it mapped: nothing else may come to lie at its address while another process writes there."""


class Lent:
    """The regions that another process is given. Threads: any number call `place`, one at a time the rest."""

    def __init__(self) -> None:
        self._regions: tuple[Region, ...] = ()  # by address
        self._descriptors: list[int] = []

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions)

    def add(self, memory: NDArray[np.uint8]) -> Region:
        """Flat memory of this process, kept mapped until `clear`.

        Raises `ConfigurationError` where no other process can have it mapped.
        """
        address = address_in_memory(memory)
        descriptor, offset = _file_behind(address, memory.nbytes)
        region = Region(len(self._descriptors), address, memory.nbytes, descriptor, offset, memory)
        self._descriptors.append(descriptor)
        self._regions = tuple(sorted((*self._regions, region), key=_address))
        return region

    def remove(self, region: Region) -> None:
        """Nothing lies in it any more. Its descriptor is closed by `clear`: it may be on its way."""
        self._regions = tuple(one for one in self._regions if one is not region)

    def place(self, memory: NDArray[np.uint8]) -> tuple[int, int] | None:
        """The number of the region that the flat `memory` lies in, and where there; None if it lies in none."""
        address, regions = address_in_memory(memory), self._regions
        index = bisect_right(regions, address, key=_address) - 1
        if index < 0:
            return None
        region = regions[index]
        start = address - region.address
        return (region.number, start) if start + memory.nbytes <= region.nbytes else None

    def clear(self) -> None:
        """The other process is gone, or has let go of all of them."""
        self._regions = ()
        while self._descriptors:
            os.close(self._descriptors.pop())


_address = attrgetter("address")


def _file_behind(address: int, nbytes: int) -> tuple[int, int]:
    """A descriptor of our own, and where in its file the memory begins."""
    file, offset = _mapped(address, nbytes)
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
        with contextlib.suppress(OSError):
            if _is_open_on(int(entry), file):  # only then: closing a copy lets go of its file's POSIX locks
                copy = os.dup(int(entry))
                if _is_open_on(copy, file):  # still: another thread may have closed the one and opened another
                    return copy, offset
                os.close(copy)
    raise ConfigurationError(
        f"{nbytes} bytes of memory cannot be shared with the I/O process: nothing here has their file open any more."
        f" {_REMEDY}"
    )


def _is_open_on(descriptor: int, file: tuple[int, int, int]) -> bool:
    """For reading and writing. Raises `OSError` if it is not open."""
    about = os.fstat(descriptor)
    writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    return writable and (os.major(about.st_dev), os.minor(about.st_dev), about.st_ino) == file


_REMEDY = (
    "Make the memory with kvstore.apart.shared_memory, or PrimaryTier(…, shared=True), or leave io_process out (in"
    ' vLLM: "io_process": false)'
)


def _mapped(address: int, nbytes: int) -> tuple[tuple[int, int, int], int]:
    """The file (major, minor, inode) that is mapped there, writable and shared, and where in it that begins."""
    file: tuple[int, int, int] | None = None
    first, reached = 0, address
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = _MAPPING.match(line)
        if found is None:
            continue
        start, stop, offset = int(found[1], 16), int(found[2], 16), int(found[4], 16)
        if not start <= reached < stop:
            continue
        here = int(found[5], 16), int(found[6], 16), int(found[7])
        at = offset + reached - start
        if "w" not in found[3] or "s" not in found[3] or not here[2]:
            break
        if file is None:
            file, first = here, at
        elif (here, at) != (file, first + reached - address):  # another file's, or another part of this one
            break
        reached = stop
        if reached >= address + nbytes:
            return file, first
    raise ConfigurationError(
        f"{nbytes} bytes of memory cannot be shared with the I/O process: they are private to this one. {_REMEDY}"
    )
