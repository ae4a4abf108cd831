"""The option `io_process`: another process uses vLLM's primary memory, of which a tier gets nothing but a view."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from driver import Driver, keys, kvstore_tier

from kvstore.apart import StoreApart
from kvstore.errors import InvalidOptionError
from kvstore.vllm.options import TierOptions

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def process_of(engine: Driver) -> int:
    store = engine.tiers[0]._tier._store
    assert isinstance(store, StoreApart)
    assert store.process is not None
    return store.process


@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_blocks_go_from_and_to_primary_memory_in_another_process(kind: str, tmp_path: Path) -> None:
    tier = {**kvstore_tier(f"{kind}://{tmp_path}/tier"), "io_process": True}
    names = keys(32)
    with Driver([tier], rows=12, row_bytes=MIB) as engine:
        first = process_of(engine)
        assert engine.store(names, batch=4) == 32
        engine.evict_all()
        assert engine.load(names[:10]) == 10  # the driver compares every byte
        os.kill(first, signal.SIGKILL)
        engine.evict_all()
        engine.until(lambda: engine.load(names[10:20]) == 10)
    with Driver([{**tier, "io_process": False}], rows=32, row_bytes=MIB) as engine:
        assert engine.load(names) == 32
    assert not os.path.exists(f"/proc/{first}")  # noqa: PTH110


def test_it_is_true_or_false() -> None:
    with pytest.raises(InvalidOptionError, match="io_process"):
        TierOptions.of({"url": "memory://a", "io_process": "perhaps"})
