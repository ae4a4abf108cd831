"""Recency is told, not guessed: the hottest prefix is served from memory, and its tier keeps it all the same.

A tier that is never asked about a block would take it for the oldest; requests that finish tell every tier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tiering_helpers import PATIENCE, ask, engine_load, keys, managed, writes

from kvstore import LookupResult, TierURL, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    from kvstore import BlockKey
    from kvstore.tiering import TieringManager

HOT = keys(8, "hot")
COLD = keys(8, "cold")
ROUNDS = 1000
NOVEL = keys(3 * ROUNDS, "novel")
CAPACITY = "4MiB"
"""Room for a few hundred blocks, so that the novel ones turn the tier over several times."""


@pytest.fixture(params=["memory", "file", "lmdb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A small tier that outlives the managers over it, on every backend."""
    scheme: str = request.param
    with open_store(f"memory://{tmp_path}"):
        yield f"{scheme}://{tmp_path}{'' if scheme == 'memory' else '/tier'}?capacity={CAPACITY}"


def test_a_prefix_hit_a_thousand_times_in_memory_is_still_in_its_tier_after_a_restart(
    url: str, fresh_process: Executor
) -> None:
    with managed(url, primary_slots=32) as manager:
        manager.store(writes(HOT + COLD))
        turn_over(manager)
        served = manager.stats().tiers[0]
        assert (served.loads, served.hits) == (0, 0), "the hot prefix never reached the tier"
        assert served.stores > 0.9 * len(NOVEL)
    with open_store(url) as store:
        assert len(list(store.scan(manager.namespace))) * 4 < served.stores, "turned over several times"
        assert not any(store.contains_many(manager.namespace, COLD)), "what nobody used again is gone"
    assert hits_after_restart(url, HOT) == len(HOT)
    if TierURL.parse(url).scheme != "memory":
        assert fresh_process.submit(hits_after_restart, url, HOT).result(PATIENCE) == len(HOT)


def turn_over(manager: TieringManager) -> None:
    """A request for the hot prefix, and one for three novel blocks that nobody asks for again, by turns."""
    for start in range(0, len(NOVEL), 3):
        assert ask(manager, HOT) == [LookupResult.HIT] * len(HOT)
        assert engine_load(manager, HOT) == len(HOT)
        novel = NOVEL[start : start + 3]
        manager.store(writes(novel))
        manager.finish_request(novel)
        manager.step()


def hits_after_restart(url: str, names: Sequence[BlockKey]) -> int:
    """Leading blocks that a new manager, with nothing in memory yet, gets from the tier, intact."""
    with managed(url) as manager:
        return engine_load(manager, names)
