"""A real Valkey server for the tests of `redis://`, and an empty place in it for each test."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from kvstore.testing.servers import valkey

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.testing.servers import RedisServer

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server() -> Iterator[RedisServer]:
    """One for all tests of this process."""
    with valkey() as running:
        yield running


@pytest.fixture
def place(server: RedisServer) -> str:
    """A tier where nothing is yet."""
    return f"{server.url()}?prefix=test-{next(_numbers)}:"
