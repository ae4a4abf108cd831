"""LMDB's traps, each sprung on purpose: a clear error instead of a signal, a hang or silence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb
import pytest

from kvstore import lmdb_files as module
from kvstore.environment import LOCK_BYTES, PAGE, Environment, check_filesystem, damage, filesystem_of
from kvstore.errors import (
    StoreAccessError,
    StoreClosedError,
    StoreDamagedError,
    StoreFullError,
    StoreNotFoundError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor


def opened(directory: Path, **options: object) -> Environment:
    return Environment.open(directory, ["a", "b"], **options)  # type: ignore[arg-type]


def put(environment: Environment, key: bytes, value: bytes) -> None:
    with environment.write() as txn:
        txn.put(key, value, db=environment.databases["a"])


def get(environment: Environment, key: bytes) -> bytes | None:
    with environment.read() as txn:
        value = txn.get(key, db=environment.databases["a"])
        return None if value is None else bytes(value)


def put_and_get(directory: Path, key: bytes, value: bytes, asked: bytes) -> bytes | None:
    environment = opened(directory)
    put(environment, key, value)
    found = get(environment, asked)
    environment.close()
    return found


def filled(directory: Path) -> Path:
    environment = opened(directory)
    for number in range(200):
        put(environment, b"%d" % number, bytes(3000))
    environment.close()
    return directory / "data.mdb"


def test_two_processes_see_each_others_commits(tmp_path: Path, stranger: Executor) -> None:
    environment = opened(tmp_path)
    put(environment, b"mine", b"1")
    assert stranger.submit(put_and_get, tmp_path, b"theirs", b"2", b"mine").result() == b"1"
    assert get(environment, b"theirs") == b"2"
    environment.close()


def test_one_process_opens_a_directory_as_often_as_it_likes(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    first.close()
    first.close()
    put(second, b"key", b"value")
    assert get(second, b"key") == b"value"
    with pytest.raises(StoreClosedError, match="closed"):
        get(first, b"key")
    with pytest.raises(StoreAccessError, match="other options"):
        opened(tmp_path, sync=True)
    second.close()
    opened(tmp_path, sync=True).close()


def test_a_write_that_raises_changes_nothing(tmp_path: Path) -> None:
    environment = opened(tmp_path)

    def write_and_raise() -> None:
        with environment.write() as txn:
            txn.put(b"key", b"value", db=environment.databases["a"])
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        write_and_raise()
    assert get(environment, b"key") is None
    environment.close()


def test_a_map_of_a_given_size_bounds_the_file(tmp_path: Path) -> None:
    environment = opened(tmp_path, map_size=64 * PAGE)
    with pytest.raises(lmdb.MapFullError):
        put(environment, b"key", bytes(80 * PAGE))
    put(environment, b"key", bytes(20 * PAGE))
    assert (tmp_path / "data.mdb").stat().st_size <= 64 * PAGE
    environment.close()


def test_read_only_needs_something_to_read(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        opened(tmp_path, readonly=True)
    assert list(tmp_path.iterdir()) == []
    filled(tmp_path)
    environment = opened(tmp_path, readonly=True)
    assert get(environment, b"7") == bytes(3000)
    with pytest.raises((lmdb.Error, OSError)):
        put(environment, b"key", b"value")
    environment.close()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 // PAGE * PAGE)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def zero_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(PAGE))


def zero_both_headers(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(2 * PAGE))


def garble(path: Path) -> None:
    path.write_bytes(os.urandom(10 * PAGE))


@pytest.mark.parametrize("harm", [truncate, empty, zero_header, zero_both_headers, garble])
def test_what_would_be_a_signal_is_an_error(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    harm(filled(tmp_path))
    assert damage(tmp_path, thorough=False) is not None
    with pytest.raises(StoreDamagedError, match=r"data\.mdb"):
        opened(tmp_path)


def test_a_lost_page_is_found_by_a_thorough_look(tmp_path: Path) -> None:
    path = filled(tmp_path)
    assert damage(tmp_path, thorough=True) is None
    found = 0
    for page in range(2, 40):
        whole = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(page * PAGE)
            file.write(bytes(PAGE))
        assert damage(tmp_path, thorough=False) is None
        found += damage(tmp_path, thorough=True) is not None
        path.write_bytes(whole)
    assert found >= 20  # the rest are free pages


def test_nothing_there_is_no_damage(tmp_path: Path) -> None:
    assert damage(tmp_path, thorough=True) is None


def test_a_full_disk_is_an_error_and_the_environment_goes_on(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(4 << 20)
    (disk / "filler").write_bytes(bytes((4 << 20) - 5 * PAGE))
    with pytest.raises(StoreFullError, match="make room"):
        opened(disk)
    (disk / "filler").unlink()
    environment = opened(disk)
    assert (disk / "lock.mdb").stat().st_blocks * 512 >= LOCK_BYTES
    put(environment, b"before", b"1")
    with pytest.raises(OSError, match="No space left"):
        put(environment, b"large", bytes(8 << 20))
    assert get(environment, b"before") == b"1"
    assert get(environment, b"large") is None
    put(environment, b"after", b"2")
    assert get(environment, b"after") == b"2"
    environment.close()


def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    environment = opened(tmp_path)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        names: list[str] = []
        for use in (lambda: get(environment, b"x"), lambda: put(environment, b"x", b"y"), lambda: opened(tmp_path)):
            try:
                use()
                names.append("went through")
            except Exception as error:
                names.append(type(error).__name__)
        environment.close()
        os.write(writing, " ".join(names).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 1000).split() == [b"StoreClosedError", b"StoreClosedError", b"StoreAccessError"]
    put(environment, b"x", b"z")
    assert get(environment, b"x") == b"z"
    environment.close()
    os.close(reading)
    os.close(writing)


def hold(directory: Path, write: bool) -> None:
    environment = opened(directory)
    with environment.write() if write else environment.read() as txn:
        txn.get(b"x", db=environment.databases["a"])
        (directory / "ready").touch()
        time.sleep(60)


@pytest.mark.parametrize("write", [True, False])
def test_who_is_killed_inside_a_transaction_holds_nobody_up(tmp_path: Path, write: bool) -> None:
    environment = opened(tmp_path)
    process = get_context("spawn").Process(target=hold, args=(tmp_path, write))
    process.start()
    while not (tmp_path / "ready").exists():
        time.sleep(0.005)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    put(environment, b"key", b"value")
    assert get(environment, b"key") == b"value"
    assert environment.check_readers() == (0 if write else 1)
    environment.close()


def test_closing_waits_for_the_transactions_of_other_threads(tmp_path: Path) -> None:
    environment = opened(tmp_path)
    put(environment, b"key", bytes(PAGE))
    inside, seen = threading.Event(), list[bytes]()

    def read() -> None:
        with environment.read() as txn:
            inside.set()
            time.sleep(0.2)
            value = txn.get(b"key", db=environment.databases["a"])
            seen.append(bytes(value or b""))

    thread = threading.Thread(target=read)
    thread.start()
    inside.wait()
    environment.close()
    assert seen == [bytes(PAGE)]
    thread.join()


def test_a_network_file_system_is_refused_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of mounts is the real one elsewhere; a real network mount is not to be had in a test."""
    mounts = tmp_path / "mountinfo"
    lines = [
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw",
        f"2 1 0:50 / {tmp_path}/a rw,relatime shared:1 - nfs4 host:/x rw",
        f"3 1 0:51 / {tmp_path}/a/local rw - xfs /dev/sdb rw",
        f"4 1 0:52 / {tmp_path}/with\\040space rw - fuse.sshfs host: rw",
    ]
    mounts.write_text("\n".join(lines))
    real = Path
    monkeypatch.setattr(module, "Path", lambda *parts: mounts if parts == ("/proc/self/mountinfo",) else real(*parts))
    for name, kind in {"a": "nfs4", "a/local": "xfs", "ab": "ext4", "with space": "fuse.sshfs"}.items():
        (tmp_path / name).mkdir(parents=True)
        assert filesystem_of(tmp_path / name) == kind
        if kind in ("ext4", "xfs"):
            check_filesystem(tmp_path / name)
        else:
            with pytest.raises(StoreAccessError, match="local disk"):
                opened(tmp_path / name)


def test_a_real_mount_is_told_from_what_is_around_it(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(1 << 20)
    assert filesystem_of(disk) == "tmpfs"
    assert filesystem_of(Path("/proc")) == "proc"


_IN_A_NAMESPACE = """
import sys, time
from pathlib import Path
from kvstore.environment import Environment
directory = Path(sys.argv[1])
environment = Environment.open(directory, ["a"])
with environment.read() as txn:
    (directory / "ready").touch()
    time.sleep(float(sys.argv[2]))
"""


def in_a_pid_namespace(directory: Path, seconds: float) -> subprocess.Popen[str]:
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", _IN_A_NAMESPACE, str(directory)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([*command, str(seconds)], env=environment, stderr=subprocess.PIPE, text=True)


def test_two_pid_namespaces_on_one_directory_are_refused_with_a_remedy(tmp_path: Path) -> None:
    if os.geteuid() != 0 or subprocess.run(["unshare", "--pid", "--fork", "true"], check=False).returncode:
        pytest.skip("PID namespaces are not permitted here")
    first = in_a_pid_namespace(tmp_path, 30)
    try:
        while not (tmp_path / "ready").exists():
            assert first.poll() is None
            time.sleep(0.01)
        second = in_a_pid_namespace(tmp_path, 0)
        _, message = second.communicate(timeout=30)
    finally:
        first.kill()
        first.communicate()
    assert second.returncode
    assert "StoreAccessError" in message
    assert "PID namespace" in message


def test_the_interpreter_switches_threads_promptly_while_anybody_here_writes(tmp_path: Path) -> None:
    """Each LMDB call gives the GIL away, and a busy thread would keep it for 5 ms while all writers wait.

    How long they wait cannot be tested where other work keeps the cores busy; that the interval is short can.
    """
    usual = sys.getswitchinterval()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = opened(tmp_path / "a"), opened(tmp_path / "b")
    with first.write():
        assert sys.getswitchinterval() < usual / 10
        with second.write():
            assert sys.getswitchinterval() < usual / 10
        assert sys.getswitchinterval() < usual / 10
    assert sys.getswitchinterval() == usual
    with pytest.raises(ZeroDivisionError), first.write():
        _ = 1 // 0
    assert sys.getswitchinterval() == usual
    first.close()
    second.close()
