"""A transformers model finds a prefix that another process archived: the same keys and values, and nothing computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="pip install torch 'transformers>=5'")
transformers = pytest.importorskip("transformers", reason="pip install torch 'transformers>=5'")

from kvstore import open_store  # noqa: E402
from kvstore.archive import create, open_archive, select  # noqa: E402
from kvstore.hf import PrefixCache  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = [(7 * i * i + 3 * i) % 97 for i in range(70)]
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS, initializer_range=0.2)).eval()


def test_a_new_cache_begins_with_the_archive_and_stock_readers_see_the_models_kv(model: Any, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/archives/prompt"
    with PrefixCache(model, f"file://{tmp_path}/first") as cache:
        computed = cache.prefill(PROMPT)
        cache.store(PROMPT, computed.cache)
        cache.drain()
        space = cache.namespace
    with open_store(f"file://{tmp_path}/first") as store:
        create(url, store, space, select(store, space, tokens=PROMPT))
    with open_archive(url) as archive:
        kv = archive.xarray().g0
        for layer, kept in enumerate(computed.cache.layers):
            for which, tensor in enumerate((kept.keys, kept.values)):  # (1, head, token, dim)
                stored = kv.isel(layer=layer, kv=which).transpose("head", "token", "dim").values
                assert np.array_equal(stored, tensor[0, :, :64].numpy())
    with PrefixCache(model, f"lmdb://{tmp_path}/second", archives=[url]) as cache:
        assert cache.manager.warming is not None
        assert cache.manager.warming.wait(20)
        again = cache.prefill(PROMPT)
    assert again.hit_tokens == 64
    assert torch.equal(again.cache.layers[1].keys[:, :, :64], computed.cache.layers[1].keys[:, :, :64])
