"""One tier of each kind to look into, with nothing in it yet."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["memory", "lmdb", "file", "s3"])
def tier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a tier that is empty."""
    name = uuid.uuid4().hex
    if request.param == "memory":
        return f"memory://{name}"
    if request.param != "s3":
        return f"{request.param}://{tmp_path}/{name}"
    return _in_a_bucket(request, monkeypatch)


@pytest.fixture
def s3_tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a tier in a bucket that is empty."""
    return _in_a_bucket(request, monkeypatch)


def _in_a_bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("obstore", reason="pip install obstore")
    server = request.getfixturevalue("s3_server")
    for variable in [variable for variable in os.environ if variable.startswith("AWS_")]:
        monkeypatch.delenv(variable)
    for variable, value in server.environment.items():
        monkeypatch.setenv(variable, value)
    return str(server.url(uuid.uuid4().hex))


@pytest.fixture(params=["lmdb", "file"])
def local(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a tier on this machine's disk that is empty."""
    return f"{request.param}://{tmp_path}/{uuid.uuid4().hex}"
