"""Layouts: what the bytes of a block mean, and views of them that share the memory."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import BlockLayout
from kvstore.errors import InvalidBlockError
from kvstore.layout import CANONICAL_AXES, DTYPES, LATENT_AXES, as_bytes

CANONICAL = BlockLayout.canonical(layers=3, tokens=4, heads=2, head_dim=8, dtype="float16")


def test_the_canonical_layout_is_layer_kv_token_head_dim_with_keys_before_values() -> None:
    assert CANONICAL.axes == CANONICAL_AXES == ("layer", "kv", "token", "head", "dim")
    assert CANONICAL.shape == (3, 2, 4, 2, 8)
    assert CANONICAL.nbytes == 3 * 2 * 4 * 2 * 8 * 2


SIZES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


def test_these_are_the_element_types() -> None:
    assert dict(DTYPES) == SIZES


@pytest.mark.parametrize(("dtype", "size"), SIZES.items())
def test_a_block_has_the_bytes_of_its_elements(dtype: str, size: int) -> None:
    layout = BlockLayout.canonical(layers=1, tokens=2, heads=3, head_dim=5, dtype=dtype)
    assert layout.nbytes == 60 * size
    assert layout.numpy_dtype.itemsize == size == DTYPES[dtype]


def test_multi_byte_elements_are_little_endian_whatever_the_machine() -> None:
    layout = BlockLayout("float32", ("x",), (1,))
    assert layout.to_numpy(b"\x00\x00\x80\x3f").tolist() == [1.0]
    assert BlockLayout("float16", ("x",), (1,)).to_numpy(b"\x00\x3c").tolist() == [1.0]
    assert BlockLayout("bfloat16", ("x",), (1,)).to_numpy(b"\x80\x3f").astype(np.float32).tolist() == [1.0]


def test_bfloat16_is_the_usual_one() -> None:
    assert BlockLayout("bfloat16", ("x",), (4,)).numpy_dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("dtype", "byte", "value"),
    [("float8_e4m3fn", 0x38, 1.0), ("float8_e4m3fn", 0x7E, 448.0), ("float8_e5m2", 0x3C, 1.0), ("int8", 0xFF, -1.0)],
)
def test_a_byte_means_the_same_to_numpy_and_to_torch(dtype: str, byte: int, value: float) -> None:
    layout = BlockLayout(dtype, ("x",), (1,))
    assert float(layout.to_numpy(bytes([byte]))[0]) == value
    pytest.importorskip("torch")
    assert float(layout.to_torch(bytearray([byte]))[0]) == value


@pytest.mark.parametrize("dtype", [dtype for dtype in SIZES if dtype != "uint8"])
@pytest.mark.parametrize("kind", ["heads", "latent", "state"])
def test_numpy_and_torch_views_share_the_blocks_memory(dtype: str, kind: str) -> None:
    torch = pytest.importorskip("torch")
    layout = {
        "heads": BlockLayout.canonical(layers=2, tokens=4, heads=2, head_dim=8, dtype=dtype),
        "latent": BlockLayout.latent(layers=2, tokens=4, latent=24, dtype=dtype),
        "state": BlockLayout(dtype, ("layer", "head", "dim", "state"), (2, 3, 4, 5)),
    }[kind]
    block = bytearray(layout.nbytes)
    array, tensor = layout.to_numpy(block), layout.to_torch(block)
    last = tuple(extent - 1 for extent in layout.shape)
    array[last] = 3
    assert tensor.shape == array.shape == layout.shape
    assert tensor.dtype == getattr(torch, dtype)
    assert float(tensor[last]) == 3
    tensor.select(0, 0).view(-1)[1:2].copy_(torch.tensor([-4.0]))
    assert float(array.reshape(-1)[1]) == -4
    assert np.flatnonzero(np.frombuffer(block, np.uint8)).max() == len(block) - 1


def test_a_read_only_buffer_gives_a_read_only_array_and_no_tensor() -> None:
    block = bytes(CANONICAL.nbytes)
    assert not CANONICAL.to_numpy(block).flags.writeable
    pytest.importorskip("torch")
    with pytest.raises(InvalidBlockError, match="read-only"):
        CANONICAL.to_torch(block)


def test_a_buffer_of_another_size_is_no_block() -> None:
    with pytest.raises(InvalidBlockError, match=f"{CANONICAL.nbytes - 1} bytes.*{CANONICAL.nbytes}"):
        CANONICAL.to_numpy(bytes(CANONICAL.nbytes - 1))


@pytest.mark.parametrize(
    ("dtype", "axes", "shape", "said"),
    [
        ("float64", ("x",), (4,), "float64.*float16"),
        ("float16", ("x",), (4, 4), "axes"),
        ("float16", ("x", "x"), (4, 4), "axes"),
        ("float16", (), (), "empty"),
        ("float16", ("x", "y"), (4, 0), "empty"),
        ("float16", ("x",), (-1,), "empty"),
        ("float16", ("x", "y"), (2**20, 2**19 + 1), "larger than"),
        ("uint8", ("x",), (2**4000,), "larger than"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(
    dtype: str, axes: tuple[str, ...], shape: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        BlockLayout(dtype, axes, shape)


@given(
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(1, 64), min_size=1, max_size=6),
)
def test_a_layout_survives_its_manifest(dtype: str, shape: list[int]) -> None:
    layout = BlockLayout(dtype, tuple(f"axis{i}" for i in range(len(shape))), tuple(shape))
    assert BlockLayout.from_manifest(layout.to_manifest()) == layout


def test_the_latent_layout_has_neither_kv_nor_heads() -> None:
    layout = BlockLayout.latent(layers=61, tokens=64, latent=576, dtype="float8_e4m3fn")
    assert layout.axes == LATENT_AXES == ("layer", "token", "latent")
    assert layout.nbytes == 61 * 64 * 576


def test_the_opaque_layout_is_bytes() -> None:
    assert BlockLayout.opaque(1000) == BlockLayout("uint8", ("byte",), (1000,))
    assert BlockLayout.opaque(1000).nbytes == 1000


def test_any_contiguous_buffer_is_seen_as_bytes_without_a_copy() -> None:
    owner = np.arange(6, dtype=np.float32).reshape(2, 3)
    for buffer in (owner, memoryview(owner)):
        flat = as_bytes(buffer)
        assert flat.dtype == np.uint8
        assert flat.shape == (24,)
        assert np.shares_memory(flat, owner)
    assert as_bytes(owner.astype(ml_dtypes.bfloat16)).nbytes == 12


@pytest.mark.parametrize("buffer", [np.zeros((4, 4))[:, ::2], np.zeros((4, 2)).T, memoryview(bytes(16))[::2]])
def test_a_buffer_with_gaps_is_refused(buffer: np.ndarray | memoryview) -> None:
    with pytest.raises(InvalidBlockError, match="contiguous"):
        as_bytes(buffer)
