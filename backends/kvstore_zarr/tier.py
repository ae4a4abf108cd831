"""What one opened `file://` tier consists of; made by `opening`, used by every other module here.

Whatever is not a block, its draft or a `zarr.json` lies in the folder `.kvstore`: the catalogue, the locks, drafts of
documents.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.errors import NewerFormatError, OlderFormatError, StoreOpenError
from kvstore.namespace import FINGERPRINT_BYTES
from kvstore.sealing import PLAIN
from kvstore.types import BlockKey
from kvstore_zarr.folders import occupied
from kvstore_zarr.format import PAGE
from kvstore_zarr.metadata import NamespaceTree, read_namespace

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kvstore.catalog import Catalog, Change, Intent, Snapshot
    from kvstore.environment import Environment
    from kvstore.namespace import Namespace
    from kvstore.presence import Presence
    from kvstore.sealing import Sealer
    from kvstore_zarr.device import BlockDevice
    from kvstore_zarr.folders import Folders
    from kvstore_zarr.names import NameLocks

__all__ = [
    "CATALOGUE",
    "DRAFTS",
    "INNER",
    "PURGE",
    "LocalTier",
    "draft_prefix",
    "is_draft",
    "pack_addresses",
    "unpack_addresses",
]

_log = logging.getLogger("kvstore.file")

INNER = ".kvstore"
CATALOGUE = f"{INNER}/catalogue"
DRAFTS = f"{INNER}/drafts"
"""A folder for documents under temporary names."""
_DRAFT = "draft-"
"""How the temporary name of a block's file begins: `draft-<lease>-<intent>-<number>`."""


@dataclass
class LocalTier:
    """The parts of an open tier. Thread-safe. `slack` is kept free under a capacity for what is not measured each time:
    what the catalogue grows by until it is measured again, lock files, leases.
    """

    root: Path
    device: BlockDevice
    environment: Environment
    catalog: Catalog
    lock_bytes: int
    """What LMDB's lock file occupies; it does not grow."""
    presence: Presence
    folders: Folders
    names: NameLocks
    capacity: int | None
    slack: int
    keep_free: int
    """What is to stay free on the disk, in bytes: blocks make room for it, whether there is a capacity or not."""
    mode: int
    durable: bool
    readonly: bool
    sealer: Sealer | None = None
    """What its blocks are sealed with."""
    recorded: set[bytes] = field(default_factory=set[bytes])
    """Fingerprints of namespaces whose manifests this process has put into the catalogue."""
    claimed: set[bytes] = field(default_factory=set[bytes])
    """Blocks that some thread of this process is about to evict."""
    stranded: list[Intent] = field(default_factory=list["Intent"])
    """Intents of our own that could not be settled, for a full disk say; to be tried again."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    reclaimed: float = 0.0
    """When the dead were last looked for (`time.monotonic`)."""
    remarks: list[str] = field(default_factory=list[str])
    counts_live: bool = False
    """Whether the catalogue counts for what it would occupy without its free pages: it is about to lose them."""
    purged_bytes: int = 0
    """What this process has overwritten of purged blocks."""
    dropped: set[bytes] = field(default_factory=set[bytes])
    """Fingerprints of namespaces that were dropped: their folders go when the last one closes, if they are empty."""
    aside: dict[str, str] = field(default_factory=dict[str, str])
    """Namespaces (by the name of their folder) that cannot be served, and why: neither read nor written nor evicted."""
    damaged: set[str] = field(default_factory=set[str])
    """Those of them that are no other version's."""
    aside_bytes: int = 0
    """What stands in those folders and in no entry of the catalogue."""
    _trees: dict[bytes, NamespaceTree] = field(default_factory=dict[bytes, NamespaceTree])

    @property
    def seal(self) -> str:
        """The id of its keyring; `PLAIN` where it has none."""
        return PLAIN if self.sealer is None else self.sealer.id

    def tree(self, namespace: Namespace) -> NamespaceTree:
        """Where the namespace's blocks stand."""
        tree = self._trees.get(namespace.fingerprint)
        if tree is None:
            tree = self._trees.setdefault(namespace.fingerprint, NamespaceTree(namespace, self.seal))
        return tree

    def place(self, address: bytes) -> tuple[NamespaceTree, BlockKey] | None:
        """What a catalogue address names; None if neither folder nor catalogue has its manifest."""
        fingerprint = address[:FINGERPRINT_BYTES]
        tree = self._trees.get(fingerprint)
        if tree is None:
            namespace = self._read_namespace(fingerprint.hex())
            if namespace is None and not self.is_aside(fingerprint):
                namespace = self._recorded(fingerprint)
            if namespace is None:
                return None
            tree = self.tree(namespace)
        group = int.from_bytes(address[FINGERPRINT_BYTES : FINGERPRINT_BYTES + 2], "big")
        return tree, BlockKey(address[FINGERPRINT_BYTES + 2 :], group)

    def is_aside(self, address: bytes) -> bool:
        """Whether the address (or fingerprint) is of a namespace that cannot be served."""
        return bool(self.aside) and address[:FINGERPRINT_BYTES].hex() in self.aside

    def set_aside(self, name: str, error: StoreOpenError) -> None:
        """Serve the namespace in folder `name` no longer, and leave it as it is."""
        if name not in self.aside:
            if not isinstance(error, NewerFormatError | OlderFormatError):
                self.damaged.add(name)
            self.aside[name] = f"namespace {name} is set aside, and what is in it is left alone: {error}"
            _log.warning(self.aside[name])

    def serve_again(self, name: str) -> None:
        """The namespace in folder `name` is in order: take it out of those that are set aside."""
        self.aside.pop(name, None)
        self.damaged.discard(name)
        if not self.aside:
            self.aside_bytes = 0

    def notes(self) -> tuple[str, ...]:
        """What an operator should know of the tier as it was found."""
        return (*self.remarks, *self.aside.values())

    def remark(self, text: str) -> None:
        """Tell the operator, in the log and in `Capabilities.notes`."""
        self.remarks.append(f"{self.root}: {text}")
        _log.warning(self.remarks[-1])

    def _read_namespace(self, name: str) -> Namespace | None:
        if name in self.aside:
            return None
        try:
            tree = read_namespace(self.root / name, self.seal)
        except StoreOpenError as error:
            self.set_aside(name, error)
            return None
        return None if tree is None else tree.namespace

    def _recorded(self, fingerprint: bytes) -> Namespace | None:
        """What the catalogue says of a namespace whose document is gone."""
        with self.catalog.read() as snapshot:
            return next((space for space in snapshot.namespaces() if space.fingerprint == fingerprint), None)

    def name_in(self, change: Change, namespace: Namespace) -> None:
        """See that the catalogue names a namespace that is put into: another process may have purged it whole since
        this one recorded it, and its folders then are to be made and counted anew.
        """
        if namespace.fingerprint in self.recorded:
            if change.names(namespace.fingerprint):
                return
            self.folders.lose(namespace.name)
        change.add_namespace(namespace)

    def path(self, address: bytes) -> str | None:
        """The file of the block at a catalogue address; None if its namespace's manifest is gone."""
        place = self.place(address)
        return None if place is None else f"{self.root}/{place[0].block(place[1])}"

    def draft(self, intent: Intent, number: int, address: bytes) -> str:
        """A path that nobody else uses, for the file of the `number`-th address of `intent`; beside its block.

        There, and not in one folder for all: making a file and renaming it lock the folders that they touch, and a
        rename between two folders locks out all others of the file system.
        """
        group = int.from_bytes(address[FINGERPRINT_BYTES : FINGERPRINT_BYTES + 2], "big")
        folder = f"{address[:FINGERPRINT_BYTES].hex()}/g{group}/{address[FINGERPRINT_BYTES + 2]:02x}"
        return f"{self.root}/{folder}/{draft_prefix(intent)}{number}"

    def room(self, snapshot: Snapshot) -> int | None:
        """What a put may still reserve, in bytes, with folders and catalogue as they are now; None without a cap."""
        totals = snapshot.totals()
        if totals.capacity is None:
            return None
        return totals.capacity - self.occupied(snapshot) - self.slack

    def occupied(self, snapshot: Snapshot) -> int:
        """What the tier occupies, and what puts have reserved, in bytes."""
        totals = snapshot.totals()
        return totals.used + totals.reserved + self._records(snapshot)

    def free_on_disk(self) -> int:
        """What the disk has left for us, in bytes."""
        status = os.statvfs(self.root)
        return status.f_bavail * status.f_frsize if status.f_blocks else sys.maxsize  # ramfs, say, does not tell

    def account(self, change: Change) -> None:
        """Bring up to date what the tier says it keeps aside: folders, catalogue, and what is left of the slack."""
        totals, records = change.totals(), self._records(change)
        left = self.slack
        if totals.capacity is not None:
            left = max(0, min(left, totals.capacity - totals.used - totals.reserved - records))
        if records + left != totals.overhead:
            change.set_overhead(records + left)

    def _records(self, snapshot: Snapshot) -> int:
        catalogue = (
            self.environment.live_pages(snapshot.txn) * PAGE
            if self.counts_live
            else occupied(f"{self.root}/{CATALOGUE}/data.mdb")
        )
        return self.folders.total(snapshot.txn) + self.lock_bytes + self.aside_bytes + catalogue


def draft_prefix(intent: Intent) -> str:
    """How the names of an intent's drafts begin."""
    return f"{_DRAFT}{intent.lease.hex()}-{intent.number}-"


def is_draft(name: str) -> bool:
    """Whether a file in a folder of blocks has the name of a draft."""
    return name.startswith(_DRAFT)


PURGE = b"\0"
"""How the payload of an intent begins whose files are to be overwritten before they go: an address without length."""


def pack_addresses(addresses: Iterable[bytes]) -> bytes:
    """An intent's payload: the addresses whose names may come to stand for something, or cease to; one byte of length
    before each.
    """
    return b"".join(bytes((len(address),)) + address for address in addresses)


def unpack_addresses(payload: bytes) -> list[bytes]:
    """The addresses that `pack_addresses` packed."""
    addresses: list[bytes] = []
    start = len(PURGE) if payload.startswith(PURGE) else 0
    while start < len(payload):
        end = start + 1 + payload[start]
        addresses.append(payload[start + 1 : end])
        start = end
    return addresses
