"""What requests say of themselves, and where their blocks stand in them: passed on from `tier.py` to the store.

    on_new_request        what `kv_transfer_params["kvstore"]` says is read, once
    submit_store          each block gets its place in its prefix, and what its request says of it
    on_request_finished   the request's blocks were used; what it says is said of those that are stored already

From vLLM 0.31 on nobody calls `touch`, and hits in GPU or primary memory never reach a tier's `lookup`. Without
`on_request_finished` the first blocks to be evicted from a tier would be those that everybody uses.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from kvstore.marks import Mark
from kvstore.types import NO_PARENT, NO_POSITION
from kvstore.vllm._compat import positions_of
from kvstore.vllm.lookups import GROUP_BYTES, BlockKeys, block_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from kvstore.tiering import SecondaryTier
    from kvstore.types import BlockKey
    from kvstore.vllm._compat import ReqContext

__all__ = ["PARAMS", "Place", "Requests", "said"]

log = logging.getLogger(__name__)

PARAMS = "kvstore"
"""Where in `kv_transfer_params` a request speaks to this tier."""

MOST_SCANNED = 4096
"""Keys of a request looked through for a block's predecessor (some 0.1 ms); it happens about once in a request."""

Place = tuple[int, bytes]
"""A block's position in its prefix, and the digest of the block before it."""


def said(params: object) -> Mark | None:
    """What a request's `kv_transfer_params` say to this tier; None for nothing.

    Raises `ValueError` where that is something else than `{"label": text, "pin": true or false, "tenant": text}`.
    """
    given = cast("Mapping[str, Any]", params).get(PARAMS) if isinstance(params, Mapping) else None
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(f"it is {_shown(given)}, not an object")
    fields: dict[str, Any] = {"label": "", "pin": False, "tenant": "", **cast("Mapping[str, Any]", given)}
    for name, value in fields.items():
        kind = {"label": str, "pin": bool, "tenant": str}.get(name)
        if kind is None:
            raise ValueError(f"there is no {_shown(name)}")
        if not isinstance(value, kind):
            raise ValueError(f"{name} is {_shown(value)}, not {'true or false' if kind is bool else 'a text'}")
    if fields["pin"] and not fields["label"]:
        raise ValueError("a pin needs a label, by which it can be taken back")
    mark = Mark(fields["label"], fields["pin"], fields["tenant"])
    return None if mark == Mark() else mark


class _Request:
    """One that has not ended. `ends`: the end in tokens and the digest of the last block stored of each group."""

    __slots__ = ("ends", "mark", "touched")

    def __init__(self, mark: Mark | None) -> None:
        self.mark = mark
        self.ends: dict[bytes, tuple[int, bytes]] = {}
        self.touched: dict[bytes, None] = {}


class Requests:
    """Those of one tier. `chunk_tokens` are the tokens of one key, by KV-cache group. `refused` is how many requests
    said something that cannot be understood, of which nothing is done, or asked for a pin that `allow_pins` forbids,
    of which the rest is done; the first is logged.

    Threads: one at a time makes all calls; none of them waits, nor looks at each key of a request.
    """

    def __init__(self, tier: SecondaryTier, chunk_tokens: Sequence[int], *, allow_pins: bool = True) -> None:
        self._tier = tier
        self._chunk_tokens = chunk_tokens
        self._allow_pins = allow_pins
        self._open: dict[str, _Request] = {}
        self.refused = 0

    def begin(self, context: ReqContext) -> None:
        """A new request."""
        mark = None
        try:
            mark = said(context.kv_transfer_params)
        except ValueError as error:
            self._refuse(context, "is passed over", error)
        if mark is not None and mark.pinned and not self._allow_pins:
            mark = replace(mark, pinned=False)
            self._refuse(context, "pins nothing", "the tier's option allow_pins is false")
        self._open[context.req_id] = _Request(mark)

    def _refuse(self, context: ReqContext, what: str, why: object) -> None:
        self.refused += 1
        if self.refused == 1:
            log.warning(
                "%s: kv_transfer_params[%r] of request %s %s: %s. What can be said: "
                '{"label": "…", "pin": true, "tenant": "…"} (said once; vllm:kvstore_refused_params counts)',
                *(self._tier.url, PARAMS, context.req_id, what, why),
            )

    def mark_of(self, context: ReqContext) -> Mark | None:
        """What it says of its blocks."""
        request = self._open.get(context.req_id)
        return request.mark if request else None

    def places(self, context: ReqContext, keys: Collection[bytes]) -> Iterable[Place]:
        """Where in its prefix each of these blocks stands, which are about to be stored."""
        ends = positions_of(context)
        request = self._open.get(context.req_id)
        if not ends or request is None:
            return ((NO_POSITION, NO_PARENT) for _ in keys)
        return self._places(request, ends, keys)

    def _places(self, request: _Request, ends: Mapping[bytes, int], keys: Collection[bytes]) -> Iterator[Place]:
        here = {(key[-GROUP_BYTES:], ends[key]): key[:-GROUP_BYTES] for key in keys if key in ends}
        here.update(((group, end), digest) for group, (end, digest) in request.ends.items())
        for key in keys:
            group, end = key[-GROUP_BYTES:], ends.get(key, 0)
            tokens = self._tokens(group)
            if not end or not tokens or end % tokens:
                yield NO_POSITION, NO_PARENT
                continue
            request.ends[group] = end, key[:-GROUP_BYTES]
            parent = NO_PARENT
            if end > tokens:
                parent = here.get((group, end - tokens)) or _found(ends, group, end - tokens)
            yield end // tokens - 1, parent

    def _tokens(self, group: bytes) -> int:
        index = int.from_bytes(group, "big")
        return self._chunk_tokens[index] if index < len(self._chunk_tokens) else 0

    def touched(self, context: ReqContext, keys: Collection[bytes]) -> None:
        """Its blocks were used; up to vLLM 0.30 somebody calls this, the front of the prefix first."""
        used = tuple(keys)
        self._tier.touch(BlockKeys(used))
        request = self._open.get(context.req_id)
        if request is not None and request.mark is not None:
            request.touched.update(dict.fromkeys(used))

    def finish(self, context: ReqContext) -> None:
        """It has ended or was aborted: its blocks were used, wherever they were found."""
        request = self._open.pop(context.req_id, None)
        ends = positions_of(context)
        used: BlockKeys | None = None
        if ends:
            used = _InOrder(dict(ends))
            self._tier.touch(used)
        elif request is not None and request.touched:
            used = BlockKeys(request.touched)
        if used is not None and request is not None and request.mark is not None:
            self._tier.mark(used, request.mark)


class _InOrder(BlockKeys):
    """Keys by where they end, the front of the prefix first; sorted by whoever looks at them."""

    def __init__(self, ends: dict[bytes, int]) -> None:
        super().__init__(ends)
        self._ends = ends

    def __iter__(self) -> Iterator[BlockKey]:
        return map(block_key, sorted(self._ends, key=self._ends.__getitem__))


def _found(ends: Mapping[bytes, int], group: bytes, end: int) -> bytes:
    """The digest of the request's block that ends there, looked for among the last ones."""
    for key, its_end in islice(reversed(cast("dict[bytes, int]", ends).items()), MOST_SCANNED):
        if its_end == end and key[-GROUP_BYTES:] == group:
            return key[:-GROUP_BYTES]
    return NO_PARENT


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
