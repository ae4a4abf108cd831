"""What a block asks of the system in one go: the same from C and from Python."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.integrity import crc32c
from kvstore_zarr import calls
from kvstore_zarr.calls import NO_SUM, PYTHON, SIZE_DIFFERS, TOO_SHORT, BlockFile, Step, Then, Whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

pytestmark = pytest.mark.usefixtures("executor")
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_CLOEXEC


def filled(nbytes: int, seed: int = 1) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def empty(nbytes: int) -> NDArray[np.uint8]:
    return np.zeros(nbytes, np.uint8)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of 10 000 bytes."""
    (tmp_path / "file").write_bytes(filled(10_000).tobytes())
    return tmp_path / "file"


def failed(file: BlockFile) -> tuple[int, int, bool]:
    """How a file failed, and whether it is open still, which it is not after this."""
    is_open = file.fd >= 0
    if is_open:
        os.close(file.fd)
    return file.error, file.step, is_open


def test_a_file_is_written_and_read_back_in_two_pieces_and_parts(tmp_path: Path) -> None:
    path, before = tmp_path / "ümlaut", descriptors()
    for then in (Then.END, Then.END_SYNCED):
        file = BlockFile(str(path), NEW, 0o640)
        file.write(0, filled(4096), None, Then.GO_ON)
        assert file.fd >= 0
        file.write(4096, filled(904, 2), filled(300, 3), then)
        status = path.stat()
        assert (file.mode, file.occupied, file.inode) == (status.st_mode, status.st_blocks * 512, status.st_ino)
        assert status.st_mode & 0o777 == 0o640
        again = BlockFile(str(path), READ, 5300)
        first, second, closing = empty(4096), empty(904), empty(300)
        assert again.read(0, first, None, Then.GO_ON)
        with path.open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert again.read(4096, second, closing, Then.END)
        assert (again.mode, again.occupied, again.inode) == (status.st_mode, status.st_blocks * 512, status.st_ino)
        assert [filled(4096).tobytes(), filled(904, 2).tobytes(), filled(300, 3).tobytes()] == [
            piece.tobytes() for piece in (first, second, closing)
        ]
        assert (file.fd, again.fd, descriptors()) == (-1, -1, before)
        path.unlink()


def test_a_file_that_is_open_is_written_over_and_unlocked(path: Path) -> None:
    fd = os.open(path, os.O_RDWR)
    twin = os.dup(fd)  # as a child's, that was forked meanwhile
    fcntl.flock(fd, fcntl.LOCK_EX)
    file = BlockFile(str(path), NEW, 0o600, fd)
    file.write(0, filled(10_000, 2), empty(0), Then.END)
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(twin)
    assert path.read_bytes() == filled(10_000, 2).tobytes()


def test_what_is_no_block_is_told_by_the_step_that_failed(path: Path) -> None:
    missing = BlockFile(f"{path}/none", READ, 1)
    assert not missing.read(0, empty(1), None, Then.END)
    assert failed(missing) == (errno.ENOTDIR, Step.OPEN, False)
    assert isinstance(missing.failure(), NotADirectoryError)
    with pytest.raises(FileExistsError):
        BlockFile(str(path), NEW, 0o600).write(0, filled(1), None, Then.END)
    other = BlockFile(str(path), READ, 10_001)
    assert not other.read(0, empty(1), None, Then.END)
    assert other.inode == path.stat().st_ino
    assert failed(other) == (SIZE_DIFFERS, Step.EXPECT, True)
    short = BlockFile(str(path), READ, 10_000)
    assert not short.read(9000, empty(500), empty(501), Then.END)
    assert failed(short) == (TOO_SHORT, Step.MOVE, True)
    with path.open("rb") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        busy = BlockFile(str(path), READ, 10_000)
        assert not busy.read(0, empty(1), None, Then.END)
        assert failed(busy) == (errno.EWOULDBLOCK, Step.LOCK, True)


def test_a_file_that_stays_open_is_read_and_locked_until_it_is_closed(path: Path) -> None:
    file, into = BlockFile(str(path), READ, 10_000), empty(10_000)
    assert file.read(0, into, None, Then.GO_ON)
    assert into.tobytes() == path.read_bytes()
    with path.open("rb") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(file.fd)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_reads_that_bring_less_are_gone_on_with() -> None:
    source = Path("/proc/kallsyms")  # gives some pages at a time
    expected = source.read_bytes()[: 1 << 18] if source.exists() else b""
    if len(expected) < 1 << 18:
        pytest.skip("no such file here")
    first, second = empty(100_001), empty((1 << 18) - 100_001)
    assert BlockFile(str(source), READ, 0).read(0, first, second, Then.END)
    assert first.tobytes() + second.tobytes() == expected


def test_writes_that_take_less_are_gone_on_with(tmp_path: Path) -> None:
    file = BlockFile(str(tmp_path / "file"), NEW, 0o600)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.write(0, filled(4000), filled(4000, 2), Then.END)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failed(file) == (errno.EFBIG, Step.MOVE, True)
    assert (tmp_path / "file").read_bytes() == filled(4000).tobytes() + filled(4000, 2)[:1000].tobytes()


def test_bodies_are_summed_up_and_the_sums_stand_in_the_closing(tmp_path: Path) -> None:
    first, second, closing = filled(7000), filled(3000, 2), filled(500, 3)
    expected = crc32c(closing[:100], crc32c(second, crc32c(first)))
    file = BlockFile(str(tmp_path / "file"), NEW, 0o600)
    file.crc = 0
    file.write(0, first, None, Then.GO_ON)
    file.write(7000, second, closing, Then.END, (100, 300))
    assert file.crc == crc32c(second, crc32c(first))
    written = np.frombuffer((tmp_path / "file").read_bytes(), np.uint8)
    assert written.tobytes() == first.tobytes() + second.tobytes() + closing.tobytes()
    assert int.from_bytes(closing[100:104].tobytes(), "little") == expected
    assert int.from_bytes(closing[300:304].tobytes(), "little") == crc32c(closing[100:300])
    assert closing[:100].tobytes() + closing[304:].tobytes() == (
        filled(500, 3)[:100].tobytes() + filled(500, 3)[304:].tobytes()
    )
    file = BlockFile(str(tmp_path / "file"), READ, 10_500)
    file.crc = 0
    assert file.read(0, empty(7000), None, Then.GO_ON)
    assert file.read(7000, empty(3000), empty(500), Then.END)
    assert file.crc == crc32c(second, crc32c(first))
    file = BlockFile(str(tmp_path / "file"), READ, 10_500)
    assert file.read(0, empty(7000), None, Then.END)
    assert file.crc == NO_SUM  # nobody asked for it


def test_files_are_written_together_and_each_says_what_became_of_it(tmp_path: Path) -> None:
    bodies, closings = [filled(5000, n) for n in range(4)], [filled(500, 9 + n) for n in range(4)]
    (tmp_path / "2").mkdir()
    files = [BlockFile(str(tmp_path / str(number)), NEW, 0o600) for number in range(3)]
    files.append(BlockFile(str(tmp_path / "none" / "3"), NEW, 0o600))
    parts = zip(files, bodies, closings, strict=True)
    BlockFile.write_all([Whole(file, body, closing, (100, 300)) for file, body, closing in parts], Then.END)
    assert [(file.error, file.step, file.fd) for file in files] == [
        (0, Step.DONE, -1),
        (0, Step.DONE, -1),
        (errno.EEXIST, Step.OPEN, -1),
        (errno.ENOENT, Step.OPEN, -1),
    ]
    for file, body, closing in zip(files[:2], bodies, closings, strict=False):
        assert Path(file.path).read_bytes() == body.tobytes() + closing.tobytes()
        assert int.from_bytes(closing[100:104].tobytes(), "little") == crc32c(closing[:100], crc32c(body))
        assert file.inode == Path(file.path).stat().st_ino


def test_a_full_device_and_a_lack_of_descriptors_are_told(path: Path) -> None:
    full = BlockFile("/dev/full", os.O_WRONLY, 0)
    with pytest.raises(OSError, match="No space left"):
        full.write(0, filled(10), None, Then.END)
    assert failed(full) == (errno.ENOSPC, Step.MOVE, True)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = os.open(path, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 1, hard))
    try:
        file = BlockFile(str(path), READ, 10_000)
        assert not file.read(0, empty(1), None, Then.END)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(held)
    assert failed(file) == (errno.EMFILE, Step.OPEN, False)


@given(
    writing=st.booleans(), there=st.sampled_from([None, 0, 5000, 9000]), number=st.sampled_from([0, 5000, 9000]),
    flags=st.sampled_from([READ, NEW, os.O_RDWR, os.O_WRONLY]), offset=st.integers(0, 9000),
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=2), then=st.sampled_from(Then), is_open=st.booleans(),
    crc=st.sampled_from([NO_SUM, 0, 12345]), sums=st.sampled_from([(0, 0), (0, 4), (70, 200)]),
)  # fmt: skip
def test_c_and_python_come_to_the_same(tmp_path_factory: pytest.TempPathFactory, **case: Any) -> None:
    if calls.made_by is PYTHON:
        return  # once is enough
    expected = came_to(tmp_path_factory.mktemp("python"), PYTHON.move, **case)
    move = calls.made_by.move
    for one in (move, calls._summed_in_python(move)):  # as on a processor for which C does not sum up
        assert came_to(tmp_path_factory.mktemp("c"), one, **case) == expected


def came_to(
    root: Path, move: calls.Move, *, writing: bool, there: int | None, number: int, flags: int, offset: int,
    sizes: list[int], then: int, is_open: bool, crc: int, sums: tuple[int, int],
) -> list[Any]:  # fmt: skip
    path, before = root / "file", descriptors()
    if there is not None:
        path.write_bytes(filled(there, 5).tobytes())
    fd = os.open(path, os.O_RDWR) if is_open and there is not None else -1
    pieces = [filled(nbytes, nbytes) for nbytes in sizes] + [None]
    at, until = sums if writing and len(sizes) == 2 and sizes[1] >= 204 else (0, 0)
    error, step, left, mode, occupied, inode, crc = move(
        writing, fd, str(path), flags, number, offset, pieces[0], pieces[1], then, crc, at, until
    )
    if left >= 0:
        os.close(left)
    assert descriptors() == before
    assert inode in (0, path.stat().st_ino if path.exists() else 0)
    seen = [piece.tobytes() for piece in pieces if piece is not None], crc
    return [
        error, step, left >= 0, mode, occupied, None if error and writing else seen[0], None if error else seen[1],
        path.read_bytes() if path.exists() and path.stat().st_mode & 0o400 else None,
    ]  # fmt: skip


# Of the blocks of a job together


def test_each_file_is_renamed_or_told_why_not(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)
    (tmp_path / "folder").mkdir()
    names = [("a", "ümlaut"), ("none", "x"), ("b", "folder"), ("c", "none/c"), ("c", "ümlaut")]
    errors = calls.rename_all(*([str(tmp_path / name) for name in side] for side in zip(*names, strict=True)))
    assert errors == [0, errno.ENOENT, errno.EISDIR, errno.ENOENT, 0]
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == {"b": "b", "ümlaut": "c"}
    assert calls.rename_all([], []) == []


def test_what_files_and_folders_occupy_is_what_the_device_says(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(filled(50_000))
    (tmp_path / "link").symlink_to("file")
    paths = [tmp_path, tmp_path / "file", tmp_path / "link"]
    expected = [path.lstat().st_blocks * 512 for path in paths]
    assert calls.occupied_all([*map(str, paths), str(tmp_path / "none")]) == [*expected, 0]
    with pytest.raises(NotADirectoryError, match="file/x"):
        calls.occupied_all([str(tmp_path / "file/x")])


def test_bytes_are_locked_up_to_one_that_somebody_has(tmp_path: Path) -> None:
    first, second = (os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT) for _ in range(2))
    last = (1 << 63) - 3
    assert calls.lock_all(first, [7, last]) == 2
    assert calls.lock_all(second, [5, 6, 7, 8]) == 2
    assert calls.lock_all(first, [8]) == 1  # after the one that it did not have, nothing was locked
    assert calls.lock_all(first, [6]) == 0
    assert calls.lock_all(second, [last]) == 0
    calls.unlock(first)
    assert calls.lock_all(second, [7, last]) == 2
    assert calls.lock_all(second, []) == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        calls.lock_all(1 << 20, [1])
    for fd in (first, second):
        os.close(fd)
