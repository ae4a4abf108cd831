"""Pictures of values: the numbers in them are those of the arrays, whichever type and order these have."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("matplotlib", reason='pip install "kvstore-tiers[inspect]"')
xarray = pytest.importorskip("xarray", reason='pip install "kvstore-tiers[inspect]"')

from pictures_helpers import texts  # noqa: E402

from kvstore.inspect.pictures import (  # noqa: E402
    Picture,
    channels,
    distributions,
    fp8_cost,
    fp8_errors,
    norms,
    outliers,
    similarity,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

AXES = ("layer", "kv", "token", "head", "dim")
ALL: list[Callable[..., Picture]] = [norms, outliers, channels, distributions, fp8_cost]


def kv(layers: int = 3, tokens: int = 16, heads: int = 2, dim: int = 8, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((layers, 2, tokens, heads, dim)).astype(np.float32)


def named(values: NDArray[Any], **coords: Any) -> Any:
    return xarray.DataArray(values, dims=AXES, coords={"kv": ["key", "value"], **coords})


def cells(picture: Picture) -> list[NDArray[np.float64]]:
    """The numbers behind the coloured cells, K before V."""
    return [np.asarray(axes.images[0].get_array()) for axes in picture.axes if axes.images]


def test_norms_are_mean_lengths_per_layer_and_head() -> None:
    values = kv()
    wanted = np.linalg.norm(values, axis=-1).mean(2)
    keys, others = cells(norms(values))
    assert np.allclose(keys, wanted[:, 0])
    assert np.allclose(others, wanted[:, 1])
    assert "mean L2 norm per token" in texts(norms(values))


def test_outliers_are_peaks_in_units_of_the_root_mean_square() -> None:
    values = kv()
    values[1, 0, 3, 1, 2] = -40
    wanted = np.abs(values).max((2, 4)) / np.sqrt((values**2).mean((2, 4)))
    keys, others = cells(outliers(values))
    assert np.allclose(keys, wanted[:, 0], rtol=1e-5)
    assert np.allclose(others, wanted[:, 1], rtol=1e-5)
    assert np.unravel_index(keys.argmax(), keys.shape) == (1, 1)


def test_channels_show_where_outliers_sit() -> None:
    values = kv()
    values[:, 0, :, 1, 5] = 9
    keys, others = cells(channels(values))
    assert keys.shape == (3, 16)
    assert keys.argmax(1).tolist() == [8 + 5] * 3
    assert np.allclose(others, np.sqrt((values[:, 1] ** 2).mean(1)).reshape(3, 16), rtol=1e-5)


def test_bands_hold_the_share_of_values_that_they_say() -> None:
    values = kv(tokens=200)
    picture = distributions(values)
    for side, axes in enumerate(picture.axes[:2]):
        extremes, most, nine, half = axes.containers
        for layer in range(3):
            numbers = values[layer, side].ravel()
            for bars, share, slack in (
                (extremes, 1.0, 0.0),
                (most, 0.998, 0.002),
                (nine, 0.9, 0.01),
                (half, 0.5, 0.01),
            ):
                low, high = bars[layer].get_y(), bars[layer].get_y() + bars[layer].get_height()
                inside = np.mean((numbers >= low - 1e-6) & (numbers <= high + 1e-6))
                assert inside == pytest.approx(share, abs=slack + 1e-9)
    assert {"value of K", "value of V", "layer"} <= set(texts(picture).splitlines())


def test_similarity_is_the_mean_cosine_of_tokens() -> None:
    one, other = kv(seed=1), kv(seed=2)
    other[2] = one[2] * 3
    other[1, 1] = -one[1, 1]
    keys, values = cells(similarity(one, other))
    assert keys[2] == pytest.approx(1)
    assert values[1] == pytest.approx(-1)
    wanted = (one * other).sum(-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1)
    assert np.allclose(keys, wanted[:, 0].mean(1), atol=1e-6)


def test_a_token_without_direction_is_left_out_of_the_similarity() -> None:
    one = kv()
    other = one.copy()
    other[:, :, 0] = 0
    assert np.allclose(cells(similarity(one, other)), 1)
    other[0, 0] = 0
    keys, _ = cells(similarity(one, other))
    assert np.isnan(keys[0].astype(float)).all() or np.ma.getmaskarray(keys)[0].all()


def test_what_has_other_shapes_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match=r"yesterday has .* today .* one shape"):
        similarity(kv(), kv(tokens=17), names=("yesterday", "today"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32"])
@pytest.mark.parametrize("draw", ALL)
def test_every_type_that_a_block_has_can_be_drawn(draw: Callable[..., Picture], dtype: str) -> None:
    values = kv(2, 4).astype(getattr(ml_dtypes, dtype, dtype))
    drawn, same = draw(values), draw(named(values))
    assert texts(drawn) == texts(same)
    if dtype == "bfloat16":
        assert drawn._repr_png_().startswith(b"\x89PNG")


def test_the_type_is_said_and_the_numbers_are_those_of_the_type() -> None:
    values = kv().astype(ml_dtypes.bfloat16)
    picture = norms(values)
    assert "3 layers, 16 tokens, bfloat16" in texts(picture)
    assert np.allclose(cells(picture)[0], np.linalg.norm(values.astype(np.float32), axis=-1).mean(2)[:, 0])


def test_names_of_axes_count_not_their_order() -> None:
    values = kv()
    turned = named(values).transpose("head", "dim", "kv", "layer", "token")
    assert np.allclose(cells(norms(turned)), cells(norms(values)))


def test_a_view_is_taken_at_its_array() -> None:
    class View:
        def xarray(self) -> Any:
            return named(kv())

    assert np.allclose(cells(norms(View())), cells(norms(kv())))


def test_selections_keep_the_numbers_of_their_layers_and_heads() -> None:
    values = named(kv(layers=10), layer=range(10), head=[0, 1])
    some = norms(values.sel(layer=[4, 7]))
    some._repr_png_()
    ticks = [label.get_text() for label in some.axes[0].get_yticklabels()]
    assert [tick for tick in ticks if tick] == ["4", "7"]
    one = norms(values.sel(layer=4, kv="value"))
    assert [array.shape for array in cells(one)] == [(1, 2)]
    assert "layer 4" in texts(one)
    assert one.axes[0].get_title() == "V"
    assert cells(norms(values.isel(head=1)))[0].shape == (10, 1)


def test_latent_kv_has_one_side_and_one_head() -> None:
    values = np.random.default_rng(0).standard_normal((4, 16, 24)).astype(np.float32)
    picture = norms(xarray.DataArray(values, dims=("layer", "token", "latent")))
    assert np.allclose(cells(picture)[0][:, 0], np.linalg.norm(values, axis=-1).mean(1))
    assert picture.axes[0].get_title() == "latent"
    for draw in ALL:
        draw(xarray.DataArray(values, dims=("layer", "token", "latent")))


@pytest.mark.parametrize("draw", ALL)
def test_what_is_no_number_is_left_out_and_counted(draw: Callable[..., Picture]) -> None:
    values = kv()
    values[0, 0, 0, 0, 0], values[1, 1, 2, 0, 3] = np.nan, np.inf
    picture = draw(values)
    assert "2 values left out: not a finite number" in texts(picture)
    assert "left out" not in texts(draw(kv()))


@pytest.mark.parametrize("draw", ALL)
@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (np.zeros((2, 3)), ValueError, "layer, kv, token, head, dim"),
        (np.zeros((2, 3, 4, 5, 6)), ValueError, "keys and values are two"),
        (np.zeros((2, 2, 0, 5, 6)), ValueError, "no values to look at"),
        (np.full((1, 2, 1, 1, 1), "a"), TypeError, "holds none"),
        (xarray.DataArray(np.zeros(7, np.uint8), dims=("byte",)), ValueError, "'byte'"),
        (
            xarray.DataArray(np.zeros(7, np.uint8), dims=("byte",), attrs={"why_opaque": "nobody knows"}),
            ValueError,
            "nobody knows",
        ),
    ],
)
def test_what_is_no_kv_is_said(draw: Any, given: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        draw(given)


def test_what_is_looked_at_is_not_changed() -> None:
    values = kv()
    values[0, 0, 0, 0, 0] = np.nan
    before = values.tobytes()
    values.flags.writeable = False
    for draw in ALL:
        draw(values)
    similarity(values, values)
    assert values.tobytes() == before


# FP8


def test_errors_are_those_of_rounding_to_the_format() -> None:
    values = kv(2, 64) * 5
    found = fp8_errors(values, formats=("e5m2",), scales=("none",))
    restored = values.astype(ml_dtypes.float8_e5m2).astype(np.float32)
    wanted = np.sqrt(((restored - values) ** 2).sum((2, 4)) / (values**2).sum((2, 4)))
    assert np.allclose(found.relative[0, 0], wanted)
    assert np.allclose(found.bits, -np.log2(found.relative))


def test_three_bits_of_mantissa_lose_about_half_of_what_two_lose() -> None:
    found = fp8_errors(kv(2, 256, dim=64))
    e4m3, e5m2 = found.relative[:, 2].mean((1, 2, 3))
    assert 0.02 < e4m3 < 0.035
    assert e5m2 / e4m3 == pytest.approx(2, rel=0.1)


def test_a_scale_of_its_own_saves_a_head_that_is_much_smaller_than_its_neighbour() -> None:
    values = kv(1, 64)
    values[:, :, :, 0] *= 1e-6
    none, tensor, head = fp8_errors(values, formats=("e4m3",)).relative[0, :, 0, 0, 0]
    assert none == pytest.approx(1)
    assert tensor == pytest.approx(1, abs=0.2)
    assert head < 0.035


def test_without_a_scale_what_is_too_large_saturates_and_is_counted() -> None:
    values = kv(1, 4)
    values[0, 0, 0, 0, :3] = 900
    found = fp8_errors(values, formats=("e4m3",))
    assert found.saturated[0, :, 0, 0].tolist() == [[3, 0], [0, 0], [0, 0]]
    assert found.relative[0, 0, 0, 0, 0] == pytest.approx((900 - 448) / 900, rel=1e-2)
    assert found.relative[0, 2, 0, 0, 0] < 0.04
    assert "too large for the format: e4m3 with no scale: 3" in texts(fp8_cost(values))
    assert "too large" not in texts(fp8_cost(kv()))


def test_zeros_cost_nothing() -> None:
    assert fp8_errors(np.zeros((1, 2, 3, 1, 4), np.float32)).relative.max() == 0


def test_lines_are_the_errors_of_all_heads_and_dots_those_of_each() -> None:
    values = kv(5, 32)
    found = fp8_errors(values)
    picture = fp8_cost(found)
    for side, axes in enumerate(picture.axes[:2]):
        lines = {line.get_gid(): line for line in axes.lines if line.get_gid()}
        assert set(lines) == {f"{name} {kind}" for name in ("e4m3", "e5m2") for kind in ("none", "tensor", "head")}
        errors = found.relative[1, 2, :, side] * 100
        assert np.allclose(lines["e5m2 head"].get_ydata(), np.sqrt((errors**2).mean(1)))
        dots = axes.lines[list(axes.lines).index(lines["e5m2 head"]) + 1]
        assert np.allclose(dots.get_ydata(), errors.ravel())
    assert {"error of K (%)", "error of V (%)", "effective bits"} <= set(texts(picture).splitlines())
    assert "e4m3, a scale per head" in texts(picture)


def test_the_right_axis_says_the_same_in_bits() -> None:
    picture = fp8_cost(kv(4, 64))
    (left, right) = next(
        (one, other)
        for one in picture.axes
        for other in picture.axes
        if one.get_ylabel() == "error of K (%)" and other.get_ylabel() == "effective bits"
    )
    picture._repr_png_()
    assert left.get_ylim() == right.get_ylim()
    ticks = {label.get_text(): place for place, label in zip(right.get_yticks(), right.get_yticklabels(), strict=True)}
    assert ticks["5"] == pytest.approx(100 / 32)


@pytest.mark.parametrize("options", [{"formats": ("e3m4",)}, {"scales": ("row",)}, {"formats": ()}])
def test_unknown_formats_and_scales_are_said(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="e4m3, e5m2, scales of none, tensor, head"):
        fp8_errors(kv(), **options)


@pytest.mark.parametrize("draw", [*ALL, lambda given: similarity(given, given)])
def test_a_large_model_s_block_takes_seconds(draw: Callable[..., Picture]) -> None:
    values = kv(80, 16, 8, 128).astype(ml_dtypes.bfloat16)
    began = time.process_time()
    draw(values)._repr_png_()
    assert time.process_time() - began < 3
