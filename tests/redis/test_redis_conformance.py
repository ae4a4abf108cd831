"""The contract, over a real server: what every built-in backend passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import redis

from kvstore.testing import StoreTests
from kvstore.url import TierURL
from kvstore.values import name_of

if TYPE_CHECKING:
    from kvstore import BlockKey, Namespace


class TestRedis(StoreTests):
    """Of one server, each test in a tier of its own."""

    @pytest.fixture
    def url(self, place: str) -> str:
        return place

    def raw_get(self, url: str, namespace: Namespace, key: BlockKey) -> bytes:
        with redis.Redis.from_url(url.partition("?")[0]) as client:
            value: bytes = client.get(_name(url, namespace, key))
            return value

    def raw_set(self, url: str, namespace: Namespace, key: BlockKey, data: bytes | None) -> None:
        with redis.Redis.from_url(url.partition("?")[0]) as client:
            if data is None:
                client.delete(_name(url, namespace, key))
            else:
                client.set(_name(url, namespace, key), data)


def _name(url: str, namespace: Namespace, key: BlockKey) -> str:
    return f"{TierURL.parse(url).raw_options['prefix']}{name_of(namespace, key)}"
