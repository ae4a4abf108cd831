"""What a put, a delete, a purge or a resealing is about to do, on record before it is done: who owes it, who undoes it.

An intent stands in the catalogue from the transaction that takes its room to the one that says all is done. Where a job
ends otherwise, whoever had begun it undoes it at once, or keeps it to be undone later; where its process died, or left
without, whoever comes by does. So nothing that an intent names is ever owed for good.
"""

# ruff: noqa: PTH208 - plain strings: a Path costs more than the system call it is made for

from __future__ import annotations

import os
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import lmdb

from kvstore_zarr.folders import occupied
from kvstore_zarr.format import PAGE
from kvstore_zarr.removal import Patience, cut, in_batches, is_erased, take_off_for_good, tried
from kvstore_zarr.tier import DRAFTS, PURGE, draft_prefix, pack_addresses, unpack_addresses

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence
    from typing import Self

    from kvstore.catalog import Change, Intent
    from kvstore_zarr.tier import LocalTier

__all__ = ["Undertaking", "abandon", "reclaim", "reclaim_if_due", "settle_intent"]


class Undertaking:
    """What one intent says, from the transaction that records it to the one that drops it; used as a context manager.

    Whatever ends it before its time, nothing of it is owed: what it names is undone, or kept to be undone later. For
    one thread, and outside of the names' locks: undoing takes them.
    """

    def __init__(self, tier: LocalTier) -> None:
        self._tier = tier
        self.intent: Intent | None = None
        self._ended = True

    @contextmanager
    def recording(self) -> Generator[Change]:
        """The transaction that records it. What does not commit is not owed: the next job has its number."""
        try:
            with self._tier.catalog.write() as change:
                yield change
        except BaseException:
            self.intent, self._ended = None, True
            raise

    def begin(self, change: Change, reserved: int, addresses: Iterable[bytes], *, purge: bool = False) -> Intent:
        """Record it, in `recording`."""
        payload = (PURGE if purge else b"") + pack_addresses(addresses)
        self.intent, self._ended = change.reserve(self._tier.presence.lease, reserved, payload), False
        return self.intent

    def end(self, change: Change) -> None:
        """Drop it: all is done."""
        if self.intent is not None:
            change.release(self.intent)
            self._ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.intent is not None and (kind is not None or not self._ended):
            abandon(self._tier, self.intent)


def settle_intent(tier: LocalTier, intent: Intent) -> None:
    """Bring what an intent left half-done to its end: nothing of it stays, but what was published. Idempotent.

    A file that cannot be removed keeps its room, and its intent, which is tried again by `reclaim`. Whoever reads its
    blocks is waited for, all of them together, and with no name locked.
    """
    patience = Patience()
    addresses, purged = unpack_addresses(intent.payload), intent.payload.startswith(PURGE)
    drafts = [tier.draft(intent, number, address) for number, address in enumerate(addresses)]
    names = os.listdir(f"{tier.root}/{DRAFTS}")
    drafts += [f"{tier.root}/{DRAFTS}/{name}" for name in names if name.startswith(draft_prefix(intent))]  # documents'
    kept = sum(_room_of(draft) for draft in drafts if not is_erased(tier, draft, patience, purged=purged))
    stuck: dict[bytes, int] = {}
    for some in in_batches(addresses):
        stuck |= _take_unpublished(tier, some, patience, purged=purged)
    measured = tier.folders.measure(_folders(tier, addresses))
    with tier.catalog.write() as change:
        tier.folders.record(change.txn, measured)
        if not stuck and not kept:
            change.release(intent)
            return
        named = addresses if kept else stuck  # a draft's name has its address's place among them
        payload, room = (PURGE if purged else b"") + pack_addresses(named), kept + sum(stuck.values())
        if (payload, room) != (intent.payload, intent.reserved):
            intent = change.amend(intent, room, payload)
    _strand(tier, intent)


def _take_unpublished(
    tier: LocalTier, addresses: Sequence[bytes], patience: Patience, *, purged: bool
) -> dict[bytes, int]:
    """Remove files of which the catalogue has no entry; those that cannot be removed, with their room."""
    stuck: dict[bytes, int] = {}
    with ExitStack() as cuts, tier.names.hold(addresses):  # cut once the names are let go
        with tier.catalog.read() as snapshot:
            present = snapshot.contains(addresses)
        for address, published in zip(addresses, present, strict=True):
            path = tier.path(address)
            if path is None or published:
                continue
            fd = tried(path, partial(take_off_for_good, tier, path, overwriting=purged))
            if fd is None:
                stuck[address] = _room_of(path)
            else:
                cuts.callback(tried, path, partial(cut, fd, patience))
    return stuck


def abandon(tier: LocalTier, intent: Intent) -> None:
    """Undo a job that an error ended; what cannot be undone now is kept for later."""
    try:
        settle_intent(tier, intent)
    except BaseException as error:
        _strand(tier, intent)
        if not isinstance(error, OSError | lmdb.Error):
            raise


def _strand(tier: LocalTier, intent: Intent) -> None:
    """Keep an intent of ours that cannot be settled now for later. Others' are found again by whoever reclaims."""
    if intent.lease == tier.presence.lease:
        with tier.lock:
            tier.stranded.append(intent)


def _room_of(path: str) -> int:
    """What a file that cannot be removed keeps; at least a page, where it cannot even be looked at."""
    try:
        return max(PAGE, occupied(path))
    except OSError:
        return PAGE


def _folders(tier: LocalTier, addresses: Iterable[bytes]) -> set[str]:
    places = (tier.place(address) for address in addresses)
    return {place[0].folder(place[1]) for place in places if place is not None}


def reclaim(tier: LocalTier, *, alone: bool = False) -> None:
    """Settle the intents of dead processes, of those that left without settling them, and those of our own that could
    not be settled before.

    `alone`: nobody else has the tier open, so whatever is there and not ours is of the dead.
    """
    tier.environment.check_readers()
    for lease in tier.presence.dead():
        _settle_all(tier, lease)
    with tier.catalog.read() as snapshot:
        intents = snapshot.intents()
    owners = set[bytes]() if alone or not intents else {tier.presence.lease, *tier.presence.leases()}
    for intent in intents:
        if intent.lease not in owners:
            settle_intent(tier, intent)
    if alone:
        patience = Patience()
        for name in os.listdir(f"{tier.root}/{DRAFTS}"):
            is_erased(tier, f"{tier.root}/{DRAFTS}/{name}", patience, purged=False)
    with tier.lock:
        stranded, tier.stranded = tier.stranded, []
    while stranded:
        try:
            settle_intent(tier, stranded[-1])
            stranded.pop()
        except BaseException:
            with tier.lock:
                tier.stranded += stranded
            raise


def reclaim_if_due(tier: LocalTier, interval: float) -> None:
    """`reclaim`, unless some thread of this process did so in the last `interval` seconds."""
    now = time.monotonic()
    with tier.lock:
        due = now - tier.reclaimed >= interval
        if due:
            tier.reclaimed = now
    if due:
        reclaim(tier)


def _settle_all(tier: LocalTier, lease: bytes) -> None:
    with tier.catalog.read() as snapshot:
        intents = snapshot.intents(lease)
    for intent in intents:
        settle_intent(tier, intent)
