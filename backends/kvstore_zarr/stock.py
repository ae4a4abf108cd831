"""One block as a zarr array of its own, for those who look into a tier: stock zarr decodes the very chunk that is
stored.

The tier's arrays are as wide as all digests, and a block is one chunk of one of them. Here its chunk stands alone under
a document that is the tier's own without the axes of the digest. The chunk is read when its first value is asked for.
"""

from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING, Any

from kvstore.errors import DamagedBlockError, NotStoredError
from kvstore.layout import as_bytes
from kvstore_zarr.metadata import METADATA_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    import zarr
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvstore.types import BlockKey
    from kvstore_zarr.metadata import NamespaceTree

__all__ = ["block_array"]


def block_array(
    tree: NamespaceTree, key: BlockKey, read: Callable[[str], Buffer | None], where: str
) -> zarr.Array[Any]:
    """The block `key`. `read(path)` gives the bytes of a file of the tier that is called `where`, None where there is
    none.

    Asking for values raises `NotStoredError` where the block is gone and `DamagedBlockError` where it fails its checks.
    """
    document = f"{tree.folder(key)}/{METADATA_NAME}"
    stored = read(document)
    described = _without_digest(json.loads(bytes(stored or tree.documents(key)[document])))
    name = described["chunk_key_encoding"]["configuration"]["separator"].join("0" * len(described["shape"]))
    files = _Files(lambda path: _checked(tree, key, read, where) if path == name else None)
    files[METADATA_NAME] = _buffer(json.dumps(described).encode())
    api: Any = importlib.import_module("zarr")  # not loaded with the store
    importlib.import_module("kvstore_zarr.dtypes").register()
    if tree.seal:
        importlib.import_module("kvstore_zarr.codec").register()
    array: zarr.Array[Any] = api.open_array(api.storage.MemoryStore(files, read_only=True), mode="r")
    return array


class _Files(dict[str, Any]):
    """What zarr takes for a store of values in memory, filled as it asks."""

    def __init__(self, read: Callable[[str], Buffer | None]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, name: str) -> Any:
        data = self._read(name)
        if data is None:
            raise KeyError(name)
        value = self[name] = _buffer(data)
        return value


def _buffer(data: Buffer) -> Any:
    flat: NDArray[Any] = as_bytes(data)
    return importlib.import_module("zarr.core.buffer.cpu").Buffer.from_array_like(flat)


def _without_digest(document: dict[str, Any]) -> dict[str, Any]:
    """The document of an array of blocks, as that of one block."""
    names: list[str] = document["dimension_names"]
    words = sum(name.startswith("w") and name[1:].isdigit() for name in names)
    grid, codec = document["chunk_grid"], document["codecs"][0]
    chunk: list[int] = grid["configuration"]["chunk_shape"][words:]
    inner: list[int] = codec["configuration"]["chunk_shape"][words:]
    return {
        **document,
        "shape": document["shape"][words:],
        "dimension_names": names[words:],
        "chunk_grid": {**grid, "configuration": {"chunk_shape": chunk}},
        "codecs": [{**codec, "configuration": {**codec["configuration"], "chunk_shape": inner}}],
    }


def _checked(tree: NamespaceTree, key: BlockKey, read: Callable[[str], Buffer | None], where: str) -> Buffer:
    """The block's file, if its checksums and facts hold: zarr's own checksum does not say whose block it is."""
    block = f"{where}: block {key.digest.hex()} of group {key.group} in namespace {tree.namespace.name}"
    data = read(tree.block(key))
    if data is None:
        raise NotStoredError(f"{block} is not there any more: it was evicted or removed since the tier was looked at")
    frame, whole = tree.frames[key.group], as_bytes(data)
    facts = frame.facts(whole[frame.whole :]) if whole.nbytes == frame.file_bytes else None
    if (
        facts is None
        or (facts.key, facts.fingerprint) != (key, tree.namespace.fingerprint)
        or not frame.payload_is_intact(whole[frame.whole :], whole[: frame.payload_bytes])
    ):
        raise DamagedBlockError(f"{block} fails its checks, so nothing of it can be shown")
    return data
