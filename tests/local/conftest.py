"""Where the tiers of these tests are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture(params=["file", "lmdb"])
def scheme(request: pytest.FixtureRequest) -> str:
    scheme: str = request.param
    return scheme
