"""Stored KV as arrays: the values that were stored, with what they are, and nothing read before it is asked for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inspect_helpers import DTYPES, KEYS, LAYOUT, PROMPT, SPACE, TOKENS, Reads, looking, space_of, store_prompt, values

xarray = pytest.importorskip("xarray", reason='pip install "kvstore-tiers[inspect]"')

from xarray.core import indexing  # noqa: E402

import kvstore.inspect  # noqa: E402
from kvstore import BlockLayout, BlockWrite, Namespace, TierURL, block_keys, open_store  # noqa: E402
from kvstore.inspect.lazy import Blocks  # noqa: E402
from kvstore.inspect.reading import BlockReader  # noqa: E402

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.inspect import PrefixView

WHOLE = np.concatenate([values(key, LAYOUT) for key in KEYS], axis=2)


def bits(array: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def test_a_block_is_what_was_stored_in_every_library(tier: str) -> None:
    with looking(tier, SPACE) as look:
        block = look.namespace().block(KEYS[3].digest.hex())
        expected = values(KEYS[3], LAYOUT)
        assert block.bytes() == bits(expected)
        assert bits(block.numpy()) == bits(expected)
        assert bits(block.xarray().values) == bits(expected)
        assert bits(block.zarr()[...]) == bits(expected)
        assert bits(block.zarr()[1, 0, 2:]) == bits(expected[1, 0, 2:])
        assert block.zarr().shape == LAYOUT.shape
        assert block.zarr().metadata.dimension_names == LAYOUT.axes
        assert not block.numpy().flags.writeable


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_of_elements_comes_back(dtype: str, local: str) -> None:
    space = space_of(dtype)
    with looking(local, space) as look:
        block = look.namespace().block(KEYS[5].digest.hex())
        expected = values(KEYS[5], space.layouts[0])
        assert block.numpy().dtype == expected.dtype
        assert bits(block.xarray(dtype=dtype).values) == bits(expected)
        assert bits(block.zarr()[...]) == bits(expected)
        computed = block.xarray()
        assert computed.attrs["dtype"] == dtype
        assert computed.dtype == ("float32" if dtype.startswith(("bfloat", "float8")) else dtype)
        assert np.array_equal(computed.values, expected.astype(computed.dtype))
        assert np.isfinite(float(computed.mean()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_has_the_same_bits_and_may_write_to_them(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    space = space_of(dtype)
    with looking("memory://torch", space) as look:
        block = look.namespace().block(KEYS[5].digest.hex())
        tensor = block.torch()
        assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, dtype), space.layouts[0].shape)
        assert bits(tensor.view(torch.uint8).numpy()) == bits(values(KEYS[5], space.layouts[0]))
        tensor.zero_()
        assert block.bytes() == bits(values(KEYS[5], space.layouts[0]))


def test_a_labelled_array_says_what_it_is(tmp_path_factory: pytest.TempPathFactory) -> None:
    url = f"lmdb://{tmp_path_factory.mktemp('x')}/kv"
    with looking(url, SPACE) as look:
        array = look.namespace().block(KEYS[2].digest.hex()).xarray()
        whole = look.namespace().prefix(KEYS[-1].digest.hex()).xarray()
    assert array.dims == whole.dims == ("layer", "kv", "token", "head", "dim")
    assert list(array.layer.values) == [0, 1, 2]
    assert list(array.kv.values) == ["key", "value"]
    assert list(array.token.values) == [8, 9, 10, 11]
    assert list(whole.token.values) == list(range(40))
    assert list(whole.block.values) == [number // TOKENS for number in range(40)]
    facts = {"units": "1", "model": "org/model", "revision": "revision-1", "namespace": SPACE.name, "group": 0}
    assert facts.items() <= array.attrs.items()
    assert (array.attrs["digest"], array.attrs["position"]) == (KEYS[2].digest.hex(), 2)
    assert array.attrs["source"] == url
    assert whole.attrs["complete"] == 1


def test_nothing_is_read_before_values_are_asked_for_and_no_block_twice(
    tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with looking(tier, SPACE) as look:
        reads = Reads(look, monkeypatch)
        space = look.namespace()
        block, prefix = space.block(KEYS[2].digest.hex()), space.prefix(KEYS[-1].digest.hex())
        shown = [repr(one) + one._repr_html_() for one in (look, space, space.tree(), prefix, block)]
        array, whole = block.xarray(), prefix.xarray()
        layer = array.sel(layer=1)
        some = whole.sel(token=slice(9, 17), kv="value").isel(head=0)
        assert all(shown)
        assert repr(array)
        assert repr(some)
        assert not reads.calls
        assert layer.shape == (2, TOKENS, 2, 8)
        assert bits(layer.values) == bits(values(KEYS[2], LAYOUT)[1])
        assert reads.keys == [KEYS[2]]
        assert np.array_equal(some.values, WHOLE[:, 1, 9:18, 0])
        assert sorted(reads.keys) == sorted(KEYS[2:5])
        assert np.array_equal(whole.sel(token=16).values, WHOLE[:, :, 16])
        assert sorted(reads.keys) == sorted(KEYS[2:5])
        assert np.array_equal(whole.values, WHOLE)
        assert sorted(reads.keys) == sorted(KEYS)


INDEX = st.one_of(
    st.integers(-40, 39),
    st.slices(40),
    st.lists(st.integers(-40, 39), max_size=9).map(lambda places: np.array(places, np.int64)),
)


@pytest.fixture(scope="module")
def prefix() -> Any:
    with looking("memory://indexed", SPACE) as look:
        yield look.namespace().prefix(KEYS[-1].digest.hex())


@given(
    INDEX, st.sampled_from([0, 2, -1, slice(None), slice(1, 3), [2, 0]]), st.sampled_from([1, slice(None, None, -1)])
)
def test_any_index_gives_what_numpy_gives(prefix: PrefixView, token: Any, layer: Any, head: Any) -> None:
    found = prefix.xarray().isel(token=token, layer=layer, head=head)
    plain = xarray.DataArray(WHOLE, dims=LAYOUT.axes).isel(token=token, layer=layer, head=head)
    assert found.dims == plain.dims
    assert np.array_equal(found.values, plain.values)
    assert found.values.dtype == plain.dtype


@pytest.mark.parametrize("places", [[0, 2, 1, 3], [5, 7, 6, 8], [2, 2, 3], [-1, 0], [-2, -1], [39, 0, 38]])
def test_places_may_be_out_of_order_or_counted_from_the_end(prefix: PrefixView, places: list[int]) -> None:
    assert np.array_equal(prefix.xarray().isel(token=places).values, WHOLE[:, :, places])
    lazy = Blocks(prefix.axes, 10, 2, prefix.read_each, np.dtype("float16"))
    rest = (slice(None),) * 2
    assert np.array_equal(lazy[indexing.OuterIndexer((*rest, np.array(places), *rest))], WHOLE[:, :, places])
    heads = np.array([-1, 0])
    assert np.array_equal(lazy[indexing.OuterIndexer((*rest, 7, heads, slice(None)))], WHOLE[:, :, 7, heads])


def test_points_may_be_picked(prefix: PrefixView) -> None:
    where = {axis: xarray.DataArray([0, 2, 1], dims="point") for axis in ("layer", "token")}
    assert np.array_equal(prefix.xarray().isel(where).values, xarray.DataArray(WHOLE, dims=LAYOUT.axes).isel(where))


def test_what_is_changed_here_is_changed_nowhere_else(prefix: PrefixView) -> None:
    array = prefix.xarray().load()
    array[...] = 0
    assert np.array_equal(prefix.xarray().values, WHOLE)
    single = prefix[0].xarray().load()
    single.values[...] = 0
    assert np.array_equal(prefix[0].xarray().values, WHOLE[:, :, :TOKENS])


def test_a_prefix_is_its_blocks(prefix: PrefixView) -> None:
    assert prefix.keys == KEYS
    assert [block.key for block in prefix] == KEYS
    assert [block.tokens for block in prefix][3] == range(12, 16)
    assert list(prefix.blocks().digest) == [key.digest.hex() for key in KEYS]
    assert len(prefix) == 10


def test_layer_statistics_are_those_of_the_values(prefix: PrefixView) -> None:
    rows = prefix.statistics()
    assert [(row.layer, row.kv) for row in rows][:3] == [(0, "key"), (0, "value"), (1, "key")]
    exact = WHOLE.astype(np.float64)[2, 1]
    assert (rows[5].absmax, rows[5].nonfinite) == (np.abs(exact).max(), 0)
    assert rows[5].mean == pytest.approx(exact.mean(), abs=1e-12)
    assert rows[5].std == pytest.approx(exact.std(), rel=1e-9)


def test_what_is_no_number_is_counted_and_left_out() -> None:
    block = values(KEYS[0], LAYOUT)
    block[0, 0, 0, 0, :3] = [np.nan, np.inf, -np.inf]
    block[1, 1] = np.nan
    with open_store("memory://nan") as store:
        store.put_many(SPACE, [BlockWrite(KEYS[0], block.view(np.uint8).data, 0)])
        with kvstore.inspect.open(store) as look:
            rows = look.namespace().block(KEYS[0].digest.hex()).statistics()
    kept = block[0, 0].astype(np.float64)
    assert rows[0].nonfinite == 3
    assert rows[0].mean == pytest.approx(kept[np.isfinite(kept)].mean())
    assert (rows[3].nonfinite, np.isnan(rows[3].absmax), np.isnan(rows[3].std)) == (64, True, True)


def test_the_reader_keeps_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    with looking("memory://kept", SPACE) as look:
        reads = Reads(look, monkeypatch)
        reader = BlockReader(look.store, "memory://kept", kept_bytes=3 * SPACE.block_bytes())
        for number in (0, 1, 2, 0, 3, 0, 1):
            assert bits(reader.read(SPACE, KEYS[number])) == bits(values(KEYS[number], LAYOUT))
        assert reads.keys == [KEYS[0], KEYS[1], KEYS[2], KEYS[3], KEYS[1]]


def test_a_long_prefix_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    with looking("memory://parts", SPACE) as look:
        some = dataclasses.replace(look.store.capabilities, batch_bytes=4 * SPACE.block_bytes())
        monkeypatch.setattr(look.store, "capabilities", some)
        reads = Reads(look, monkeypatch)
        look.namespace().prefix(KEYS[-1].digest.hex()).xarray().load()
        assert [len(call) for call in reads.calls] == [4, 4, 2]


@pytest.mark.parametrize(
    ("layout", "dims"),
    [
        (BlockLayout.latent(layers=2, tokens=TOKENS, latent=6, dtype="float16"), ("layer", "token", "latent")),
        (BlockLayout("float32", ("layer", "head", "state"), (2, 3, 5)), ("block", "layer", "head", "state")),
        (BlockLayout.opaque(64), ("block", "byte")),
    ],
    ids=["latent", "state space", "opaque"],
)
def test_other_layouts_have_the_axes_that_they_have(layout: BlockLayout, dims: tuple[str, ...], local: str) -> None:
    space = Namespace("model", "revision", (layout,), block_tokens=TOKENS)
    with looking(local, space) as look:
        view = look.namespace()
        prefix = view.prefix(KEYS[-1].digest.hex())
        array = prefix.xarray()
        assert array.dims == dims
        along = dims.index("token" if "token" in dims else "block")
        expected = [values(key, layout) for key in KEYS]
        whole = np.concatenate(expected, axis=along) if "token" in dims else np.stack(expected)
        assert np.array_equal(array.values, whole)
        assert np.array_equal(array.isel({dims[along]: [3, 1]}).values, whole.take([3, 1], axis=along))
        block = prefix[3]
        assert np.array_equal(block.zarr()[...], expected[3])
        assert "key" not in str(block.xarray().coords)
        assert bool(block.why_opaque) == (layout.axes == ("byte",))
        assert block.why_opaque in block._repr_html_()
        assert len(block.statistics()) == (0 if block.why_opaque else 2)


def test_tokens_of_unknown_place_have_no_coordinate() -> None:
    with open_store("memory://unknown") as store:
        store.put_many(SPACE, [BlockWrite(KEYS[0], values(KEYS[0], LAYOUT).view(np.uint8).data)])
        with kvstore.inspect.open(store) as look:
            block = look.namespace().block(KEYS[0].digest.hex())
            assert "token" not in block.xarray().coords
            assert block.xarray().attrs["position"] == "unknown"
            assert block.tokens is None
            assert look.namespace().prefix(KEYS[0].digest.hex()).complete is False


def test_groups_have_layouts_and_arrays_of_their_own(local: str) -> None:
    wide = BlockLayout.canonical(layers=1, tokens=2 * TOKENS, heads=1, head_dim=4, dtype="bfloat16")
    space = Namespace("model", "revision", (LAYOUT, wide), block_tokens=TOKENS)
    with open_store(local) as store:
        store_prompt(store, space)
        store_prompt(store, space, PROMPT[:16], group=1)
    with kvstore.inspect.open(local) as look:
        view = look.namespace()
        second = block_keys(PROMPT[:16], TOKENS, group=1)
        prefix = view.prefix(second[-1].digest.hex(), group=1)
        assert prefix.keys == second
        assert prefix.xarray().sizes["token"] == prefix.tokens == 32
        assert list(prefix[1].xarray().token.values) == list(range(8, 16))
        assert view.prefix(second[-1].digest.hex()).keys == KEYS[:4]
        blocks = view.blocks()
        assert list(blocks[blocks.group == 1].tokens_end) == [8, 16, 24, 32]
        assert TierURL.parse(local).scheme in view._repr_html_()
