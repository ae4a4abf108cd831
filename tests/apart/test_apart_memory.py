"""Memory that two processes have: found again from nothing but a buffer, and refused where it cannot be had."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import TYPE_CHECKING

import numpy as np
import pytest
from apart_helpers import descriptors

from kvstore.apart.memory import Lent, is_shareable, shared_memory
from kvstore.errors import ConfigurationError

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAGE = mmap.PAGESIZE


def through_the_file(lent: Lent, part: NDArray[np.uint8]) -> bytes:
    """The bytes of `part`, as whoever was given its region finds them."""
    place = lent.place(part)
    assert place is not None
    region = next(one for one in lent if one.number == place[0])
    return os.pread(region.descriptor, part.nbytes, region.offset + place[1])


def flat(area: mmap.mmap) -> NDArray[np.uint8]:
    return np.frombuffer(area, np.uint8)


def test_a_part_of_lent_memory_is_found_at_its_place_in_the_file() -> None:
    lent, memory = Lent(), shared_memory(5 * PAGE)
    lent.add(memory)
    memory[PAGE + 7 : PAGE + 9] = (3, 4)
    assert through_the_file(lent, memory[PAGE + 7 : PAGE + 9]) == b"\3\4"
    lent.clear()


def test_memory_of_somebody_else_is_found_though_its_file_has_no_name_and_was_closed() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(8 * PAGE)
        area = mmap.mmap(file.fileno(), 6 * PAGE, offset=2 * PAGE)
    lent, memory = Lent(), flat(area)
    for part in (memory[PAGE : 3 * PAGE], memory[4 * PAGE :]):
        lent.add(part)
        part[:] = 1 + lent.place(part)[0]  # type: ignore[index]
        assert through_the_file(lent, part[5:]) == bytes(part[5:])
    assert lent.place(memory[:PAGE]) is None
    assert lent.place(memory[2 * PAGE : 4 * PAGE]) is None, "the end of it was not lent"
    lent.clear()


def test_memory_whose_parts_have_other_flags_is_one_region() -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(64 * PAGE)
        area = mmap.mmap(file.fileno(), 64 * PAGE)
    area.madvise(mmap.MADV_DONTDUMP, 8 * PAGE, 16 * PAGE)  # three mappings in /proc/self/maps
    lent, memory = Lent(), flat(area)
    lent.add(memory)
    memory[-1] = 9
    assert through_the_file(lent, memory[-1:]) == b"\x09"
    lent.clear()


def test_memory_is_lent_in_any_order_and_found() -> None:
    lent, area = Lent(), shared_memory(4 * PAGE).reshape(4, PAGE)
    for row in (2, 0, 3):
        lent.add(area[row])
    assert [lent.place(row) for row in area] == [(1, 0), None, (0, 0), (2, 0)]
    lent.clear()


@pytest.mark.parametrize("kind", ["private", "heap", "anonymous", "read-only"])
def test_what_cannot_be_shared_is_refused_with_what_to_do(kind: str) -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(PAGE)
        memory = {
            "private": flat(mmap.mmap(file.fileno(), PAGE, flags=mmap.MAP_PRIVATE)),
            "heap": np.zeros(PAGE, np.uint8),
            "anonymous": flat(mmap.mmap(-1, PAGE)),  # shared with children, and nothing has its file open
            "read-only": flat(mmap.mmap(file.fileno(), PAGE, prot=mmap.PROT_READ)),
        }[kind]
        before = descriptors()
        assert not is_shareable(memory)
        with pytest.raises(ConfigurationError, match=r"cannot be shared.*shared_memory.*io_process"):
            Lent().add(memory)
        assert descriptors() <= before  # fewer: a store of the test before has just let go of its own


def test_clearing_closes_what_was_opened() -> None:
    memory, lent = shared_memory(PAGE), Lent()
    before = descriptors()
    assert is_shareable(memory.data)
    assert descriptors() <= before
    descriptor = lent.add(memory).descriptor
    assert os.fstat(descriptor).st_size == PAGE
    lent.clear()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert lent.place(memory) is None
