"""Whom a put evicts: the least recently used blocks that nobody is reading, locked while they go.

A victim's file is locked exclusively from its choice to its end: readers hold a shared lock, so a block that is being
read is skipped and made young again. Where sizes match, the put overwrites the victim's file in place under its own
name: nothing is allocated, nothing fragments, and it is more than twice as fast.
"""

# ruff: noqa: PTH104, PTH108 - plain strings: a Path costs more than the system call it is made for

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from kvstore.files import NotAFileError
from kvstore_zarr.removal import erase, free, inode_of, release

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from kvstore.catalog import Snapshot, Victim
    from kvstore_zarr.descriptors import Share
    from kvstore_zarr.tier import LocalTier

__all__ = ["Held", "choose", "clear_away", "hand_on", "heirs_among", "hold", "let_go", "oldest", "sacrifice"]

MOST_LOOKED_AT = 4096
"""How many of the oldest blocks one choice looks at, when one after the other is taken or being read."""
SPARED = 4
"""Descriptors kept open while victims are held, and free then: for locks of names, for a file that is made."""


@dataclass(slots=True, eq=False)
class Held:
    """A victim whose file this thread has open and locked; `fd` is -1 where the file is gone. Where it has more `links`
    than its name, somebody keeps it: it is not written into.
    """

    victim: Victim
    path: str
    fd: int = -1
    file_bytes: int = -1
    inode: int = -1
    links: int = 1


def oldest(tier: LocalTier, snapshot: Snapshot, shortage: int, *, after: int = 0) -> list[Victim]:
    """The oldest blocks that may go, from the one numbered `after` on, whose sizes add up to `shortage` bytes."""
    found: list[Victim] = []
    may_go = (one for one in snapshot.oldest() if not tier.is_aside(one.address) and one.address not in tier.claimed)
    for victim in islice(may_go, after, MOST_LOOKED_AT):
        if shortage <= 0:
            break
        found.append(victim)
        shortage -= victim.size
    return found


def choose(tier: LocalTier, victims: list[Victim], shortage: int, share: Share) -> list[Held]:
    """Victims whose sizes add up to `shortage` bytes, if so many can be had: of those, which are the `oldest`, and of
    the next ones instead of any that somebody reads; as many as there are descriptors for. The rest is for a next job.

    Files are opened outside of read transactions, which are to be short.
    """
    chosen: list[Held] = []
    spared = 0
    while victims:
        some = victims[: share.grant(len(victims))]
        try:
            held = hold(tier, some, share)
        except BaseException as error:
            if chosen and isinstance(error, OSError):
                break
            let_go(tier, chosen)
            raise
        share.give_back(len(some) - len(held))
        chosen += held
        spared += len(some) - len(held)
        shortage -= sum(one.victim.size for one in held)
        if shortage <= 0 or share.is_exhausted or (chosen and len(some) < len(victims)):
            break
        if len(chosen) + spared >= MOST_LOOKED_AT:
            break
        with tier.catalog.read() as snapshot:
            victims = oldest(tier, snapshot, shortage, after=spared)
    return chosen


def hold(tier: LocalTier, victims: Iterable[Victim], share: Share) -> list[Held]:
    """Those of the victims that nobody reads or evicts, held for an eviction.

    As many of them as leave the process descriptors enough to replace what is evicted then. Raises OSError where it had
    none to begin with.
    """
    held: list[Held] = []
    with _sparing(tier):
        for victim in victims:
            if tier.is_aside(victim.address):
                continue
            try:
                one = _hold(tier, victim)
            except BaseException as error:
                if held and isinstance(error, OSError):
                    share.is_exhausted = True
                    break
                let_go(tier, held)
                raise
            if one is not None:
                held.append(one)
    return held


@contextmanager
def _sparing(tier: LocalTier) -> Generator[None]:
    """Keep some descriptors from what the body opens."""
    spared: list[int] = []
    try:
        spared.append(os.open(tier.root, os.O_PATH | os.O_CLOEXEC))
        while len(spared) < SPARED:
            spared.append(os.dup(spared[0]))
        yield
    finally:
        for fd in spared:
            os.close(fd)


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
    except OSError as error:
        tier.claimed.discard(victim.address)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None
    if not _lock(tier, held):
        let_go(tier, [held])
        return None
    status = os.fstat(held.fd)
    held.file_bytes, held.inode, held.links = status.st_size, status.st_ino, status.st_nlink
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
        free(one.fd)
        return True
    return False


def heirs_among(taken: Sequence[Held], drafts: Iterable[tuple[int, str]]) -> list[tuple[Held, str]]:
    """Which evicted blocks' files become drafts, and which drafts: those of the same size.

    `drafts` are the size and the path of each file to be written.
    """
    by_size: dict[int, list[Held]] = {}
    for held in taken:
        if held.links == 1:
            by_size.setdefault(held.file_bytes, []).append(held)
    return [(matching.pop(), path) for file_bytes, path in drafts if (matching := by_size.get(file_bytes))]


def clear_away(tier: LocalTier, taken: Sequence[Held]) -> None:
    """Take the files of evicted blocks away; their space is free on return."""
    if not taken:
        return
    with tier.names.hold(held.victim.address for held in taken):
        for held in taken:
            if _is_there(tier, held):
                os.unlink(held.path)
    _cut(tier, taken)


def hand_on(tier: LocalTier, heirs: Sequence[tuple[Held, str]]) -> dict[str, int]:
    """Make drafts of evicted blocks' files: descriptors of those that are, still locked, by path. The others go."""
    if not heirs:
        return {}
    recycled: dict[str, Held] = {}
    with tier.names.hold(held.victim.address for held, _ in heirs):
        for held, draft in heirs:
            if not _is_there(tier, held):
                continue
            try:
                os.rename(held.path, draft)
                recycled[draft] = held
            except FileNotFoundError:  # the draft has no folder: the disk was full, or somebody removed it
                os.unlink(held.path)
    kept = set(map(id, recycled.values()))
    _cut(tier, [held for held, _ in heirs if id(held) not in kept])
    descriptors = {draft: held.fd for draft, held in recycled.items()}
    for held in recycled.values():
        held.fd = -1
    let_go(tier, recycled.values())
    return descriptors


def _is_there(tier: LocalTier, held: Held) -> bool:
    """Whether a victim's file stands under its name still. Another one that is nobody's goes."""
    if held.fd < 0:
        return False
    if inode_of(held.path) == held.inode:
        return True
    with tier.catalog.read() as snapshot:  # a newer copy is known; of one that was sealed anew the entry is gone
        (known,) = snapshot.contains([held.victim.address])
    if not known:
        erase(held.path)
    return False


def _cut(tier: LocalTier, taken: Sequence[Held]) -> None:
    for held in taken:
        if held.fd >= 0:  # nobody who has it open may keep the space
            free(held.fd)
    let_go(tier, taken)
