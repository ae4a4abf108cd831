"""Blocks go through vLLM's manager and a kvstore tier, leave primary memory, and come back: every byte is compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import Driver, keys, kvstore_tier
from vllm.v1.kv_offload.base import LookupResult, ReqContext

from kvstore import open_store
from kvstore.testing.faults import FaultyStore, Hanging

MIB = 1 << 20
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


def urls(kinds: str, folder: Path) -> list[str]:
    """A tier of each kind, in the order given."""
    return [f"{kind}://{folder}/{kind}" for kind in kinds.split("+")]


@pytest.mark.parametrize("kinds", ["file", "lmdb", "file+lmdb"])
def test_64_blocks_of_2_mib_are_stored_evicted_and_promoted(kinds: str, tmp_path: Path) -> None:
    tiers = [kvstore_tier(url) for url in urls(kinds, tmp_path)]
    names = keys(64)
    with Driver(tiers, rows=24, row_bytes=2 * MIB) as engine:
        assert engine.store(names, batch=8) == 64
        assert engine.load(names[:20]) == 20, "evicted by later ones, and promoted"
    for tier in tiers:  # each of them has everything, as a fresh engine sees it
        with Driver([tier], rows=64, row_bytes=2 * MIB) as engine:
            assert engine.load(names) == 64
            assert engine.tiers[0]._tier.stats().loads == 64


def test_a_block_that_only_the_second_tier_has_comes_from_there(tmp_path: Path) -> None:
    first, second = (kvstore_tier(url) for url in urls("file+lmdb", tmp_path))
    names = keys(8)
    with Driver([second], rows=8) as engine:
        engine.store(names)
    with Driver([first], rows=8) as engine:
        engine.store(names[:4])
    with Driver([first, second], rows=8) as engine:
        assert engine.load(names) == 8
        loads = [tier._tier.stats().loads for tier in engine.tiers]
        assert sum(loads) == 8
        assert loads[1] >= 4, "and whatever the first was asked for and had not answered yet: vLLM takes the first yes"


@pytest.mark.parametrize("kind", ["file", "lmdb", "memory"])
@pytest.mark.parametrize(
    "shape",
    [
        {"groups": 2, "row_bytes": 64 * 1024},
        {"row_bytes": 576 * 2 * 16 * 27},  # latents of 27 layers: no whole number of pages
        {"row_bytes": 4 * 8192, "blocks_per_chunk": 4},
        {"row_bytes": 8192, "tokens_per_block": 64, "tokens_per_hash": 16},
        {"row_bytes": 100},
    ],
    ids=["two groups", "latent attention", "four blocks to a chunk", "four hashes to a block", "tiny"],
)
def test_every_shape_of_block_comes_back(kind: str, shape: dict[str, int], tmp_path: Path) -> None:
    names = [key for group in range(shape.get("groups", 1)) for key in keys(6, group=group)]
    with Driver([kvstore_tier(f"{kind}://{tmp_path}/tier")], rows=len(names), **shape) as engine:
        assert engine.store(names) == len(names)
        engine.evict_all()
        assert engine.load(names) == len(names)
        assert engine.tiers[0]._tier.stats().loads == len(names)


def test_of_a_prompt_larger_than_primary_memory_the_front_is_loaded(tmp_path: Path) -> None:
    names = keys(40)
    with Driver([kvstore_tier(f"file://{tmp_path}/tier")], rows=8) as engine:
        engine.store(names, batch=4)
        assert engine.load(names) == 8
        if hasattr(ReqContext, "get_offload_key_position"):  # the tier can tell what is too far behind
            assert [engine.load(names) for _ in range(3)] == [8, 8, 8]
        first, second = engine.arrive(names), engine.arrive(keys(40, "of somebody else") + names)
        engine.until(lambda: engine.final(first) and engine.final(second))


def test_blocks_that_are_there_are_not_written_again(tmp_path: Path) -> None:
    with Driver([kvstore_tier(f"file://{tmp_path}/tier")], rows=8) as engine:
        engine.store(keys(8))
        engine.evict_all()
        engine.store(keys(8))
        stats = engine.tiers[0]._tier.stats()
        assert (stats.stores, stats.exists, stats.bytes_stored) == (8, 8, 8 * 8192)


@pytest.mark.parametrize("kinds", ["file", "lmdb", "file+lmdb"])
def test_after_shutdown_primary_memory_is_unmapped(kinds: str, tmp_path: Path) -> None:
    with Driver([kvstore_tier(url) for url in urls(kinds, tmp_path)], rows=8) as engine:
        engine.store(keys(8))
        engine.evict_all()
        assert engine.load(keys(8)) == 8
        assert engine.config.engine_id in Path("/proc/self/maps").read_text()
        engine.shutdown()
        assert engine.config.engine_id not in Path("/proc/self/maps").read_text()


def test_an_old_no_is_not_told_to_a_new_request() -> None:
    with Driver([kvstore_tier("memory://old-no")], rows=8) as engine:
        early = engine.arrive(keys(4))
        assert engine.until(lambda: engine.final(early)) == [MISS]
        engine.store(keys(4))
        engine.evict_all()
        assert engine.load(keys(4)) == 4, "although the early request still waits"


class TestWhileAJobIsLive:
    """One store whose calls wait until a test lets them go."""

    @pytest.fixture
    def store(self, monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
        """What the next tier opens, whatever its URL."""
        store = FaultyStore(open_store("memory://live"), can_hang=True)
        monkeypatch.setattr("kvstore.tiering.secondary.open_store", lambda _url: store)
        return store

    @pytest.mark.parametrize("network", [False, True])
    def test_a_request_that_is_preempted_or_aborted_leaves_its_load_to_the_next(
        self, store: FaultyStore, hanging: Hanging, network: bool
    ) -> None:
        store.capabilities = FaultyStore(store.inner, can_hang=network).capabilities
        with Driver([kvstore_tier("memory://live")], rows=8) as engine:
            engine.store(keys(6))
            engine.evict_all()
            store.plan["get"] = hanging
            first, second = engine.arrive(keys(6)), engine.arrive(keys(6))
            engine.until(lambda: engine.final(first) or hanging.waiting)
            engine.preempt(first)
            engine.step()
            assert RETRY not in engine.lookup(second)
            engine.finish(first)
            hanging.release()
            assert engine.until(lambda: engine.final(second)) == [HIT] * 6
            assert engine.read(second, second.keys) == []
            read = [key for verb, names in store.calls if verb == "get" for key in names]
            assert len(read) == len(set(read)) == 6, "nothing was read twice"

    def test_a_block_is_stored_again_while_its_first_store_hangs(self, store: FaultyStore, hanging: Hanging) -> None:
        with Driver([kvstore_tier("memory://live")], rows=4) as engine:
            store.plan["put"] = hanging
            engine.store(keys(4))
            engine.until(lambda: hanging.waiting)
            engine.store(keys(4, "b"))  # takes the place of the first ones in primary memory
            engine.store(keys(4))
            hanging.release()
            engine.until(lambda: engine.tiers[0]._tier.idle)
            engine.evict_all()
            assert engine.load(keys(4)) == 4
            assert engine.load(keys(4, "b")) == 4
