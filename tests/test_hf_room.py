"""What is loaded has room behind it: the next tokens are written there, and nobody who looks at the cache sees that."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="pip install torch 'transformers>=5'")
transformers = pytest.importorskip("transformers", reason="pip install torch 'transformers>=5'")

from transformers.cache_utils import DynamicLayer  # noqa: E402

from kvstore.hf_room import RoomyLayer  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

LOADED, ROOM = 10, 18
SHAPE = (1, 2, ROOM, 4)


def states(tokens: int, seed: int = 1) -> tuple[Any, Any]:
    random = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 1, 2, tokens, 4, generator=random)
    return keys, values


def pair() -> tuple[RoomyLayer, DynamicLayer]:
    """A layer that was loaded, and a stock one with the same content."""
    keys, values = states(ROOM)
    roomy, stock = RoomyLayer(keys, values, LOADED), DynamicLayer()
    stock.update(keys[:, :, :LOADED].clone(), values[:, :, :LOADED].clone())
    return roomy, stock


def same(roomy: Any, stock: Any) -> bool:
    ours, theirs = (roomy.keys, roomy.values), (stock.keys, stock.values)
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def both(layers: tuple[Any, Any], act: Callable[[Any], object]) -> None:
    with torch.no_grad():
        for layer in layers:
            act(layer)
    assert same(*layers)


def test_what_follows_is_written_behind_what_was_loaded_and_copied_only_where_the_room_ends() -> None:
    roomy, stock = pair()
    place, before = roomy.keys.data_ptr(), roomy.keys
    kept = before.clone()
    for number, tokens in enumerate([5, 1, 1]):
        both((roomy, stock), lambda layer, n=number, t=tokens: layer.update(*states(t, n)))
        assert roomy.keys.data_ptr() == place
        assert roomy.get_seq_length() == stock.get_seq_length()
    both((roomy, stock), lambda layer: layer.update(*states(2, 9)))
    assert roomy.keys.data_ptr() != place
    both((roomy, stock), lambda layer: layer.update(*states(1, 10)))
    assert torch.equal(before, kept)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.crop(-3),
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.batch_select_indices(torch.tensor([0])),
        lambda layer: layer.reset(),
    ],
    ids=["crop", "repeat", "select", "reset"],
)
def test_after_whatever_else_is_done_with_it_it_is_as_a_stock_layer(change: Callable[[Any], object]) -> None:
    layers = pair()
    both(layers, lambda layer: layer.update(*states(2, 2)))
    shown = layers[0].keys
    kept = shown.clone()
    for layer in layers:
        change(layer)
    batch = 1 if layers[1].keys is None else layers[1].keys.shape[0]
    for number in (3, 4):
        both(layers, lambda layer, n=number: layer.update(*(part.repeat(batch, 1, 1, 1) for part in states(2, n))))
    assert torch.equal(shown, kept), "a tensor that somebody got is never written to"


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_two_copies_go_on_without_seeing_each_other(duplicate: Callable[[Any], Any]) -> None:
    roomy, stock = pair()
    other, other_stock = duplicate(roomy), copy.deepcopy(stock)
    both((roomy, stock), lambda layer: layer.update(*states(2, 2)))
    both((other, other_stock), lambda layer: layer.update(*states(3, 3)))
    both((roomy, stock), lambda layer: layer.update(*states(1, 4)))
    assert same(other, other_stock)


def test_gradients_go_the_stock_way() -> None:
    roomy, stock = pair()
    keys, values = (part.requires_grad_() for part in states(2, 2))
    for layer in (roomy, stock):
        loaded = layer.keys
        (layer.update(keys, values)[0].sum() * 2).backward()
        assert not loaded.requires_grad
    assert torch.equal(keys.grad, torch.full_like(keys, 4))


def test_a_backward_finds_what_a_forward_before_was_shown() -> None:
    """As where an adapter has changed the queries alone: keys need no gradient, and the queries' one needs the keys."""
    gradients: list[Any] = []
    for layer in pair():
        queries = states(1, 5)[0].requires_grad_()
        outputs = [
            torch.nn.functional.scaled_dot_product_attention(queries, *layer.update(*states(1, n))) for n in (2, 3)
        ]
        sum(outputs).sum().backward()
        gradients.append(queries.grad)
    assert torch.equal(*gradients)


def test_what_is_of_another_type_is_promoted_as_in_a_stock_layer() -> None:
    keys, values = (part.bfloat16() for part in states(ROOM))
    roomy, stock = RoomyLayer(keys, values, LOADED), DynamicLayer()
    stock.update(keys[:, :, :LOADED], values[:, :, :LOADED])
    both((roomy, stock), lambda layer: layer.update(*states(2, 2)))
    assert roomy.keys.dtype == torch.float32


def test_what_was_made_in_inference_mode_grows_outside_of_it() -> None:
    with torch.inference_mode():
        layers = pair()
        place = layers[0].keys.data_ptr()
        both(layers, lambda layer: layer.update(*states(2, 2)))
        assert layers[0].keys.data_ptr() == place
    both(layers, lambda layer: layer.update(*states(2, 3)))


def test_what_was_loaded_is_let_go_of_once_there_is_no_room_left() -> None:
    keys, values = states(ROOM)
    loaded = [weakref.ref(part) for part in (keys, values)]
    layer = RoomyLayer(keys, values, LOADED)
    del keys, values
    with torch.no_grad():
        layer.update(*states(ROOM - LOADED + 1, 2))
    gc.collect()
    assert [one() for one in loaded] == [None, None]
