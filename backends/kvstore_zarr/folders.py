"""The folders of the tree: made when first needed, and counted, because a cap counts them too.

A directory grows with its names and, on ext4, never shrinks. What each occupies, and each `zarr.json`, stands in the
catalogue's `folders` database; a put reserves the most that its names can add, and records what they did add when it
publishes. The documents of a group's arrays are one file under many names, each of which is counted: so does whoever
sums up the tree.
"""

# ruff: noqa: PTH104, PTH110, PTH120 - plain strings: a Path costs more than the system call it is made for

from __future__ import annotations

import os
import struct
import threading
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from kvstore.files import make_folder, open_file, replace_file, sync_folder
from kvstore_zarr.calls import occupied_all
from kvstore_zarr.format import PAGE
from kvstore_zarr.metadata import METADATA_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import lmdb

    from kvstore.environment import Environment
    from kvstore.types import BlockKey
    from kvstore_zarr.metadata import NamespaceTree

__all__ = ["FOLDERS_DATABASE", "Folders", "occupied"]

FOLDERS_DATABASE = "folders"

NAME_GROWTH = 4 * PAGE
"""The most one new name adds to an ext4 directory: a split leaf, a split index, a new root, an extent block."""
SMALL = 64 * PAGE
"""A directory whose index is one page at most: a name adds a split leaf, and that page or an extent block."""
FOLDER_GROWTH = 3 * (NAME_GROWTH + 2 * PAGE)
"""The most a put adds when it makes namespace, group and array: each a folder with its document, and a name above."""

_LOOKED_AT = 8
"""Folders beside a new one in which a document to link to is looked for."""
_U64 = struct.Struct("<Q")
_TOTAL = b"\0total"


def occupied(path: str | Path) -> int:
    """What the device says `path` occupies, in bytes; 0 if there is no such file."""
    try:
        return os.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def _says(path: str, text: bytes) -> bool:
    with open(open_file(path, os.O_RDONLY), "rb") as file:
        return file.read(len(text) + 1) == text


class Folders:
    """The folders of one store, by path relative to its root. Thread-safe: what it remembers only saves work."""

    def __init__(self, root: Path, temporaries: Path, environment: Environment, mode: int, *, durable: bool) -> None:
        """`durable`: a folder is on disk before anything is put into it. Documents are in any case: a namespace whose
        manifest a power loss had emptied could not be served.
        """
        self._root = root
        self._temporaries = temporaries
        self._drafts = str(temporaries.relative_to(root))
        self._database = environment.databases[FOLDERS_DATABASE]
        self._mode = mode
        self._durable = durable
        self._made: set[str] = set()
        self._counted: dict[str, int] = {}
        self._documents: dict[bytes, str] = {}
        self._writing = threading.Lock()

    def growth(self, folder: str) -> int:
        """The most that a new file in `folder` can add to the tree's directories."""
        name = 2 * PAGE if self._counted.get(folder, SMALL) < SMALL else NAME_GROWTH
        return name * 2 if folder in self._made else name * 2 + FOLDER_GROWTH  # a draft's name, and the block's

    def make(self, tree: NamespaceTree, key: BlockKey, *, unique: str, again: bool = False) -> None:
        """See that the folder for `key` and all above it exist and are described.

        `unique` is a file name that nobody else uses. `again`: even if this process did so before. Atomic: a document
        appears whole. Raises OSError.
        """
        folder = tree.folder(key)
        if folder in self._made and not again:
            return
        for path, text in tree.documents(key).items():
            described = path.removesuffix(f"/{METADATA_NAME}")
            if described not in self._made or again:
                self._describe(f"{self._root}/{described}", text, f"{self._temporaries}/{unique}")
                self._made.add(described)

    def _describe(self, folder: str, text: bytes, draft: str) -> None:
        document = f"{folder}/{METADATA_NAME}"
        if os.path.exists(document):
            return
        make_folder(folder, self._mode, draft=f"{draft}-folder")
        if self._durable:
            sync_folder(os.path.dirname(folder))
        if not self._is_linked(text, document):
            with (
                self._writing
            ):  # of threads that begin together one waits for the disk, and the others link to its file
                if not os.path.exists(document) and not self._is_linked(text, document):
                    self._write(document, text, draft)

    def rewrite(self, documents: Mapping[str, bytes], *, unique: str) -> None:
        """Put documents (path relative to the root, to text) in place of what stands there. Raises OSError."""
        draft = f"{self._temporaries}/{unique}"
        self._documents.clear()  # one that is damaged is not to be linked to
        for path, text in documents.items():
            document = f"{self._root}/{path}"
            if self._is_linked(text, draft):
                os.rename(draft, document)
            else:
                self._write(document, text, draft)

    def _write(self, document: str, text: bytes, draft: str) -> None:
        replace_file(document, text, draft=draft, mode=self._mode)
        self._documents[text] = document

    def _is_linked(self, text: bytes, document: str) -> bool:
        """Whether `document` is there by another name of one that says the same: one system call instead of five, and
        one file for all the arrays of a group. Not where there are no links, or no more of them.
        """
        same = self._documents.get(text) or self._beside(document, text)
        if same is None:
            return False
        try:
            os.link(same, document)
        except FileExistsError:
            pass
        except OSError:
            self._documents.pop(text, None)
            return False
        return True

    def _beside(self, document: str, text: bytes) -> str | None:
        """A document that says the same in one of the first folders beside that of `document`, if there is one."""
        folder = os.path.dirname(document)
        with suppress(OSError), os.scandir(os.path.dirname(folder)) as entries:
            for other in islice((entry.path for entry in entries if entry.path != folder), _LOOKED_AT):
                with suppress(OSError):  # none there, or one that cannot be read
                    if _says(f"{other}/{METADATA_NAME}", text):
                        return self._documents.setdefault(text, f"{other}/{METADATA_NAME}")
        return None

    def measure(self, folders: Iterable[str]) -> dict[str, int]:
        """What has grown since this process last recorded it: `folders`, and what stands above those that are new."""
        paths = set(folders)
        for folder in [path for path in paths if path not in self._counted]:
            space, group, _ = folder.split("/")
            above = (space, f"{space}/{group}", folder)
            documents = (f"{path}/{METADATA_NAME}" for path in above)
            paths.update((".", self._drafts), above, (path for path in documents if path not in self._counted))
        order = list(paths)
        sizes = zip(order, occupied_all([f"{self._root}/{path}" for path in order]), strict=True)
        return {path: nbytes for path, nbytes in sizes if nbytes > self._counted.get(path, -1)}

    def measure_all(self) -> dict[str, int]:
        """What every directory and document in the tree occupies, by a walk: for a rebuild, and a new store."""
        found: dict[str, int] = {}
        for path, _, files in os.walk(self._root):
            folder = os.path.relpath(path, self._root)
            found[folder] = occupied(path)
            if METADATA_NAME in files:
                found[f"{folder}/{METADATA_NAME}"] = occupied(f"{path}/{METADATA_NAME}")
        return found

    def record(self, txn: lmdb.Transaction[memoryview], measured: Mapping[str, int]) -> None:
        """Write down what `measure` found, in a write transaction. A smaller figure than the recorded one is old."""
        added = 0
        for folder, nbytes in measured.items():
            stored = txn.get(folder.encode(), db=self._database)
            known = _U64.unpack(stored)[0] if stored is not None else 0
            if nbytes > known:
                txn.put(folder.encode(), _U64.pack(nbytes), db=self._database)
                added += nbytes - known
            self._counted[folder] = max(nbytes, known)
        if added:
            txn.put(_TOTAL, _U64.pack(self.total(txn) + added), db=self._database)

    def total(self, txn: lmdb.Transaction[memoryview]) -> int:
        """What all recorded folders occupy, in bytes."""
        stored = txn.get(_TOTAL, db=self._database)
        return _U64.unpack(stored)[0] if stored is not None else 0

    def drop(self, txn: lmdb.Transaction[memoryview], namespace: str) -> None:
        """Drop the records of what stands in a namespace's folder, which is about to go."""
        cursor, freed = txn.cursor(self._database), 0
        while cursor.set_range(namespace.encode()) and bytes(cursor.key()).startswith(namespace.encode()):
            freed += _U64.unpack(cursor.value())[0]
            cursor.delete()
        txn.put(_TOTAL, _U64.pack(max(0, self.total(txn) - freed)), db=self._database)
        self.lose(namespace)

    def lose(self, namespace: str) -> None:
        """Know no more of what stands in a namespace's folder: it is gone, or nobody counts it."""
        for counted in [path for path in list(self._counted) if path.startswith(namespace)]:
            self._counted.pop(counted, None)
        self._made -= {path for path in self._made.copy() if path.startswith(namespace)}

    def forget(self, txn: lmdb.Transaction[memoryview]) -> None:
        """Drop every record, before a rebuild."""
        txn.drop(self._database, delete=False)
        self._counted.clear()
