"""A real S3 server for the tests of object stores, and places in it where nothing is yet."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import pytest

from kvstore.testing.clock import movable_clock
from kvstore.testing.servers import juicefs, seaweedfs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.testing.clock import MovableClock
    from kvstore.testing.servers import S3Server

CLIENTS = ("obstore", "fsspec")


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    """SeaweedFS: it checks signatures, and honours If-None-Match."""
    with seaweedfs() as running:
        yield running


@pytest.fixture(scope="session")
def overwriting_server() -> Iterator[S3Server]:
    """JuiceFS' gateway: it overwrites, whatever it is told."""
    with juicefs() as running:
        yield running


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    """Either client for S3."""
    chosen: str = request.param
    return chosen


@pytest.fixture
def credentials(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The standard variables lead to the server, in this process and in those that it starts from now on."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    # The suite keeps a process for each sys.path, which must have been started with these variables.
    monkeypatch.syspath_prepend(str(tmp_path_factory.getbasetemp() / f"server-{server.port}"))


_numbers = itertools.count()


@pytest.fixture
def second_profile(
    overwriting_server: S3Server, credentials: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> str:
    """The name of a profile in files of the usual form, which leads to the other server."""
    del credentials
    files = {"AWS_CONFIG_FILE": tmp_path / "config", "AWS_SHARED_CREDENTIALS_FILE": tmp_path / "credentials"}
    for name, file in files.items():
        monkeypatch.setenv(name, str(file))
    there = overwriting_server
    files["AWS_CONFIG_FILE"].write_text(f"[profile second]\nregion = {there.region}\nendpoint_url = {there.endpoint}\n")
    files["AWS_SHARED_CREDENTIALS_FILE"].write_text(
        f"[second]\naws_access_key_id = {there.access_key}\naws_secret_access_key = {there.secret_key}\n"
    )
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "second"


@pytest.fixture
def serial() -> int:
    """Another one for each test."""
    return next(_numbers)


@pytest.fixture
def place(server: S3Server, credentials: None, serial: int) -> str:
    """`s3://bucket/prefix` with nothing there."""
    del credentials
    return server.url(f"test-{serial}/tier")


@pytest.fixture
def clock() -> Iterator[MovableClock]:
    """What the stores of this process go by."""
    with movable_clock() as moved:
        yield moved
