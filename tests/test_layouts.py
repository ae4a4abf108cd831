"""Layouts through real stores: every kind of attention, every element type, several groups in one namespace."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore import BlockKey, BlockLayout, BlockRead, BlockWrite, GetOutcome, Namespace, chain_digests, open_store
from kvstore.layout import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

TOKENS = 16
HYBRID = {
    "grouped queries": BlockLayout.canonical(layers=4, tokens=TOKENS, heads=2, head_dim=32, dtype="bfloat16"),
    "sliding window": BlockLayout.canonical(layers=3, tokens=TOKENS, heads=4, head_dim=16, dtype="float8_e5m2"),
    "fewer tokens kept": BlockLayout.canonical(layers=3, tokens=5, heads=1, head_dim=64, dtype="float16"),
    "latent": BlockLayout.latent(layers=5, tokens=TOKENS, latent=72, dtype="float8_e4m3fn"),
    "state space": BlockLayout("float32", ("layer", "head", "dim", "state"), (2, 3, 8, 16)),
    "convolution state": BlockLayout("int8", ("layer", "channel", "tap"), (2, 96, 3)),
    "quantised": BlockLayout("uint8", ("layer", "kv", "token", "head", "dim"), (4, 2, TOKENS, 2, 32)),
}
SPACE = Namespace("hybrid", "r1", tuple(HYBRID.values()), TOKENS)
DIGEST = chain_digests(range(TOKENS), TOKENS)[0]


@pytest.fixture(params=["memory", "file", "lmdb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A location on every backend that is here, kept while the test runs."""
    location = {"memory": "memory://layouts", "file": f"file://{tmp_path}/kv", "lmdb": f"lmdb://{tmp_path}/kv.lmdb"}
    with open_store("memory://layouts"):
        yield location[request.param]


def block(layout: BlockLayout, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, layout.nbytes, np.uint8)


def test_groups_of_all_shapes_share_a_namespace_and_a_digest_and_nothing_else(url: str) -> None:
    blocks = [block(layout, seed) for seed, layout in enumerate(SPACE.layouts)]
    with open_store(url) as store:
        outcomes = store.put_many(
            SPACE, [BlockWrite(BlockKey(DIGEST, group), data) for group, data in enumerate(blocks)]
        )
        assert all(outcome.present for outcome in outcomes)
    with open_store(url, readonly=True) as store:
        buffers = [np.zeros(layout.nbytes, np.uint8) for layout in SPACE.layouts]
        requests = [BlockRead(BlockKey(DIGEST, group), into) for group, into in enumerate(buffers)]
        assert store.get_many_into(SPACE, requests) == [GetOutcome.HIT] * len(HYBRID)
        for layout, into, data in zip(SPACE.layouts, buffers, blocks, strict=True):
            assert into.tobytes() == data.tobytes()
            assert layout.to_numpy(into).shape == layout.shape


def test_every_element_type_is_an_array_that_a_stock_reader_opens(tmp_path: Path) -> None:
    """Stock readers see a block that is missing as NaN, or as 0 where there is no NaN."""
    tensorstore = pytest.importorskip("tensorstore")
    layouts = tuple(BlockLayout(dtype, ("layer", "token", "latent"), (2, 4, 8)) for dtype in DTYPES)
    space = Namespace("m", "r", layouts, 4)
    blocks = [block(layout, seed) for seed, layout in enumerate(layouts)]
    with open_store(f"file://{tmp_path}/kv") as store:
        puts = [BlockWrite(BlockKey(DIGEST, group), data) for group, data in enumerate(blocks)]
        assert all(outcome.present for outcome in store.put_many(space, puts))
    words = [int.from_bytes(DIGEST[start : start + 7], "big") for start in range(1, 32, 7)]
    for group, (layout, data) in enumerate(zip(layouts, blocks, strict=True)):
        folder = tmp_path / "kv" / space.name / f"g{group}" / f"{DIGEST[0]:02x}"
        document = json.loads((folder / "zarr.json").read_text())
        assert document["data_type"] == layout.dtype
        array = tensorstore.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder)}}).result()
        assert array.dtype.numpy_dtype == layout.numpy_dtype
        assert array[tuple(words)].read().result().tobytes() == data.tobytes()
        missing = array[(0,) * len(words)].read().result().astype(np.float32)
        assert np.isnan(missing).all() if "float" in layout.dtype else not missing.any()
