"""The tiering manager: what a scheduler asks, once per request and once per step, without ever waiting.

::

    engine  ──prepare_store / complete_store──►  primary tier  ──cascade──►  every secondary tier
    engine  ◄──prepare_load / complete_load───   primary tier  ◄─promotion─  the first tier that has the block

It lives in the scheduler's thread, and in no other: nothing here is locked, and every method (the constructor and
`close` excepted, and the convenience layer) returns in microseconds. Bytes move on the transfer
threads of the secondary tiers; what they finished is collected by `step`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Any, Self

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.tiering.primary import PrimaryTier
    from kvstore.tiering.secondary import SecondaryTier
    from kvstore.types import BlockKey, BlockWrite, LookupResult
    from kvstore.url import TierURL

__all__ = ["TieringManager"]


class TieringManager:
    """One primary tier and the secondary tiers behind it, for the blocks of one namespace.

    `tiers` are URLs (or mappings, or `TierURL`s), opened here and closed by `close`; open `BlockStore`s, which stay the
    caller's; or `SecondaryTier`s, which `close` closes. They are asked in the order given; every one gets every
    store. The primary tier is `primary`, or a new one of `primary_slots` slots of the largest group's block.

    Raises a `ConfigurationError` or a `StoreOpenError` when a tier cannot be opened. Afterwards nothing that a tier
    does (hang, fail, be slow) raises here or makes a call wait: it is a miss, counted in `stats`.

    Threads: one thread, the scheduler's, makes all calls.
    """

    def __init__(
        self,
        namespace: Namespace,
        tiers: Sequence[str | Mapping[str, Any] | TierURL | BlockStore | SecondaryTier] = (),
        *,
        primary_slots: int | None = None,
        primary: PrimaryTier | None = None,
    ) -> None:
        raise NotImplementedError

    def lookup(self, keys: Sequence[BlockKey]) -> list[LookupResult]:
        """Where each block is; starts what is needed to bring it here. Never waits.

        HIT: in the primary tier, and kept there for a moment so that `prepare_load` finds it. HIT_PENDING: a
        secondary tier has it, its promotion waits for a slot or is under way. RETRY: the tiers are being asked; ask
        again after `step`. MISS: nowhere, not readable, or no slot became free for it in time.

        Promotions happen in the order of `keys` and of calls. Who asks for more blocks than there are slots loads
        those that are HIT, which frees their slots for the next ones.
        """
        raise NotImplementedError

    def prepare_store(
        self, keys: Sequence[BlockKey], *, position: int = -1, parent: bytes = b""
    ) -> list[NDArray[np.uint8] | None]:
        """Slots for blocks that the engine is about to write, one uint8 view per key, cut to its group's block.

        None: nothing to write, because the block is here already or no slot is free; the engine passes over it. A
        view stays valid, and its slot pinned, until `complete_store` names the key.

        `keys` are consecutive blocks of one prefix and one group: `position` is the index of the first in the prefix
        and `parent` the digest of the block before it; both are stored with the blocks (see `BlockWrite`).
        """
        raise NotImplementedError

    def complete_store(self, keys: Sequence[BlockKey], *, success: bool = True) -> None:
        """The engine has written the views of `keys`: they are HITs from now on, and cascade to every secondary tier.

        Not before the bytes have arrived (a copy from a GPU has been synchronised). With `success=False` the slots are
        given back and nothing is stored.
        """
        raise NotImplementedError

    def prepare_load(self, keys: Sequence[BlockKey]) -> list[NDArray[np.uint8] | None]:
        """Pin blocks that `lookup` called HIT; one uint8 view per key, without a copy, to be read only.

        None: it is not here any more, treat it as a miss. A view is valid until `complete_load` names the key; each
        view that was given needs one `complete_load`.
        """
        raise NotImplementedError

    def complete_load(self, keys: Sequence[BlockKey]) -> None:
        """The engine has read the views of `keys`: unpin them. Name only keys whose view was not None."""
        raise NotImplementedError

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Make blocks young for eviction from the primary tier; unknown keys are passed over."""
        raise NotImplementedError

    def finish_request(self, keys: Sequence[BlockKey]) -> None:
        """A request with these blocks has ended: they become young in every tier, and nothing is promoted for it."""
        raise NotImplementedError

    def step(self) -> None:
        """Once per scheduler step: collect what transfer threads finished, hand them what was asked since."""
        raise NotImplementedError

    # For people who have no scheduler. These wait, and call `step` themselves.

    def store(self, blocks: Sequence[BlockWrite], *, timeout: float = 30.0) -> int:
        """Copy `blocks` into the primary tier, from where they cascade; returns how many are there or were before.

        Waits for slots, and for tiers that fall behind, up to `timeout` seconds; what did not fit by then is not
        stored. On return the source buffers are the caller's again; the tiers may still be writing: `drain` waits
        for them. Raises `InvalidBlockError` when a block does not fit the namespace.
        """
        raise NotImplementedError

    def load_prefix(
        self,
        keys: Sequence[BlockKey],
        into: Sequence[Buffer] | Callable[[int, NDArray[np.uint8]], None],
        *,
        timeout: float = 30.0,
    ) -> int:
        """Load the longest stored prefix of `keys`; returns the number of blocks loaded, from the front.

        `into` is one writable buffer per key, or a function called as `into(index, view)` in the order of `keys`,
        whose view (uint8, of the group's block size) is valid during the call only. Works block by block, so the
        prefix may be larger than the primary tier.

        Ends at the first block that no tier has, or after `timeout` seconds without a block. For models with
        several groups pass the keys block by block, all groups of a block together: only complete blocks count, so
        divide the result by the number of groups. Buffers behind the number returned are untouched.
        """
        raise NotImplementedError

    def prefetch(self, keys: Sequence[BlockKey], *, timeout: float = 30.0) -> int:
        """Promote the front of `keys` into the primary tier; returns how many leading blocks are there on return.

        At most as many as there are slots.
        """
        raise NotImplementedError

    def drain(self, timeout: float) -> bool:
        """Wait until no store, load or lookup is under way; False if `timeout` seconds were not enough."""
        raise NotImplementedError

    def close(self, timeout: float = 10.0) -> None:
        """Let queued stores finish, close the tiers, within `timeout` seconds. A second call does nothing.

        Raises `ShutdownTimeout` when a transfer still holds primary memory by then: it says which tier, and the memory
        stays mapped until that transfer ends. Stores that were queued behind it are dropped and counted as shed.
        """
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
