"""What the bytes of a block mean: the one place that decides which axes a view has, and why it has none.

- A layout with axes of its own (canonical, latent, state space) is shown as it is.
- An opaque one is a row of vLLM's: `kvstore.vllm.rows` says where keys and values stand in it, if the namespace says
  how the row was made, or the model's configuration helps.
- What cannot be told apart is bytes, along one axis called `byte`, and `Axes.why_opaque` says why.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvstore.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvstore.layout import BlockLayout
    from kvstore.namespace import Namespace

    ModelConfig = Mapping[str, Any] | str | Path

__all__ = ["KV", "TOKEN", "Axes", "axes_of", "engine_of", "tokens_of"]

TOKEN = "token"
KV = ("key", "value")
"""The coordinates of the axis `kv`."""
_OPAQUE = ("byte",)


@dataclass(frozen=True, slots=True)
class Axes:
    """How blocks of one KV-cache group are shown: arrays of `shape` over `dims`, which `decode` makes of a block's
    bytes without a copy where it can (flat uint8 in, never written to).
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    dtype_name: str
    decode: Callable[[NDArray[np.uint8]], NDArray[Any]] = field(repr=False)
    layers: tuple[int, ...] | None = None
    """The model's number of each layer of the group; None where there is no layer axis."""
    layer_names: tuple[str, ...] = ()
    """What the engine calls them, where it says so."""
    why_opaque: str = ""
    """Why the bytes cannot be told apart; empty where they can."""

    @property
    def token_axis(self) -> int | None:
        """Where in `dims` the tokens are; None where a block has no such axis."""
        return self.dims.index(TOKEN) if TOKEN in self.dims else None

    @property
    def tokens(self) -> int | None:
        """Along that axis."""
        return None if self.token_axis is None else self.shape[self.token_axis]

    @property
    def words(self) -> str:
        """Dims and shape for people: `layer 2 × kv 2 × token 16`."""
        return " × ".join(f"{name} {length}" for name, length in zip(self.dims, self.shape, strict=True))

    def split_kv(self, block: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Keys and values of a decoded block, each with the other axes; None where they are not told apart."""
        if "kv" not in self.dims:
            return None
        keys, values = np.moveaxis(block, self.dims.index("kv"), 0)
        return keys, values


def axes_of(namespace: Namespace, group: int, model_config: ModelConfig | None = None) -> Axes:
    """The axes of blocks of KV-cache group `group`. Raises `ConfigurationError` for a `model_config` that is none."""
    layout = namespace.layouts[group]
    if layout.axes != _OPAQUE:
        return _of_layout(layout)
    if engine_of(namespace) == "vllm":
        return _of_row(namespace, group, model_config)
    return _opaque(layout, "its layout names no axes: it says only how many bytes a block has")


def engine_of(namespace: Namespace) -> str:
    """Who computed the blocks, as far as the namespace says."""
    return namespace.extra.get("engine", "")


def tokens_of(namespace: Namespace, group: int) -> int:
    """Tokens of one block of KV-cache group `group`."""
    layout = namespace.layouts[group]
    if TOKEN in layout.axes:
        return layout.shape[layout.axes.index(TOKEN)]
    fields = group_fields(namespace, group)
    try:
        return int(fields["tokens_per_block"]) * int(namespace.extra["blocks_per_chunk"])
    except (KeyError, TypeError, ValueError):
        return namespace.block_tokens


def group_fields(namespace: Namespace, group: int) -> Mapping[str, Any]:
    """What a namespace of vLLM's says of a group (`kvstore.vllm.identity`); nothing where it does not."""
    try:
        groups: list[dict[str, Any]] = json.loads(namespace.extra["groups"])
        return next(fields for fields in groups if fields["id"] == group)
    except (KeyError, TypeError, ValueError, StopIteration):
        return {}


def _of_layout(layout: BlockLayout) -> Axes:
    layers = tuple(range(layout.shape[layout.axes.index("layer")])) if "layer" in layout.axes else None
    return Axes(layout.axes, layout.shape, layout.numpy_dtype, layout.dtype, _decoder(layout), layers)


def _decoder(layout: BlockLayout) -> Callable[[NDArray[np.uint8]], NDArray[Any]]:
    return lambda data: layout.to_numpy(data.data)


def _opaque(layout: BlockLayout, why: str) -> Axes:
    return Axes(_OPAQUE, layout.shape, layout.numpy_dtype, layout.dtype, _decoder(layout), why_opaque=why)


def _of_row(namespace: Namespace, group: int, model_config: ModelConfig | None) -> Axes:
    from kvstore.vllm.rows import kv_view

    config = _contents(model_config)
    try:
        view = kv_view(namespace, group, config)
    except ConfigurationError as why:
        return _opaque(namespace.layouts[group], str(why))
    found = view.layout
    return Axes(
        dims=found.axes,
        shape=found.shape,
        dtype=found.numpy_dtype,
        dtype_name=found.dtype,
        decode=lambda data: view.to_numpy(data.data),
        layers=_numbers(view.layer_names),
        layer_names=view.layer_names,
    )


def _numbers(names: Sequence[str]) -> tuple[int, ...]:
    """The model's number of each layer (`model.layers.7.self_attn.attn` is 7), or how they are counted in the group."""
    found = [re.search(r"(?:^|\.)(\d+)(?:\.|$)", name) for name in names]
    numbers = tuple(int(number[1]) for number in found if number is not None)
    return numbers if len(set(numbers)) == len(names) else tuple(range(len(names)))


def _contents(config: ModelConfig | None) -> Mapping[str, Any] | None:
    if config is None or isinstance(config, Mapping):
        return config
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        contents: object = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as a model's config.json: {error}") from error
    if not isinstance(contents, dict):
        raise ConfigurationError(f"{path} is no model's config.json: it has no entries")
    return cast("Mapping[str, Any]", contents)
