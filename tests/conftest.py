"""What every test may use: a short hypothesis profile, small file systems, and processes that are not this one."""

from __future__ import annotations

import contextlib
import os
import subprocess
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor
    from pathlib import Path

    MountSmallDisk = Callable[..., Path]

settings.register_profile("ci", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[MountSmallDisk]:
    """`small_disk(size_bytes)` mounts an empty tmpfs of that size and returns where; skipped where mounting is not permitted."""
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        if os.geteuid() != 0:
            pytest.skip("mounting a small file system takes root")
        path = tmp_path / f"disk{len(mounted)}"
        path.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "kvstore-test", path], capture_output=True)
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.decode().strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        with contextlib.suppress(subprocess.CalledProcessError):
            subprocess.run(["umount", path], check=True, capture_output=True)
