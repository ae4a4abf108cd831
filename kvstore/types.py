"""The values that pass between an engine, the tiers and a backend: keys, requests, outcomes, facts.

All are frozen; none owns a block's bytes. Layouts and namespaces have rooms of their own (`layout`, `namespace`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvstore.marks import Mark

__all__ = [
    "NO_PARENT",
    "NO_POSITION",
    "BlockInfo",
    "BlockKey",
    "BlockRead",
    "BlockWrite",
    "GetOutcome",
    "Leftover",
    "LookupResult",
    "PutOutcome",
    "Residue",
    "Usage",
]

NO_POSITION = -1
"""A block whose place in its prefix is not known."""

NO_PARENT = b""
"""A block that starts a prefix, or whose predecessor is not known."""


@dataclass(frozen=True, slots=True, order=True)
class BlockKey:
    """What names a block within its namespace.

    `digest` is chained over all tokens up to the block's end, so that equal digests mean equal prefixes (16 to 64
    bytes, the same length throughout a namespace). `group` is the KV-cache group index: models with several kinds of
    attention keep one block per group for the same tokens.
    """

    digest: bytes
    group: int = 0

    def __repr__(self) -> str:
        return f"BlockKey({self.digest.hex()[:16]}…, group={self.group})"


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """One block to put. `data` stays the caller's: it is only read, and not after the call returns.

    `data` holds exactly the block's bytes, C-contiguous. `position` is the block's index in its prefix (0 for the
    first), `parent` the digest of the block before it; both are kept, so that a store can be read as a tree. `tenant`
    says under whose data key a tier with `encryption=` seals it; other tiers keep it only as a mark, where one is made.
    """

    key: BlockKey
    data: Buffer
    position: int = NO_POSITION
    parent: bytes = NO_PARENT
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class BlockRead:
    """One block to get. `into` stays the caller's: writable, C-contiguous, exactly the block's bytes.

    After any outcome but `HIT` the contents of `into` are undefined and must not be used.
    """

    key: BlockKey
    into: Buffer


class PutOutcome(enum.Enum):
    """What became of one block of a put."""

    STORED = "stored"
    """It was written; readers in every process that shares the store see it."""
    EXISTS = "exists"
    """A block under this key was there already, and was left as it is."""
    FULL = "full"
    """No room under the capacity or on the device; nothing was written."""
    FAILED = "failed"
    """The device refused this block; nothing of it is visible."""
    REFUSED = "refused"
    """It was purged a short while ago (`BlockStore.purge_many`), and is not to be stored again yet."""

    @property
    def present(self) -> bool:
        """Whether the block is in the store after the call."""
        return self in (PutOutcome.STORED, PutOutcome.EXISTS)


class GetOutcome(enum.Enum):
    """What became of one block of a get."""

    HIT = "hit"
    """The buffer holds the block; checksum, key and namespace were verified."""
    MISS = "miss"
    """No such block."""
    CORRUPT = "corrupt"
    """There was one and it failed its checks. It is removed (unless the store is read-only), so a put replaces it."""


class ResealOutcome(enum.Enum):
    """What became of one block that was to be sealed anew where it is."""

    RESEALED = "resealed"
    """It is under its tenant's newest data key now; all that is known of it is as it was."""
    GONE = "gone"
    """There is none any more, and nothing was stored."""
    KEPT = "kept"
    """It is as it was: the store replaces none, or has no room for a second copy at the moment."""


class LookupResult(enum.Enum):
    """The manager's answer about one key; never waits for a device."""

    HIT = "hit"
    """In the primary tier now: `prepare_load` will pin it."""
    HIT_PENDING = "hit_pending"
    """In a secondary tier; its promotion is under way."""
    RETRY = "retry"
    """Not known yet: the tiers are being asked. Ask again at the next step."""
    MISS = "miss"
    """Nowhere, or not readable: compute it."""


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """What a store knows of one block without reading it. Times are seconds since the epoch.

    `stored_bytes` is what the block occupies in the store, its framing included.
    """

    key: BlockKey
    stored_bytes: int
    created: float
    last_used: float
    hits: int = 0
    position: int = NO_POSITION
    parent: bytes = NO_PARENT
    marks: tuple[Mark, ...] = ()
    """What was said of it (`BlockStore.mark_many`)."""
    dated: bool = True
    """Whether it is known when it was stored. Else its times are those of the scan: nothing goes for an age unknown."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Its labels, in order."""
        return tuple(sorted({mark.label for mark in self.marks} - {""}))

    @property
    def tenants(self) -> tuple[str, ...]:
        """Whose it is, in order."""
        return tuple(sorted({mark.tenant for mark in self.marks} - {""}))

    @property
    def pinned(self) -> bool:
        """Whether a mark keeps it from being evicted."""
        return any(mark.pinned for mark in self.marks)


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a store is, in bytes as the device counts them.

    `used` is what published blocks occupy, `reserved` what puts in flight may still write, `overhead` the store's own
    records (catalogue, directories, temporaries). `capacity` is the cap on their sum, None where there is none.
    `pinned` is how much of `used` is not evicted (`kvstore.marks`).
    """

    blocks: int
    used: int
    reserved: int = 0
    overhead: int = 0
    capacity: int | None = None
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something of ours in a tier that is no block and that nobody needs: what a writer that died was writing, say.

    `place` says where, in the tier's own words; `modified` is seconds since the epoch, 0 where it is not known.
    """

    place: str
    nbytes: int
    modified: float


@dataclass(frozen=True, slots=True)
class Unseen:
    """Blocks of ours that stand in a tier and in no listing of it, so that no verb reaches them.

    `why` is a sentence that names the namespace. `blocks` and `bytes` count what has the names of blocks there; bytes
    are None where they are not known. `later`: of another version of kvstore, be it an older format, which is left
    alone, and no damage.
    Not `whole`: the namespace is served, and these stand beside the blocks that are listed.
    """

    namespace: str
    why: str
    blocks: int
    bytes: int | None = None
    later: bool = False
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Residue:
    """What a purge cannot take away, in the tier's own words, and what an operator can do about it.

    `nbytes` is how much it is, where that is known; None where only that there may be some.
    """

    what: str
    nbytes: int | None = None
    remedy: str = ""
