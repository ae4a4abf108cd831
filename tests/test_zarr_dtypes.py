"""With kvstore installed, zarr-python opens blocks of types that it does not know by itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

from kvstore import BlockKey, BlockLayout, BlockWrite, Namespace, open_store

zarr = pytest.importorskip("zarr")
dtypes = pytest.importorskip("kvstore_zarr.dtypes")

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.fixture(autouse=True)
def _registered() -> None:
    """As the entry points do, should the suite run from a tree that is not installed."""
    for kind in (dtypes.BFloat16, dtypes.Float8E4M3FN, dtypes.Float8E5M2):
        zarr.dtype.data_type_registry.register(kind._zarr_v3_name, kind)


@pytest.mark.parametrize("name", NAMES)
def test_zarr_reads_the_block_and_nan_where_there_is_none(name: str, tmp_path: Path) -> None:
    layout = BlockLayout.canonical(layers=2, tokens=3, heads=2, head_dim=4, dtype=name)
    space = Namespace("model", "revision", (layout,), block_tokens=3)
    key = BlockKey(bytes([7]) + bytes(31))
    block = np.random.default_rng(1).standard_normal(layout.shape).astype(layout.numpy_dtype)
    with open_store(f"file://{tmp_path}/kv") as store:
        store.put_many(space, [BlockWrite(key, block.view(np.uint8).data)])
    array = zarr.open_array(tmp_path / "kv" / space.name / "g0" / "07", mode="r")
    found = array[0, 0, 0, 0, 0]
    assert found.dtype == np.dtype(getattr(ml_dtypes, name))
    assert found.tobytes() == block.tobytes()
    assert np.isnan(array[0, 0, 0, 0, 1].astype(np.float32)).all()


@pytest.mark.parametrize("name", NAMES)
def test_what_zarr_writes_with_these_types_it_reads_again(name: str, tmp_path: Path) -> None:
    kind = np.dtype(getattr(ml_dtypes, name))
    array = zarr.create_array(tmp_path / "a", shape=(4,), chunks=(2,), dtype=kind, fill_value=1.5)
    array[:2] = np.array([0.5, -2], kind)
    assert json.loads((tmp_path / "a" / "zarr.json").read_text())["data_type"] == name
    assert zarr.open_array(tmp_path / "a", mode="r")[:].astype(float).tolist() == [0.5, -2, 1.5, 1.5]


@pytest.mark.parametrize(
    ("text", "number"), [("NaN", np.nan), ("Infinity", np.inf), ("-Infinity", -np.inf), (0.25, 0.25)]
)
def test_fill_values_are_written_as_zarr_writes_numbers(text: object, number: float) -> None:
    kind = dtypes.BFloat16()
    value = kind.from_json_scalar(text, zarr_format=3)
    assert np.array_equal(float(value), number, equal_nan=True)
    assert kind.to_json_scalar(value, zarr_format=3) == text
    with pytest.raises(TypeError):
        kind.from_json_scalar("much", zarr_format=3)


def test_the_entry_points_name_them() -> None:
    from importlib.metadata import entry_points

    found = {entry.name: entry.load() for entry in entry_points(group="zarr.data_type")}
    if not found.keys() & set(NAMES):
        pytest.skip("kvstore is not installed here, only on the path")
    assert {name: found[name] for name in NAMES} == {
        "bfloat16": dtypes.BFloat16,
        "float8_e4m3fn": dtypes.Float8E4M3FN,
        "float8_e5m2": dtypes.Float8E5M2,
    }
