"""How much of a prefix can be used when every block of it exists once per KV-cache group.

A prefix is usable up to the first block that any needed group lacks; and that is decided anew with every block that
turns out to be missing, when it is asked for as well as when it is loaded. Which blocks a group needs depends on its
kind: full attention all of them, a sliding window the last few, a state space only the last one.

`lookup_prefix` and `prepare_prefix` are for schedulers and never wait; `load_groups` waits.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from typing import TYPE_CHECKING

from kvstore.types import BlockKey, LookupResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.tiering.blocking import BlockingCalls

__all__ = ["WHOLE", "Prefix", "load_groups", "lookup_prefix", "prepare_prefix", "window_blocks"]

WHOLE = sys.maxsize
"""What a group of full attention needs: every block of the prefix."""


def window_blocks(window_tokens: int, block_tokens: int) -> int:
    """The last blocks that a sliding window of `window_tokens` needs: the next token itself is in the window, too."""
    return -(-(window_tokens - 1) // block_tokens)


class Prefix:
    """The blocks of one request's prompt, what each group needs of them, and what turned out to be missing.

    `digests` has one digest per block, from the first on. `needs` has, for each KV-cache group that is needed, how many
    of the last blocks before the point where the computation goes on: `WHOLE`, or `window_blocks(…)` of a sliding
    window, or 1 for a state space. Groups that are not in it are not looked at.

    One per request: a block that was missing once is not promised to it again, so the usable part only ever shrinks,
    and every question about it comes to an end. Raises `ValueError` for `needs` without a group or below 0.
    """

    def __init__(self, digests: Sequence[bytes], needs: Mapping[int, int] | None = None) -> None:
        self.needs = {0: WHOLE} if needs is None else dict(needs)
        if not self.needs or min(self.needs.values()) < 0:
            raise ValueError(f"needs={self.needs}: name at least one group, and the blocks it needs, from 0 on")
        self.lacking: set[BlockKey] = set()
        """Blocks that were missing, or could not be loaded."""
        self._keys = {group: [BlockKey(digest, group) for digest in digests] for group in self.needs}
        self._places = {digest: at for at, digest in enumerate(digests)}
        self._blocks = len(digests)

    def needed(self, blocks: int) -> list[BlockKey]:
        """What has to be there to go on behind the first `blocks` blocks, in the order of the prefix."""
        firsts = [(self._keys[group], blocks - last) for group, last in self.needs.items()]
        return [keys[at] for at in range(blocks) for keys, first in firsts if at >= first]

    def usable(self, slots: int | None = None) -> int:
        """How many leading blocks can be used if all that is not in `lacking` can be had, `slots` blocks at most."""
        blocks = self._blocks
        if slots is not None:
            blocks = bisect_right(range(blocks + 1), slots, key=self._count) - 1
        holes = [(self._places[key.digest], key.group) for key in self.lacking]
        for at, group in sorted(holes, reverse=True):
            # Every length from here down to the hole needs it, too; ending there, holes further on do not matter.
            if blocks - self.needs[group] <= at < blocks:
                blocks = at
        return blocks

    def _count(self, blocks: int) -> int:
        return sum(min(blocks, last) for last in self.needs.values())


def lookup_prefix(manager: BlockingCalls, prefix: Prefix) -> tuple[int, LookupResult]:
    """How much of `prefix` may be usable, and how far that is. Never waits.

    HIT: these leading blocks are in the primary tier, in all groups that need them, and kept there for a moment:
    `prepare_prefix` pins them. HIT_PENDING, RETRY: ask again after `step`; the number may shrink. MISS: it is 0.
    No more is promised than fits into the primary tier at once.
    """
    while True:
        blocks = prefix.usable(manager.primary.slots)
        wanted = prefix.needed(blocks)
        answers = manager.lookup(wanted)
        missing = {key for key, answer in zip(wanted, answers, strict=True) if answer is LookupResult.MISS}
        if not missing:
            break
        prefix.lacking |= missing
        # What the shorter prefix does without makes room for what it needs.
        manager.forget(list(set(wanted).difference(prefix.needed(prefix.usable(manager.primary.slots)))))
    if not blocks:
        return 0, LookupResult.MISS
    worst = (LookupResult.RETRY, LookupResult.HIT_PENDING)
    return blocks, next((answer for answer in worst if answer in answers), LookupResult.HIT)


def prepare_prefix(manager: BlockingCalls, prefix: Prefix) -> tuple[int, dict[BlockKey, NDArray[np.uint8]]]:
    """Pin what `lookup_prefix` called HIT: how many leading blocks are usable, and the views of all that they need.

    A block that is not here (any more) shortens the prefix for every group; what the shorter one does not need is let
    go at once. Each view is to be read only, and needs one `complete_load`. Never waits.
    """
    views: dict[BlockKey, NDArray[np.uint8]] = {}
    while True:
        blocks = prefix.usable(manager.primary.slots)
        needed = prefix.needed(blocks)
        wanted = [key for key in needed if key not in views]
        pinned = dict(zip(wanted, manager.prepare_load(wanted), strict=True))
        views.update({key: view for key, view in pinned.items() if view is not None})
        missing = pinned.keys() - views.keys()
        if not missing:
            break
        prefix.lacking |= missing
    surplus = views.keys() - needed
    manager.complete_load(list(surplus))
    return blocks, {key: view for key, view in views.items() if key not in surplus}


def load_groups(
    manager: BlockingCalls,
    prefix: Prefix,
    deliver: Callable[[BlockKey, NDArray[np.uint8]], None],
    *,
    timeout: float = 30.0,
) -> int:
    """Load the longest usable prefix, all groups of it; returns its number of blocks. Waits, as `load_prefix` does.

    `deliver(key, view)` gets each block while its view is valid, in the order of the prefix. A block that cannot be
    loaded shortens the prefix for all groups; blocks delivered before that and not needed any more are to be ignored.
    Ends after `timeout` seconds without a block.
    """
    delivered: set[BlockKey] = set()
    deadline = time.monotonic() + timeout
    while True:
        blocks = prefix.usable()
        wanted = [key for key in prefix.needed(blocks) if key not in delivered]
        loaded = manager.load_prefix(wanted, _by_key(deliver, wanted), timeout=max(0.0, deadline - time.monotonic()))
        if loaded == len(wanted):
            return blocks
        delivered.update(wanted[:loaded])
        prefix.lacking.add(wanted[loaded])
        if loaded:
            deadline = time.monotonic() + timeout


def _by_key(
    deliver: Callable[[BlockKey, NDArray[np.uint8]], None], wanted: Sequence[BlockKey]
) -> Callable[[int, NDArray[np.uint8]], None]:
    return lambda index, view: deliver(wanted[index], view)
