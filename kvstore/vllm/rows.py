"""A row of vLLM's primary memory, which is a block of its tiers, as keys and values; on a machine without vLLM.

    row = one page for each layer and block of the GPU ── page = heads, tokens and contents in the order of the layout
                                                          content = key and value of one token and head, side by side

That is so for vLLM 0.30 to 0.33 on CUDA with the usual kernels, whatever the layout (LBHNC, LBNHC, BLHNC, BLNHC,
BHLNC), as `vllm/v1/kv_cache_interface.py` lays out pages. Its kernels for CPUs have for each head the keys of the page,
transposed, and then the values. What the manifest of a namespace says of its rows is enough to tell; where it does not
say enough, or says something else, `kv_view` refuses with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvstore.errors import ConfigurationError
from kvstore.layout import DTYPES, BlockLayout, as_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvstore.namespace import Namespace

__all__ = ["KVView", "kv_view"]

ROW_ALIGNMENT = 4096
"""Rows are padded to it."""
KERNEL_TOKENS = 16
"""Tokens of a page that every kernel on CUDA takes as it is; a larger one may consist of several of theirs."""
PACKED_BACKENDS = (None, "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
"""Attention backends that keep a token's key and value side by side; None: one of them, by vLLM's choice on CUDA."""
KINDS = ("FullAttentionSpec", "SlidingWindowSpec")
PLAIN_FIELDS = frozenset(
    {"id", "kind", "layers", "tokens_per_block", "dtype", "head_size", "head_size_v", "num_kv_heads"}
    | {"sliding_window", "attention_chunk_size", "non_causal", "kv_quant_mode", "page_size_padded"}
)
"""Of a group, what is understood here; anything else that a later version says may move bytes."""
ELEMENTS = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "float8_e4m3fn": "float8_e4m3fn"} | {
    "fp8_e5m2": "float8_e5m2",
    **{name: name for name in ("float16", "bfloat16", "float32")},
}
"""vLLM's names for the elements of a KV cache, and kvstore's."""

Strides = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where keys, or values, stand in a row: elements before the first, and between neighbours along
    (layer, page of the row, token, head, dim).
    """

    start: int
    strides: Strides


@dataclass(frozen=True, slots=True)
class KVView:
    """How rows of one KV-cache group are read. Arrays share the row's memory where that is possible: always with one
    page to a row in `keys` and `values`; else they are copies.

    `layer_names`: vLLM's names for what the first axis counts. `layout`: shape and dtype of `to_numpy`.
    """

    layout: BlockLayout
    layer_names: tuple[str, ...]
    nbytes: int
    """Of a row, padding included."""
    pages: int
    key: _Place
    value: _Place

    def keys(self, row: Buffer) -> NDArray[Any]:
        """Shape (layer, token, head, dim)."""
        return self._view(row, self.key)

    def values(self, row: Buffer) -> NDArray[Any]:
        """Shape (layer, token, head, dim)."""
        return self._view(row, self.value)

    def to_numpy(self, row: Buffer) -> NDArray[Any]:
        """Shape (layer, kv, token, head, dim): a view where keys and values stand alike in one page, else a copy."""
        if self.pages > 1 or self.key.strides != self.value.strides:
            return np.stack([self.keys(row), self.values(row)], axis=1)
        elements = self._elements(row)
        layer, _, *rest = (stride * elements.itemsize for stride in self.key.strides)
        between = (self.value.start - self.key.start) * elements.itemsize
        return np.lib.stride_tricks.as_strided(
            elements[self.key.start :], self.layout.shape, (layer, between, *rest), writeable=elements.flags.writeable
        )

    def _view(self, row: Buffer, place: _Place) -> NDArray[Any]:
        elements = self._elements(row)
        layers, _, tokens, heads, dim = self.layout.shape
        pages = np.lib.stride_tricks.as_strided(
            elements[place.start :],
            (layers, self.pages, tokens // self.pages, heads, dim),
            tuple(stride * elements.itemsize for stride in place.strides),
            writeable=elements.flags.writeable,
        )
        return pages.reshape(layers, tokens, heads, dim)

    def _elements(self, row: Buffer) -> NDArray[Any]:
        flat = as_bytes(row)
        if flat.nbytes != self.nbytes:
            raise ValueError(f"the row has {flat.nbytes} bytes, those of this namespace have {self.nbytes}")
        itemsize = DTYPES[self.layout.dtype]
        return flat[: flat.nbytes // itemsize * itemsize].view(self.layout.numpy_dtype)


def kv_view(namespace: Namespace, group: int = 0, model_config: Mapping[str, Any] | None = None) -> KVView:
    """How a block of KV-cache group `group` of a vLLM engine's namespace holds keys and values.

    `model_config` is the model's `config.json` as a mapping; asked for where the namespace was named by an operator,
    so that its manifest does not say how many heads there are. Raises `ConfigurationError` with the reason where rows
    cannot be told apart into keys and values.
    """
    try:
        return _kv_view(namespace, group, model_config)
    except _OpaqueError as why:
        raise ConfigurationError(
            f"blocks of group {group} in namespace {namespace.name[:12]} ({namespace.model}) cannot be read as keys and"
            f" values: {why}"
        ) from None


class _OpaqueError(Exception):
    """Why not."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """One group, as its manifest has it; sizes in elements and tokens."""

    layers: tuple[str, ...]
    heads: int
    dim: int
    tokens: int
    page: int
    """Elements of a page, padding included."""
    pages: int
    """Of each layer in a row."""
    dtype: str


def _kv_view(namespace: Namespace, group: int, model_config: Mapping[str, Any] | None) -> KVView:
    extra = namespace.extra
    if extra.get("engine") != "vllm":
        raise _OpaqueError("no vLLM wrote it")
    recorded = _recorded(namespace, group)
    _check_rows(extra)
    facts = _facts(extra, recorded, model_config)
    layout, device = extra["kv_cache_layout"], extra.get("attention", "unknown")
    if re.search(r"\bcpu\b", device):
        key, value = _cpu(facts, layout, device)
    else:
        _check_backend(facts, layout, device)
        key, value = _packed(facts, layout)
    used = len(facts.layers) * facts.pages * facts.page * DTYPES[facts.dtype]
    nbytes = namespace.block_bytes(group)
    if -used % ROW_ALIGNMENT + used != nbytes:
        raise _OpaqueError(
            f"a row has {nbytes} bytes, but {len(facts.layers)} layers, {facts.heads} heads of {facts.dim},"
            f" {facts.tokens * facts.pages} tokens and {facts.dtype} make {used}"
        )
    blocks = BlockLayout.canonical(
        layers=len(facts.layers),
        tokens=facts.tokens * facts.pages,
        heads=facts.heads,
        head_dim=facts.dim,
        dtype=facts.dtype,
    )
    return KVView(blocks, facts.layers, nbytes, facts.pages, key, value)


def _recorded(namespace: Namespace, group: int) -> dict[str, Any]:
    """The group's entry in the manifest, of the one kind that is understood."""
    try:
        groups: list[dict[str, Any]] = json.loads(namespace.extra["groups"])
        found = next(each for each in groups if each["id"] == group)
    except (KeyError, ValueError, StopIteration):
        raise _OpaqueError("its manifest does not describe the group") from None
    if len(groups) > 1:
        raise _OpaqueError("several KV-cache groups share a row, and where each layer stands in it is not recorded")
    if found["kind"] not in (*KINDS, "unknown"):
        what = "latents of MLA" if "MLA" in found["kind"] else "something else than keys and values of attention"
        raise _OpaqueError(f"its cache is of kind {found['kind']}, which keeps {what}")
    strange = sorted(found.keys() - PLAIN_FIELDS)
    if strange:
        raise _OpaqueError(f"its cache has {', '.join(strange)}, which may move bytes")
    return found


def _check_rows(extra: Mapping[str, str]) -> None:
    """Whether a row is one rank's pages, or all ranks' put together."""
    rows, topology = extra.get("rows", ""), extra.get("topology", "")
    layout = extra.get("kv_cache_layout", "")
    if rows != "direct" and not re.fullmatch(r"canonical v1-(nhd|hnd)", rows):
        raise _OpaqueError(
            f"its rows are {rows or 'of a format that is not recorded'!r}, which this kvstore does not know"
        )
    whole = topology == "any" and (rows != "direct" or layout == "BHLNC")
    if not whole and not re.fullmatch(r"(\w+=1 ?)+", topology):
        raise _OpaqueError(
            f"its rows are put together from those of several ranks ({topology}): engines with canonical_layout have"
            " rows that do not depend on the ranks"
        )


def _facts(extra: Mapping[str, str], recorded: dict[str, Any], model_config: Mapping[str, Any] | None) -> _Facts:
    heads, dim = _heads(extra, recorded, model_config)
    dtype = ELEMENTS.get(extra.get("kv_dtype", ""))
    if dtype is None:
        raise _OpaqueError(f"its elements are {extra.get('kv_dtype')!r}, which this kvstore does not know")
    quantised = str(recorded.get("kv_quant_mode", "NONE"))
    if quantised not in ("NONE", "FP8_PER_TENSOR"):
        raise _OpaqueError(f"scales are among its elements (kv_quant_mode {quantised})")
    tokens = int(recorded["tokens_per_block"])
    padded = int(recorded.get("page_size_padded") or 0) // DTYPES[dtype]
    return _Facts(
        layers=tuple(recorded["layers"]),
        heads=heads,
        dim=dim,
        tokens=tokens,
        page=padded or heads * tokens * 2 * dim,
        pages=int(extra["blocks_per_chunk"]),
        dtype=dtype,
    )


def _heads(
    extra: Mapping[str, str], recorded: dict[str, Any], model_config: Mapping[str, Any] | None
) -> tuple[int, int]:
    """KV heads in a row, and elements of each."""
    if "head_size" in recorded:
        if recorded.get("head_size_v", recorded["head_size"]) != recorded["head_size"]:
            raise _OpaqueError("its keys and values have heads of different sizes")
        return int(recorded.get("num_kv_heads") or extra["kv_heads"]), int(recorded["head_size"])
    if model_config is None:
        raise _OpaqueError(
            "its manifest does not say how many heads there are, because an operator named it and vLLM did not load"
            " kvstore's plugin; the model's config.json would do"
        )
    config = model_config.get("text_config", model_config)
    config = cast("Mapping[str, Any]", config if isinstance(config, Mapping) else model_config)
    try:
        every = int(config["num_attention_heads"])
        return int(config.get("num_key_value_heads") or every), int(
            config.get("head_dim") or config["hidden_size"] // every
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _OpaqueError(f"the model's configuration does not say how many heads there are ({error!r})") from None


def _cpu(facts: _Facts, layout: str, device: str) -> tuple[_Place, _Place]:
    """As the vector kernels of vLLM have it: per head, keys with tokens innermost, then values."""
    if layout != "LBHNC":
        raise _OpaqueError(f"vLLM has no kernels for CPUs with the layout {layout}")
    vectors = "x86_64" in device and facts.dim % 32 == 0 and facts.tokens % 32 == 0
    if not vectors or facts.dtype not in ("float32", "float16", "bfloat16"):
        raise _OpaqueError(f"how the kernels of this CPU pack keys is not known ({device}, heads of {facts.dim})")
    if facts.dtype == "bfloat16" and "amx=False" not in device:
        raise _OpaqueError(f"kernels with AMX pack keys of bfloat16 for the processor's tiles ({device})")
    page, head = facts.page, facts.tokens * 2 * facts.dim
    outer = facts.pages * page, page
    return (
        _Place(0, (*outer, 1, head, facts.tokens)),
        _Place(facts.tokens * facts.dim, (*outer, facts.dim, head, 1)),
    )


def _check_backend(facts: _Facts, layout: str, device: str) -> None:
    """Whether these are kernels on CUDA that keep key and value of a token side by side."""
    chosen = re.match(r"(\{.*\}) on cuda\b(?!.*\bshuffle=)", device)
    if not chosen:
        raise _OpaqueError(f"how its kernels lay out a page is not known ({device})")
    kernels: dict[str, Any] = json.loads(chosen[1])
    backend = kernels.get("backend")
    if backend not in PACKED_BACKENDS or any(kernels[name] for name in kernels.keys() - {"backend"}):
        raise _OpaqueError(f"how its kernels lay out a page is not known ({chosen[1]})")
    if not layout.endswith("NHC") and facts.tokens != KERNEL_TOKENS:
        raise _OpaqueError(
            f"its pages of {facts.tokens} tokens, heads first, may consist of several of the kernel's, whose size is"
            " not recorded"
        )


def _packed(facts: _Facts, layout: str) -> tuple[_Place, _Place]:
    """A page as `[heads, tokens, key and value]` in the order that the layout says."""
    content = 2 * facts.dim
    layers, page = len(facts.layers), facts.page
    token, head = {"HNC": (content, facts.tokens * content), "NHC": (facts.heads * content, content)}.get(
        layout[-3:], (content, layers * facts.tokens * content)
    )
    outer = {
        "LBHNC": (facts.pages * page, page),
        "LBNHC": (facts.pages * page, page),
        "BLHNC": (page, layers * page),
        "BLNHC": (page, layers * page),
        "BHLNC": (facts.tokens * content, layers * page),
    }.get(layout)
    if outer is None or (layout == "BHLNC" and page != facts.heads * facts.tokens * content):
        raise _OpaqueError(f"its layout is {layout!r}, whose pages do not stand together or are not known")
    strides = (*outer, token, head, 1)
    return _Place(0, strides), _Place(facts.dim, strides)
