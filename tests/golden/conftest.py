"""The golden fixtures, to read and to go on with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from golden_tiers import GOLDEN


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of all of them."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "v1"))
