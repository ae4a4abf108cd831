"""An encrypted tier is zarr all the same: stock zarr-python reads its blocks where the keys are at hand."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from sealing_helpers import key_file, sealed

from kvstore import BlockLayout, BlockWrite, Namespace, open_store
from kvstore.errors import KeyringError
from kvstore.sealing import Keyring, KeySource
from kvstore.testing.supply import key
from kvstore_zarr.codec import AES256GCM
from kvstore_zarr.format import DigestWords
from kvstore_zarr.metadata import SEAL_CODEC, NamespaceTree, read_namespace

if TYPE_CHECKING:
    from numpy.typing import NDArray

LAYOUT = BlockLayout.canonical(layers=2, tokens=4, heads=2, head_dim=8, dtype="float16")
SPACE = Namespace("model", "revision", (LAYOUT,), block_tokens=4)
READER = Path(__file__).with_name("read_sealed.py")


@pytest.fixture
def values() -> NDArray[np.float16]:
    return np.arange(np.prod(LAYOUT.shape)).astype(np.float16).reshape(LAYOUT.shape)


@pytest.fixture(params=["", "?remote=true"])
def url(request: pytest.FixtureRequest, tmp_path: Path, values: NDArray[np.float16]) -> str:
    """A tier with one block."""
    url = sealed(f"file://{tmp_path}/tier{request.param}", tmp_path)
    with open_store(url) as store:
        store.put_many(SPACE, [BlockWrite(key(1), values.data, tenant="acme")])
    return url


def read(tier: Path, expected: Path, **environment: str) -> str:
    folder = tier / NamespaceTree(SPACE).folder(key(1))
    place = ",".join(map(str, DigestWords(32).index(key(1).digest)))
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, str(READER), str(folder), place, str(expected)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_stock_zarr_reads_it_with_the_keys_and_not_without(
    url: str, tmp_path: Path, values: NDArray[np.float16]
) -> None:
    assert url
    np.save(tmp_path / "expected.npy", values)
    keys = {"KVSTORE_ENCRYPTION": f"file:{key_file(tmp_path)}", "KVSTORE_KEYRING": f"{tmp_path}/keyring.json"}
    tier, expected = tmp_path / "tier", tmp_path / "expected.npy"
    assert read(tier, expected, **keys) == "equal"
    assert read(tier, expected).startswith("KeyringError these blocks are encrypted")
    Keyring.open(tmp_path / "other.json", KeySource.parse(f"file:{key_file(tmp_path)}").read())
    assert "is keyring" in read(tier, expected, **keys | {"KVSTORE_KEYRING": f"{tmp_path}/other.json"})
    block = next(path for path in tier.rglob("*.0.0.0.0.0") if path.is_file())
    data = bytearray(block.read_bytes())
    data[200] ^= 1
    block.write_bytes(data)
    assert "checksum" in read(tier, expected, **keys)


def test_the_block_as_an_array_of_an_open_tier(url: str, values: NDArray[np.float16], tmp_path: Path) -> None:
    with open_store(url) as store:
        array = store.zarr_array(SPACE, key(1))  # type: ignore[attr-defined]
        assert np.array_equal(array[...], values)
        ring = Keyring.open(tmp_path / "keyring.json", KeySource.parse(f"file:{key_file(tmp_path)}").read())
        ring.destroy("acme")
        gone = store.zarr_array(SPACE, key(1))  # type: ignore[attr-defined]
        with pytest.raises(KeyringError, match="destroyed"):
            gone[...]


def test_the_documents_say_which_keyring_and_the_codec_takes_nothing_else(url: str, tmp_path: Path) -> None:
    assert url
    tree = read_namespace(tmp_path / "tier" / SPACE.name)
    assert tree is not None
    ring = Keyring.open(tmp_path / "keyring.json", KeySource.parse(f"file:{key_file(tmp_path)}").read())
    assert tree.seal == ring.id
    codec = AES256GCM(ring.id)
    assert AES256GCM.from_dict(codec.to_dict()) == codec
    for wrong in ({}, {"name": "kvstore.aes256gcm"}, {"name": "crc32c", "configuration": {"keyring": "x"}}):
        with pytest.raises(ValueError, match="does not describe"):
            AES256GCM.from_dict(wrong)


def test_the_package_tells_zarr_of_it() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["zarr.codecs"][SEAL_CODEC].partition(":")
    assert getattr(importlib.import_module(module), name) is AES256GCM
