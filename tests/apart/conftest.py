"""Stores in processes of their own, on the backends that several processes can have open."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["file", "lmdb"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a tier with nothing there yet."""
    return f"{request.param}://{tmp_path}/tier"
