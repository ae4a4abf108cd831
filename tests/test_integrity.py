"""Checksums: the ones that everybody else computes, and no other thread waits for one."""

from __future__ import annotations

import sys
import threading
import time
import types
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import integrity
from kvstore.integrity import LARGE_BYTES, copied, crc32c
from kvstore.testing.patience import wait_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

DATA = np.random.default_rng(0).integers(0, 256, 2 << 20, np.uint8)


def test_the_check_value_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0


@pytest.mark.parametrize("nbytes", [1, 100, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, DATA.nbytes])
def test_short_or_long_bytes_or_array_in_one_piece_or_two_the_checksum_is_the_same(nbytes: int) -> None:
    data = DATA[:nbytes]
    expected = google_crc32c.value(data)
    assert crc32c(data) == crc32c(data.tobytes()) == expected
    for cut in (0, nbytes // 3, nbytes):
        assert crc32c(data[cut:], crc32c(data[:cut])) == expected


def test_checksums_of_memory_that_must_not_be_written_to() -> None:
    data = DATA.copy()
    data.flags.writeable = False
    assert crc32c(data) == google_crc32c.value(DATA)


@pytest.mark.parametrize("large", [None, integrity._without_the_gil(), integrity._with_wide_registers()])
def test_whichever_library_is_there_checksums_are_as_right(monkeypatch: pytest.MonkeyPatch, large: object) -> None:
    monkeypatch.setattr(integrity, "_large", large)
    read_only = DATA.copy()
    read_only.flags.writeable = False
    assert crc32c(DATA) == crc32c(read_only) == crc32c(DATA.tobytes()) == google_crc32c.value(DATA)
    assert crc32c(DATA[100:], crc32c(DATA[:100])) == google_crc32c.value(DATA)


def test_a_library_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = types.SimpleNamespace(iscsi=lambda *_: 7, copy=lambda *_: 7, SUMS=1)
    monkeypatch.setitem(sys.modules, "fastcrc.crc32", wrong)  # type: ignore[arg-type]
    assert integrity._with_wide_registers() is None
    monkeypatch.setattr(integrity, "extension", wrong)
    assert integrity._on_the_way() is None


def ways_to_copy() -> list[object]:
    """In C on a processor that can; and a copy with a checksum after it."""
    return [None, integrity._on_the_way()]


@pytest.mark.parametrize("way", ways_to_copy())
@given(
    nbytes=st.one_of(st.integers(0, 1100), st.integers(LARGE_BYTES - 300, LARGE_BYTES + 300)),
    offset=st.integers(0, 70),
    to=st.integers(0, 70),
    start=st.integers(0, 2**32 - 1),
)
def test_a_copy_and_its_checksum(way: object, nbytes: int, offset: int, to: int, start: int) -> None:
    source, memory = DATA[offset : offset + nbytes], np.full(nbytes + 140, 7, np.uint8)
    into = memory[to : to + nbytes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integrity, "_copy", way)
        assert copied(into, source, start) == crc32c(source, start)
        assert into.tobytes() == source.tobytes()
        assert set(memory[:to]) | set(memory[to + nbytes :]) == {7}
        assert copied(into, source.tobytes()) == copied(into, source.data) == crc32c(source)


@pytest.mark.parametrize("way", ways_to_copy())
def test_a_copy_that_does_not_fit(way: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "_copy", way)
    into = np.full(3, 7, np.uint8)
    for source in (b"", b"1", b"four"):
        with pytest.raises(ValueError, match=f"{len(source)} bytes do not fit into 3"):
            copied(into, source)
    assert set(into) == {7}
    into.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copied(into, b"new")


def test_other_threads_go_on_while_a_large_block_is_checked() -> None:
    """One checksum of 256 MiB takes 10 ms and more: a thread that ticks meanwhile must not see them as one pause."""
    data = np.ones(256 << 20, np.uint8)
    wait_for(lambda: ticks_while_checked(data) > 3)  # a busy machine may be one pause itself, and not each time


def ticks_while_checked(data: NDArray[np.uint8]) -> int:
    begun, ticks, ended = threading.Event(), 0, threading.Event()

    def check() -> None:
        begun.set()
        crc32c(data)
        ended.set()

    checking = threading.Thread(target=check)
    checking.start()
    begun.wait()
    while not ended.is_set():
        ticks += 1
        time.sleep(0.0005)
    checking.join()
    return ticks
