"""What the tier knows about the blocks that requests ask for, from the first question to the end of the request.

The scheduler asks about every block of a waiting request, step after step, until all is answered. A question goes to
the store once per request (in the batch of its step); the answer is kept for that request, so that it is told the same
in every step, and a block whose load failed stays a miss for everybody who asked before: asked anew, a store that
cannot read what it has would say yes again, and the request would go round for ever.

A new request asks anew. So nobody inherits an old no about a block that has been stored since, and a block that is
damaged costs each request one load at most.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from itertools import takewhile
from typing import TYPE_CHECKING

from kvstore.types import BlockKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvstore.vllm._compat import ReqContext

__all__ = ["BlockKeys", "Lookups", "block_key", "offload_key"]

GROUP_BYTES = 4
ABSENT = 0


class BlockKeys(Collection[BlockKey]):
    """Keys of vLLM's as kvstore's, converted by whoever looks at them: a long prompt has thousands."""

    def __init__(self, keys: Collection[bytes]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[BlockKey]:
        return map(block_key, self._keys)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, BlockKey) and offload_key(key) in self._keys


class Verdicts(dict[bytes, "int | None"]):
    """Of one request: key -> how many failures there had been when it was told that the block is there; `ABSENT`; None
    while nobody knows. `hits` are those that are there. Of failures, those up to number `begun` came before its first
    question, and it knows of those up to number `settled`.
    """

    hits = 0
    held_since: float | None = None

    def __init__(self, begun: int) -> None:
        super().__init__()
        self.begun = self.settled = begun


def block_key(key: bytes) -> BlockKey:
    """A block that vLLM names by its digest and, in four bytes, its KV-cache group; in kvstore's terms."""
    return BlockKey(key[:-GROUP_BYTES], int.from_bytes(key[-GROUP_BYTES:], "big"))


def offload_key(key: BlockKey) -> bytes:
    """The other way round."""
    return key.digest + key.group.to_bytes(GROUP_BYTES, "big")


class Lookups:
    """Verdicts per request. `ask` takes a question to the store; `answered` brings what came back.

    `most`: blocks that one request is told to be there, as many as there are rows in primary memory. Promoting more
    than that would throw out the first ones, and the request would never have all of them; those that it asked for
    first, the front of its prefix, it can have. `beyond` knows blocks so far behind that there is no room for what is
    in front of them, which may be in primary memory already.
    Threads: one at a time makes all calls.
    """

    def __init__(
        self, ask: Callable[[list[BlockKey]], None], most: int, beyond: Callable[[bytes, ReqContext], bool]
    ) -> None:
        self._ask = ask
        self._most = most
        self._beyond = beyond
        self._requests: dict[str, Verdicts] = {}
        self._asking: dict[bytes, list[Verdicts]] = {}
        self._failures = ABSENT + 1
        self._failed: dict[bytes, int] = {}  # key -> the number of its last failure, in their order

    @property
    def waiting(self) -> bool:
        """Somebody has asked and got no answer yet."""
        return bool(self._asking)

    def find(self, key: bytes, request: ReqContext) -> bool | None:
        """Is it there? None: not known yet, ask again in the next step."""
        verdicts = self._requests.get(request.req_id)
        if verdicts is None:
            verdicts = self._requests[request.req_id] = Verdicts(self._failures)
        if key in verdicts:
            return self._verdict(verdicts, key)
        if self._beyond(key, request):
            return False
        verdicts[key] = None
        asking = self._asking.get(key)
        if asking is None:
            self._asking[key] = [verdicts]
            self._ask([block_key(key)])
        else:
            asking.append(verdicts)
        return None

    def answered(self, answers: Iterable[tuple[BlockKey, bool]]) -> None:
        """What the store says."""
        for block, found in answers:
            key = offload_key(block)
            for verdicts in self._asking.pop(key, ()):
                there = found and verdicts.hits < self._most
                verdicts[key] = self._failures if there else ABSENT
                verdicts.hits += there

    def failed(self, keys: Iterable[bytes]) -> None:
        """They could not be loaded: a miss for every request that has been told otherwise.

        It finds out when it asks. Many blocks that fail at once, of which many requests know, would cost a step.
        """
        self._failures += 1
        for key in keys:
            self._failed.pop(key, None)
            self._failed[key] = self._failures

    def _verdict(self, verdicts: Verdicts, key: bytes) -> bool | None:
        told = verdicts[key]
        if told is None:
            return None
        if told != ABSENT and self._failed.get(key, ABSENT) > told:
            verdicts[key] = told = ABSENT
            verdicts.hits -= 1
        return told != ABSENT

    def _there(self, verdicts: Verdicts) -> list[bytes]:
        """The blocks that are there, in the order in which they were asked for; after that all of them are settled."""
        verdicts.settled = self._failures
        return [key for key in verdicts if self._verdict(verdicts, key)]

    def held_back(self, request: str, held_rows: int, patience: float) -> bool:
        """Whether a request had better wait with what it was told is there: stores hold rows that it needs.

        vLLM finds no row for a block to be promoted, calls it a miss, and computes what would have been there as soon
        as a store had ended. `held_rows`: as many as stores hold now; `patience`: seconds that it may take. After that
        it is told of no more blocks than there is room for: each of the others would be promoted into the row of one
        that it has waited for, for ever.
        """
        verdicts = self._requests[request]
        room = max(0, self._most - held_rows)
        if verdicts.hits > room and verdicts.settled != self._failures:
            self._there(verdicts)
        if verdicts.hits <= room:
            return False
        now = time.monotonic()
        if verdicts.held_since is None:
            verdicts.held_since = now
        if now - verdicts.held_since < patience:
            return True
        for key in self._there(verdicts)[room:]:
            verdicts[key] = ABSENT
        verdicts.hits = room
        return False

    def forget(self, request: str) -> None:
        """It has ended. What is being asked for it is answered to nobody."""
        self._requests.pop(request, None)
        # The oldest request is the first; what had failed before it began concerns nobody.
        begun = next((verdicts.begun for verdicts in self._requests.values()), self._failures)
        for key in list(takewhile(lambda key: self._failed[key] <= begun, self._failed)):
            del self._failed[key]
