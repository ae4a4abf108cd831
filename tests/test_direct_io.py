"""How block bytes move: past the page cache where that works, through it where not, and the mode in use is reported."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore import BlockKey, BlockLayout, BlockRead, BlockWrite, GetOutcome, Namespace, PutOutcome, open_store
from kvstore.errors import StoreAccessError
from kvstore_zarr import calls
from kvstore_zarr.device import BlockDevice, aligned_empty, probe_direct
from kvstore_zarr.format import PAGE, PART_BYTES
from kvstore_zarr.metadata import NamespaceTree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

MIB = 1 << 20
SIZES = [1, 100, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 17, MIB, PART_BYTES, PART_BYTES + PAGE, 2 * PART_BYTES + 5]


def space_of(nbytes: int) -> Namespace:
    return Namespace("model", "1", (BlockLayout.opaque(nbytes),), block_tokens=16)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "little"))


def buffer(nbytes: int, offset: int) -> NDArray[np.uint8]:
    """`nbytes` that begin `offset` bytes after a page boundary."""
    return aligned_empty(nbytes + offset)[offset : offset + nbytes]


@pytest.fixture
def direct_folder(tmp_path: Path) -> Path:
    """A folder whose file system takes O_DIRECT."""
    reason = probe_direct(tmp_path)
    if reason is not None:
        pytest.skip(reason)
    return tmp_path


@pytest.fixture
def refusing_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system that refuses O_DIRECT: ramfs does."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system takes root")
    path = tmp_path / "ramfs"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "ramfs", "kvstore-test", path], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", path], check=True, capture_output=True)


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("nbytes", SIZES)
def test_blocks_of_any_size_move_to_and_from_buffers_at_any_address(direct_folder: Path, io: str, nbytes: int) -> None:
    space = space_of(nbytes)
    given = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    with open_store(f"file://{direct_folder}/tier", io=io) as store:
        assert store.capabilities.io == io
        for number, offset in enumerate((0, 1, 64, PAGE - 1)):
            source = buffer(nbytes, offset)
            source[:] = given
            assert store.put_many(space, [BlockWrite(key(number), source)]) == [PutOutcome.STORED]
            assert np.array_equal(source, given)
            around = buffer(nbytes + 2, offset)
            around[:] = 99
            assert store.get_many_into(space, [BlockRead(key(number), around[1:-1])]) == [GetOutcome.HIT]
            assert np.array_equal(around[1:-1], given)
            assert (around[0], around[-1]) == (99, 99)


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_blocks_that_go_together_and_blocks_that_go_alone_do_not_mix(direct_folder: Path, io: str) -> None:
    """Of one call: small and large, in pages of their own or not."""
    sizes = (5000, MIB, PART_BYTES + 5)
    space = Namespace("model", "1", tuple(BlockLayout.opaque(nbytes) for nbytes in sizes), block_tokens=16)
    sources: list[tuple[BlockKey, NDArray[np.uint8]]] = []
    for number in range(60):
        group = 2 if number % 20 == 7 else number % 5 == 3
        source = buffer(sizes[group], 0 if number % 3 else number)
        source[:] = np.random.default_rng(number).integers(0, 256, sizes[group], np.uint8)
        sources.append((BlockKey(number.to_bytes(32, "little"), int(group)), source))
    with open_store(f"file://{direct_folder}/tier", io=io) as store:
        outcomes = store.put_many(space, [BlockWrite(*source) for source in sources])
        assert set(outcomes) == {PutOutcome.STORED}
        into = [np.zeros_like(source) for _, source in sources]
        reads = [BlockRead(name, row) for (name, _), row in zip(sources, into, strict=True)]
        assert set(store.get_many_into(space, reads)) == {GetOutcome.HIT}
        assert all(np.array_equal(row, source) for row, (_, source) in zip(into, sources, strict=True))


def test_what_one_mode_wrote_the_other_reads(direct_folder: Path) -> None:
    space = space_of(10_000)
    data = np.random.default_rng(1).integers(0, 256, 10_000, np.uint8)
    for writer, reader in (("direct", "buffered"), ("buffered", "direct")):
        path = direct_folder / writer
        with open_store(f"file://{path}", io=writer) as store:
            store.put_many(space, [BlockWrite(key(1), data)])
        with open_store(f"file://{path}", io=reader) as store:
            into = np.empty(10_000, np.uint8)
            assert store.get_many_into(space, [BlockRead(key(1), into)]) == [GetOutcome.HIT]
            assert np.array_equal(into, data)


def test_the_mode_is_reported_with_its_reason(direct_folder: Path) -> None:
    with open_store(f"file://{direct_folder}/tier") as store:
        assert (store.capabilities.io, store.capabilities.alignment) == ("direct", PAGE)
        assert store.capabilities.notes == (f"client: {calls.how}",)
    with open_store(f"file://{direct_folder}/tier", io="buffered") as store:
        assert (store.capabilities.io, store.capabilities.alignment) == ("buffered", 1)
        assert "io=buffered" in store.capabilities.notes[0]
    with open_store(f"file://{direct_folder}/tier", readonly=True) as store:
        assert store.capabilities.io == "direct"


def test_where_direct_is_refused_auto_falls_back_and_says_why(refusing_folder: Path) -> None:
    """Field report 20: O_DIRECT refused by a file system, or silently buffered."""
    space = space_of(10_000)
    with open_store(f"file://{refusing_folder}/tier") as store:
        assert store.capabilities.io == "buffered"
        assert re.search("refuses O_DIRECT", store.capabilities.notes[0])
        assert store.put_many(space, [BlockWrite(key(1), bytes(10_000))]) == [PutOutcome.STORED]
        assert store.get_many_into(space, [BlockRead(key(1), bytearray(10_000))]) == [GetOutcome.HIT]
    with open_store(f"file://{refusing_folder}/tier", readonly=True) as store:
        assert store.capabilities.io == "buffered"
    assert not list(refusing_folder.rglob("probe-*"))


def test_where_direct_is_refused_asking_for_it_is_an_error(refusing_folder: Path) -> None:
    with pytest.raises(StoreAccessError, match=r"io=direct is not possible.*io=auto"):
        open_store(f"file://{refusing_folder}/deep/tier", io="direct")
    assert not list(refusing_folder.iterdir())  # nothing was changed


def test_direct_blocks_stay_out_of_the_page_cache(direct_folder: Path) -> None:
    fincore = shutil.which("fincore")
    if fincore is None:
        pytest.skip("fincore (util-linux) is not installed")
    space, cached = space_of(MIB), {}
    for io in ("direct", "buffered"):
        with open_store(f"file://{direct_folder}/{io}", io=io) as store:
            store.put_many(space, [BlockWrite(key(1), aligned_empty(MIB))])
            file = direct_folder / io / NamespaceTree(space).block(key(1))
            for _ in range(10):  # somebody else on this machine may drop the page cache in between, a benchmark does
                store.get_many_into(space, [BlockRead(key(1), aligned_empty(MIB))])
                asked = [fincore, "-b", "-n", "-o", "RES", file]
                done = subprocess.run(asked, capture_output=True, text=True, check=True)
                cached[io] = int(done.stdout)
                if cached[io]:
                    break
    assert cached["direct"] == 0
    assert cached["buffered"] >= MIB


def test_a_block_moves_in_one_call_each_way(direct_folder: Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    log = direct_folder / "calls"
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
import kvstore
from kvstore_zarr.device import aligned_empty
space = kvstore.Namespace("m", "1", (kvstore.BlockLayout.opaque({MIB}),), 16)
with kvstore.open_store("file://{direct_folder}/tier", io="direct") as store:
    for number in range(3):
        key = kvstore.BlockKey(bytes([number]) * 32)
        assert store.put_many(space, [kvstore.BlockWrite(key, aligned_empty({MIB}))])[0].name == "STORED"
        assert store.get_many_into(space, [kvstore.BlockRead(key, aligned_empty({MIB}))])[0].name == "HIT"
"""
    command = [strace, "-f", "-e", "trace=pwritev,preadv,pwritev2,preadv2,ftruncate", "-o", str(log)]
    done = subprocess.run([*command, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if "ptrace" in done.stderr.lower():
        pytest.skip(f"strace is not permitted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    moved = re.findall(rf"(p\w+)\(.*= {MIB + PAGE}$", log.read_text(), re.MULTILINE)
    assert moved == ["pwritev", "preadv"] * 3 or moved == ["pwritev2", "preadv2"] * 3, log.read_text()[-3000:]
    assert "ftruncate" not in log.read_text().partition(f"= {MIB + PAGE}")[2]  # padded, not cut


@pytest.mark.parametrize("nbytes", [1, PAGE, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES + 5, 32 * MIB])
def test_parts_are_whole_pages_and_none_is_small(nbytes: int) -> None:
    parts = list(NamespaceTree(space_of(nbytes)).frames[0].parts)
    assert [start for start, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == nbytes
    assert all(start % PAGE == 0 and end - start <= PART_BYTES for start, end in parts)
    assert all(end - start > nbytes / len(parts) - PAGE * len(parts) for start, end in parts)


def test_a_thread_keeps_a_bounded_buffer(direct_folder: Path) -> None:
    device, _ = BlockDevice.choose("direct", direct_folder, sample=direct_folder / "none", readonly=False)
    space = space_of(4 * PART_BYTES)
    frame = NamespaceTree(space).frames[0]
    payload = buffer(4 * PART_BYTES, 1)
    file = device.create(str(direct_folder / "file"), 0o600)
    device.write(file, frame, payload, lambda *_: None, sync=False)
    assert file.fd == -1
    assert device._scratch.bounce.nbytes == PART_BYTES
