"""What every test may use: a short hypothesis profile, small file systems, servers, processes that are not this one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from extension_helpers import NEEDS_COMPILER, compiled
from hypothesis import HealthCheck, settings

from kvstore.objects.settings import TIMEOUT
from kvstore.testing.faults import Hanging
from kvstore.testing.patience import PATIENCE
from kvstore.testing.servers import juicefs, seaweedfs
from kvstore.tiering import SecondaryTier
from kvstore_zarr import calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

    from kvstore.testing.servers import S3Server

settings.register_profile("ci", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it puts into the background so, and every process of a test would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was told no time-out waits for a busy machine: the defaults, a second and a few, are for engines."""
    defaults = SecondaryTier.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "lookup_timeout", PATIENCE)
    monkeypatch.setitem(vars(TIMEOUT), "default", PATIENCE)


@pytest.fixture(scope="session")
def made_by_c(tmp_path_factory: pytest.TempPathFactory) -> calls.Calls:
    """The installed extension's, or those of one compiled for all tests of this process, where none is installed."""
    if calls.made_by is not calls.PYTHON:
        return calls.made_by
    return calls.in_c(compiled(tmp_path_factory.mktemp("extension")))


@pytest.fixture(params=[pytest.param("C", marks=NEEDS_COMPILER), "Python"])
def executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes the system calls for blocks in this process."""
    in_c = request.param == "C"
    monkeypatch.setattr(calls, "made_by", request.getfixturevalue("made_by_c") if in_c else calls.PYTHON)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """An empty folder that every user of the machine may reach, unlike pytest's own: each session closes those."""
    with tempfile.TemporaryDirectory(prefix="kvstore-open-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        closed = [parent for parent in folder.parents if not parent.stat().st_mode & 0o001]
        if closed and os.geteuid() == 0:
            pytest.skip(f"{closed[0]} is closed to other users: set TMPDIR to a folder that is not")
        yield folder


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    """A fault for the verbs of a `FaultyStore` that are to hang; it lets go of everybody when the test is over."""
    fault = Hanging()
    yield fault
    fault.release()


@pytest.fixture(scope="session")
def stranger() -> Iterator[Executor]:
    """One process that shares nothing with this one but the disk; it lives as long as the tests do."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.fixture
def fresh_process() -> Iterator[Executor]:
    """A process started for this test alone, as after a restart."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server with an empty bucket, for all tests of this process: each takes a prefix of its own."""
    with seaweedfs() as server:
        yield server


@pytest.fixture(scope="session")
def s3_server_without_conditions() -> Iterator[S3Server]:
    """As `s3_server`, of the kind that ignores If-None-Match: what must not overwrite does."""
    with juicefs() as server:
        yield server


@pytest.fixture
def small_disk() -> Iterator[Callable[[int], Path]]:
    """`small_disk(size_bytes)` mounts an empty tmpfs of that size and returns where; skipped where it must not."""
    with contextlib.ExitStack() as mounted:

        def mount(size: int) -> Path:
            if os.geteuid() != 0:
                pytest.skip("mounting a small file system takes root")
            # Not below pytest's own folders, which it removes while a run that was killed still has them mounted.
            path = Path(mounted.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-disk-")))
            command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "kvstore-test", path]
            done = subprocess.run(command, capture_output=True, check=False)
            if done.returncode:
                pytest.skip(f"mounting is not permitted here: {done.stderr.decode().strip()}")
            mounted.callback(subprocess.run, ["umount", "-l", path], check=True)
            return path

        yield mount
