"""A prefix cache for transformers' causal models: KV that some process computed before comes back from a tier.

::

    tokens ─block_keys─► TieringManager.load_prefix ─► DynamicCache ─► model(the rest of the tokens) ─► store

For one sequence at a time (batch size 1, no beam search), for models that keep plain keys and values of every token in
every layer: multi-head and grouped-query attention. Others are refused with the reason.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvstore.abc import BlockStore
from kvstore.errors import ConfigurationError, MissingDependencyError, StoreClosedError
from kvstore.keys import block_keys
from kvstore.layout import BlockLayout
from kvstore.namespace import Namespace
from kvstore.tiering import TieringManager
from kvstore.types import NO_PARENT, BlockWrite
from kvstore.url import TierURL, parse_size

try:
    import torch
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    from kvstore.hf_room import RoomyLayer
except ImportError as missing:
    raise MissingDependencyError(
        f"kvstore.hf needs torch and transformers 5 ({missing}): pip install torch 'transformers>=5'"
    ) from missing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.keys import KeyExtras
    from kvstore.types import BlockKey

    Tier = str | Mapping[str, Any] | TierURL | BlockStore

__all__ = ["Prefill", "PrefixCache", "model_namespace", "weights_digest"]

KV_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}

MIN_SLOTS = 4
"""Fewer would leave stores and loads waiting for each other."""

ROOM = 256
"""Tokens of an answer that find room behind what was loaded (`RoomyLayer`)."""

# What may differ between two copies of one model without changing a single key or value.
_CONFIG_IRRELEVANT = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")

# These recompute the rotary frequencies once a sequence grows long, so a prefix's keys depend on what follows it.
_ROPE_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt that was read, ready for decoding.

    `logits` are those of the last token, shape (vocabulary,). `cache` holds all tokens of the prompt and is the
    caller's. The first `hit_tokens` of them came from the tiers.
    """

    logits: torch.Tensor
    cache: DynamicCache
    hit_tokens: int


class PrefixCache:
    """Prompts of one model, with the KV of their longest known prefix loaded instead of computed.

    `tiers` is one tier URL or several (also mappings, `TierURL`s, or open stores, which stay the caller's). A block
    is the KV of `block_tokens` tokens. `extras` separates adapters and salts that must not share (see `KeyExtras`).
    `revision` and `name` are passed to `model_namespace`; the weights must not change afterwards. `host_memory`
    is what the primary tier may take (`1GiB` or bytes; touched as it fills), `timeout` the seconds without a block
    after which the rest of a prefix is computed. `archives` are URLs of prefixes that are restored into the first tier,
    in the background (`kvstore.archive`; `manager.warming` says how far that is). `tenant` says whose the prompts are:
    tiers mark what is stored, and encrypted ones seal it under that tenant's data key.

    Raises `ConfigurationError` for a model whose cache cannot be kept, and what `kvstore.open_store` raises.

    Threads: one at a time.
    """

    def __init__(
        self,
        model: Any,
        tiers: Tier | Sequence[Tier],
        *,
        block_tokens: int = 16,
        extras: KeyExtras | None = None,
        revision: str | None = None,
        name: str | None = None,
        host_memory: int | str = "1GiB",
        timeout: float = 10.0,
        archives: Sequence[str | Mapping[str, Any] | TierURL] = (),
        tenant: str = "",
    ) -> None:
        self._closed = False
        self.model = model
        self.block_tokens = block_tokens
        self.namespace = model_namespace(model, block_tokens, revision=revision, name=name)
        self.timeout = timeout
        self.tenant = tenant
        self._layout = self.namespace.layouts[0]
        self._extras = extras
        several = [tiers] if isinstance(tiers, str | Mapping | TierURL | BlockStore) else list(tiers)
        slots = max(MIN_SLOTS, parse_size(host_memory) // self._layout.nbytes)
        self.manager = TieringManager(self.namespace, several, primary_slots=slots, archives=archives)

    def load(self, tokens: Sequence[int] | torch.Tensor) -> tuple[DynamicCache, int]:
        """The KV of the longest stored prefix, and its length in tokens.

        Never the whole prompt: at least the last token is left for the model, which owes its logits. The cache is
        the caller's. A block that is missing, damaged or late ends the prefix before it.
        """
        ids = _token_ids(tokens)
        keys = self._keys(ids)[: (len(ids) - 1) // self.block_tokens]
        layers, _, step, heads, head_dim = self._layout.shape
        # numpy moves the blocks: torch would start its threads for each of them, at twice the time.
        word = np.dtype(f"u{self._layout.numpy_dtype.itemsize}")
        host = np.empty((layers, 2, heads, len(ids) + ROOM, head_dim), word)

        def place(index: int, view: NDArray[np.uint8]) -> None:
            block = view.view(word).reshape(self._layout.shape)
            host[:, :, :, index * step : (index + 1) * step] = block.swapaxes(2, 3)

        hit_tokens = self.manager.load_prefix(keys, place, timeout=self.timeout) * step if keys else 0
        cache = DynamicCache(config=self.model.config)
        if hit_tokens:
            with torch.inference_mode(False):  # else nobody could write into it outside of that mode
                kv = torch.as_tensor(host.view(np.uint8)).view(getattr(torch, self._layout.dtype))
                kv = kv.to(self.model.device)[:, :, None]
                _layers(cache)[:] = [RoomyLayer(key, value, hit_tokens) for key, value in kv]
        return cache, hit_tokens

    def store(self, tokens: Sequence[int] | torch.Tensor, cache: DynamicCache, *, start: int = 0) -> int:
        """Keep every whole block of `tokens[start:]` that `cache` holds; returns how many are kept now.

        `cache` is only read, and the caller's again on return: the blocks have been copied to host memory, and go
        on to every tier in the background (`drain` waits for them). Raises `ValueError` when the cache is not what this
        model makes by itself, as under autocast or with beams.
        """
        ids = _token_ids(tokens)
        keys = self._keys(ids)
        self._check(cache)
        block = np.empty(self._layout.nbytes, np.uint8)
        view = self._layout.to_torch(block.data)
        kept = 0
        for index in range(start // self.block_tokens, min(len(ids), cache.get_seq_length()) // self.block_tokens):
            view.copy_(_stacked(cache, index * self.block_tokens, (index + 1) * self.block_tokens).transpose(2, 3))
            parent = keys[index - 1].digest if index else NO_PARENT
            write = BlockWrite(keys[index], block.data, index, parent, self.tenant)
            kept += self.manager.store([write], timeout=self.timeout)
        return kept

    def prefill(self, tokens: Sequence[int] | torch.Tensor) -> Prefill:
        """Read a prompt: load its longest stored prefix, compute the rest. Stores nothing.

        So the first token need not wait for it: call `store(tokens, prefill.cache, start=prefill.hit_tokens)` once
        that token is out.
        """
        ids = _token_ids(tokens)
        cache, hit_tokens = self.load(ids)
        rest = torch.tensor([ids[hit_tokens:]], device=self.model.device)
        return Prefill(_forward(self.model, rest, cache), cache, hit_tokens)

    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """`model.generate(input_ids, **options)` with the stored prefix loaded; then the prompt's blocks are stored.

        `input_ids` has shape (1, tokens). Raises `ValueError` for padding, beams or several sequences.
        """
        ids = _token_ids(input_ids)
        prompt = torch.tensor([ids], device=self.model.device)
        mask = options.pop("attention_mask", None)
        if mask is not None and not bool(mask.all()):
            raise ValueError("the prompt is padded: pass one sequence without padding, as its tokens decide the keys")
        chosen = options.get("generation_config") or self.model.generation_config
        for name in ("num_beams", "num_return_sequences"):
            if (options.get(name) or getattr(chosen, name, None) or 1) != 1:
                raise ValueError(f"{name} has to be 1: a prefix cache serves one sequence at a time")
        cache, hit_tokens = self.load(ids)
        options[_cache_argument(self.model)] = cache
        output: torch.Tensor = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        self.store(ids, cache, start=hit_tokens)
        return output

    def drain(self, timeout: float = 60.0) -> bool:
        """Wait until everything stored has reached its tiers; False if `timeout` seconds were not enough."""
        return self.manager.drain(timeout)

    def close(self) -> None:
        """Let queued stores finish, close the tiers. Raises `ShutdownTimeout` if one hangs."""
        self._closed = True
        self.manager.close()

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keys(self, ids: Sequence[int]) -> list[BlockKey]:
        if self._closed:
            raise StoreClosedError("this prefix cache was closed: make another one")
        return block_keys(ids, self.block_tokens, self._extras)

    def _check(self, cache: DynamicCache) -> None:
        """The cache must be what the layout says: autocast or beam search make something else."""
        found = _layout_of(cache, self.block_tokens)
        if found != self._layout:
            raise ValueError(f"this cache has blocks of {found}, and the model's were {self._layout}")


def model_namespace(
    model: Any, block_tokens: int, *, revision: str | None = None, name: str | None = None
) -> Namespace:
    """The namespace of a loaded transformers model: who has the same one may use the same blocks.

    The identity of the weights is `weights_digest(model)`, computed here (about 0.6 s per GB and core), because a name
    or a path says nothing about what was fine-tuned or merged since; or `revision`, which is then the caller's promise
    that equal text means equal weights (a commit hash). `name` is for people; by default the last part of the name the
    model was loaded by. The layout is read from the cache that the model fills for a single token.

    Raises `ConfigurationError` when the model's cache cannot be kept as blocks, or its weights are not in memory.
    """
    if model.training:
        raise ConfigurationError("the model is in training mode, where dropout changes the KV: call model.eval() first")
    layout = _probe(model, block_tokens)
    loaded_by = Path(str(getattr(model.config, "_name_or_path", "") or "")).name
    return Namespace(
        model=name or loaded_by or type(model).__name__,
        revision=revision or weights_digest(model),
        layouts=(layout,),
        block_tokens=block_tokens,
        extra={"engine": "transformers"},
    )


def weights_digest(model: Any) -> str:
    """SHA-256 over the configuration and every weight of `model`, as they are in memory.

    Raises `ConfigurationError` when some are not (offloaded, or on the meta device).
    """
    state = cast("Mapping[str, object]", model.state_dict())
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    absent = sorted(name for name in state if name not in tensors or tensors[name].is_meta)
    if absent:
        raise ConfigurationError(
            f"{len(absent)} weights, such as {absent[0]}, are not in memory, so that the model cannot be told from"
            " others: pass revision=, a text that changes whenever the weights do (a commit hash)"
        )
    with ThreadPoolExecutor() as threads:  # hashing releases the GIL
        digests = dict(zip(tensors, threads.map(_tensor_digest, tensors.values()), strict=True))
    config = {name: value for name, value in model.config.to_dict().items() if name not in _CONFIG_IRRELEVANT}
    identity = json.dumps([config, digests], sort_keys=True, default=str)
    return "sha256:" + hashlib.sha256(b"kvstore-weights-1:" + identity.encode("ascii")).hexdigest()


def _tensor_digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(flat.numpy().data).hexdigest()}"


def _probe(model: Any, block_tokens: int) -> BlockLayout:
    """The layout of the model's KV. The model is asked, not its configuration: there are too many spellings of it."""
    who = f"{type(model).__name__}: kvstore cannot keep this model's cache yet:"
    by_length = sorted(set(_rope_types(model.config)) & set(_ROPE_BY_LENGTH))
    if by_length:
        raise ConfigurationError(
            f"{who} its rotary embedding ({by_length[0]}) makes a prefix depend on what follows it"
        )
    cache = DynamicCache(config=model.config)
    kinds = sorted({type(layer).__name__ for layer in _layers(cache) if type(layer) is not DynamicLayer})
    if kinds:
        raise ConfigurationError(
            f"{who} it has layers of kind {', '.join(kinds)}, and all must be full attention, with keys and values of"
            " every token"
        )
    _forward(model, torch.zeros((1, 1), dtype=torch.long, device=model.device), cache)
    try:
        return _layout_of(cache, block_tokens)
    except ValueError as error:
        raise ConfigurationError(f"{who} {error}") from None


def _layout_of(cache: DynamicCache, block_tokens: int) -> BlockLayout:
    """The canonical layout of blocks of `cache`; ValueError when there is none that fits all of its layers."""
    layers = _layers(cache)
    tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    if not tensors or any(not isinstance(tensor, torch.Tensor) or tensor.ndim != 4 for tensor in tensors):
        raise ValueError("the model does not fill a DynamicCache with keys and values")
    shapes = {(tensor.shape[0], tensor.shape[1], tensor.shape[3], tensor.dtype, tensor.device) for tensor in tensors}
    if len(shapes) > 1:
        raise ValueError("keys and values differ in heads, dimension, type or device within the cache")
    batch, heads, head_dim, dtype, _ = shapes.pop()
    if batch != 1 or dtype not in KV_DTYPES:
        raise ValueError(f"batch size {batch} and {dtype}: it must be 1, and one of {', '.join(KV_DTYPES.values())}")
    return BlockLayout.canonical(
        layers=len(layers), tokens=block_tokens, heads=heads, head_dim=head_dim, dtype=KV_DTYPES[dtype]
    )


def _stacked(cache: DynamicCache, start: int, stop: int) -> torch.Tensor:
    """A copy of the KV of tokens `start` to `stop`: axes (layer, kv, head, token, dim)."""
    pairs = [(layer.keys[0, :, start:stop], layer.values[0, :, start:stop]) for layer in _layers(cache)]
    return torch.stack([torch.stack(pair) for pair in pairs])


def _layers(cache: DynamicCache) -> list[Any]:
    return cast("list[Any]", cache.layers)


def _rope_types(config: Any) -> list[str]:
    """Every rotary embedding the configuration names: one, or one per kind of layer."""
    rope = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    kinds = [rope, *(cast("dict[str, Any]", value) for value in rope.values() if isinstance(value, dict))]
    return [str(kind["rope_type"]) for kind in kinds if "rope_type" in kind]


@torch.inference_mode()
def _forward(model: Any, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """Extend `cache` by `tokens` of shape (1, n); the logits of the last one, shape (vocabulary,)."""
    output = model(tokens, use_cache=True, logits_to_keep=1, **{_cache_argument(model): cache})
    logits: torch.Tensor = output.logits[0, -1]
    return logits


def _cache_argument(model: Any) -> str:
    """What this version of transformers calls the argument: it was renamed within version 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _token_ids(tokens: Sequence[int] | torch.Tensor) -> list[int]:
    """One sequence, as a list; from a list, or a tensor of shape (n,) or (1, n)."""
    if not isinstance(tokens, torch.Tensor):
        ids = list(tokens)
    elif tokens.ndim == 1 or (tokens.ndim == 2 and tokens.shape[0] == 1):
        ids = tokens.reshape(-1).cpu().numpy().tolist()
    else:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)}: one sequence at a time, shape (n,) or (1, n)")
    if not ids:
        raise ValueError("a prompt has at least one token")
    return ids
