"""The `zarr.json` documents beside the blocks, and where in the tree everything stands.

::

    <root>/<namespace>/zarr.json                       group; attributes: the namespace manifest, the digest words
    <root>/<namespace>/g0/zarr.json                    group of KV-cache group 0
    <root>/<namespace>/g0/a7/zarr.json                 its digests whose first byte is a7: a sparse array
    <root>/<namespace>/g0/a7/<w0>.….<w4>.0.0.0.0.0     one block: one shard with one inner chunk

The documents are written as JSON, without zarr-python, whose import alone takes longer than opening a tier may; the
tests hold them against zarr-python and tensorstore.
"""

from __future__ import annotations

import enum
import errno
import json
import logging
import os
import re
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvstore.errors import NewerFormatError, NotAStoreError, OlderFormatError, StoreOpenError, StoreSealedError
from kvstore.files import open_file
from kvstore.layout import DTYPES
from kvstore.namespace import Namespace, is_namespace_name
from kvstore.sealing import PLAIN, SEAL_BYTES
from kvstore.types import BlockKey
from kvstore.untrusted import fields, parsed, record
from kvstore.versions import FORMAT_VERSION, check_version
from kvstore_zarr.format import BlockFrame, DigestWords

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvstore.layout import BlockLayout

__all__ = [
    "METADATA_NAME",
    "SEAL_CODEC",
    "Kind",
    "NamespaceTree",
    "namespaces_in",
    "parse_namespace",
    "read_document",
    "read_namespace",
    "seal_said_by_array",
]

METADATA_NAME = "zarr.json"
SEAL_CODEC = "kvstore.aes256gcm"
"""The codec of a sealed chunk (`kvstore_zarr.codec`)."""
_ATTRIBUTE = "kvstore"
_SEALED = "sealed"
_FOLDER, _WORD = re.compile("[0-9a-f]{2}"), "(0|[1-9][0-9]*)"
_ARRAY = re.compile("[0-9a-f]{2}")
_LARGEST_MANIFEST = 16 << 20

_log = logging.getLogger("kvstore.file")


class NamespaceTree:
    """Where the blocks of one namespace stand, relative to the store's root, and the documents that describe them.

    `seal` is the id of the keyring with which its blocks are sealed, `PLAIN` where they are not; `frames` has each
    group's `BlockFrame`. Nothing changes it but what it keeps of texts it has made; threads share it.
    """

    def __init__(self, namespace: Namespace, seal: str = PLAIN) -> None:
        self.namespace = namespace
        self.seal = seal
        self._words = DigestWords(namespace.digest_bytes)
        self._suffixes = tuple(".0" * len(layout.shape) for layout in namespace.layouts)
        words = r"\.".join([_WORD] * len(self._words.widths))
        self._names = tuple(re.compile(words + re.escape(suffix), re.ASCII) for suffix in self._suffixes)
        longer = SEAL_BYTES if seal else 0
        self.frames = tuple(BlockFrame(layout.nbytes + longer, sealed=bool(seal)) for layout in namespace.layouts)
        self._of_namespace = _dump(self._namespace_document())
        self._of_group = _dump(_group_document({}))
        self._of_arrays = tuple(_dump(self._array_document(layout)) for layout in namespace.layouts)
        self._groups = tuple(f"{namespace.name}/g{group}" for group in range(len(namespace.layouts)))
        self._documents: dict[str, dict[str, bytes]] = {}

    @property
    def manifest(self) -> bytes:
        """The text of the namespace's document."""
        return self._of_namespace

    def group_folder(self, group: int) -> str:
        """The folder of a KV-cache group's arrays."""
        return self._groups[group]

    def folder(self, key: BlockKey) -> str:
        """The array that holds `key`'s block."""
        return f"{self._groups[key.group]}/{self._words.folder(key.digest)}"

    def block(self, key: BlockKey) -> str:
        """The file that holds `key`'s block."""
        words = ".".join(map(str, self._words.index(key.digest)))
        return f"{self.folder(key)}/{words}{self._suffixes[key.group]}"

    def key(self, group: int, folder: str, name: str) -> BlockKey:
        """The inverse of `block`: the key that file `name` holds. Raises ValueError or OverflowError if none."""
        words = self._names[group].fullmatch(name)
        if words is None or not _FOLDER.fullmatch(folder):
            raise ValueError(f"{folder}/{name} is not the name of a block of group {group}")
        return BlockKey(self._words.digest(folder, tuple(map(int, words.groups()))), group)

    def key_at(self, path: str) -> BlockKey | None:
        """The key of the block whose file is `path`, relative to the store's root; None if that is no block's."""
        parts = path.split("/")
        if len(parts) != 4 or parts[0] != self.namespace.name or f"{parts[0]}/{parts[1]}" not in self._groups:
            return None
        try:
            return self.key(int(parts[1][1:]), parts[2], parts[3])
        except (ValueError, OverflowError):
            return None

    def documents(self, key: BlockKey) -> Mapping[str, bytes]:
        """The `zarr.json` of every folder from the namespace's down to `key`'s, outermost first: path to text."""
        folder = self.folder(key)
        found = self._documents.get(folder)  # 256 of them for each group, in the path of every put
        if found is None:
            found = self._documents[folder] = {
                f"{self.namespace.name}/{METADATA_NAME}": self._of_namespace,
                f"{self._groups[key.group]}/{METADATA_NAME}": self._of_group,
                f"{folder}/{METADATA_NAME}": self._of_arrays[key.group],
            }
        return found

    def all_documents(self, root: Path) -> dict[str, bytes]:
        """`documents`, of every folder that stands below `root`: path relative to it, to text."""
        name = self.namespace.name
        found = {f"{name}/{METADATA_NAME}": self._of_namespace}
        for group, folder in enumerate(self._groups):
            if (root / folder).is_dir():
                found[f"{folder}/{METADATA_NAME}"] = self._of_group
                arrays = (array for array in sorted((root / folder).iterdir()) if _ARRAY.fullmatch(array.name))
                found |= {f"{folder}/{array.name}/{METADATA_NAME}": self._of_arrays[group] for array in arrays}
        return found

    def is_contradicted(self, root: Path) -> bool:
        """Whether the manifest says of how blocks are sealed what none of the arrays that stand below `root` says."""
        said = set[str | None]()
        for path in self.all_documents(root):
            with suppress(OSError):
                said.add(seal_said_by_array(read_document(root / path)))
        said.discard(None)
        return bool(said) and self.seal not in said

    def _namespace_document(self) -> dict[str, Any]:
        facts = {
            "format": FORMAT_VERSION,
            "fingerprint": self.namespace.name,
            "digest_words": {"count": len(self._words.widths), "bytes": list(self._words.widths)},
            "namespace": self.namespace.to_manifest(),
        }
        sealed = {_SEALED: {"keyring": self.seal}} if self.seal else {}
        return _group_document({_ATTRIBUTE: facts | sealed})

    def _array_document(self, layout: BlockLayout) -> dict[str, Any]:
        widths = self._words.widths
        chunk = [1] * len(widths) + list(layout.shape)
        as_bytes = {"name": "bytes", "configuration": {"endian": "little"}}
        checksum = {"name": "crc32c"}
        inner = {"name": "bytes"} if DTYPES[layout.dtype] == 1 else as_bytes
        seal = [{"name": SEAL_CODEC, "configuration": {"keyring": self.seal}}] if self.seal else []
        sharding = {
            "chunk_shape": chunk,
            "codecs": [inner, *seal, checksum],
            "index_codecs": [as_bytes, checksum],
            "index_location": "end",
        }
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [1 << 8 * width for width in widths] + list(layout.shape),
            "data_type": layout.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
            "fill_value": "NaN" if "float" in layout.dtype else 0,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": {},
            "dimension_names": [f"w{number}" for number in range(len(widths))] + list(layout.axes),
            "storage_transformers": [],
        }


def seal_said_by_array(data: bytes) -> str | None:
    """How an array's document says that its blocks are sealed, as `NamespaceTree.seal`; None where it says nothing."""
    try:
        (sharding,) = json.loads(data)["codecs"]
        codecs = {codec["name"]: codec for codec in sharding["configuration"]["codecs"]}
        sealed = codecs.get(SEAL_CODEC)
        return PLAIN if sealed is None else str(sealed["configuration"]["keyring"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def read_namespace(folder: Path, seal: str | None = None) -> NamespaceTree | None:
    """The namespace whose blocks are below `folder`, from its manifest; None where that is no kvstore namespace.

    `seal`: the keyring of the tier, or `PLAIN`; None for any. Raises what `parse_namespace` raises.
    """
    place = str(folder / METADATA_NAME)
    try:
        data = read_document(folder / METADATA_NAME)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        _check_unreadable(folder.name, place, error)
        return None
    return parse_namespace(data, folder.name, place, seal)


_REMEDY = (
    "kvstore verify --repair writes that of a local tier anew, elsewhere the next store into the namespace does; or"
    " restore it, or move its folder away"
)


def parse_namespace(data: bytes, name: str, place: str, seal: str | None = None) -> NamespaceTree | None:
    """The namespace that the manifest `data` describes, found at `place` in a folder called `name`; None if it is none.

    The folder's name is a checksum of what matters: a manifest that has it is of version 1, and is sound, whatever it
    says beside that (and what it says wrongly is logged). Raises `NewerFormatError` and `OlderFormatError` for another
    one of another format, `StoreSealedError` for one whose blocks are not sealed as `seal` says (see `read_namespace`),
    and `NotAStoreError` for one that contradicts itself, or that cannot be read although the folder is named as a
    namespace is.
    """
    try:
        attributes = record(fields(parsed(data), "it"), "attributes")
        facts = fields(attributes.get(_ATTRIBUTE), "what kvstore says")
        version, manifest = facts.get("format"), facts.get("namespace")
        found = str(fields(facts.get(_SEALED, {}), "how it is sealed").get("keyring", PLAIN))
    except ValueError as error:
        _check_unreadable(name, place, error)
        return None
    try:
        namespace = Namespace.from_manifest(manifest)
    except ValueError as error:
        if is_namespace_name(name):
            _check_format(version, place)
            raise NotAStoreError(f"{place} does not describe a namespace ({error!r}): {_REMEDY}") from error
        return None
    if namespace.name != name:
        _check_format(version, place)
        raise NotAStoreError(
            f"{place} describes namespace {namespace.name}, in a folder named {name}: the document was changed, or the"
            f" folder renamed. {_REMEDY}"
        )
    if (version, facts.get("fingerprint")) != (FORMAT_VERSION, name) or type(version) is not int:
        _say_damaged(place, f"it says format {version!r} and fingerprint {facts.get('fingerprint')!r}")
    if seal not in (None, found):
        raise StoreSealedError(f"{place} is of blocks that are {_how(found)}, in a tier whose blocks are {_how(seal)}")
    return NamespaceTree(namespace, found)


@lru_cache
def _say_damaged(place: str, how: str) -> None:
    """Once."""
    _log.warning(
        "%s is damaged: %s, but what it describes is what its folder is named after, in format %d. It is used as that;"
        " kvstore verify --repair writes the document of a local tier anew",
        *(place, how, FORMAT_VERSION),
    )


def _check_format(version: object, place: str) -> None:
    """Raise where a manifest says that it is of another version than ours. What says none is damaged."""
    if type(version) is int:
        check_version(version, place, "remove the tier or move it away; it is a cache, and is filled anew")


def _how(seal: str | None) -> str:
    return f"encrypted with keyring {seal}" if seal else "not encrypted"


class Kind(enum.Enum):
    """What a path below a namespace's folder is the name of, whatever its manifest says."""

    BLOCK = re.compile(r"g[0-9]+/[0-9a-f]{2}/[0-9]+(\.[0-9]+)+")
    DRAFT = re.compile(r"g[0-9]+/[0-9a-f]{2}/draft-[^/]+")
    DOCUMENT = re.compile(r"(g[0-9]+/([0-9a-f]{2}/)?)?zarr\.json")

    @classmethod
    def of(cls, path: str) -> Kind | None:
        """None: it is not ours."""
        return next((kind for kind in cls if kind.value.fullmatch(path)), None)


def _check_unreadable(name: str, place: str, error: Exception) -> None:
    """What cannot be read is nobody's concern, unless it stands where a namespace's manifest does."""
    if is_namespace_name(name):
        raise NotAStoreError(f"{place} is no manifest that can be read ({error!r}): {_REMEDY}") from error


def namespaces_in(root: Path, seal: str | None = None) -> tuple[list[NamespaceTree], dict[str, StoreOpenError]]:
    """The namespaces below `root`, and those that cannot be served: name of the folder, and what is wrong with it.

    `seal` as for `read_namespace`. One bad folder is not to stop the others. Raises `NewerFormatError` or
    `OlderFormatError` where there is nothing that can be served, and one of another format.
    """
    trees: list[NamespaceTree] = []
    aside: dict[str, StoreOpenError] = {}
    for folder in sorted(root.iterdir()):
        try:
            tree = read_namespace(folder, seal) if folder.is_dir() else None
        except StoreOpenError as error:
            aside[folder.name] = error
            continue
        if tree is not None:
            trees.append(tree)
    for reason in aside.values():
        if not trees and isinstance(reason, NewerFormatError | OlderFormatError):
            raise reason
    return trees, aside


def read_document(path: Path) -> bytes:
    """The text of a `zarr.json`. Raises OSError."""
    with open(open_file(str(path), os.O_RDONLY), "rb") as file:
        return file.read(_LARGEST_MANIFEST)


def _group_document(attributes: dict[str, Any]) -> dict[str, Any]:
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def _dump(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=1).encode() + b"\n"
