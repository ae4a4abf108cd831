"""Stores under the tiers: on every backend, or such that misbehave on order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tiering_helpers import faulty

from kvstore import open_store
from kvstore.testing.faults import FaultyStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    """A backend that behaves until it is told not to."""
    backend = faulty()
    yield backend
    backend.close()


@pytest.fixture(params=["memory", "file", "lmdb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A location that outlives the managers over it, on every backend."""
    location = {"memory": "memory://prompts", "file": f"file://{tmp_path}/kv", "lmdb": f"lmdb://{tmp_path}/kv.lmdb"}
    with open_store("memory://prompts"):
        yield location[request.param]


@pytest.fixture
def remote() -> Iterator[FaultyStore]:
    """A store that can hang on a network, and behaves until it is told not to."""
    with FaultyStore(open_store("memory://remote"), can_hang=True) as store:
        yield store


@pytest.fixture
def local() -> Iterator[FaultyStore]:
    """A store that cannot hang on a network: a call of its that does is stuck in the kernel."""
    with FaultyStore(open_store("memory://local")) as store:
        yield store
