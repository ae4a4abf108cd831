"""Where each backend can be tested: an empty location of every kind."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest
from readme_backend import install, install_sqlite
from tiers import Tier

if TYPE_CHECKING:
    from pathlib import Path

PERSISTENT = ("file-direct", "file-buffered", "lmdb")
EVERY_BACKEND = ("memory", *PERSISTENT, "readme", pytest.param("sqlite", marks=pytest.mark.soak))
"""SQLite is `KeyValueStore` again, as the README's example and Redis are."""


@pytest.fixture(params=EVERY_BACKEND)
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend there is, those that third parties could have written included."""
    backend: str = request.param
    return backend


@pytest.fixture(params=PERSISTENT)
def persistent_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    """A location where nothing is yet, on every built-in backend whose blocks outlive the process."""
    return Tier.at(url_of(request.param, tmp_path))


@pytest.fixture(scope="session")
def readme_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the backend of `backends/README.md` is installed."""
    return install(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def sqlite_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the backend of `tests/kvstore_sqlite.py` is installed."""
    return install_sqlite(tmp_path_factory.mktemp("site"))


@pytest.fixture(params=["file", "lmdb", "remote", "sqlite"])
def sealing_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every kind of tier that can be sealed here."""
    kind: str = request.param
    if kind == "sqlite":
        monkeypatch.syspath_prepend(request.getfixturevalue("sqlite_site"))
        monkeypatch.delitem(sys.modules, "kvstore_sqlite", raising=False)
    return kind


@pytest.fixture
def plain_url(sealing_kind: str, tmp_path: Path) -> str:
    """Where a tier of such a kind can be, without the options that say that it is sealed."""
    return f"file://{tmp_path}/tier?remote=true" if sealing_kind == "remote" else f"{sealing_kind}://{tmp_path}/tier"


@pytest.fixture
def backend_url(backend: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL of every backend, with nothing there yet."""
    if backend in ("readme", "sqlite"):
        monkeypatch.syspath_prepend(request.getfixturevalue(f"{backend}_site"))
        monkeypatch.delitem(sys.modules, "kvstore_dir", raising=False)
        monkeypatch.delitem(sys.modules, "kvstore_sqlite", raising=False)
    return url_of(backend, tmp_path)


def url_of(kind: str, folder: Path) -> str:
    """An empty location of this kind below `folder`."""
    match kind:
        case "memory":
            return f"memory://{folder}"
        case "file-direct":
            if not _takes_direct_io(folder):
                pytest.skip(f"no O_DIRECT on the file system of {folder}")
            return f"file://{folder}/tier?io=direct"
        case "file-buffered":
            return f"file://{folder}/tier?io=buffered"
        case "lmdb":
            return f"lmdb://{folder}/tier.lmdb"
        case "sqlite":
            return f"sqlite://{folder}/tier.sqlite"
        case _:
            return f"dir://{folder}/tier"


def _takes_direct_io(folder: Path) -> bool:
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True
