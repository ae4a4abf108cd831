"""What tests of the tiers share: blocks whose bytes follow from their key, and engines that store and load them."""

from __future__ import annotations

import contextlib
import hashlib
import time
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kvstore import (
    BlockKey,
    BlockLayout,
    BlockRead,
    BlockStore,
    BlockWrite,
    GetOutcome,
    LookupResult,
    Namespace,
    open_store,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvstore.tiering import SecondaryTier

from kvstore.errors import ShutdownTimeout
from kvstore.testing.faults import FaultyStore
from kvstore.testing.patience import PATIENCE
from kvstore.tiering import TieringManager
from kvstore.tiering.breaker import BreakerState

BLOCK = 8192
SPACE = Namespace("model", "revision-1", (BlockLayout.opaque(BLOCK),), block_tokens=16)
HIT, PENDING, RETRY, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.RETRY, LookupResult.MISS


def keys(count: int, prompt: str = "a", group: int = 0) -> list[BlockKey]:
    """The blocks of one prompt."""
    return [BlockKey(hashlib.sha256(f"{prompt} {number}".encode()).digest(), group) for number in range(count)]


PROMPT = keys(60)


def content(key: BlockKey, nbytes: int = BLOCK) -> NDArray[np.uint8]:
    """The bytes that belong to this key and to no other."""
    seed = int.from_bytes(key.digest[:8], "little") + key.group
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def writes(names: Sequence[BlockKey], space: Namespace = SPACE) -> list[BlockWrite]:
    """Their blocks, as one prefix."""
    parents = [b"", *(name.digest for name in names)]
    return [
        BlockWrite(name, content(name, space.block_bytes(name.group)).data, position, parents[position])
        for position, name in enumerate(names)
    ]


def fill(url: str, names: Sequence[BlockKey], space: Namespace = SPACE) -> None:
    """Put blocks into a store behind the manager's back."""
    with open_store(url) as store:
        assert all(outcome.present for outcome in store.put_many(space, writes(names, space)))


def ask(manager: TieringManager, names: Sequence[BlockKey], timeout: float = PATIENCE) -> list[LookupResult]:
    """Look up, as an engine does, once per step, until every answer is final."""
    return until(manager, lambda: _final(manager.lookup(names)), timeout)


def _final(answers: list[LookupResult]) -> list[LookupResult] | None:
    return None if {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(answers) else answers


T = TypeVar("T")


def until(manager: TieringManager, condition: Callable[[], T | None], timeout: float = PATIENCE) -> T:
    """Step until the condition is true, and return what it is."""
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {timeout} s: {manager.stats()}"
        manager._turn()  # without a budget: what goes in one batch must not depend on the machine
        time.sleep(0.0005)
    return result


@contextlib.contextmanager
def managed(*tiers: Any, space: Namespace = SPACE, **options: Any) -> Iterator[TieringManager]:
    """A manager that is checked when the test is through with it: nothing pinned, nothing forgotten, right bytes."""
    manager = TieringManager(space, tiers, **{"primary_slots": 4, **options})
    try:
        yield manager
        check(manager)
        manager.close()
    finally:
        with contextlib.suppress(ShutdownTimeout):  # of a test that failed already
            manager.close(timeout=0.1)


def hurry(*tiers: SecondaryTier, seconds: float = 0.2) -> None:
    """From now on they give up lookups and loads after `seconds`. For the time of a fault: what is healthy is not to
    meet a short time-out, which a busy machine may exceed, so that `hurry(…, seconds=PATIENCE)` ends it.
    """
    for tier in tiers:
        tier._questions._timeout = tier._transit._load_timeout = seconds


def all_closed(manager: TieringManager) -> bool:
    """No tier is left alone by its breaker."""
    return all(tier.breaker is BreakerState.CLOSED for tier in manager.stats().tiers)


def check(manager: TieringManager) -> None:
    """What holds whenever nothing is under way."""
    assert manager.drain(PATIENCE), manager.stats()
    stats = manager.stats()
    assert (stats.asking, stats.waiting) == (0, 0)
    assert stats.primary.pinned == stats.held, "somebody forgot a pin"
    assert stats.primary.ready + stats.primary.free == stats.primary.slots, "somebody forgot a slot"
    assert not any(tier.backlog_bytes for tier in stats.tiers)
    slots = list(manager.primary._by_key.values())
    assert sorted(manager.primary._free + [slot.index for slot in slots]) == list(range(stats.primary.slots))
    for slot in slots:
        assert np.array_equal(slot.view, content(slot.key, slot.view.nbytes)), f"{slot.key} holds other bytes"


def engine_store(manager: TieringManager, names: Sequence[BlockKey]) -> list[BlockKey]:
    """Store as an engine does: what finds no slot at once is passed over. Returns what was written."""
    views = dict(zip(names, manager.prepare_store(names, position=0), strict=True))
    written = [name for name, view in views.items() if view is not None]
    for name in written:
        np.copyto(views[name], content(name, views[name].nbytes))
    manager.complete_store(written)
    return written


def engine_load(manager: TieringManager, names: Sequence[BlockKey]) -> int:
    """Load as an engine does whose memory is small: what is HIT, then the rest; checks bytes, returns how many."""
    done = 0
    while done < len(names):
        rest = names[done:]
        answers = until(manager, partial(_started, manager, rest))
        if answers[0] is LookupResult.MISS:
            break
        ready = [
            name for name, _ in takewhile(lambda pair: pair[1] is LookupResult.HIT, zip(rest, answers, strict=True))
        ]
        for name, view in zip(ready, manager.prepare_load(ready), strict=True):
            assert np.array_equal(view, content(name, view.nbytes)), f"wrong bytes for {name}"
        manager.complete_load(ready)
        done += len(ready)
        manager._turn()
    manager.finish_request(names)
    return done


def _started(manager: TieringManager, names: Sequence[BlockKey]) -> list[LookupResult] | None:
    answers = manager.lookup(names)
    return answers if answers[0] in (LookupResult.HIT, LookupResult.MISS) else None


def faulty(name: str = "faulty") -> FaultyStore:
    """A `memory://` store that misbehaves on order."""
    return FaultyStore(open_store(f"memory://{name}"))


def intact(store: BlockStore, names: Sequence[BlockKey], space: Namespace = SPACE) -> list[bool]:
    """Which blocks a store has, with the right bytes; wrong bytes are an error."""
    buffers = [np.empty(space.block_bytes(name.group), np.uint8) for name in names]
    outcomes = store.get_many_into(
        space, [BlockRead(name, buffer.data) for name, buffer in zip(names, buffers, strict=True)]
    )
    hits = [outcome is GetOutcome.HIT for outcome in outcomes]
    for name, buffer, hit in zip(names, buffers, hits, strict=True):
        assert not hit or np.array_equal(buffer, content(name, buffer.nbytes)), f"wrong bytes for {name}"
    return hits
