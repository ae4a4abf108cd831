"""What rows hold is what vLLM put there: KV caches as vLLM lays them out, written as its kernels do, copied to rows.

The kernels on GPUs write a token's key and value through views that are made here as they make them; those for CPUs are
run by `test_engine.py`.
"""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from engines import BLOCK_TOKENS, HEAD_SIZE, HEADS, LAYERS, build, make_model, namespace_of_engine, planned

from kvstore import Namespace
from kvstore.errors import ConfigurationError
from kvstore.vllm import identity
from kvstore.vllm.rows import kv_view

worker_utils = pytest.importorskip("vllm.v1.worker.utils")
layouts = pytest.importorskip("vllm.v1.kv_cache_layout", reason="layouts have names from 0.30 on")
if not hasattr(worker_utils, "allocate_kv_cache"):
    pytest.skip("0.30 and 0.31 allocate elsewhere", allow_module_level=True)

import vllm.distributed.kv_transfer.kv_connector.v1.offloading.config as offloading  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker  # noqa: E402
from vllm.v1.kv_offload.base import GPULoadStoreSpec  # noqa: E402
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec  # noqa: E402

from kvstore.vllm.cpu import CPUTieringSpec  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

BLOCKS = 6
ON_CUDA = '{"backend":"FLASH_ATTN","backend_per_kind":null,"indexer_kv_dtype":null} on cuda, runner 1'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama")


class Cache:
    """The KV cache of `ranks` workers in `layout`, all of its bytes different, and a row made of its last blocks."""

    def __init__(self, model: Path, layout: str, tokens: int, *, ranks: int = 1, **offload: Any) -> None:
        self.tokens, self.heads = tokens, HEADS // ranks
        self.per_row = offload.get("blocks_per_chunk", 1)
        self.caches: list[dict[str, torch.Tensor]] = []
        name = uuid.uuid4().hex
        workers = [self._worker(model, layout, rank, ranks, name, offload) for rank in range(ranks)]
        for worker in workers:
            worker.submit_store(1, GPULoadStoreSpec(self.stored, [self.per_row], [0]), CPULoadStoreSpec([2]))
        rows = workers[0]._region._base.numpy().reshape(-1, self.row_bytes)
        self.row: NDArray[np.uint8] = rows[2].view(np.uint8).copy()
        del rows
        for worker in workers:
            worker.shutdown()

    @property
    def stored(self) -> list[int]:
        return list(range(BLOCKS - 1, BLOCKS - 1 - self.per_row, -1))

    def _worker(self, model: Path, layout: str, rank: int, ranks: int, name: str, offload: dict[str, Any]) -> Any:
        config, _ = build(model, block_size=self.tokens, tensor_parallel_size=ranks, offload=offload)
        config.cache_config.kv_cache_layout = layout
        config.kv_transfer_config.engine_id = name
        config.parallel_config.rank = rank
        kv_cache = planned(config)
        assert kv_cache.num_blocks >= BLOCKS
        caches = worker_utils.allocate_kv_cache(
            kv_cache, torch.device("cpu"), layouts.KVCacheLayout[layout], [self.tokens]
        )
        for number, cache in enumerate(caches.values()):
            noise = torch.Generator().manual_seed(100 * rank + number)
            cache.copy_(torch.randn(cache.shape, generator=noise))
        self.caches.append(caches)
        spec = CPUTieringSpec(offloading.build_offloading_config(config, kv_cache))
        self.row_bytes = spec.kv_bytes_per_chunk
        connector = OffloadingConnectorWorker(spec, config, kv_cache)
        connector.register_kv_caches(caches)
        return connector.worker

    def expected(self) -> torch.Tensor:
        """(layer, kv, token, head, dim), by the views through which FlashAttention writes."""
        found: list[torch.Tensor] = []
        for caches in self.caches:
            for cache in caches.values():
                key, value = cache.transpose(1, 2).split(HEAD_SIZE, dim=-1)
                found.append(torch.stack([torch.cat([each[block] for block in self.stored]) for each in (key, value)]))
        by_rank = torch.stack(found).unflatten(0, (len(self.caches), LAYERS))
        return torch.cat(list(by_rank), dim=3)


def on_cuda(namespace: Namespace, **extra: str) -> Namespace:
    """The same engine, as it would call itself there."""
    manifest = namespace.to_manifest()
    manifest["extra"] |= {"attention": ON_CUDA, **extra}
    return Namespace.from_manifest(manifest)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("per_row", [1, 2])
def test_every_layout_is_read_as_it_was_written(model: Path, layout: str, per_row: int) -> None:
    cache = Cache(model, layout, 16, blocks_per_chunk=per_row)
    space = namespace_of_engine(model, layout=layout, block_size=16, offload={"blocks_per_chunk": per_row})
    view = kv_view(on_cuda(space), 0)
    assert view.layout.shape == (LAYERS, 2, 16 * per_row, HEADS, HEAD_SIZE)
    assert view.layout.dtype == "bfloat16"
    assert [name.split(".")[2] for name in view.layer_names] == ["0", "1"]
    found = view.to_numpy(cache.row)
    np.testing.assert_array_equal(found.astype(np.float32), cache.expected().float().numpy())
    np.testing.assert_array_equal(view.keys(cache.row), found[:, 0])
    np.testing.assert_array_equal(view.values(cache.row), found[:, 1])
    assert np.shares_memory(found, cache.row) == (per_row == 1)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_rows_in_the_canonical_format_of_two_ranks_are_those_of_one(model: Path, layout: str) -> None:
    name = {"HND": "LBHNC", "NHD": "LBNHC"}[layout]
    cache = Cache(model, name, 16, ranks=2, canonical_layout=True)
    offload = {"canonical_layout": True}
    space = on_cuda(namespace_of_engine(model, layout=layout, block_size=16, tensor_parallel_size=2, offload=offload))
    assert space.extra["topology"] == "any"
    found = kv_view(space, 0).to_numpy(cache.row)
    np.testing.assert_array_equal(found.astype(np.float32), cache.expected().float().numpy())


def test_a_number_that_is_written_through_the_view_is_in_the_row(model: Path) -> None:
    space = on_cuda(namespace_of_engine(model, layout="NHD"))
    row = np.zeros(space.block_bytes(0), np.uint8)
    kv_view(space).to_numpy(row)[1, 1, 31, 1, 15] = 1.0
    assert row[: 2 * 2 * BLOCK_TOKENS * HEADS * HEAD_SIZE * LAYERS].view(np.uint16)[-1] == 0x3F80


def test_a_row_of_another_size_is_an_error(model: Path) -> None:
    view = kv_view(on_cuda(namespace_of_engine(model, layout="NHD")))
    with pytest.raises(ValueError, match="the row has 4096 bytes"):
        view.keys(bytes(4096))


def changed(namespace: Namespace, extra: dict[str, str], group: dict[str, Any]) -> Namespace:
    manifest = namespace.to_manifest()
    groups = json.loads(manifest["extra"]["groups"])
    manifest["extra"] |= {"groups": json.dumps([groups[0] | group]), **extra}
    return Namespace.from_manifest(manifest)


AMX = "vLLM 0.33.0, cpu x86_64 AVX512 amx=True, runner 1"
ROCM = ON_CUDA.replace("cuda", "cuda shuffle=False")
REFUSED: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "no vLLM": ({"engine": "other"}, {}, "no vLLM wrote it"),
    "latents": ({}, {"kind": "MLAAttentionSpec"}, "latents of MLA"),
    "states": ({}, {"kind": "MambaSpec"}, "something else than keys and values"),
    "layers of two kinds": ({}, {"each": ["a", "b"]}, "each, which may move bytes"),
    "what a later version says": ({}, {"swizzle": 8}, "swizzle, which may move bytes"),
    "heads of two sizes": ({}, {"head_size_v": 8}, "different sizes"),
    "scales": ({}, {"kv_quant_mode": "FP8_PER_TOKEN_HEAD"}, "scales are among its elements"),
    "elements of 4 bits": ({"kv_dtype": "nvfp4"}, {}, "'nvfp4', which this kvstore does not know"),
    "rows of two ranks": ({"topology": "tp=2 pp=1 world=2"}, {}, "several ranks .*canonical_layout"),
    "an unknown row": ({"rows": "direct, vLLM 0.28.0"}, {}, "direct, vLLM 0.28.0.*does not know"),
    "a later canonical row": ({"rows": "canonical v2-nhd"}, {}, "canonical v2-nhd.*does not know"),
    "pages that are scattered": (
        {"kv_cache_layout": "LHBNC"},
        {},
        "(LHBNC.*do not stand together|several of the kernel)",
    ),
    "an unknown layout": ({"kv_cache_layout": "NHD of vLLM 0.28"}, {}, "several of the kernel|not known"),
    "another backend": ({"attention": ON_CUDA.replace("FLASH_ATTN", "ROCM_ATTN")}, {}, "lay out a page is not known"),
    "ROCm": ({"attention": ROCM}, {}, "lay out a page is not known"),
    "a backend that nobody saw": ({"attention": "unknown on cuda 9.0, vLLM 0.33.0"}, {}, "lay out a page is not known"),
    "large pages with heads first": ({"kv_cache_layout": "LBHNC"}, {}, "several of the kernel's"),
    "tiles": ({"attention": AMX, "kv_cache_layout": "LBHNC"}, {"head_size": 32, "head_size_v": 32}, "AMX pack keys"),
    "an ARM": (
        {"attention": AMX.replace("x86_64", "aarch64"), "kv_cache_layout": "LBHNC"},
        {},
        "of this CPU pack keys",
    ),
    "sizes that do not agree": ({}, {"num_kv_heads": 3}, "a row has 8192 bytes, but .* 3 heads"),
}


@pytest.mark.parametrize(("extra", "group", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_told_apart_is_refused_with_the_reason(
    model: Path, extra: dict[str, str], group: dict[str, Any], message: str
) -> None:
    space = on_cuda(namespace_of_engine(model, layout="NHD"))
    kv_view(space)
    with pytest.raises(ConfigurationError, match=f"cannot be read as keys and values: .*({message})"):
        kv_view(changed(space, extra, group))


def test_of_an_engine_that_an_operator_named_the_models_configuration_says_the_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model", head_dim=32)
    seen = kv_view(namespace_of_engine(model))
    monkeypatch.setattr(identity, "captured", lambda _engine_id: None)
    named = namespace_of_engine(model, override="mine")
    assert "unknown on cpu" in named.extra["attention"]
    with pytest.raises(ConfigurationError, match=r"the model's config.json would do"):
        kv_view(named)
    config = json.loads((model / "config.json").read_text())
    assert kv_view(named, model_config=config) == seen
    assert kv_view(named, model_config={"text_config": config}) == seen
    with pytest.raises(ConfigurationError, match="does not say how many heads"):
        kv_view(named, model_config={})


def test_fp8_elements_are_what_they_are_called(model: Path) -> None:
    view = kv_view(on_cuda(namespace_of_engine(model, layout="NHD", kv_cache_dtype="fp8")))
    row = np.full(view.nbytes, 0x38, np.uint8)
    assert view.to_numpy(row).dtype.name == "float8_e4m3fn"
    assert (view.to_numpy(row).astype(np.float32) == 1.0).all()
