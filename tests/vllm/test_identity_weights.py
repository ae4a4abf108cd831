"""Which weights a model has: commits of the hub as its client keeps them, digests of any other folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from typing import TYPE_CHECKING

import pytest

from kvstore.vllm.weights import MIB, SAMPLE, ModelSource, UnknownWeightsError, weights_identity

if TYPE_CHECKING:
    from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = 1000
LARGE = 5 * MIB + 123


def safetensors(path: Path, *, name: str = "w", fill: bytes = b"\x01") -> None:
    """A small tensor and a large one."""
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            f"{name}.small": {"dtype": "U8", "shape": [SMALL], "data_offsets": [0, SMALL]},
            f"{name}.large": {"dtype": "U8", "shape": [LARGE], "data_offsets": [SMALL, SMALL + LARGE]},
        }
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + fill * (SMALL + LARGE))


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    safetensors(path / "model.safetensors")
    return path


def snapshot(cache: Path, commit: str = COMMIT, reference: str = "main") -> Path:
    """As the hub's client makes it: links to blobs that are named by their content."""
    repository = cache / "models--org--name"
    for place in ("blobs", "refs", f"snapshots/{commit}"):
        (repository / place).mkdir(parents=True, exist_ok=True)
    (repository / "refs" / reference).write_text(commit)
    scratch = folder(cache / "scratch")
    for file in scratch.iterdir():
        blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        file.replace(blob)
        (repository / "snapshots" / commit / file.name).symlink_to(f"../../blobs/{blob.name}")
    scratch.rmdir()
    return repository / "snapshots" / commit


def identity(model: Path | str, **source: str) -> str:
    return weights_identity(ModelSource(str(model), **source))


def test_equal_files_in_two_folders_are_the_same_weights(tmp_path: Path) -> None:
    one = folder(tmp_path / "one")
    other = shutil.copytree(one, tmp_path / "two", copy_function=shutil.copyfile)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "optimizer.pt"):
        (other / name).write_text("{}")
    assert identity(one) == identity(other)


@pytest.mark.parametrize(
    "position",
    [0, SMALL - 1, SMALL, SMALL + SAMPLE - 1, SMALL + MIB, SMALL + 5 * MIB, SMALL + LARGE - 1],
    ids=["first", "small", "large", "sampled", "second MiB", "last MiB", "last"],
)
def test_a_byte_changed_in_place_is_seen_where_samples_are_taken(position: int, tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    weights = path / "model.safetensors"
    before, times = identity(path), weights.stat()
    data_start = weights.stat().st_size - SMALL - LARGE
    with weights.open("r+b") as file:
        file.seek(data_start + position)
        file.write(b"\x02")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert identity(path) != before


def test_weights_replaced_with_equal_shapes_are_seen_in_every_format(tmp_path: Path) -> None:
    for suffix in (".safetensors", ".bin", ".gguf"):
        path = folder(tmp_path / suffix)
        (path / "model.safetensors").rename(path / f"model{suffix}")
        before = identity(path)
        safetensors(path / f"model{suffix}", fill=b"\x02")
        assert identity(path) != before


def test_names_of_tensors_shards_and_configuration_count(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    seen = {identity(path)}
    safetensors(path / "model.safetensors", name="v")
    seen.add(identity(path))
    (path / "model.safetensors").rename(path / "model-00001.safetensors")
    seen.add(identity(path))
    (path / "config.json").write_text('{"model_type": "mistral"}')
    seen.add(identity(path))
    (path / "modeling_custom.py").write_text("code = 1")
    seen.add(identity(path))
    assert len(seen) == 5


def test_a_single_file_is_a_model_whatever_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(3 * MIB))
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    assert identity(tmp_path / "a.gguf") == identity(tmp_path / "b.gguf")


def test_a_snapshot_of_the_hub_is_its_commit_by_path_by_name_and_by_revision(tmp_path: Path) -> None:
    path = snapshot(tmp_path, reference="v1")
    expected = f"org/name@{COMMIT}"
    assert identity(path) == expected
    assert identity("org/name", revision="v1", download_dir=str(tmp_path)) == expected
    assert identity("org/name", revision=COMMIT) == expected


def test_a_snapshot_with_a_file_of_somebodys_own_is_what_is_in_it(tmp_path: Path) -> None:
    path = snapshot(tmp_path)
    copy = shutil.copytree(path, tmp_path / "copy")
    (path / "model.safetensors").unlink()
    safetensors(path / "model.safetensors", fill=b"\x02")
    assert identity(path).startswith("sha256:")
    assert identity(path) != identity(copy)


def test_two_commits_of_one_branch_differ(tmp_path: Path) -> None:
    snapshot(tmp_path)
    before = identity("org/name", download_dir=str(tmp_path))
    snapshot(tmp_path, commit=COMMIT[::-1])
    assert before != identity("org/name", download_dir=str(tmp_path)) == f"org/name@{COMMIT[::-1]}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ({"model": "org/never-downloaded"}, "no commit of 'org/never-downloaded', revision 'main'"),
        ({"model": "s3://bucket/model"}, "neither a folder, a file, nor a repository"),
        ({"model": ".", "remote": "s3://bucket/model"}, "streamed from 's3://bucket/model'"),
        ({"model": ".", "load_format": "tensorizer"}, "load_format='tensorizer'"),
    ],
)
def test_what_cannot_be_known_is_an_error_that_says_why(
    source: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownWeightsError, match=reason):
        weights_identity(ModelSource(**{"download_dir": str(tmp_path), **source}))


@pytest.mark.parametrize("damage", [b"", b"\xff" * 100, struct.pack("<Q", 50) + b"{" * 60])
def test_a_damaged_file_is_refused_and_named(damage: bytes, tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    (path / "model.safetensors").write_bytes(damage)
    with pytest.raises(UnknownWeightsError, match=r"model\.safetensors is no safetensors file"):
        identity(path)


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(2 * MIB)
    with pytest.raises(UnknownWeightsError, match="cut short"):
        identity(path)


def test_random_weights_are_called_what_they_are(tmp_path: Path) -> None:
    assert identity(tmp_path, load_format="dummy") == "dummy"
