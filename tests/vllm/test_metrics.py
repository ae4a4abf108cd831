"""What vLLM's metrics say is what happened, at the end where Prometheus reads them, with several tiers as with one."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from driver import Driver, keys
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import metrics as offloading_metrics
from vllm.v1.kv_offload.base import OffloadingCounterMetadata

from kvstore import open_store
from kvstore.testing.faults import FaultyStore, failing
from kvstore.vllm.metrics import COUNTERS, GAUGES, definitions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

prometheus_client = pytest.importorskip("prometheus_client")

ROW = 16 << 10


def tier(scheme: str, folder: Path, **options: Any) -> dict[str, Any]:
    url = f"{scheme}://{folder}/{scheme}?capacity=64MB"
    return {"type": "KVStoreTier", "module_path": "kvstore.vllm", "url": url, "namespace": "metrics", **options}


@pytest.fixture
def registry() -> Iterator[Any]:
    """The default registry, where vLLM's metrics register: emptied of whatever others left there."""
    registry = prometheus_client.REGISTRY
    for collector in list(registry._collector_to_names):
        registry.unregister(collector)
    yield registry
    for collector in list(registry._collector_to_names):
        registry.unregister(collector)


def front_end(tiers: list[dict[str, Any]]) -> Any:
    """The receiver that vLLM has of a connector's statistics, as its Prometheus logger makes it for one engine."""
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 20, "secondary_tiers": tiers}
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
    kinds = {
        prometheus_client.Counter: prometheus_client.Counter,
        prometheus_client.Gauge: prometheus_client.Gauge,
        prometheus_client.Histogram: prometheus_client.Histogram,
    }
    labels = {0: ["test/model", "0"]}
    return offloading_metrics.OffloadPromMetrics(config, kinds, ["model_name", "engine"], labels)


def report(engine: Driver, receiver: Any) -> None:
    """One interval: from the manager through what a process boundary leaves of it to the front end."""
    with engine.locked():
        stats = engine.manager.get_stats()
    if stats is not None:
        receiver.observe(pickle.loads(pickle.dumps(stats.data)))


def value(registry: Any, metric: str, url: str) -> float | None:
    labels = {"model_name": "test/model", "engine": "0", "url": url}
    suffix = "" if metric in {name for name, _ in GAUGES.values()} else "_total"
    found = registry.get_sample_value(f"vllm:kvstore_{metric}{suffix}", labels)
    return None if found is None else float(found)


def test_prometheus_reads_what_happened_of_each_of_two_tiers(registry: Any, tmp_path: Path) -> None:
    tiers = [tier("file", tmp_path), tier("lmdb", tmp_path)]
    receiver = front_end(tiers)
    urls = [f"{scheme}://{tmp_path}/{scheme}" for scheme in ("file", "lmdb")]
    names = keys(8, "stored")
    with Driver(tiers, rows=16, row_bytes=ROW) as engine:
        report(engine, receiver)
        assert {value(registry, metric, url) for metric, _ in COUNTERS.values() for url in urls} == {0.0}
        row = engine.row_bytes
        engine.store(names, params={"kvstore": {"label": "a"}})
        report(engine, receiver)
        engine.evict_all()
        assert engine.load(names) == 8
        assert engine.load(keys(4, "nowhere")) == 0
        engine.store(keys(2, "bad"), params={"kvstore": {"pin": True}})
        engine.settle()
        for _ in range(3):
            report(engine, receiver)
        stats = [engine.tiers[number]._tier.stats() for number in range(2)]
    for url in urls:
        assert value(registry, "store_bytes", url) == 10 * row
        assert value(registry, "stored_blocks", url) == 10
        assert value(registry, "refused_params", url) == 1
        assert value(registry, "store_seconds", url) > 0
        assert value(registry, "backlog_bytes", url) == 0
        assert value(registry, "blocks_in_flight", url) == 0
    # Which of two tiers that have a block is read, vLLM decides: the one that answered.
    assert sum(value(registry, "load_bytes", url) for url in urls) == 8 * row
    assert sum(value(registry, "loaded_blocks", url) for url in urls) == 8
    assert sum(value(registry, "load_seconds", url) for url in urls) > 0
    assert sum(value(registry, "lookup_hits", url) for url in urls) >= 8
    for url, did in zip(urls, stats, strict=True):
        assert value(registry, "load_bytes", url) == did.bytes_loaded
        assert value(registry, "lookup_hits", url) == did.hits
        assert value(registry, "lookup_misses", url) == did.misses > 0


def test_damage_and_shed_stores_are_counted(registry: Any, tmp_path: Path) -> None:
    tiers = [tier("file", tmp_path, backlog="1")]
    receiver = front_end(tiers)
    url = f"file://{tmp_path}/file"
    names = keys(6, "stored")
    with Driver(tiers, rows=16, row_bytes=ROW) as engine:
        for name in names[:2]:
            engine.store([name])
        engine.evict_all()
        with open_store(url, readonly=True) as store:
            (space,) = store.namespaces()
        for path in (tmp_path / "file" / space.name).rglob("*.0"):
            data = path.read_bytes()
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        assert engine.load(names[:2]) == 0
        engine.store(names[2:])
        engine.settle()
        report(engine, receiver)
        stats = engine.tiers[0]._tier.stats()
    assert value(registry, "corrupt_blocks", url) == stats.corrupt == 2
    assert value(registry, "failed_load_blocks", url) == 2
    assert value(registry, "shed_blocks", url) == stats.shed == 3


def test_a_tier_that_is_left_alone_shows_it(registry: Any, tmp_path: Path) -> None:
    tiers = [tier("file", tmp_path)]
    receiver = front_end(tiers)
    url = f"file://{tmp_path}/file"
    with Driver(tiers, rows=16, row_bytes=ROW) as engine:
        secondary = engine.tiers[0]._tier
        report(engine, receiver)
        assert value(registry, "breaker_state", url) == 0
        questions = secondary._questions
        inner = questions._store
        questions._store = faulty = FaultyStore(inner)
        faulty.plan["contains"] = failing()
        for number in range(3):
            assert engine.load(keys(1, f"asked {number}")) == 0
        report(engine, receiver)
        assert value(registry, "breaker_state", url) in (1, 2)
        assert value(registry, "breaker_trips", url) == 1
        assert value(registry, "failed_calls", url) == 3


def test_a_quiet_interval_reports_nothing_and_none_is_counted_twice(tmp_path: Path) -> None:
    with Driver([tier("file", tmp_path)], rows=16, row_bytes=ROW) as engine:
        (secondary,) = engine.tiers
        assert not secondary.get_stats().is_empty()
        assert secondary.get_stats() is None
        engine.store(keys(2))
        observed = secondary.get_stats().reduce()
        stored = {name: count for name, count in observed.items() if "stored_blocks" in name}
        assert list(stored.values()) == [2]
        assert secondary.get_stats() is None


def test_the_label_is_the_url_without_options_and_credentials(tmp_path: Path) -> None:
    with Driver([tier("file", tmp_path)], rows=16, row_bytes=ROW) as engine:
        (secondary,) = engine.tiers
        labels = {labels for by_label in secondary.get_stats().data["data"].values() for labels in by_label}
    assert labels == {(f"file://{tmp_path}/file",)}


def test_every_metric_is_declared_in_vllms_style() -> None:
    declared = definitions()
    assert len(declared) == len(COUNTERS) + len(GAUGES)
    for name, metadata in declared.items():
        assert name.startswith("vllm:kvstore_")
        assert metadata.labelnames == ("url",)
        assert metadata.documentation.endswith(".")
    counters = [name for name, metadata in declared.items() if isinstance(metadata, OffloadingCounterMetadata)]
    assert len(counters) == len(COUNTERS)
