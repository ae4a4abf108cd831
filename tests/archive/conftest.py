"""Archives of several shards although their blocks are small."""

from __future__ import annotations

import pytest

from kvstore.archive import packing


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> int:
    """Three blocks to a shard, of those in `archive_helpers`; as many as there are of others."""
    monkeypatch.setattr(packing, "SHARD_BYTES", 3 * 2048)
    return 3
