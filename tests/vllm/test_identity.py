"""Two engines that can share blocks have one namespace, two that cannot never have: real configurations of vLLM."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import vllm
from engines import make_model, namespace_of_engine, offloading_spec

from kvstore.errors import ConfigurationError
from kvstore.vllm import facts, plugin
from kvstore.vllm.identity import IdentityError, namespace_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import Namespace

HERE = Path(__file__).parent
SINCE_0_30 = hasattr(facts.vllm_module("v1.core.kv_cache_utils"), "resolve_none_hash_seed")


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 0.28 nothing can be shared without it."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama")


def fields(namespace: Namespace) -> dict[str, Any]:
    manifest = namespace.to_manifest()
    extra = manifest.pop("extra")
    return manifest | {f"extra.{name}": value for name, value in extra.items()}


def difference(one: Namespace, other: Namespace) -> set[str]:
    """Names of the fields that two manifests do not agree in."""
    ours, theirs = fields(one), fields(other)
    return {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}


@dataclass
class Apart:
    """A change to the engine that makes its blocks useless to the other, and all fields that say so."""

    fields: str
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    of: Callable[[Path], Path] = lambda folder: folder


def _remade(folder: Path, **config: Any) -> Path:
    return make_model(folder.parent / ("other" + "".join(config)), **config)


APART = {
    "other weights": Apart("revision", of=lambda folder: _remade(folder, weight=0.25)),
    "a rope override": Apart("extra.model.config", {"hf_overrides": {"rope_theta": 5.0}}),
    "scaled rope": Apart(
        "extra.model.config",
        {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}},
    ),
    "an override by a function": Apart("extra.model.config", {"hf_overrides": lambda config: _with_eps(config)}),
    "another class of model": Apart(
        "model extra.model.config", {"hf_overrides": {"architectures": ["MistralForCausalLM"]}}
    ),
    "another implementation": Apart("extra.model.model_impl", {"model_impl": "vllm"}),
    "quantised weights": Apart("extra.model.quantization", {"quantization": "fp8"}),
    "no sliding window": Apart("extra.model.config", {"disable_sliding_window": True}),
    "another dtype": Apart("extra.model.dtype extra.kv_dtype extra.groups", {"dtype": "float16"}),
    "fp8 blocks": Apart("layouts extra.kv_dtype extra.groups", {"kv_cache_dtype": "fp8"}),
    "a layer that stays as it is": Apart("extra.kv_cache_dtype_skip_layers", {"kv_cache_dtype_skip_layers": ["0"]}),
    "another loader": Apart("extra.loader", {"model_loader_extra_config": {"enable_multithread_load": True}}),
    "NHD": Apart("extra.kv_cache_layout", {"layout": "NHD"}),
    "larger blocks": Apart("layouts block_tokens extra.tokens_per_hash extra.groups", {"block_size": 64}),
    "two blocks to a row": Apart("layouts block_tokens extra.blocks_per_chunk", {"offload": {"blocks_per_chunk": 2}}),
    "another seed": Apart("extra.hash_seed", environment={"PYTHONHASHSEED": "1"}),
    "another hash": Apart("key_scheme", {"prefix_caching_hash_algo": "sha256_cbor"}),
    "shorter digests": Apart("key_scheme digest_bytes", {"prefix_caching_hash_algo": "xxhash"}),
    "two ranks": Apart("extra.topology extra.groups", {"tensor_parallel_size": 2}),
    "the canonical format": Apart("extra.rows extra.topology extra.groups", {"offload": {"canonical_layout": True}}),
    "more heads": Apart(
        "revision layouts extra.kv_heads extra.groups extra.model.config",
        of=lambda folder: _remade(folder, num_key_value_heads=4),
    ),
}


def _with_eps(config: Any) -> Any:
    config.rms_norm_eps = 0.125
    return config


@pytest.mark.parametrize("change", APART.values(), ids=APART.keys())
def test_an_engine_that_cannot_share_has_a_namespace_of_its_own_for_exactly_this_reason(
    change: Apart, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if change.arguments.get("prefix_caching_hash_algo") == "xxhash":
        pytest.importorskip("xxhash")
    usual = namespace_of_engine(model)
    for name, value in change.environment.items():
        monkeypatch.setenv(name, value)
    changed = namespace_of_engine(change.of(model), **change.arguments)
    assert changed.fingerprint != usual.fingerprint
    assert difference(usual, changed) == set(change.fields.split())


SHARED: dict[str, dict[str, Any]] = {
    "shorter requests": {"max_model_len": 128},
    "another share of memory": {"gpu_memory_utilization": 0.5, "num_gpu_blocks_override": 77},
    "other scheduling": {"max_num_seqs": 7, "max_num_batched_tokens": 512, "seed": 3},
    "a larger primary tier": {"offload": {"cpu_bytes_to_use": 32 << 20}},
    "another name to clients": {"served_model_name": "nobody"},
    "guessing by n-grams": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    },
    "an override that says the same": {"hf_overrides": lambda config: config},
}


@pytest.mark.parametrize("arguments", SHARED.values(), ids=SHARED.keys())
def test_what_changes_no_block_keeps_the_namespace(arguments: dict[str, Any], model: Path) -> None:
    assert difference(namespace_of_engine(model), namespace_of_engine(model, **arguments)) == set()


def test_the_same_model_in_another_folder_is_the_same(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    (copy / "tokenizer_config.json").write_text("{}")
    assert namespace_of_engine(copy).fingerprint == namespace_of_engine(model).fingerprint


def test_weights_replaced_in_place_are_other_weights(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", weight=0.5)
    before = namespace_of_engine(folder)
    times = (folder / "model.safetensors").stat()
    make_model(folder, weight=0.25)
    os.utime(folder / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert difference(before, namespace_of_engine(folder)) == {"revision"}


def test_each_engine_has_an_id_and_none_of_it_is_in_the_namespace(model: Path) -> None:
    one, other = offloading_spec(model), offloading_spec(model)
    assert one.config.engine_id != other.config.engine_id
    assert namespace_of(one, 4096).fingerprint == namespace_of(other, 4096).fingerprint
    assert str(model) not in json.dumps(namespace_of(one, 4096).to_manifest())


def test_another_process_finds_the_same_namespace(model: Path) -> None:
    """Its sets and dictionaries are ordered by another seed than ours; the seed of block hashes is set later."""
    program = "import os, runpy; os.environ['PYTHONHASHSEED'] = '0'; runpy.run_path('engines.py', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import sys; sys.argv = ['', {str(model)!r}]; {program}"],
        cwd=HERE,
        env={**os.environ, "PYTHONHASHSEED": "random", "VLLM_LOGGING_LEVEL": "ERROR"},
        stdout=subprocess.PIPE,
        timeout=110,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == namespace_of_engine(model).to_manifest()


def test_in_the_canonical_format_another_topology_reads_the_same_blocks(model: Path) -> None:
    canonical = {"offload": {"canonical_layout": True}}
    alone = namespace_of_engine(model, **canonical)
    assert alone.extra["topology"] == "any"
    assert difference(alone, namespace_of_engine(model, **canonical, tensor_parallel_size=2)) == set()


def test_in_the_direct_format_two_ranks_never_read_what_one_wrote_whatever_vllm_promises(model: Path) -> None:
    """A row of two ranks holds all layers of one rank's heads, then all of the other's."""
    spec = offloading_spec(model, tensor_parallel_size=2)
    assert spec.config.parallel.is_parallelism_agnostic
    assert namespace_of(spec, 4096).extra["topology"] == "tp=2 pp=1 pcp=1 dcp=1 world=2"


def test_a_draft_model_is_part_of_what_is_computed(model: Path) -> None:
    def drafted_by(folder: Path) -> Namespace:
        draft = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
        return namespace_of_engine(model, speculative_config=draft)

    drafted = drafted_by(model)
    assert {"revision", "extra.draft.config", "extra.draft.method"} < difference(drafted, namespace_of_engine(model))
    assert difference(drafted, drafted_by(_remade(model, weight=0.125))) == {"revision"}


def test_kernels_for_another_processor_or_version_lay_out_blocks_of_their_own(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = namespace_of_engine(model)
    monkeypatch.setattr(facts, "_cpu", lambda: "some other processor")
    assert difference(usual, namespace_of_engine(model)) == {"extra.attention"}
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(facts, "engine_version", lambda: "0.99.0")
    assert difference(usual, namespace_of_engine(model)) == {"extra.attention"}


def test_the_manifest_says_how_to_read_a_block(model: Path) -> None:
    namespace = namespace_of_engine(model)
    (group,) = json.loads(namespace.extra["groups"])
    assert group["layers"] == [f"model.layers.{layer}.self_attn.attn" for layer in range(2)]
    assert (group["kind"], group["num_kv_heads"], group["head_size"]) == ("FullAttentionSpec", 2, 16)
    assert (group["dtype"], group["tokens_per_block"]) == ("torch.bfloat16", 32)
    assert namespace.extra["kv_cache_layout"] == ("LBHNC" if SINCE_0_30 else f"HND of vLLM {vllm.__version__}")
    assert namespace.layouts[0].axes == ("byte",)


def test_a_name_of_the_operators_stands_for_the_weights_only(model: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", weight=0.125)
    named = namespace_of_engine(model, override="mine")
    assert difference(named, namespace_of_engine(other, override="mine")) == set()
    assert difference(named, namespace_of_engine(other, override="yours")) == {"model", "revision"}
    assert difference(named, namespace_of_engine(model, override="mine", layout="NHD")) == {"extra.kv_cache_layout"}


def test_weights_that_nobody_can_identify_are_refused_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(IdentityError, match=r'no weight file.*"namespace"') as caught:
        namespace_of_engine(folder)
    assert isinstance(caught.value, ConfigurationError)
    assert namespace_of_engine(folder, override="mine")


def test_adapters_need_a_name_because_block_hashes_do_not_know_their_weights(model: Path) -> None:
    with pytest.raises(IdentityError, match=r"adapters.*namespace"):
        namespace_of_engine(model, enable_lora=True)
    assert namespace_of_engine(model, enable_lora=True, override="base + adapters of May")


@pytest.mark.parametrize("override", [None, "mine"])
def test_a_random_seed_is_refused_because_nothing_would_ever_be_found(
    override: str | None, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xxhash")
    monkeypatch.delenv("PYTHONHASHSEED")
    with pytest.raises(IdentityError, match="PYTHONHASHSEED=0"):
        namespace_of_engine(model, prefix_caching_hash_algo="xxhash", override=override)


def test_without_a_seed_sha256_is_shared_from_0_30_on_and_refused_before(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED")
    if SINCE_0_30:
        assert namespace_of_engine(model).fingerprint == namespace_of_engine(model).fingerprint
    else:
        with pytest.raises(IdentityError, match="PYTHONHASHSEED=0"):
            namespace_of_engine(model)


def test_an_engine_that_was_not_seen_into_is_refused_unless_it_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = offloading_spec(model)
    monkeypatch.setattr(plugin, "_captured", {})
    with pytest.raises(IdentityError, match=r"did not load kvstore's plugin.*namespace"):
        namespace_of(spec, 4096)
    monkeypatch.setenv("VLLM_PLUGINS", "lora_hf_hub_resolver")
    with pytest.raises(IdentityError, match="VLLM_PLUGINS=lora_hf_hub_resolver leaves out"):
        namespace_of(spec, 4096)
    blind = namespace_of(spec, 4096, override="mine")
    assert blind.digest_bytes == 32, "until the first key shows how long they are"
    assert vllm.__version__ in blind.extra["attention"]


def test_a_configuration_that_cannot_be_read_is_an_error_with_its_reason(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = AttributeError("no attribute 'get_total_num_kv_heads'")
    spec = offloading_spec(model)
    monkeypatch.setattr(plugin, "_captured", {spec.config.engine_id: error})
    with pytest.raises(IdentityError, match=r"cannot read.*get_total_num_kv_heads.*namespace"):
        namespace_of(spec, 4096)
    assert namespace_of(spec, 4096, override="mine")
