"""Whom a put evicts: the least recently used blocks that nobody is reading, locked while they go.

A victim's file is locked exclusively from its choice to its end: readers hold a shared lock, so a block that is being
read is skipped and made young again. Where sizes match, the put overwrites the victim's file in place under its own
name: nothing is allocated, nothing fragments, and it is more than twice as fast.
"""

# ruff: noqa: PTH104, PTH108 - plain strings: a Path costs more than the system call it is made for

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.files import NotAFileError
from kvstore_zarr.removal import erase, inode_of, release

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore.catalog import Snapshot, Victim
    from kvstore_zarr.tier import LocalTier

__all__ = ["Held", "choose", "clear_away", "hold", "let_go", "sacrifice"]

MOST_LOOKED_AT = 4096
"""How many of the oldest blocks one choice looks at, when one after the other is taken or being read."""


@dataclass(slots=True)
class Held:
    """A victim whose file this thread has open and locked; `fd` is -1 where the file is gone."""

    victim: Victim
    path: str
    fd: int = -1
    file_bytes: int = -1
    inode: int = -1


def choose(tier: LocalTier, snapshot: Snapshot, shortage: int) -> list[Held]:
    """Victims whose sizes add up to `shortage` bytes, if so many can be had."""
    chosen: list[Held] = []
    for number, victim in enumerate(victim for victim in snapshot.oldest() if not tier.is_aside(victim.address)):
        if shortage <= 0 or number == MOST_LOOKED_AT:
            break
        held = _hold(tier, victim)
        if held is not None:
            chosen.append(held)
            shortage -= victim.size
    return chosen


def hold(tier: LocalTier, victims: Iterable[Victim]) -> list[Held]:
    """Those of the victims that nobody reads or evicts, held for an eviction."""
    ours = (victim for victim in victims if not tier.is_aside(victim.address))
    return [held for victim in ours if (held := _hold(tier, victim)) is not None]


def _hold(tier: LocalTier, victim: Victim) -> Held | None:
    with tier.lock:
        if victim.address in tier.claimed:
            return None
        tier.claimed.add(victim.address)
    held = Held(victim, tier.path(victim.address) or "")
    if tier.is_aside(victim.address):
        tier.claimed.discard(victim.address)
        return None
    try:
        held.fd = tier.device.open(held.path, writable=True)
    except (FileNotFoundError, NotADirectoryError, NotAFileError):
        return held  # the entry alone is there to be evicted
    except OSError:
        tier.claimed.discard(victim.address)
        return None
    if not _lock(tier, held):
        let_go(tier, [held])
        return None
    status = os.fstat(held.fd)
    held.file_bytes, held.inode = status.st_size, status.st_ino
    return held


def _lock(tier: LocalTier, held: Held) -> bool:
    try:
        fcntl.flock(held.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        try:
            fcntl.flock(held.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False  # another process evicts it
        tier.catalog.note([held.victim.address], hits=0)  # it is being read
        return False
    return True


def let_go(tier: LocalTier, held: Iterable[Held]) -> None:
    """Close and unlock victims, spared or gone."""
    for one in held:
        if one.fd >= 0:
            release(one.fd)
            one.fd = -1
        tier.claimed.discard(one.victim.address)


def sacrifice(tier: LocalTier, held: Sequence[Held]) -> bool:
    """Free the space of the first victim that has any, its entry notwithstanding: a full disk lets no entry go first.

    A kill before the entry goes leaves a block whose file is gone: a miss. Whether there was such a victim.
    """
    for one in held:
        if one.fd < 0:
            continue
        with tier.names.hold([one.victim.address]):
            if inode_of(one.path) != one.inode:
                continue
            os.unlink(one.path)
        os.ftruncate(one.fd, 0)
        return True
    return False


def _erase_unless_known(tier: LocalTier, held: Held) -> None:
    """Of a block that was sealed anew while it was held, the new file stands there, and the entry is gone."""
    with tier.catalog.read() as snapshot:
        (known,) = snapshot.contains([held.victim.address])
    if not known:
        erase(held.path)


def clear_away(tier: LocalTier, taken: Sequence[Held], drafts: Iterator[tuple[int, str]]) -> dict[str, int]:
    """Take the files of evicted blocks away: descriptors of those that became drafts instead, still locked, by path.

    `drafts` are the size and the path of each file to be written. All other victims' space is free on return.
    """
    by_size: dict[int, list[Held]] = {}
    for held in taken:
        by_size.setdefault(held.file_bytes, []).append(held)
    heirs = {
        matching.pop().victim.address: path for file_bytes, path in drafts if (matching := by_size.get(file_bytes))
    }
    recycled: dict[str, int] = {}
    if not taken:
        return recycled
    with tier.names.hold(held.victim.address for held in taken):
        for held in taken:
            heir = heirs.get(held.victim.address)
            if held.fd < 0:
                continue
            if inode_of(held.path) != held.inode:  # replaced since by another copy, which unlinked it
                _erase_unless_known(tier, held)
                continue
            if heir is None:
                os.unlink(held.path)
                continue
            try:
                os.rename(held.path, heir)
            except FileNotFoundError:  # somebody removed the heir's folder behind our back
                os.unlink(held.path)
            else:
                recycled[heir], held.fd = held.fd, -1
    for held in taken:
        if held.fd >= 0:  # no name any more, and nobody who has it open may keep the space
            os.ftruncate(held.fd, 0)
    let_go(tier, taken)
    return recycled
