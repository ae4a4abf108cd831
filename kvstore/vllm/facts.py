"""What of vLLM's configuration decides which engines may share blocks, as plain values.

`plugin` reads it where the connector is built, `identity` makes a namespace of it. An `EngineFacts` holds text, numbers
and nothing of vLLM's own, so that no model's configuration is kept alive. Values are read from vLLM's objects as they
were resolved (an `auto` has become a dtype, an override is in the model's configuration), not from what was asked for.

What is not in here on purpose: engine id, paths, host, sizes of caches and pools, scheduling. The longest request and
the reach of a group's attention are for sizing alone (`sizing.py`), no part of anybody's identity.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import importlib
import json
import platform
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, cast

from kvstore.vllm._compat import hash_seed, salt_form
from kvstore.vllm.keys import seed_digest
from kvstore.vllm.weights import ModelSource

__all__ = [
    "SEED_REMEDY",
    "SHARDED",
    "EngineFacts",
    "GroupFacts",
    "KeyFacts",
    "device_facts",
    "engine_version",
    "read_facts",
    "read_keys",
    "vllm_module",
]

CONFIG_NOISE = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "transformers_version"})
"""Where a model's configuration came from; everything else in it may change what is computed."""
SPEC_NOISE = frozenset({"block_size", "dcp_sharded", "max_tp_shards", "block_stride_alignment", "is_draft"})
"""Fields of a KV-cache spec that are stated elsewhere, or that say nothing of the bytes."""
SHARDED = frozenset({"num_kv_heads", "page_size_padded", "num_head_slots"})
"""Fields of a KV-cache spec that are those of one rank."""
MEDIA = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_hasher_algorithm",
    "mm_encoder_attn_dtype",
    "interleave_mm_strings",
    "video_pruning_rate",
    "video_pruning_method",
    "language_model_only",
)
"""Settings of the engine that change what media become, and that are not in the digest of a block."""
SEED_REMEDY = (
    "the seed of the block hash ({}) is random in each process, so that no other ever finds a block: set the"
    " environment variable PYTHONHASHSEED to the same number in all of them (PYTHONHASHSEED=0)"
)


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One KV-cache group: the kind of its cache, and what is in a block of one layer on one rank."""

    kind: str
    fields: Mapping[str, Any]
    """By layer kind where layers differ; JSON values."""
    window: int | None = None
    """Tokens that its attention reaches back, so that older blocks are of no use; None: to the front. Not identity."""


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """How the engine names a block."""

    algorithm: str
    digest_bytes: int
    seed: str | None
    """What digests start from, itself as a digest (`keys.seed_digest`); None if random in each process."""
    salts: str
    """How a request's `cache_salt` goes into its first digest (`keys.NAMED_SALT`)."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One engine. `values`: what changes the numbers in a block; the rest: where they stand, and under which key."""

    architecture: str
    sources: tuple[ModelSource, ...]
    """Weights that KV is computed with: the model's, then those of a draft model."""
    values: Mapping[str, str]
    kv_heads: int
    """Over all ranks."""
    groups: tuple[GroupFacts, ...]
    """By their index in vLLM's `KVCacheConfig`."""
    attention: str
    """Which kernels lay out a block, as far as the engine core knows."""
    keys: KeyFacts
    doubts: tuple[str, ...]
    """Why blocks of equal keys may differ although everything here agrees; the operator has to vouch for them."""
    unique: tuple[str, ...]
    """Why no other process, not even the same after a restart, can ever use these blocks."""
    max_model_len: int
    """Tokens of the longest request. Not identity."""


def read_facts(vllm_config: Any, kv_cache_config: Any) -> EngineFacts:
    """Raises whatever reading an unknown version's configuration raises; `plugin` keeps that for the error message."""
    model, load = vllm_config.model_config, vllm_config.load_config
    keys, draft = read_keys(vllm_config.cache_config.prefix_caching_hash_algo), _draft(vllm_config)
    return EngineFacts(
        architecture=", ".join(model.hf_config.architectures or [type(model.hf_config).__name__]),
        sources=tuple(_source(each, load) for each in (model, draft) if each is not None),
        values={name: _text(value) for name, value in _values(vllm_config, draft).items()},
        kv_heads=int(model.get_total_num_kv_heads()),
        groups=tuple(_group(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups),
        attention=_attention(vllm_config),
        keys=keys,
        doubts=_doubts(vllm_config),
        unique=_unique(vllm_config, keys),
        max_model_len=int(model.max_model_len),
    )


def _source(model: Any, load: Any) -> ModelSource:
    return ModelSource(
        model=str(model.model),
        revision=model.revision,
        load_format=str(getattr(load.load_format, "value", load.load_format)),
        download_dir=load.download_dir,
        remote=getattr(model, "model_weights", None) or "",
    )


def _draft(vllm_config: Any) -> Any:
    """The draft model's configuration, where it has weights and KV of its own: guessing by n-grams has neither."""
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    return None if draft is vllm_config.model_config else draft


def _values(vllm_config: Any, draft: Any) -> dict[str, Any]:
    cache = vllm_config.cache_config
    found: dict[str, Any] = {f"model.{name}": value for name, value in _model(vllm_config.model_config).items()}
    if draft is not None:
        found |= {f"draft.{name}": value for name, value in _model(draft).items()}
        found["draft.method"] = vllm_config.speculative_config.method
    found |= {
        name: getattr(cache, name, None)
        for name in ("kv_cache_dtype_skip_layers", "mamba_cache_mode", "kv_sharing_fast_prefill")
    }
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1:
        found["interleave"] = str(parallel.cp_kv_cache_interleave_size)  # tokens of a block go to ranks in turns of it
    found["loader"] = vllm_config.load_config.model_loader_extra_config
    media = vllm_config.model_config.multimodal_config
    if media is not None:
        found |= {f"media.{name}": getattr(media, name, None) for name in MEDIA}
    return {name: value for name, value in found.items() if value not in (None, {}, [], False, "")}


def _model(model: Any) -> dict[str, Any]:
    """What a model computes with, besides its weights: the whole configuration, overrides applied, as a digest."""
    config = _text(_plain(model.hf_config.to_dict()))
    return {
        "config": hashlib.sha256(config.encode()).hexdigest(),
        "dtype": model.dtype,
        "quantization": model.quantization,
        "quantization_config": getattr(model, "quantization_config", None),
        "model_impl": model.model_impl,
        "code_revision": model.code_revision,
        "override_attention_dtype": getattr(model, "override_attention_dtype", None),
        "model_class_overrides": getattr(model, "model_class_overrides", None),
    }


def _group(spec: Any) -> GroupFacts:
    """A wrapper over layers of several kinds is what the scheduler's configuration flattens; both are read alike."""
    layers: Mapping[str, Any] = getattr(spec, "kv_cache_specs", None) or {"": spec}
    kinds = {json.dumps(_spec(each), sort_keys=True): type(each).__name__ for each in layers.values()}
    windows = [_window(each) for each in layers.values()]
    return GroupFacts(
        kind=" + ".join(kinds.values()),
        fields=json.loads(next(iter(kinds))) if len(kinds) == 1 else {"each": sorted(kinds)},
        window=None if None in windows else max(cast("list[int]", windows)),
    )


def _window(spec: Any) -> int | None:
    """As vLLM's scheduler looks at it; of a recurrent state the last one is enough."""
    kinds = vllm_module("v1.kv_cache_interface")
    if isinstance(spec, kinds.SlidingWindowSpec):
        return int(spec.sliding_window)
    if isinstance(spec, kinds.ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return 1 if isinstance(spec, kinds.MambaSpec) else None


def _spec(spec: Any) -> dict[str, Any]:
    """The fields of a KV-cache spec that are not at their defaults: a later version's new field changes nothing."""
    return {
        field.name: _plain(getattr(spec, field.name))
        for field in dataclasses.fields(spec)
        if field.name not in SPEC_NOISE and getattr(spec, field.name) != field.default
    }


def _attention(vllm_config: Any) -> str:
    """The attention backend, where it was chosen; else what vLLM chooses by: its own version and the device.

    The choice is made in the workers, and the engine core is not told. Kernels for CPUs pack keys as the instruction
    set likes it.
    """
    config = vllm_config.attention_config
    chosen = {name: getattr(config, name, None) for name in ("backend", "backend_per_kind", "indexer_kv_dtype")}
    runner = "runner 2" if getattr(vllm_config, "use_v2_model_runner", False) else "runner 1"
    if vllm_module("platforms").current_platform.device_type == "cpu":
        return f"vLLM {engine_version()}, {device_facts()}, {runner}"
    by_version = chosen["backend"] is None
    device = device_facts(capability=by_version) + (f", vLLM {engine_version()}" if by_version else "")
    return f"{_text(_plain(chosen))} on {device}, {runner}"


def device_facts(*, capability: bool = True) -> str:
    """What this process computes on, as far as kernels are chosen by it: kind, and compute capability if wanted."""
    current_platform = vllm_module("platforms").current_platform
    device = str(current_platform.device_type or "unspecified")
    if device == "cpu":
        return f"cpu {_cpu()}"
    if current_platform.is_rocm():
        device += f" shuffle={getattr(vllm_module('envs'), 'VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT', False)}"
    if capability:
        numbers = current_platform.get_device_capability()
        device += f" {'.'.join(map(str, numbers)) if numbers else 'of unknown capability'}"
    return device


def _cpu() -> str:
    torch: Any = importlib.import_module("torch")
    tiles: Any = getattr(torch.cpu, "_is_amx_tile_supported", None)
    amx = bool(tiles()) if tiles is not None else "unknown"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} amx={amx}"


def vllm_module(name: str) -> Any:
    """`vllm.NAME`, imported here and now; untyped, because type checkers need no vLLM installed."""
    return importlib.import_module(f"vllm.{name}")


def engine_version() -> str:
    """As vLLM says of itself, with whatever marks a build of one's own."""
    return str(vllm_module("version").__version__)


def read_keys(algorithm: str) -> KeyFacts:
    """How this process names blocks, by vLLM's name for the hash."""
    function = vllm_module("utils.hashing").get_hash_fn_by_name(algorithm)
    seed, again = hash_seed(function), hash_seed(function)
    digest = seed_digest(seed) if seed is not None and seed == again else None
    return KeyFacts(algorithm, len(function(b"")), digest, salt_form())


def _doubts(vllm_config: Any) -> tuple[str, ...]:
    found: list[str] = []
    if vllm_config.lora_config is not None:
        found.append("adapters (LoRA) are told apart by their name or path, not by their weights")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        found.append("the scales of FP8 blocks are computed from the first requests of each process")
    return tuple(found)


def _unique(vllm_config: Any, keys: KeyFacts) -> tuple[str, ...]:
    found: list[str] = []
    if keys.seed is None:
        found.append(SEED_REMEDY.format(keys.algorithm))
    media = vllm_config.model_config.multimodal_config
    if media is not None and media.mm_processor_cache_gb == 0 and not vllm_config.cache_config.enable_prefix_caching:
        found.append(
            "images and other media are named by their request, not by their content: enable prefix caching, or give"
            " mm_processor_cache_gb a size"
        )
    return tuple(found)


def _text(value: Any) -> str:
    value = _plain(value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it, the same in every process. Raises TypeError for what has no such form."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        items = cast("Any", value).items()
        return {str(_plain(name)): _plain(item) for name, item in items if name not in CONFIG_NOISE}
    if isinstance(value, Set):
        return sorted(json.dumps(_plain(item), sort_keys=True) for item in cast("Any", value))
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(item) for item in cast("Any", value)]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "to_dict"):
        return _plain(cast("Any", value).to_dict())
    if type(value).__module__ in ("torch", "fractions"):  # a dtype or a fraction: its text is its value
        return str(value)
    if type(value).__module__ == "numpy":
        return _plain(cast("Any", value).tolist())
    raise TypeError(f"cannot write down {type(value).__module__}.{type(value).__qualname__} {value!r:.80}")
