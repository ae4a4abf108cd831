"""Layers of a cache that were loaded with room behind them, so that what the model computes next is written there.

A stock layer makes new tensors for every forward and copies all that it had into them: of a long prefix that was loaded
in 0.2 s as much again before the first token, and the same for every further one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RoomyLayer"]


_untyped: Any = DynamicLayer


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """The first `length` tokens of `keys` and `values`, which become the layer's own; the rest of them is room.

    Shape (1, heads, tokens, dim). Only memory that no tensor of the layer ever showed is written: after a crop, in
    beams, in the second of two copies and where there is no room left, it does what the stock layer does.
    """

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        _untyped.__init__(self)
        self.lazy_initialization(keys, values)
        self._room: tuple[Tensor, Tensor] | None = (keys, values)
        self._shown = [length]  # one for all copies that share the memory
        self.keys, self.values = keys[..., :length, :], values[..., :length, :]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append; the keys and values of all tokens."""
        end = self._shown[0] + key_states.shape[-2]
        if self._room is None or not self._has_room(self._room[0], key_states, end):
            self._room = None  # it has no use any more, and would keep what was loaded in memory
            return cast("tuple[Tensor, Tensor]", _untyped.update(self, key_states, value_states, *args, **kwargs))
        keys, values = self._room
        start, self._shown[0] = self._shown[0], end
        keys[..., start:end, :] = key_states
        values[..., start:end, :] = value_states
        self.keys, self.values = keys[..., :end, :], values[..., :end, :]
        return self.keys, self.values

    def _has_room(self, room: Tensor, states: Tensor, end: int) -> bool:
        shown = self.keys
        if shown is None or shown.data_ptr() != room.data_ptr() or end > room.shape[-2]:
            return False
        # Where gradients are recorded, a backward may want what is shown as it was; and other types are promoted.
        if torch.is_grad_enabled() or states.dtype != room.dtype:
            return False
        if room.is_inference() and not torch.is_inference_mode_enabled():
            return False
        return shown.shape[:-2] == states.shape[:-2] and shown.shape[-2] == self._shown[0]
