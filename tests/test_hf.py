"""The prefix cache for transformers: what comes back is what was computed, and nobody else's."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="pip install torch 'transformers>=5'")
transformers = pytest.importorskip("transformers", reason="pip install torch 'transformers>=5'")

from kvstore import KeyExtras, open_store  # noqa: E402
from kvstore.errors import ConfigurationError, StoreClosedError  # noqa: E402, StoreClosedError
from kvstore.hf import PrefixCache, model_namespace, weights_digest  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.abc import BlockStore

PROMPT = [(7 * i * i + 3 * i) % 97 for i in range(70)]
BLOCK = 16

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with two layers, four query heads on two key-value heads, and random weights."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, initializer_range=0.2)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(folder: Path, dtype: str = "float32") -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


@pytest.fixture(scope="session")
def model(model_dir: Path) -> Any:
    return load(model_dir)


@pytest.fixture
def store() -> Iterator[BlockStore]:
    with open_store(f"memory://{os.urandom(8).hex()}") as opened:
        yield opened


def remember(model: Any, store: BlockStore, tokens: list[int], **options: Any) -> None:
    """Another process, as far as memory goes: what it leaves is in the store only."""
    with PrefixCache(model, store, block_tokens=BLOCK, **options) as cache:
        prompt = cache.prefill(tokens)
        cache.store(tokens, prompt.cache, start=prompt.hit_tokens)
        assert cache.drain()


def hit_tokens(model: Any, store: BlockStore, tokens: list[int], **options: Any) -> int:
    with PrefixCache(model, store, block_tokens=BLOCK, **options) as cache:
        return cache.load(tokens)[1]


def computed(model: Any, tokens: list[int]) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=True)


def kv(cache: Any, tokens: int) -> list[bytes]:
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    return [t[:, :, :tokens].contiguous().view(torch.uint8).numpy().tobytes() for pair in pairs for t in pair]


def test_a_prompt_that_was_read_in_inference_mode_goes_on_outside_of_it(model_dir: Path, store: BlockStore) -> None:
    model = load(model_dir, "float32")
    remember(model, store, PROMPT)
    with PrefixCache(model, store, block_tokens=BLOCK) as cache, torch.inference_mode():
        prompt = cache.prefill(PROMPT)
    assert prompt.hit_tokens
    layer = prompt.cache.layers[0]
    place, before = layer.keys.data_ptr(), kv(prompt.cache, len(PROMPT))
    with torch.no_grad():
        layer.update(layer.keys[:, :, -1:].clone(), layer.values[:, :, -1:].clone())
    assert (layer.keys.data_ptr(), layer.get_seq_length()) == (place, len(PROMPT) + 1)
    assert kv(prompt.cache, len(PROMPT)) == before


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_restored_is_bytewise_what_was_computed(model_dir: Path, store: BlockStore, dtype: str) -> None:
    model = load(model_dir, dtype)
    remember(model, store, PROMPT)
    fresh = computed(model, PROMPT)
    with PrefixCache(model, store, block_tokens=BLOCK) as cache:
        restored, hits = cache.load(PROMPT)
    assert hits == 64
    assert restored.get_seq_length() == 64
    assert {t.dtype for layer in restored.layers for t in (layer.keys, layer.values)} == {getattr(torch, dtype)}
    fresh_cache = getattr(fresh, "cache", None) or fresh.past_key_values
    assert kv(restored, 64) == kv(fresh_cache, 64)


def test_a_block_holds_layer_kv_token_head_dim_in_the_canonical_order(model: Any, store: BlockStore) -> None:
    from kvstore import BlockRead, GetOutcome, block_keys

    remember(model, store, PROMPT)
    space = model_namespace(model, BLOCK)
    assert space.layouts[0].shape == (2, 2, BLOCK, 2, 8)
    block = bytearray(space.block_bytes())
    assert store.get_many_into(space, [BlockRead(block_keys(PROMPT, BLOCK)[2], block)]) == [GetOutcome.HIT]
    fresh = computed(model, PROMPT)
    layer = (getattr(fresh, "cache", None) or fresh.past_key_values).layers[1]
    value = layer.values[0, 1, 2 * BLOCK + 5]
    assert space.layouts[0].to_numpy(block)[1, 1, 5, 1].tobytes() == value.numpy().tobytes()


def test_the_same_tokens_are_generated_with_and_without_the_cache(model: Any, store: BlockStore) -> None:
    prompt = torch.tensor([PROMPT])
    stock = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20)
    for _ in range(2):
        with PrefixCache(model, store, block_tokens=BLOCK) as cache:
            assert cache.generate(prompt, do_sample=False, max_new_tokens=20).tolist() == stock.tolist()
    assert store.usage().blocks == 4
    assert hit_tokens(model, store, PROMPT) == 64


def test_what_was_loaded_is_not_copied_for_what_follows(model: Any, store: BlockStore) -> None:
    remember(model, store, PROMPT)
    with PrefixCache(model, store, block_tokens=BLOCK) as cache:
        read = cache.prefill(PROMPT)
    assert (read.hit_tokens, read.cache.get_seq_length()) == (64, len(PROMPT))
    rooms = [layer._room for layer in read.cache.layers]
    assert [layer.keys.data_ptr() for layer in read.cache.layers] == [keys.data_ptr() for keys, _ in rooms]
    fresh = computed(model, PROMPT)
    fresh_cache = getattr(fresh, "cache", None) or fresh.past_key_values
    assert kv(read.cache, 64) == kv(fresh_cache, 64)


def test_prefill_gives_the_logits_of_the_last_token(model: Any, store: BlockStore) -> None:
    remember(model, store, PROMPT)
    with PrefixCache(model, store, block_tokens=BLOCK) as cache:
        prompt = cache.prefill(torch.tensor([PROMPT]))
    assert prompt.hit_tokens == 64
    assert prompt.cache.get_seq_length() == len(PROMPT)
    torch.testing.assert_close(prompt.logits, computed(model, PROMPT).logits[0, -1])


def test_prompts_that_part_share_the_blocks_before(model: Any, store: BlockStore) -> None:
    remember(model, store, PROMPT)
    assert hit_tokens(model, store, [*PROMPT[:40], 5, 5, 5]) == 32
    assert hit_tokens(model, store, PROMPT[:33]) == 32
    assert hit_tokens(model, store, [5, *PROMPT[1:]]) == 0


def test_the_last_token_is_always_left_for_the_model(model: Any, store: BlockStore) -> None:
    remember(model, store, PROMPT)
    assert hit_tokens(model, store, PROMPT[:64]) == 48
    assert hit_tokens(model, store, PROMPT[:1]) == 0


def test_a_prefix_ends_at_the_first_block_that_is_missing(model: Any, store: BlockStore) -> None:
    from kvstore import block_keys

    remember(model, store, PROMPT)
    assert store.delete_many(model_namespace(model, BLOCK), [block_keys(PROMPT, BLOCK)[2]]) == [True]
    assert hit_tokens(model, store, PROMPT) == 32
    remember(model, store, PROMPT)
    assert hit_tokens(model, store, PROMPT) == 64


def test_a_prompt_may_be_larger_than_host_memory_keeps(model: Any, store: BlockStore) -> None:
    long = [(5 * i * i + i) % 97 for i in range(200)]
    remember(model, store, long, host_memory=1)
    assert hit_tokens(model, store, long, host_memory=1) == 192


def test_two_loads_of_one_folder_share_and_so_does_a_copy_elsewhere(model_dir: Path, tmp_path: Path) -> None:
    model = load(model_dir)
    model.save_pretrained(tmp_path / model_dir.name)
    spaces = [model_namespace(m, BLOCK) for m in (model, load(model_dir), load(tmp_path / model_dir.name))]
    assert len({space.fingerprint for space in spaces}) == 1


def test_a_single_changed_weight_is_another_model(model: Any, store: BlockStore) -> None:
    remember(model, store, PROMPT)
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        tuned.model.layers[1].self_attn.v_proj.weight[3, 4] += 2**-10
    assert weights_digest(tuned) != weights_digest(model)
    assert hit_tokens(tuned, store, PROMPT) == 0


def test_another_rope_base_or_dtype_or_block_size_is_another_namespace(model_dir: Path, model: Any) -> None:
    config = copy.deepcopy(model.config)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 77.0}
    turned = transformers.AutoModelForCausalLM.from_pretrained(model_dir, config=config, dtype=torch.float32).eval()
    spaces = [
        model_namespace(model, BLOCK),
        model_namespace(turned, BLOCK),
        model_namespace(load(model_dir, "bfloat16"), BLOCK),
        model_namespace(model, 2 * BLOCK),
        model_namespace(model, BLOCK, revision="0123abc"),
    ]
    assert len({space.fingerprint for space in spaces}) == len(spaces)


def test_salts_and_adapters_do_not_share(model: Any, store: BlockStore) -> None:
    remember(model, store, PROMPT, extras=KeyExtras(salt="tenant 1"))
    assert hit_tokens(model, store, PROMPT, extras=KeyExtras(salt="tenant 1")) == 64
    assert hit_tokens(model, store, PROMPT, extras=KeyExtras(salt="tenant 2")) == 0
    assert hit_tokens(model, store, PROMPT, extras=KeyExtras(adapter="tenant 1")) == 0


def test_weights_that_are_not_in_memory_need_a_revision() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with pytest.raises(ConfigurationError, match="pass revision="):
        weights_digest(model)


MLA = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (("MistralConfig", {"sliding_window": 8}), "DynamicSlidingWindowLayer"),
        (("Gemma2Config", {"num_key_value_heads": 2, "head_dim": 8}), "DynamicSlidingWindowLayer"),
        (("MambaConfig", {"state_size": 4}), "LinearAttentionLayer"),
        (("DeepseekV3Config", MLA), "keys and values differ"),
        (("LlamaConfig", {"rope_parameters": DYNAMIC}), "dynamic"),
    ],
    ids=["sliding window", "some layers sliding", "state space", "latent attention", "rope by length"],
)
def test_a_cache_that_is_not_plain_full_attention_is_refused(
    config: tuple[str, dict[str, Any]], reason: str, store: BlockStore
) -> None:
    name, options = config
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SIZES, **options)).eval()
    with pytest.raises(ConfigurationError, match=reason):
        PrefixCache(model, store)


def test_a_model_in_training_mode_is_refused(model_dir: Path, store: BlockStore) -> None:
    with pytest.raises(ConfigurationError, match=r"model\.eval\(\)"):
        PrefixCache(load(model_dir).train(), store)


def test_batches_padding_and_empty_prompts_are_refused(model: Any, store: BlockStore) -> None:
    with PrefixCache(model, store, block_tokens=BLOCK) as cache:
        with pytest.raises(ValueError, match="one sequence at a time"):
            cache.prefill(torch.tensor([PROMPT, PROMPT]))
        with pytest.raises(ValueError, match="at least one token"):
            cache.prefill([])
        with pytest.raises(ValueError, match="padded"):
            cache.generate(torch.tensor([PROMPT]), attention_mask=torch.tensor([[0] + [1] * 69]), max_new_tokens=1)
        for name in ("num_beams", "num_return_sequences"):
            with pytest.raises(ValueError, match=f"{name} has to be 1"):
                cache.generate(torch.tensor([PROMPT]), max_new_tokens=1, do_sample=True, **{name: 2})


def test_a_cache_of_another_type_than_the_models_is_not_stored(model: Any, store: BlockStore) -> None:
    with (
        PrefixCache(model, store, block_tokens=BLOCK) as cache,
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        prompt = cache.prefill(PROMPT)
        with pytest.raises(ValueError, match="keys and values differ in"):
            cache.store(PROMPT, prompt.cache)


def test_a_model_with_as_many_key_value_heads_as_query_heads_works_too(store: BlockStore) -> None:
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    remember(model, store, PROMPT)
    with PrefixCache(model, store, block_tokens=BLOCK) as cache:
        prompt = cache.prefill(PROMPT)
    assert prompt.hit_tokens == 64
    torch.testing.assert_close(prompt.logits, computed(model, PROMPT).logits[0, -1])


def test_a_closed_cache_says_so_instead_of_computing_everything_in_silence(model: Any, store: BlockStore) -> None:
    cache = PrefixCache(model, store, block_tokens=4)
    cache.close()
    with pytest.raises(StoreClosedError, match="make another one"):
        cache.generate(torch.tensor([list(range(1, 10))]), max_new_tokens=1)
