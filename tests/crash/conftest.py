"""What the crash tests share."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest
from disks import Disk, small_disk

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def disk() -> Iterator[Disk]:
    """Where a campaign takes place."""
    with small_disk() as found:
        yield found


@pytest.fixture(autouse=True)
def _importable_in_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11's forkserver does not hand its `sys.path` on."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
