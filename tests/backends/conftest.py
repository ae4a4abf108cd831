"""One fixture over all backends: a test that takes `tier` runs on each of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from tiers import Tier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore import BlockStore

PERSISTENT = ("file-direct", "file-buffered", "lmdb")


@pytest.fixture(params=["memory", *PERSISTENT])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    """A location where nothing is yet, on every backend."""
    return make_tier(request.param, tmp_path)


@pytest.fixture(params=PERSISTENT)
def persistent_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    """The same, on every backend whose blocks outlive the process."""
    return make_tier(request.param, tmp_path)


def make_tier(kind: str, folder: Path) -> Tier:
    """A `Tier` of this kind below `folder`."""
    match kind:
        case "memory":
            return Tier(f"memory://{folder}")
        case "file-direct":
            if not _takes_direct_io(folder):
                pytest.skip(f"no O_DIRECT on the file system of {folder}")
            return Tier(f"file://{folder}/tier?io=direct", folder / "tier")
        case "file-buffered":
            return Tier(f"file://{folder}/tier?io=buffered", folder / "tier")
        case _:
            return Tier(f"lmdb://{folder}/tier.lmdb", folder / "tier.lmdb")


def _takes_direct_io(folder: Path) -> bool:
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


@pytest.fixture
def store(tier: Tier) -> Iterator[BlockStore]:
    """An open, empty store on every backend."""
    with tier.open() as opened:
        yield opened
