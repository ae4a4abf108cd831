"""An encrypted tier is zarr all the same: stock zarr-python reads its blocks where the keys are at hand."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from sealing_helpers import key_file, sealed

from kvstore import BlockLayout, BlockRead, BlockWrite, GetOutcome, Namespace, open_store
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


def test_stock_zarr_reads_it_with_the_keys_and_not_without(tmp_path: Path, values: NDArray[np.float16]) -> None:
    with open_store(sealed(f"file://{tmp_path}/tier", tmp_path)) as store:
        store.put_many(SPACE, [BlockWrite(key(number), values.data) for number in (1, 2)])
    np.save(tmp_path / "expected.npy", values)
    tree = NamespaceTree(SPACE)
    damaged = tmp_path / "tier" / tree.block(key(2))
    data = bytearray(damaged.read_bytes())
    data[200] ^= 1
    damaged.write_bytes(data)
    Keyring.open(tmp_path / "other.json", KeySource.parse(f"file:{key_file(tmp_path)}").read())

    def look(number: int, **environment: str) -> dict[str, object]:
        place = DigestWords(32).index(key(number).digest)
        folder = str(tmp_path / "tier" / tree.folder(key(number)))
        return {"folder": folder, "place": place, "expected": f"{tmp_path}/expected.npy", "environment": environment}

    keys = {"KVSTORE_ENCRYPTION": f"file:{key_file(tmp_path)}", "KVSTORE_KEYRING": f"{tmp_path}/keyring.json"}
    looks = [look(1), look(1, **keys), look(2, **keys), look(1, **keys | {"KVSTORE_KEYRING": f"{tmp_path}/other.json"})]
    done = subprocess.run(
        [sys.executable, str(READER)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        input=json.dumps(looks),
        capture_output=True,
        text=True,
        check=True,
    )
    without, with_keys, of_damaged, with_others = done.stdout.splitlines()
    assert without.startswith("KeyringError these blocks are encrypted")
    assert with_keys == "equal"
    assert "checksum" in of_damaged
    assert "is keyring" in with_others


def test_the_block_as_an_array_of_an_open_tier(url: str, values: NDArray[np.float16], tmp_path: Path) -> None:
    with open_store(url) as store:
        array = store.zarr_array(SPACE, key(1))  # type: ignore[attr-defined]
        assert np.array_equal(array[...], values)
        ring = Keyring.open(tmp_path / "keyring.json", KeySource.parse(f"file:{key_file(tmp_path)}").read())
        ring.destroy("acme")
        gone = store.zarr_array(SPACE, key(1))  # type: ignore[attr-defined]
        with pytest.raises(KeyringError, match="destroyed"):
            gone[...]


def test_of_two_ids_of_data_keys_that_differ_neither_is_believed(tmp_path: Path) -> None:
    url = sealed(f"file://{tmp_path}/tier", tmp_path)
    with open_store(url) as store:
        store.put_many(SPACE, [BlockWrite(key(1), bytes(LAYOUT.nbytes))])
        ring = Keyring.open(tmp_path / "keyring.json", KeySource.parse(f"file:{key_file(tmp_path)}").read())
        frame = NamespaceTree(SPACE, ring.id).frames[0]
        path = tmp_path / "tier" / NamespaceTree(SPACE).block(key(1))
        file = np.frombuffer(bytearray(path.read_bytes()), np.uint8)
        facts = frame.facts(file[frame.whole :])
        assert facts is not None
        frame.seal(file[frame.whole :], file[: frame.payload_bytes].copy(), replace(facts, key_id=b"another data key"))
        path.write_bytes(file.tobytes())
        into = bytearray(LAYOUT.nbytes)
        assert store.get_many_into(SPACE, [BlockRead(key(1), into)]) == [GetOutcome.CORRUPT]


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
