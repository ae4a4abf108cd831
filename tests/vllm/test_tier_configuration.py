"""What stands in the configuration, what vLLM is told of it, and what is said when it is wrong."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import engines
import pytest
from driver import Driver, keys, kvstore_tier, offloading_config
from engines import make_model, offloading_spec
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_offload.base import Locality
from vllm.v1.kv_offload.tiering import base as tiering_base
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore import PutOutcome, open_store
from kvstore.errors import ConfigurationError, InvalidOptionError, StoreOpenError, UnknownOptionError
from kvstore.testing.faults import FaultyStore, failing
from kvstore.vllm import _compat
from kvstore.vllm._compat import windows_of
from kvstore.vllm.lookups import block_key
from kvstore.vllm.options import KNOWN
from kvstore.vllm.sizing import last_token, rows_of_longest_request

PROMPT = keys(6)


def entry(**options: Any) -> dict[str, Any]:
    """A tier in memory, with these options."""
    return {**kvstore_tier("memory://configuration"), **options}


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"thread": 4}, UnknownOptionError, "did you mean 'threads'"),
        ({"capacity": "5GB"}, UnknownOptionError, 'in the mapping "options"'),
        ({"threads": 0}, InvalidOptionError, "threads=0: expected a whole number"),
        ({"backlog": "much"}, InvalidOptionError, "backlog='much': expected bytes"),
        ({"load_timeout": "0s"}, InvalidOptionError, "expected a time above 0"),
        ({"lookup_timeout": True}, InvalidOptionError, "lookup_timeout=True"),
        ({"locality": "HERE"}, InvalidOptionError, "expected one of LOCAL, REMOTE"),
        ({"namespace": ""}, InvalidOptionError, "expected a name"),
        ({"options": ["capacity"]}, InvalidOptionError, "expected a mapping"),
        ({"options": {"colour": "red"}}, UnknownOptionError, "colour"),
        ({"archives": "file:///a"}, InvalidOptionError, "expected a list"),
        ({"archives": ["no url"]}, InvalidOptionError, "is not a tier URL"),
        ({"url": "memry://a"}, ConfigurationError, "Did you mean memory"),
        ({"url": "not a url"}, ConfigurationError, "is not a tier URL"),
        ({"url": None}, InvalidOptionError, "needs a url"),
    ],
)
def test_a_wrong_option_is_an_error_that_says_what_could_be(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught, Driver([entry(**options)]):
        pass
    assert said in str(caught.value)
    if error is UnknownOptionError and "colour" not in said:
        assert all(option.name in str(caught.value) for option in KNOWN)


def test_a_tier_that_cannot_be_opened_leaves_nothing_in_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "tier").write_text("something else")
    tiers = [entry(), kvstore_tier(f"file://{tmp_path}/tier")]
    config = offloading_config(tiers, rows=4, row_bytes=8192)
    with pytest.raises(StoreOpenError):
        TieringOffloadingSpec(config).get_manager()
    assert not list(Path("/dev/shm").glob(f"vllm_offload_{config.engine_id}*"))


def test_a_tier_that_fails_after_it_was_opened_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("as planned")

    monkeypatch.setattr("kvstore.vllm.tier.warn_if_small", fail)
    with pytest.raises(RuntimeError, match="as planned"), Driver([kvstore_tier(f"file://{tmp_path}/tier")]):
        pass
    assert (tmp_path / "tier/.kvstore/state").read_text().startswith("clean")


def test_every_option_can_be_given(tmp_path: Path) -> None:
    options = {
        "options": {"capacity": "1GB"},
        "threads": 3,
        "backlog": "64MiB",
        "lookup_timeout": "500ms",
        "load_timeout": 2.5,
        "staging": "32MiB",
        "locality": "LOCAL",
        "enable_kv_events": True,
    }
    with Driver([kvstore_tier(f"file://{tmp_path}/tier", **options)], events=True) as engine:
        tier = engine.tiers[0]
        assert tier.locality is Locality.LOCAL
        assert tier._tier.backlog_bytes == 64 << 20
        assert tier._tier._pool.threads == 3
        assert "capacity=1GB" in tier.url
        assert engine.store(PROMPT) == 6


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("published", [True, False])
def test_events_announce_what_can_be_loaded(
    wanted: bool, published: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = FaultyStore(open_store("memory://events"))
    monkeypatch.setattr("kvstore.tiering.secondary.open_store", lambda _url: store)
    refused = {block_key(PROMPT[1]): PutOutcome.FULL, block_key(PROMPT[2]): PutOutcome.FAILED}

    def put(call: Any) -> list[PutOutcome]:
        kept = [block for block in call.blocks if block.key not in refused]
        outcomes = dict(zip([block.key for block in kept], call.ask(kept), strict=True))
        return [{**refused, **outcomes}[key] for key in call.keys]

    store.plan["put"] = put
    with Driver([entry(enable_kv_events=wanted, locality="REMOTE")], events=published) as engine:
        engine.store(PROMPT)
        engine.until(lambda: engine.tiers[0]._tier.idle)
        engine.step()
        events = [event for event in engine.events() if event.medium.value == "STORAGE"]
        announced = [key for event in events for key in event.keys]
        assert sorted(announced) == (sorted([PROMPT[0], *PROMPT[3:]]) if wanted and published else [])
        assert all(event.locality is Locality.REMOTE and not event.removed for event in events)
        assert engine.events() == [] or not published
        store.plan.clear()
        engine.evict_all()
        assert all(engine.load([key]) == 1 for key in announced)
    assert ("publishes no KV events" in caplog.text) is (wanted and not published)


@pytest.mark.skipif(not hasattr(tiering_base.SecondaryTierManager, "bp_detector"), reason="from vLLM 0.31 on")
def test_vllm_holds_stores_back_that_its_backpressure_setting_counts_as_too_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = FaultyStore(open_store("memory://pressure"))
    monkeypatch.setattr("kvstore.tiering.secondary.open_store", lambda _url: store)
    pressure = {
        "backpressure_cls": "EMABackpressureDetector",
        "policy_cls": "DropStorePolicy",
        "high_water_s": 1e-9,
        "low_water_s": 1e-10,
        "warmup_completions": 1,
        "cooldown_s": 60,
    }
    with Driver([entry(backpressure=pressure)], rows=32) as engine:
        for number in range(8):
            engine.store(keys(2, f"prompt {number}"))
        assert engine.tiers[0].bp_detector is not None
        assert engine.tiers[0].bp_detector.is_under_pressure()
        assert [verb for verb, _ in store.calls].count("put") < 8


def test_a_store_that_fails_is_reported_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FaultyStore(open_store("memory://failing"))
    monkeypatch.setattr("kvstore.tiering.secondary.open_store", lambda _url: store)
    with Driver([entry()]) as engine:
        results: list[Any] = []
        tier, finished = engine.tiers[0], engine.tiers[0].get_finished_jobs
        monkeypatch.setattr(tier, "get_finished_jobs", lambda: results.extend(found := list(finished())) or found)
        store.plan["put"] = failing()
        engine.store(PROMPT)
        store.plan.clear()
        engine.store(keys(6, "b"))
        assert [result.success for result in results] == [False, True]
        assert results[1].transfer_time > 0
        assert getattr(results[1], "transfer_bytes", 6 * 8192) == 6 * 8192


@pytest.mark.parametrize(("model_len", "warns"), [(4 * 32, False), (4 * 32 + 1, True)])
def test_too_little_primary_memory_is_said_at_the_start(
    model_len: int, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 0.32 nobody tells a tier how long a request may be: the plugin has seen it."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    offload = {"cpu_bytes_to_use": 4 * 8192, "secondary_tiers": [entry()]}
    spec = offloading_spec(make_model(tmp_path / "model"), max_model_len=model_len, offload=offload)
    with caplog.at_level(logging.WARNING):
        spec.get_manager().shutdown()
    said = f"cpu_bytes_to_use holds 4 blocks, 32.8 kB, but a request of max_model_len={model_len} tokens has 5"
    assert (said in caplog.text) is warns
    assert ("cpu_bytes_to_use" in caplog.text) is warns


def test_where_the_longest_request_is_not_known_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Driver([entry()], rows=16):
        pass
    assert "cpu_bytes_to_use" not in caplog.text


def test_sliding_windows_and_groups_count_for_what_they_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "model")
    full = offloading_spec(model)
    assert (rows_of_longest_request(full, 1000), last_token(full, 8)) == (32, 8 * 32)
    specs = engines._specs

    def with_window(config: Any) -> dict[str, Any]:
        first, *others = specs(config).items()
        spec = first[1]
        window = SlidingWindowSpec(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=spec.dtype,
            sliding_window=70,
        )
        return {first[0]: window, **dict(others)}

    monkeypatch.setattr(engines, "_specs", with_window)
    mixed = offloading_spec(model, offload={"blocks_per_chunk": 2})
    assert sorted(windows_of(mixed), key=str) == [2, None]
    assert rows_of_longest_request(mixed, 1000) == 16 + 2
    assert last_token(mixed, 8) == float("inf")


@pytest.mark.parametrize("digest_bytes", [16, 20, 32, 64])
def test_blocks_are_shared_whatever_hash_names_them_where_nobody_said_which(digest_bytes: int, tmp_path: Path) -> None:
    tiers = [kvstore_tier(f"file://{tmp_path}/tier")]
    names = keys(6, digest_bytes=digest_bytes)
    with Driver(tiers) as engine:
        assert engine.load(names) == 0
        assert engine.store(names) == 6
        engine.evict_all()
        assert engine.tiers[0]._tier.stats().failed_calls == 0
        assert engine.load(names) == 6
    with Driver(tiers) as engine:
        assert engine.load(names) == 6
        stats = engine.tiers[0]._tier.stats()
    assert (stats.failed_calls, stats.failed_loads) == (0, 0)
    with open_store(f"file://{tmp_path}/tier") as store:
        assert [namespace.digest_bytes for namespace in store.namespaces()] == [digest_bytes]


def test_a_store_may_be_the_first_that_shows_a_key(tmp_path: Path) -> None:
    with Driver([kvstore_tier(f"file://{tmp_path}/tier")]) as engine:
        engine.store(keys(6, digest_bytes=16))
        assert engine.tiers[0]._tier.stats().stores == 6


def test_names_that_no_store_takes_are_misses_and_no_error() -> None:
    with Driver([entry()]) as engine:
        names = keys(6, digest_bytes=8)
        engine.store(names)
        engine.evict_all()
        assert engine.load(names) == 0
        assert engine.tiers[0]._tier.stats().failed_calls > 0


@pytest.mark.parametrize(("found", "warned"), [("0.33.4", 0), ("0.34.0rc1", 1), ("1.2", 1), ("0.28.0", 0)])
def test_an_unknown_version_is_tried_with_one_warning(
    found: str, warned: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_compat, "_checked", [])
    monkeypatch.setattr(_compat, "vllm_version", lambda: found)
    for _ in range(3):
        _compat.check_version()
    assert caplog.text.count("newer than") == warned


def test_a_version_that_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "_checked", [])
    monkeypatch.setattr(_compat, "vllm_version", lambda: "0.22.1")
    with pytest.raises(ImportError, match=r"0\.26 or later; this is 0\.22\.1"):
        _compat.check_version()


def test_without_vllm_the_package_says_what_to_install() -> None:
    code = "import sys; sys.modules['vllm'] = None; import kvstore.vllm; kvstore.vllm.KVStoreTier"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "MissingDependencyError" in done.stderr
    assert "pip install vllm" in done.stderr


def test_kvstore_alone_imports_no_vllm() -> None:
    light = "kvstore, kvstore.tiering, kvstore.vllm.keys, kvstore.vllm.rows"
    code = f"import {light}, sys; sys.exit(any(name.split('.')[0] == 'vllm' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
