"""Which weights an engine computes with: a commit of the hub, or a digest of the files in a folder.

`identity` asks for it with the weights of every model whose layers have KV in a block (the model, a draft model).
Nothing here names vLLM, reaches for the network, or trusts a path, a name or a modification time: two folders with
equal files are the same weights, and files replaced in place are other weights.

A commit is read from where the hub's client keeps snapshots (`models--ORG--NAME/snapshots/COMMIT`). Any other folder is
read: its configuration files as they are; of each weight file the size, the header and the values, namely tensors of up
to 1 MiB as a whole and of larger ones the first 16 KiB of each MiB. So a replacement of the weights is seen (training,
merging and quantising touch every MiB of what they change), an edit of less than a MiB in place may not be.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ModelSource", "UnknownWeightsError", "weights_identity"]

MIB = 1 << 20
SAMPLE = 16 << 10
"""Bytes read of each MiB of a large tensor: 1.6 % of the file, so that 16 GB of weights cost 0.25 GB of reading."""
READERS = 8
"""Files read at once: what samples wait for is the device."""
MAX_HEADER = 100 * MIB
"""What the safetensors format allows a header to have."""

WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".npz")
FACTS = (".json", ".py")
"""Configurations, indices, scales, and code that comes with a model: read as a whole."""
NO_FACTS = re.compile(
    r"tokenizer.*|vocab|added_tokens|special_tokens_map|generation_config|chat_template"
    r"|trainer_state|training_args|optimizer|scheduler|rng_state.*"
)
"""What turns text into tokens or tokens into text (a block is named by its tokens), and what training leaves behind."""

COMMIT = re.compile(r"[0-9a-f]{40}")
FILE_LOADERS = re.compile(
    r"auto|hf|(fast)?safetensors|pt|npcache|mistral|instanttensor|sharded_state|bitsandbytes|gguf|runai_streamer(_sharded)?"
)
"""Loaders that read the files of the model's folder, whatever they do with them."""


class UnknownWeightsError(ConfigurationError):
    """Nothing on this machine says which weights these are."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where an engine takes a model's weights from, in its own words."""

    model: str
    """A folder, a file, or a repository of the hub."""
    revision: str | None = None
    """A commit, branch or tag of the repository; None for its default branch."""
    load_format: str = "auto"
    download_dir: str | None = None
    """Where the engine keeps what it downloads; None for the hub client's own cache."""
    remote: str = ""
    """An address that the weights are streamed from, while `model` holds the configuration only."""


def weights_identity(source: ModelSource) -> str:
    """The weights in one line: `ORG/NAME@COMMIT`, `sha256:DIGEST`, or `dummy`.

    Equal lines mean equal weights. Raises `UnknownWeightsError` where that cannot be found out on this machine.
    """
    if source.load_format == "dummy":
        return "dummy"
    if source.remote:
        raise UnknownWeightsError(f"the weights are streamed from {source.remote!r}")
    if not FILE_LOADERS.fullmatch(source.load_format):
        raise UnknownWeightsError(f"load_format={source.load_format!r} does not read the files of the model's folder")
    place = Path(source.model)
    if place.is_file():
        return _files_identity({f"model{place.suffix}": place})
    if place.is_dir():
        return _snapshot(place) or _files_identity(_files_of(place))
    return _hub_identity(source)


def _snapshot(folder: Path) -> str | None:
    """`ORG/NAME@COMMIT` if `folder` is a snapshot as the hub's client made it; None if it is anything else.

    There a file is a link to a blob that is named by its content. Where somebody put a file of their own, or the file
    system has no links, the content decides.
    """
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--") or not COMMIT.fullmatch(folder.name):
        return None
    blobs = folder.parent.parent / "blobs"
    if not all(path.is_symlink() and path.resolve().parent == blobs for path in _files_of(folder).values()):
        return None
    return f"{repository.removeprefix('models--').replace('--', '/')}@{folder.name}"


def _hub_identity(source: ModelSource) -> str:
    """The commit of a repository of the hub: the revision itself, or what the local cache says it was resolved to."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source.model):
        raise UnknownWeightsError(f"{source.model!r} is neither a folder, a file, nor a repository of the hub")
    resolved = getattr(source.revision, "resolved", source.revision)
    if resolved and COMMIT.fullmatch(resolved):
        return f"{source.model}@{resolved}"
    revision = str(source.revision or "main")
    for cache in _caches(source):
        reference = cache / f"models--{source.model.replace('/', '--')}" / "refs" / revision
        if reference.is_file() and COMMIT.fullmatch(commit := reference.read_text().strip()):
            return f"{source.model}@{commit}"
    raise UnknownWeightsError(
        f"no commit of {source.model!r}, revision {revision!r}, is in the hub's cache on this machine"
        f" ({', '.join(map(str, _caches(source)))}); a full commit as `revision` would do"
    )


def _caches(source: ModelSource) -> list[Path]:
    """Where the weights' snapshot may be: with a download folder of the engine's own, only there."""
    if source.download_dir:
        return [Path(source.download_dir)]
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return []
    return [Path(HF_HUB_CACHE)]


def _files_of(folder: Path) -> dict[str, Path]:
    """The files that make up a model, by their names in its folder."""
    return {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.suffix in WEIGHTS + FACTS and not NO_FACTS.fullmatch(path.stem)
    }


def _files_identity(files: dict[str, Path]) -> str:
    if not any(path.suffix in WEIGHTS for path in files.values()):
        raise UnknownWeightsError(
            f"no weight file ({', '.join(WEIGHTS)}) is among {sorted(files) or 'no files at all'}"
        )
    with ThreadPoolExecutor(READERS, "kvstore-weights") as pool:
        digests = dict(zip(files, pool.map(_digest, files.values()), strict=True))
    return f"sha256:{hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()}"


def _digest(path: Path) -> str:
    """SHA-256 over the file's size and the parts that are read of it, each with its place."""
    digest = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(size.to_bytes(8, "little"))
            for start, length in _parts(file.fileno(), path, size):
                digest.update(start.to_bytes(8, "little") + length.to_bytes(8, "little"))
                digest.update(_read(file.fileno(), path, start, length))
    except OSError as error:
        raise UnknownWeightsError(f"cannot read {path}: {error.strerror or error}") from error
    return digest.hexdigest()


def _parts(fd: int, path: Path, size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of what is read of a file: all of a configuration, the header and samples of weights."""
    if path.suffix in FACTS:
        yield from ((start, min(MIB, size - start)) for start in range(0, size, MIB))
        return
    header, tensors = _tensors(fd, path, size) if path.suffix == ".safetensors" else (0, [(0, size)])
    yield 0, header
    for start, end in tensors:
        if end - start <= MIB:
            yield start, end - start
            continue
        yield from ((place, min(SAMPLE, end - place)) for place in range(start, end, MIB))
        yield end - SAMPLE, SAMPLE  # what comes last in a file without a header: pickles keep their checksums there


def _tensors(fd: int, path: Path, size: int) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of a safetensors header, and where each tensor begins and ends in the file, in order of place."""
    length = int.from_bytes(_read(fd, path, 0, min(8, size)), "little")
    if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER):
        raise UnknownWeightsError(f"{path} is no safetensors file: its header would have {length} of {size} bytes")
    try:
        entries: dict[str, Any] = json.loads(_read(fd, path, 8, length))
        places = sorted(
            (8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
            for name, entry in entries.items()
            if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UnknownWeightsError(f"{path} is no safetensors file: {error!r} in its header") from error
    if places and not (places[0][0] >= 8 + length and max(end for _, end in places) <= size):
        raise UnknownWeightsError(f"{path} is cut short: its header describes tensors past its {size} bytes")
    return 8 + length, places


def _read(fd: int, path: Path, start: int, length: int) -> bytes:
    parts: list[bytes] = []
    while length > 0:
        part = os.pread(fd, length, start)
        if not part:
            raise UnknownWeightsError(f"{path} became shorter while it was read")
        parts.append(part)
        start, length = start + len(part), length - len(part)
    return b"".join(parts)
