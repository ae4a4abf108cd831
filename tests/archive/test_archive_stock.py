"""Stock zarr and xarray, without kvstore, read an archive: named dimensions, the model's own keys and values."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from archive_helpers import BLOCKS, HYBRID, IDS, KEYS, OPAQUE, SPACE, fill, values

from kvstore import open_store
from kvstore.archive import ArchiveDamagedError, create, open_archive
from kvstore.deriving import keys_of_tokens

if TYPE_CHECKING:
    from kvstore import Namespace

READER = Path(__file__).parents[1] / "stock_zarr" / "read_archive.py"


def archived(tmp_path: Path, space: Namespace, compression: str) -> Path:
    with open_store(f"file://{tmp_path}/tier") as store:
        fill(store, space)
        create(f"file://{tmp_path}/archive", store, space, keys_of_tokens(space, IDS), label="doc",
               tokens=IDS, compression=compression)  # fmt: skip
    return tmp_path / "archive"


def whole(space: Namespace, group: int) -> Any:
    """All blocks of a group, along their token axis, or one behind the other."""
    blocks = [values(space, key) for key in keys_of_tokens(space, IDS) if key.group == group]
    axes = space.layouts[group].axes
    return np.concatenate(blocks, axes.index("token")) if "token" in axes else np.stack(blocks)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(
    ("space", "compression"),
    [(SPACE, "none"), (SPACE, "blosc"), (HYBRID, "zstd"), (OPAQUE, "none")],
    ids=["canonical", "blosc", "three groups, zstd", "opaque"],
)
def test_stock_readers_give_what_was_archived(tmp_path: Path, space: Namespace, compression: str) -> None:
    root = archived(tmp_path, space, compression)
    groups = range(len(space.layouts))
    for group in groups:
        np.save(tmp_path / f"g{group}.npy", whole(space, group))
    job = {"archive": str(root), "expected": {f"g{group}": str(tmp_path / f"g{group}.npy") for group in groups}}
    done = subprocess.run(
        [sys.executable, "-I", str(READER)], input=json.dumps(job), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["kvstore"] is False
    assert report["zarr"] == report["xarray"] == report["slices"] == {f"g{group}": True for group in groups}
    assert report["tokens"] == IDS
    assert report["label"] == "doc"
    assert report["digests"] == [key.digest.hex() for key in KEYS]
    dims = report["dims"]
    if space is SPACE:
        assert dims["g0"] == ["layer", "kv", "token", "head", "dim"]
    if space is HYBRID:
        assert dims["g1"] == ["layer_g1", "kv", "token", "head", "dim"]
    assert dims["g2" if space is HYBRID else "g0"][-1:] == ["byte"] or space is SPACE
    assert report["positions"] == list(range(BLOCKS))


def test_zarr_itself_would_write_the_same_documents(tmp_path: Path) -> None:
    import zarr

    root = archived(tmp_path, HYBRID, "blosc")
    group = zarr.open_group(root, mode="r")
    for name, array in group.arrays():
        text = json.loads((root / name / "zarr.json").read_text())
        again = json.loads(json.dumps(array.metadata.to_dict()))
        assert {**again, "storage_transformers": []} == text, name
    assert set(dict(group.arrays())) == {file.parent.name for file in root.glob("*/zarr.json")}


@pytest.mark.usefixtures("small_shards")
def test_the_dataset_of_an_archive_is_checked_and_lazy(tmp_path: Path) -> None:
    root = archived(tmp_path, SPACE, "none")
    with open_archive(f"file://{root}") as archive:
        found = archive.xarray()
        assert np.array_equal(found.g0.isel(kv=1, token=slice(5, 9)).values, whole(SPACE, 0)[:, 1, 5:9])
        assert found.attrs["kvstore_archive"]["label"] == "doc"
    shard = sorted(root.glob("g0/c/*/*/*/*/*"))[1]
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(data)
    with open_archive(f"file://{root}") as archive:
        found = archive.xarray()
        assert np.array_equal(found.g0[:, :, :12].values, whole(SPACE, 0)[:, :, :12])
        with pytest.raises(ArchiveDamagedError):
            found.g0[:, :, 12:].load()
