"""One format: what either client wrote the other reads, and stock zarr, and a local tier after a plain copy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest

from kvstore import open_store, retention
from kvstore.layout import BlockLayout, as_bytes
from kvstore.namespace import Namespace
from kvstore.testing.supply import SPACE, buffer, get, key, keys, writes
from kvstore.types import BlockWrite, GetOutcome
from kvstore_zarr import LocalZarrStore
from kvstore_zarr.format import DigestWords
from kvstore_zarr.metadata import NamespaceTree

if TYPE_CHECKING:
    from kvstore.testing.servers import S3Server

HIT = GetOutcome.HIT
READER = Path(__file__).parents[1] / "stock_zarr" / "read_block.py"
LAYOUT = BlockLayout.canonical(layers=2, tokens=16, heads=3, head_dim=64, dtype="float16")
TYPED = Namespace("model", "revision-1", (LAYOUT,), block_tokens=16)


def objects_below(server: S3Server, place: str) -> dict[str, bytes]:
    """Everything at the place, by its path below it."""
    prefix = place.removeprefix(f"s3://{server.bucket}/")
    found = [meta["path"] for page in server.objects.list(prefix) for meta in page]
    return {path.removeprefix(f"{prefix}/"): bytes(server.objects.get(path).bytes()) for path in found}


@pytest.mark.parametrize(("writer", "reader"), [("obstore", "fsspec"), ("fsspec", "obstore")])
def test_what_one_client_writes_the_other_reads(place: str, writer: str, reader: str) -> None:
    with open_store(place, client=writer) as store:
        store.put_many(SPACE, writes(range(6)))
    with open_store(place, client=reader) as store:
        assert store.namespaces() == [SPACE]
        assert get(store, range(6)) == [HIT] * 6
        assert store.contains_many(SPACE, keys(range(7))) == [True] * 6 + [False]


def test_both_clients_and_a_local_tier_write_the_same_bytes(
    place: str, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = retention.Clock(lambda: 1_700_000_000_000_000_000, lambda: 0)
    monkeypatch.setattr("kvstore.retention._clock", frozen)  # a block says when it was made
    for name in ("obstore", "fsspec"):
        with open_store(f"{place}/{name}", client=name) as store:
            store.put_many(SPACE, writes(range(3)))
    one, other = (objects_below(server, f"{place}/{name}") for name in ("obstore", "fsspec"))
    assert one == other
    with open_store(f"file://{tmp_path}/tier") as store:
        store.put_many(SPACE, writes(range(3)))
    tree = tmp_path / "tier"
    local = {
        str(path.relative_to(tree)): path.read_bytes() for path in (tree / SPACE.name).rglob("*") if path.is_file()
    }
    assert local.keys() == one.keys()
    documents = [path for path in local if path.endswith("zarr.json")]
    assert {path: local[path] for path in documents} == {path: one[path] for path in documents}
    generation = slice(SPACE.block_bytes() + 28, SPACE.block_bytes() + 36)  # numbered in local tiers, and the CRC
    for path in local.keys() - set(documents):
        ours, theirs = bytearray(local[path]), bytearray(one[path])
        for block in (ours, theirs):
            block[generation] = bytes(8)
            block[-24:-20] = bytes(4)
        assert ours == theirs


@pytest.mark.parametrize("written_with", ["obstore", "fsspec"])
def test_stock_zarr_reads_the_array_over_s3fs(place: str, written_with: str, tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal(LAYOUT.shape).astype(LAYOUT.numpy_dtype)
    name = key(1)
    with open_store(place, client=written_with) as store:
        store.put_many(TYPED, [BlockWrite(name, buffer(as_bytes(buffer(values))))])
    np.save(tmp_path / "expected.npy", values)
    job = {
        "array": f"{place}/{NamespaceTree(TYPED).folder(name)}",
        "index": DigestWords(32).index(name.digest),
        "expected": str(tmp_path / "expected.npy"),
    }
    done = subprocess.run(
        [sys.executable, "-I", READER], input=json.dumps(job), capture_output=True, text=True, check=False, timeout=90
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["equal"]
    assert report["missing_is_nan"]
    assert not report["kvstore"]


def test_a_local_tier_copied_into_a_bucket_is_read_there(place: str, server: S3Server, tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}/tier") as store:
        store.put_many(SPACE, writes(range(5)))
    for path in (tmp_path / "tier").rglob("*"):  # everything, the tier's own records as well
        if path.is_file():
            prefix = place.removeprefix(f"s3://{server.bucket}/")
            server.objects.put(f"{prefix}/{path.relative_to(tmp_path / 'tier')}", path.read_bytes())
    with open_store(place) as store:
        assert store.namespaces() == [SPACE]
        assert get(store, range(5)) == [HIT] * 5
        assert store.usage().blocks == 5


def test_a_prefix_copied_into_a_folder_is_a_local_tier(place: str, tmp_path: Path) -> None:
    with open_store(place) as store:
        store.put_many(SPACE, writes(range(5)))
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True)
    filesystem.get(place, f"{tmp_path}/fresh", recursive=True)
    with open_store(f"file://{tmp_path}/fresh") as store:  # without a catalogue it is made when it is opened
        assert get(store, range(5)) == [HIT] * 5
    with open_store(f"file://{tmp_path}/known") as store:
        store.put_many(SPACE, writes([9]))
        filesystem.get(f"{place}/", f"{tmp_path}/known/", recursive=True)
        assert isinstance(store, LocalZarrStore)
        assert store.reindex().added == 5
        assert get(store, [*range(5), 9]) == [HIT] * 6
