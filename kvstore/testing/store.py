"""What every backend has to pass, in one class for whoever writes one."""

from __future__ import annotations

from kvstore.testing.blocks import BlockTests
from kvstore.testing.damage import DamageTests
from kvstore.testing.facts import FactTests
from kvstore.testing.lifetime import LifetimeTests
from kvstore.testing.marks import MarkTests
from kvstore.testing.model import ModelTests
from kvstore.testing.purge import PurgeTests
from kvstore.testing.retention import RetentionTests

__all__ = ["StoreTests"]


class StoreTests(BlockTests, FactTests, LifetimeTests, MarkTests, RetentionTests, PurgeTests, ModelTests, DamageTests):
    """The contract of `kvstore.BlockStore`, as tests. Subclass it and say where your stores are::

        class TestMyStore(StoreTests):
            @pytest.fixture
            def url(self, tmp_path):
                return f"mine://{tmp_path}/kv"   # with nothing there yet

            def raw_get(self, url, namespace, key): ...         # bytes of a block, read past the store
            def raw_set(self, url, namespace, key, data): ...   # and written; None takes the block away

    The scheme must be one that `open_store` finds. Without the raw hooks the tests that damage blocks are skipped;
    what a store says that it does not do (`Capabilities.persistent`, `shared`, `marks`, `tombstones`; no option
    `capacity`) is skipped too.
    The raw hooks are called while the store is open, in this process.
    """
