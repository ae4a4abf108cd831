"""A get: look it up, open, lock, read in one call, check everything.

The shared lock keeps an eviction from cutting or overwriting the file while it is read. What is read is trusted for
nothing: checksum, tail, key, namespace and size are all held against what was asked for.
"""

from __future__ import annotations

import enum
import errno
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.catalog import address_of
from kvstore.sealing import Unsealed
from kvstore.types import GetOutcome
from kvstore_zarr.calls import SIZE_DIFFERS, Step
from kvstore_zarr.deleting import remove
from kvstore_zarr.removal import inode_of, release
from kvstore_zarr.sealed import unseal_file
from kvstore_zarr.tails import is_foreign

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.sealing import Ring
    from kvstore.types import BlockKey
    from kvstore_zarr.calls import BlockFile
    from kvstore_zarr.metadata import NamespaceTree
    from kvstore_zarr.tier import LocalTier

__all__ = ["get_blocks"]

LOOKS = 50
"""How often a get looks again at a block that an eviction has locked but not yet taken, a millisecond apart."""


_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Says nothing of the block: the store cannot tell at the moment."""


class _Look(enum.Enum):
    """What one look at a block's file found."""

    GOOD = "good"
    BUSY = "busy"
    CHANGED = "changed"
    UNREADABLE = "unreadable"
    """It is sealed with a key that this process does not have, or a later kvstore's: another process may read it."""


@dataclass(frozen=True, slots=True)
class _Bad:
    """A block that is to go: the inode of its file, None where there is none, and what the caller is told."""

    inode: int | None
    outcome: GetOutcome


def get_blocks(
    tier: LocalTier, tree: NamespaceTree, reads: Sequence[tuple[BlockKey, NDArray[np.uint8]]], *, used: bool = True
) -> list[GetOutcome]:
    """Get blocks of one namespace, whose buffers have been checked; one outcome each, in order. `used`: that is a use
    of those that are found.
    """
    addresses = [address_of(tree.namespace, key) for key, _ in reads]
    with tier.catalog.read() as snapshot:
        present = snapshot.alive(addresses)
    ring = None if tier.sealer is None else tier.sealer.reading()
    outcomes = [
        _get(tier, tree, address, key, into, ring) if there else GetOutcome.MISS
        for address, (key, into), there in zip(addresses, reads, present, strict=True)
    ]
    hits = [address for address, outcome in zip(addresses, outcomes, strict=True) if outcome is GetOutcome.HIT]
    if used and hits and not tier.readonly and tier.catalog.note(hits):
        tier.catalog.settle_in_passing()  # notes of use are no loss to fail a read for
    return outcomes


def _get(
    tier: LocalTier, tree: NamespaceTree, address: bytes, key: BlockKey, into: NDArray[np.uint8], ring: Ring | None
) -> GetOutcome:
    path = f"{tier.root}/{tree.block(key)}"
    generation: int | None = None
    for number in range(LOOKS):
        look = _look(tier, tree, path, key, into, ring, again=number > 0)
        if look is _Look.GOOD:
            return GetOutcome.HIT
        if look is _Look.UNREADABLE:
            return GetOutcome.MISS
        if look is _Look.BUSY:
            time.sleep(0.001)
        if isinstance(look, _Look):
            with tier.catalog.read() as snapshot:
                if not snapshot.contains([address])[0]:
                    return GetOutcome.MISS
        elif generation is None:  # looked at once more: what is bad then is this copy, or it is not removed
            with tier.catalog.read() as snapshot:
                (entry,) = snapshot.find([address])
            if entry is None:
                return GetOutcome.MISS
            generation = entry.generation
        else:
            return _heal(tier, address, look, generation)
    return GetOutcome.MISS


def _heal(tier: LocalTier, address: bytes, bad: _Bad, generation: int) -> GetOutcome:
    """Remove a block whose file is of no use, or the entry of one whose file is gone."""
    if tier.readonly:
        return bad.outcome
    (removed,) = remove(tier, [address], seen={address: bad.inode}, generation=generation)
    return bad.outcome if removed else GetOutcome.MISS


def _look(
    tier: LocalTier,
    tree: NamespaceTree,
    path: str,
    key: BlockKey,
    into: NDArray[np.uint8],
    ring: Ring | None,
    *,
    again: bool,
) -> _Look | _Bad:
    """Read the file once: what was found. `again`: have it open until that is clear."""
    file = tier.device.look_into(path, tree.frames[key.group])
    try:
        found = _read(tier, tree, file, key, into, ring, close=not again)
        if found is Unsealed.GOOD:
            return _Look.GOOD
        if file.step == Step.OPEN:
            return _not_opened(path, file)
        if file.step == Step.LOCK and file.error == errno.EWOULDBLOCK:
            return _Look.BUSY
        if file.error not in (0, SIZE_DIFFERS) and file.step != Step.MOVE:
            raise file.failure()
        # A file that another put has taken over since it was opened is no damage: look at the name again.
        if inode_of(path) != file.inode:
            return _Look.CHANGED
        if found is Unsealed.UNKNOWN or (found is Unsealed.DAMAGED and is_foreign(path)):
            return _Look.UNREADABLE
        if file.fd < 0:  # a file that came meanwhile may have got the inode
            return _Look.CHANGED
        return _Bad(file.inode, GetOutcome.CORRUPT if found is Unsealed.DAMAGED else GetOutcome.MISS)
    finally:
        if file.fd >= 0:
            release(file.fd)


def _not_opened(path: str, file: BlockFile) -> _Bad:
    if file.error in (errno.ENOENT, errno.ENOTDIR):
        return _Bad(None, GetOutcome.MISS)
    if file.error in _OUT_OF_RESOURCES:
        raise file.failure()
    inode = inode_of(path)  # no file of ours, or one that cannot be had
    return _Bad(inode, GetOutcome.MISS if inode is None else GetOutcome.CORRUPT)


def _read(
    tier: LocalTier,
    tree: NamespaceTree,
    file: BlockFile,
    key: BlockKey,
    into: NDArray[np.uint8],
    ring: Ring | None,
    *,
    close: bool,
) -> Unsealed:
    """Read the file into the caller's buffer, opened if it is sealed; of what is not, `GOOD` or `DAMAGED`."""
    frame = tree.frames[key.group]
    if ring is not None:
        sealed = tier.device.staging(frame)
        read = tier.device.read_file(file, sealed, close=close)
        return unseal_file(sealed, tree, key, into, ring) if read else Unsealed.DAMAGED
    closing = tier.device.read(file, frame, into, close=close)
    return Unsealed.GOOD if closing is not None and _is_intact(tree, key, into, *closing) else Unsealed.DAMAGED


def _is_intact(
    tree: NamespaceTree, key: BlockKey, into: NDArray[np.uint8], closing: NDArray[np.uint8], crc: int
) -> bool:
    frame = tree.frames[key.group]
    facts = frame.facts(closing)
    if facts is None or facts.key != key or facts.fingerprint != tree.namespace.fingerprint:
        return False
    return frame.payload_is_intact(closing, into, crc)
