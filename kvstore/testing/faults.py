"""Stores that misbehave on order: what a network, a device or a bug does to a backend, done to any `BlockStore`.

::

    with FaultyStore(open_store("memory://test")) as store:
        store.plan["get"] = slow(0.1, failing(TierUnavailable("down")))   # from the next call on
        store.plan["put"] = hanging = Hanging()                           # until hanging.release()
        store.plan.clear()                                                # behaves again

The plan has at most one fault per verb. A fault is a function of the call, so that whatever is missing here is a
function that a test writes: `store.plan["put"] = lambda call: [PutOutcome.FULL] * len(call.keys)`.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from kvstore.abc import REFUSE_S, BlockStore
from kvstore.errors import TierUnavailable
from kvstore.layout import as_bytes
from kvstore.types import BlockWrite, GetOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstore.marks import Mark, MarkOutcome
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo, BlockKey, BlockRead, PutOutcome, Usage

__all__ = [
    "Call",
    "Fault",
    "FaultyStore",
    "Hanging",
    "failing",
    "flapping",
    "honest",
    "lying",
    "slow",
    "truncating",
    "wrong_bytes",
]


T = TypeVar("T")

Fault: TypeAlias = "Callable[[Call], Any]"
"""Returns what the caller is told, or raises; `call.answer()` is what the store itself says."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a verb (`contains`, `put`, `get`, `delete`, `touch`, `mark`, `unmark`, `scan`, `usage`,
    `namespaces`).
    """

    verb: str
    blocks: Sequence[Any]
    """As the caller passed them: `BlockKey`, `BlockWrite` or `BlockRead`."""
    ask: Callable[[Sequence[Any]], Any]
    """The same verb of the store behind, about other blocks."""

    @property
    def keys(self) -> list[BlockKey]:
        """Of its blocks, in their order."""
        return [getattr(block, "key", block) for block in self.blocks]

    def answer(self) -> Any:
        """Let it through to the store behind; as often as a fault likes."""
        return self.ask(self.blocks)


def honest(call: Call) -> Any:
    """No fault: where faults are put together, the one that ends the chain."""
    return call.answer()


def slow(seconds: float, then: Fault = honest) -> Fault:
    """Every call takes `seconds` longer."""

    def fault(call: Call) -> Any:
        time.sleep(seconds)
        return then(call)

    return fault


def failing(error: BaseException | None = None) -> Fault:
    """Every call raises `error` (default: a `TierUnavailable`) and reaches nothing."""

    def fault(call: Call) -> Any:
        raise error or TierUnavailable(f"{call.verb}: down, by order of a test")

    return fault


class Hanging:
    """Calls that begin wait for `release`; those after it do not wait any more.

    `waiting` are the verbs of the calls that wait at this moment, `then` what becomes of them.
    """

    def __init__(self, then: Fault = honest) -> None:
        self.waiting: list[str] = []
        self.then = then
        self._released = threading.Event()

    def release(self) -> None:
        """Let go of everybody, for good."""
        self._released.set()

    def __call__(self, call: Call) -> Any:
        self.waiting.append(call.verb)
        self._released.wait()
        self.waiting.remove(call.verb)
        return self.then(call)


def lying(answer: Any) -> Fault:
    """The same answer about every block, and nothing is done: `True` of `contains`, `STORED` of `put`, …"""
    return lambda call: [answer] * len(call.blocks)


def flapping(up: Iterable[bool], down: Fault | None = None) -> Fault:
    """One entry of `up`, over and over, for each call: True lets it through, False meets `down` (default: fails)."""
    schedule, lock, fault_when_down = cycle(up), threading.Lock(), down or failing()

    def fault(call: Call) -> Any:
        with lock:
            is_up = next(schedule)
        return honest(call) if is_up else fault_when_down(call)

    return fault


def truncating(keep_bytes: int, outcome: GetOutcome = GetOutcome.CORRUPT) -> Fault:
    """Only the first bytes of a block arrive. Of `put` and `get`.

    A put stores zeros in place of the rest, as if they had been written; a get leaves the rest of the buffer as it was
    and says `outcome` where it would have said HIT. (`outcome=HIT` is what no backend may do.)
    """

    def put(call: Call) -> Any:
        return call.ask([replace(block, data=_cut(block, keep_bytes)) for block in call.blocks])

    def get(call: Call) -> list[GetOutcome]:
        rest = [as_bytes(block.into)[keep_bytes:].copy() for block in call.blocks]
        outcomes: list[GetOutcome] = call.answer()
        for block, bytes_before in zip(call.blocks, rest, strict=True):
            as_bytes(block.into)[keep_bytes:] = bytes_before
        return [outcome if said is GetOutcome.HIT else said for said in outcomes]

    return lambda call: put(call) if call.verb == "put" else get(call)


def wrong_bytes(call: Call) -> list[GetOutcome]:
    """A get that flips a bit of every block and says HIT. No caller can find out: what a suite of tests is for."""
    outcomes: list[GetOutcome] = call.answer()
    for block in call.blocks:
        as_bytes(block.into)[:1] ^= 1
    return outcomes


def _cut(block: BlockWrite, keep_bytes: int) -> bytes:
    data = as_bytes(block.data)
    return data[:keep_bytes].tobytes().ljust(data.nbytes, b"\0")


class FaultyStore(BlockStore):
    """`inner`, whose verbs meet the faults of `plan`. It belongs to this store, which closes it.

    `can_hang`: what the capabilities say about that, where it differs from `inner`'s. `calls` are all calls so far,
    verb and keys, in the order in which they began; `plan` and `calls` may be looked at and changed on any thread.
    """

    def __init__(self, inner: BlockStore, *, can_hang: bool | None = None) -> None:
        super().__init__(inner.url)
        self.inner = inner
        self.capabilities = inner.capabilities
        if can_hang is not None:
            self.capabilities = replace(inner.capabilities, can_hang=can_hang)
        self.plan: dict[str, Fault] = {}
        self.calls: list[tuple[str, list[BlockKey]]] = []
        self.closed = False

    def namespaces(self) -> list[Namespace]:
        return self._meet("namespaces", (), lambda _: self.inner.namespaces())

    def contains_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        return self._meet("contains", keys, lambda keys: self.inner.contains_many(namespace, keys))

    def put_many(self, namespace: Namespace, blocks: Sequence[BlockWrite]) -> list[PutOutcome]:
        return self._meet("put", blocks, lambda blocks: self.inner.put_many(namespace, blocks))

    def get_many_into(self, namespace: Namespace, blocks: Sequence[BlockRead]) -> list[GetOutcome]:
        return self._meet("get", blocks, lambda blocks: self.inner.get_many_into(namespace, blocks))

    def delete_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> list[bool]:
        return self._meet("delete", keys, lambda keys: self.inner.delete_many(namespace, keys))

    def touch_many(self, namespace: Namespace, keys: Sequence[BlockKey]) -> None:
        self._meet("touch", keys, lambda keys: self.inner.touch_many(namespace, keys))

    def mark_many(self, namespace: Namespace, keys: Sequence[BlockKey], mark: Mark) -> list[MarkOutcome]:
        return self._meet("mark", keys, lambda keys: self.inner.mark_many(namespace, keys, mark))

    def unmark_many(self, namespace: Namespace, keys: Sequence[BlockKey], mark: Mark) -> list[bool]:
        return self._meet("unmark", keys, lambda keys: self.inner.unmark_many(namespace, keys, mark))

    def purge_many(
        self, namespace: Namespace, keys: Sequence[BlockKey], *, refuse_s: float = REFUSE_S, overwrite: bool = True
    ) -> list[bool]:
        return self._meet(
            "purge",
            keys,
            lambda keys: self.inner.purge_many(namespace, keys, refuse_s=refuse_s, overwrite=overwrite),
        )

    def scan(self, namespace: Namespace) -> Iterator[BlockInfo]:
        return self._meet("scan", (), lambda _: self.inner.scan(namespace))

    def usage(self) -> Usage:
        return self._meet("usage", (), lambda _: self.inner.usage())

    def close(self) -> None:
        self.closed = True
        self.inner.close()

    def _meet(self, verb: str, blocks: Sequence[Any], ask: Callable[[Sequence[Any]], T]) -> T:
        call = Call(verb, blocks, ask)
        self.calls.append((verb, call.keys))
        answer: T = self.plan.get(verb, honest)(call)
        return answer
