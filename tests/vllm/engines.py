"""Real configurations of vLLM around models on disk that have no use but their identity; no device, no engine.

`namespace_of_engine(folder, …)` goes the way of an engine: `EngineArgs`, the KV-cache groups, what the connector makes
of them (kvstore's plugin looks on), the offloading spec, and then `namespace_of`. As a script it prints a manifest.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from kvstore.vllm import plugin
from kvstore.vllm.identity import namespace_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector as connector
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore import Namespace

__all__ = [
    "BLOCK_TOKENS",
    "HEADS",
    "HEAD_SIZE",
    "LAYERS",
    "build",
    "make_model",
    "namespace_of_engine",
    "offloading_spec",
    "planned",
]

BLOCK_TOKENS = 32
LAYERS, HEADS, HEAD_SIZE = 2, 2, 16
LAYOUTS = {"HND": "LBHNC", "NHD": "LBNHC"}
"""By their names from 0.30 on."""


def make_model(folder: Path, *, weight: float = 0.5, **config: Any) -> Path:
    """A tiny Llama: configuration and weights in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "architectures": ["LlamaForCausalLM"],
    }
    LlamaConfig(**(shape | config)).save_pretrained(folder)
    tensors = {f"model.layers.{layer}.self_attn.k_proj.weight": torch.full((32, 64), weight) for layer in range(LAYERS)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def build(model: object, *, layout: str = "HND", offload: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """A `VllmConfig`, and the KV-cache configuration of its scheduler."""
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 16 << 20,
            "secondary_tiers": [],
            **(offload or {}),
        },
    )
    usual: dict[str, Any] = {
        "model": str(model),
        "tokenizer": str(model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 256,
        "block_size": BLOCK_TOKENS,
        "enforce_eager": True,
    }
    with _quiet(layout):
        config = EngineArgs(**(usual | arguments), kv_transfer_config=transfer).create_engine_config()
        if hasattr(config.cache_config, "kv_cache_layout"):
            config.cache_config.kv_cache_layout = LAYOUTS.get(layout, layout)
        return config, planned(config)


def planned(config: Any) -> Any:
    """The KV-cache configuration of one rank, as the engine core plans it: in a module of its own from 0.33 on."""
    specs = [_specs(config)]
    try:
        from vllm.v1.core import kv_cache_planning as planning
    except ImportError:
        return kv_cache_utils.get_kv_cache_configs(config, specs, [16 << 20])[0]
    groups = planning.get_global_kv_cache_groups(config, specs)
    return planning.get_kv_cache_configs(config, specs, [16 << 20], groups)[0]


def _specs(config: Any) -> dict[str, Any]:
    """What the attention layers of one rank would ask for."""
    model, cache, ranks = config.model_config, config.cache_config, config.parallel_config.tensor_parallel_size
    quantised = cache.cache_dtype.startswith("fp8")
    return {
        f"model.layers.{layer}.self_attn.attn": FullAttentionSpec(
            block_size=cache.block_size,
            num_kv_heads=model.get_total_num_kv_heads() // ranks,
            head_size=model.get_head_size(),
            dtype=torch.uint8 if quantised else model.dtype,
            kv_quant_mode=KVQuantMode.FP8_PER_TENSOR if quantised else KVQuantMode.NONE,
        )
        for layer in range(model.hf_config.get_text_config().num_hidden_layers)
    }


def offloading_spec(model: object, *, layout: str = "HND", **arguments: Any) -> Any:
    """As the connector makes it, in the engine core."""
    plugin.register()
    config, kv_cache = build(model, layout=layout, **arguments)
    with _quiet(layout):
        return OffloadingSpecFactory.create_spec(connector.build_offloading_config(config, kv_cache))


def namespace_of_engine(
    model: object, *, override: str | None = None, layout: str = "HND", **arguments: Any
) -> Namespace:
    """The identity of the engine that would start with these arguments."""
    spec = offloading_spec(model, layout=layout, **arguments)
    row_bytes = getattr(spec, "kv_bytes_per_chunk", None) or spec.kv_bytes_per_block
    with _quiet(layout):
        return namespace_of(spec, row_bytes, override=override)


@contextlib.contextmanager
def _quiet(layout: str) -> Iterator[None]:
    """Without vLLM's warnings, and with the layout of the KV cache as an operator sets it."""
    before = os.environ.get("VLLM_KV_CACHE_LAYOUT")
    os.environ["VLLM_KV_CACHE_LAYOUT"] = layout
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.pop("VLLM_KV_CACHE_LAYOUT")
        if before is not None:
            os.environ["VLLM_KV_CACHE_LAYOUT"] = before


if __name__ == "__main__":
    print(json.dumps(namespace_of_engine(sys.argv[1]).to_manifest()))
