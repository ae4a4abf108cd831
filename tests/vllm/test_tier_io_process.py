"""The option `io_process`: another process uses vLLM's primary memory, of which a tier gets nothing but a view."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from driver import Driver, keys, kvstore_tier

from kvstore.apart import StoreApart, shared_memory
from kvstore.errors import InvalidOptionError
from kvstore.testing.servers import seaweedfs
from kvstore.testing.supply import SPACE
from kvstore.vllm import options
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


def test_a_bucket_has_a_process_of_its_own_unless_that_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="the bucket is reached through obstore")
    names = keys(8)
    with seaweedfs() as server, monkeypatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        url = server.url("tier")
        with Driver([kvstore_tier(url)], rows=4, row_bytes=MIB) as engine:
            process_of(engine)
            assert engine.store(names, batch=2) == 8
            engine.evict_all()
            assert engine.load(names[:4]) == 4
        with Driver([{**kvstore_tier(url), "io_process": False}], rows=8, row_bytes=MIB) as engine:
            assert not isinstance(engine.tiers[0]._tier._store, StoreApart)
            assert engine.load(names) == 8


def test_a_bucket_has_none_where_memory_cannot_be_shared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened: list[object] = []
    monkeypatch.setattr(options, "SecondaryTier", lambda *_, **named: opened.append(named["io_process"]))
    TierOptions.of({"url": "s3://bucket/tier"}).open(SPACE, memoryview(bytearray(MIB)))
    assert "memory cannot be shared" in caplog.text
    TierOptions.of({"url": "s3://bucket/tier"}).open(SPACE, shared_memory(MIB).data)
    TierOptions.of({"url": "s3://bucket/tier", "io_process": True}).open(SPACE, memoryview(bytearray(MIB)))
    assert opened == [False, True, True]  # the last is told that it is not possible


def test_a_local_tier_has_one_if_that_is_wanted(tmp_path: Path) -> None:
    for kind in ("file", "lmdb"):
        with Driver([kvstore_tier(f"{kind}://{tmp_path}/{kind}")], rows=4, row_bytes=MIB) as engine:
            assert not isinstance(engine.tiers[0]._tier._store, StoreApart)


def test_it_is_true_or_false() -> None:
    with pytest.raises(InvalidOptionError, match="io_process"):
        TierOptions.of({"url": "memory://a", "io_process": "perhaps"})
