"""The prefix that everybody uses stays in the tier, although nobody ever reads it from there.

It lives in GPU and primary memory: its hits never reach a tier's `lookup`. Up to vLLM 0.30 the scheduler calls `touch`;
from 0.31 on the tier has only `on_request_finished`, and the positions of the request's keys in its context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from driver import Driver, Request, keys
from vllm.v1.kv_offload.base import LookupResult, ReqContext

from kvstore import open_store
from kvstore.vllm.requests import Requests

if TYPE_CHECKING:
    from pathlib import Path

ROW = 64 << 10
PREFIX = 8
CAPACITY = "6MB"
"""Some 60 blocks or more: novel ones turn it over several times in a test."""

HAS_POSITIONS = hasattr(ReqContext(req_id=""), "set_offload_key_position")


def tier(scheme: str, folder: Path) -> dict[str, Any]:
    url = f"{scheme}://{folder}/kv?capacity={CAPACITY}"
    return {"type": "KVStoreTier", "module_path": "kvstore.vllm", "url": url, "namespace": "recency"}


def serve_from_memory(engine: Driver, prefix: list[bytes]) -> None:
    """A request whose prompt is in primary memory: what the scheduler does, up to its end."""
    request = engine.arrive(prefix)
    assert set(engine.lookup(request)) == {LookupResult.HIT}
    if not HAS_POSITIONS:
        engine.call("touch", prefix, request.context)
    assert engine.read(request, prefix) == []
    engine.finish(request)
    engine.step()


def wear(engine: Driver, prefix: list[bytes], rounds: int, hits: int) -> None:
    """Novel blocks pass through primary memory into the tier while the prefix is hit in primary memory."""
    for number in range(rounds):
        for _ in range(hits // rounds):
            serve_from_memory(engine, prefix)
        engine.store(keys(8, f"novel {number}"))


def run(scheme: str, folder: Path, *, hits: int = 1000) -> int:
    """Blocks of the prefix that a new engine finds after it was hit so often and the tier turned over, three times."""
    prefix = keys(PREFIX, "shared")
    with Driver([tier(scheme, folder)], rows=3 * PREFIX, row_bytes=ROW) as engine:
        engine.store(prefix)
        wear(engine, prefix, rounds=40, hits=hits)
        stats = engine.tiers[0]._tier.stats()
        assert stats.stores == PREFIX + 40 * 8
        assert stats.hits == 0, "the prefix was looked for in the tier"
    with open_store(f"{scheme}://{folder}/kv") as store:
        assert store.usage().blocks < 40 * 8 // 3, "the tier was not turned over"
    with Driver([tier(scheme, folder)], rows=3 * PREFIX, row_bytes=ROW) as engine:
        return engine.load(prefix)


@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_a_prefix_hit_a_thousand_times_in_memory_is_in_the_tier_after_a_restart(scheme: str, tmp_path: Path) -> None:
    assert run(scheme, tmp_path) == PREFIX


def test_without_the_hook_it_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would show if nobody told the tier: the proof that it can fail."""
    monkeypatch.setattr(Requests, "finish", lambda *_: None)
    monkeypatch.setattr(Requests, "touched", lambda *_: None)
    assert run("file", tmp_path, hits=40) == 0


@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_of_a_prefix_the_end_is_older_than_the_front(scheme: str, tmp_path: Path) -> None:
    """A prefix is of use up to its first gap: eviction has to begin at its end."""
    prefix = keys(200, "long")
    with Driver([tier(scheme, tmp_path) | {"namespace": "order"}], rows=256, row_bytes=8192) as engine:
        for start in range(0, 200, 20):
            engine.store(prefix[start : start + 20])
        request = engine.arrive(prefix)
        if not HAS_POSITIONS:
            engine.call("touch", prefix, request.context)
        engine.finish(request)
        engine.settle()
    with open_store(f"{scheme}://{tmp_path}/kv") as store:
        (space,) = store.namespaces()
        ages = {info.key.digest: info.last_used for info in store.scan(space)}
        used = [ages[key[:-4]] for key in prefix]
        assert len(used) == 200
        assert used == sorted(used, reverse=True)


@pytest.mark.skipif(not HAS_POSITIONS, reason="this vLLM says no positions")
@pytest.mark.parametrize("chunk", [1, 4])
def test_stored_blocks_know_their_place_and_their_predecessor(chunk: int, tmp_path: Path) -> None:
    """Whatever is stored first: of each group by itself, and over several jobs of one request."""
    blocks = {group: keys(12, "chain", group) for group in range(2)}
    with Driver([tier("file", tmp_path)], rows=64, row_bytes=8192 * chunk, groups=2, blocks_per_chunk=chunk) as engine:
        request = Request([], tokens=16 * chunk)
        for names in blocks.values():
            for number, key in enumerate(names):
                request.context.set_offload_key_position(key, (number + 1) * 16 * chunk)
        request.keys = [key for pair in zip(*blocks.values(), strict=True) for key in pair]
        engine.requests[request.id] = request
        engine.call("on_new_request", request.context)
        for part in (slice(8, 14), slice(14, 24), slice(0, 8)):
            written = engine.prepare_store(request, request.keys[part])
            assert written is not None
            engine.complete_store(request, written)
            engine.step()
        engine.finish(request)
        engine.settle()
    with open_store(f"file://{tmp_path}/kv") as store:
        (space,) = store.namespaces()
        infos = {(info.key.group, info.key.digest): info for info in store.scan(space)}
        assert len(infos) == 24
        for group, names in blocks.items():
            for number, key in enumerate(names):
                info = infos[group, key[:-4]]
                assert info.position == number
                assert info.parent == (names[number - 1][:-4] if number else b"")


def test_the_end_of_a_very_long_request_costs_the_scheduler_little(tmp_path: Path) -> None:
    prompt = keys(20_000, "long")
    with Driver([tier("file", tmp_path)], rows=16, row_bytes=8192) as engine:
        for _ in range(5):
            request = engine.arrive(prompt, {"kvstore": {"label": "a"}})
            engine.finish(request)
            engine.settle()
        assert sorted(engine.slow_calls("on_request_finished"))[2] < 0.02
