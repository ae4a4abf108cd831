"""KV of a real model, stored by `kvstore.hf`, is seen as the model computed it; rows of vLLM's as keys and values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from inspect_helpers import machine

xarray = pytest.importorskip("xarray", reason='pip install "kvstore-tiers[inspect]"')

import kvstore.inspect  # noqa: E402
from kvstore import BlockLayout, BlockWrite, Mark, Namespace, block_keys, open_store  # noqa: E402
from kvstore.errors import ConfigurationError  # noqa: E402
from kvstore.inspect.axes import axes_of  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = [(7 * i * i + 3 * i) % 97 for i in range(70)]
BLOCK = 16


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_models_keys_and_values_are_seen_as_it_computed_them(dtype: str, tier: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from kvstore.hf import PrefixCache

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=97, num_key_value_heads=2, initializer_range=0.2)
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    with open_store(tier) as store:
        with PrefixCache(model, store, block_tokens=BLOCK, name="tiny") as cache:
            computed = cache.prefill(PROMPT)
            cache.store(PROMPT, computed.cache)
            assert cache.drain()
            space = cache.namespace
        store.mark_many(space, block_keys(PROMPT, BLOCK), Mark("prompt"))
        with kvstore.inspect.open(store) as look:
            (engine,) = look.namespaces().engine
            view = look.namespace()
            (root,) = view.tree().roots
            prefix = view.prefix("prompt" if store.capabilities.marks else root.last)
            seen = prefix.xarray()
            rows = {(row.layer, row.kv): row for row in prefix.statistics()}
            assert seen.attrs["source"] == tier
    assert (engine, root.blocks, root.complete) == ("transformers", 4, True)
    assert seen.sizes == {"layer": 2, "kv": 2, "token": 64, "head": 2, "dim": 8}
    for number, layer in enumerate(computed.cache.layers):
        for kind, tensor in (("key", layer.keys), ("value", layer.values)):
            exact = tensor[0, :, :64].float().numpy().swapaxes(0, 1)
            assert np.array_equal(seen.sel(layer=number, kv=kind).values, exact)
            assert rows[number, kind].absmax == np.abs(exact).max()


HEADS, DIM, LAYERS = 2, 8, (1, 3)
FIELDS = {"id": 0, "kind": "FullAttentionSpec", "tokens_per_block": BLOCK, "dtype": "torch.bfloat16"}
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in LAYERS]
ON_CUDA = '{"backend":"FLASH_ATTN","backend_per_kind":null,"indexer_kv_dtype":null} on cuda, runner 1'
USED = len(LAYERS) * BLOCK * HEADS * 2 * DIM * 2
CONFIG = {"num_attention_heads": 4, "num_key_value_heads": HEADS, "hidden_size": 4 * DIM}


def vllm_space(**changed: Any) -> Namespace:
    """As `kvstore.vllm.identity` describes an engine on CUDA."""
    group = {**FIELDS, "layers": NAMES, "head_size": DIM, "num_kv_heads": HEADS, **changed.pop("group", {})}
    extra = {
        "engine": "vllm",
        "kv_dtype": "bfloat16",
        "kv_cache_layout": "LBNHC",
        "rows": "direct",
        "topology": "tp=1 pp=1 pcp=1 dcp=1 world=1",
        "blocks_per_chunk": "1",
        "attention": ON_CUDA,
        "kv_heads": str(HEADS),
        "groups": json.dumps([{name: value for name, value in group.items() if value is not None}]),
        **changed,
    }
    layout = BlockLayout.opaque(-(-USED // 4096) * 4096)
    return Namespace("LlamaForCausalLM", "r", (layout,), BLOCK, key_scheme="vllm-sha256", extra=extra)


def test_a_row_of_vllms_is_keys_and_values_of_its_layers(local: str) -> None:
    space, key = vllm_space(), block_keys(range(BLOCK), BLOCK)[0]
    kv = np.random.default_rng(0).standard_normal((len(LAYERS), 2, BLOCK, HEADS, DIM))
    pages = kv.transpose(0, 2, 3, 1, 4).astype(BlockLayout("bfloat16", ("x",), (1,)).numpy_dtype)
    row = np.zeros(space.block_bytes(), np.uint8)
    row[:USED] = np.ascontiguousarray(pages).view(np.uint8).ravel()
    with open_store(local) as store:
        store.put_many(space, [BlockWrite(key, row.data, 0)])
    with kvstore.inspect.open(local) as look:
        assert look.namespaces()["dtype"].iloc[0] == "bfloat16"
        block = look.namespace().block(key.digest.hex())
        array = block.xarray()
        assert (list(array.layer.values), list(array.layer_name.values)) == (list(LAYERS), NAMES)
        assert np.array_equal(array.sel(layer=3, kv="value").values, pages[1, :, :, 1].astype(np.float32))
        assert block.zarr().shape == kv.shape
        assert tuple(block.torch().shape) == kv.shape
        assert (block.why_opaque, block.tokens) == ("", range(BLOCK))
        assert [(each.layer, each.kv) for each in block.statistics()][:2] == [(1, "key"), (1, "value")]


def test_rows_that_cannot_be_told_apart_are_bytes_and_it_is_said_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space, key = vllm_space(group={"head_size": None, "num_kv_heads": None}), block_keys(range(BLOCK), BLOCK)[0]
    url = f"lmdb://{tmp_path}/kv"
    with open_store(url) as store:
        store.put_many(space, [BlockWrite(key, bytes(space.block_bytes()), 0)])
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with kvstore.inspect.open(url) as look:
        block = look.namespace().block(key.digest.hex())
        assert block.xarray().dims == ("byte",)
        assert "config.json would do" in block.why_opaque
        assert "config.json would do" in block.xarray().attrs["why_opaque"]
        for given in (CONFIG, tmp_path, tmp_path / "config.json", str(tmp_path)):
            known = look.namespace(model_config=given).block(key.digest.hex())
            assert known.xarray().dims == ("layer", "kv", "token", "head", "dim")
            assert known.why_opaque == ""
    assert "config.json would do" in machine(capsys, "show", url, key.digest.hex())["why_opaque"]
    told = machine(capsys, "show", url, key.digest.hex(), "--model-config", str(tmp_path))
    assert told["shape"] == [len(LAYERS), 2, BLOCK, HEADS, DIM]


def test_a_model_config_that_is_none_is_an_error(tmp_path: Path) -> None:
    space = vllm_space()
    for text in ("[]", "no json"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigurationError, match=r"config\.json"):
            axes_of(space, 0, tmp_path)
    with pytest.raises(ConfigurationError, match="nowhere"):
        axes_of(space, 0, tmp_path / "nowhere")


def test_tokens_of_a_row_are_those_of_its_pages() -> None:
    from kvstore.inspect.axes import tokens_of

    assert tokens_of(vllm_space(blocks_per_chunk="3"), 0) == 3 * BLOCK
    assert tokens_of(vllm_space(groups="no json"), 0) == BLOCK
