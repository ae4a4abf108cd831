"""What tests have other processes do with a tier. Each function opens it, works, and closes it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore import GetOutcome, PutOutcome
from kvstore.testing.supply import SPACE, get, keys, writes

if TYPE_CHECKING:
    from tiers import Tier

    from kvstore import Namespace, Usage


def put(tier: Tier, numbers: list[int], options: dict[str, Any] | None = None) -> list[PutOutcome]:
    """Store blocks."""
    with tier.open(**options or {}) as store:
        return store.put_many(SPACE, writes(numbers))


def read(tier: Tier, numbers: list[int]) -> list[GetOutcome | str]:
    """Get blocks and compare their bytes."""
    with tier.open() as store:
        return get(store, numbers)


def delete(tier: Tier, numbers: list[int]) -> list[bool]:
    """Remove blocks."""
    with tier.open() as store:
        return store.delete_many(SPACE, keys(numbers))


def look(tier: Tier) -> tuple[list[Namespace], set[bytes], Usage]:
    """The namespaces, the digests of SPACE's blocks, and the usage."""
    with tier.open() as store:
        return store.namespaces(), {info.key.digest for info in store.scan(SPACE)}, store.usage()


def fill(tier: Tier, most: int) -> list[int]:
    """Put blocks until the disk is full, and go on a little; the numbers of those that were stored."""
    stored: list[int] = []
    with tier.open() as store:
        for number in range(most):
            (outcome,) = store.put_many(SPACE, writes([number]))
            if outcome is PutOutcome.STORED:
                stored.append(number)
            assert outcome in (PutOutcome.STORED, PutOutcome.FULL), outcome
            if number - len(stored) >= 5:
                break
        assert all(outcome is GetOutcome.HIT for outcome in get(store, stored))
    return stored
