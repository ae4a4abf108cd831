"""A read-only store of a local tier leaves the disk as it is, to the byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import GetOutcome
from kvstore.errors import StoreNotFoundError
from kvstore.testing.supply import SPACE, get, keys, writes

if TYPE_CHECKING:
    from pathlib import Path

    from tiers import Tier

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS


def test_nothing_is_created_where_nothing_is(persistent_tier: Tier) -> None:
    assert persistent_tier.path is not None
    with pytest.raises(StoreNotFoundError, match=str(persistent_tier.path)):
        persistent_tier.open(readonly=True)
    assert not persistent_tier.path.exists()


def test_a_reader_alone_leaves_every_file_as_it_is(persistent_tier: Tier) -> None:
    assert persistent_tier.path is not None
    with persistent_tier.open() as store:
        store.put_many(SPACE, writes(range(3)))
    before = files_of(persistent_tier.path)
    with persistent_tier.open(readonly=True) as store:
        assert get(store, [0, 1, 2, 3]) == [HIT, HIT, HIT, MISS]
        store.put_many(SPACE, writes([7]))
        store.delete_many(SPACE, keys([0]))
    after = files_of(persistent_tier.path)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert {name for name in changed if not name.endswith("lock.mdb")} == set()  # LMDB's table of readers


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
