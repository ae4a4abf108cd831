"""What a salvage of `lmdb://` must not bring back: purged blocks, deleted ones, old copies, and none beside a user."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from local_helpers import HIT, MISS, STORED

from kvstore import BlockRead, BlockWrite, open_store
from kvstore.catalog import address_of
from kvstore.errors import StoreAccessError
from kvstore.registry import backend_class
from kvstore.retention import now_ns
from kvstore.testing.supply import SPACE, buffer, content, get, key, writes
from kvstore.url import TierURL
from kvstore_lmdb import LMDBStore

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from kvstore import BlockStore
    from kvstore.catalog import Catalog

OTHER_BOOT = "dirty 00000000-0000-0000-0000-000000000000\n"


@pytest.fixture
def store(root: Path) -> Generator[BlockStore]:
    """A tier of ten blocks, of which the first one's page is damaged once it is closed."""
    with open_store(f"lmdb://{root}") as store:
        assert store.put_many(SPACE, writes(range(10))) == [STORED] * 10
        yield store


def catalog_of(store: BlockStore) -> Catalog:
    assert isinstance(store, LMDBStore)
    return store._tier.catalog  # pyright: ignore[reportPrivateUsage]


def forget(store: BlockStore, number: int) -> None:
    """As if its entry's page were newer than that of its bytes."""
    with catalog_of(store).write() as change:
        assert change.discard([address_of(SPACE, key(number))])


def damage(store: BlockStore, root: Path) -> None:
    store.close()
    data = (root / "data.mdb").read_bytes()
    with (root / "data.mdb").open("r+b") as file:
        file.seek(data.index(b"kvblock\0") - 16)
        file.write(b"\xff" * 16)


def salvage(root: Path) -> int:
    url = TierURL.parse(f"lmdb://{root}")
    backend = backend_class(url)
    (repaired,) = backend.salvage(url.validated(backend.options))
    return repaired.count


def test_a_purged_block_whose_bytes_are_still_led_to_stays_purged(store: BlockStore, root: Path) -> None:
    with catalog_of(store).write() as change:
        change.tombs.bury([address_of(SPACE, key(5))], now_ns() + 600 * 10**9)
    damage(store, root)
    assert salvage(root) == 8
    with open_store(f"lmdb://{root}") as anew:
        assert get(anew, range(1, 10)) == [MISS if number == 5 else HIT for number in range(1, 10)]


@pytest.mark.parametrize("lost_power", [False, True])
def test_bytes_without_an_entry_are_saved_only_where_no_power_was_lost(
    store: BlockStore, root: Path, lost_power: bool
) -> None:
    forget(store, 5)
    damage(store, root)
    if lost_power:
        (root / "state").write_text(OTHER_BOOT)
    assert salvage(root) == 9 - lost_power
    with open_store(f"lmdb://{root}") as anew:
        assert get(anew, [5]) == [MISS if lost_power else HIT]


def test_of_two_copies_the_one_that_the_entry_leads_to_is_saved(store: BlockStore, root: Path) -> None:
    forget(store, 5)
    newer = content(500)
    assert store.put_many(SPACE, [BlockWrite(key(5), buffer(newer))]) == [STORED]
    damage(store, root)
    assert salvage(root) == 9
    with open_store(f"lmdb://{root}") as anew:
        into = np.empty(SPACE.block_bytes(), np.uint8)
        assert anew.get_many_into(SPACE, [BlockRead(key(5), buffer(into))]) == [HIT]
        assert np.array_equal(into, newer)


def test_an_entry_that_leads_to_another_blocks_bytes_saves_neither(store: BlockStore, root: Path) -> None:
    with catalog_of(store).write() as change:
        other, mine = sorted(address_of(SPACE, key(number)) for number in (5, 6))
        other, mine = change.find([other, mine])
        assert mine is not None
        assert other is not None
        meta = catalog_of(store).environment.databases["meta"]
        change.txn.put(mine.address, replace(mine, generation=other.generation).packed(), db=meta)
    damage(store, root)
    assert salvage(root) == 7
    with open_store(f"lmdb://{root}") as anew:
        assert get(anew, range(1, 10)) == [MISS if number in (5, 6) else HIT for number in range(1, 10)]


def test_nothing_is_saved_beside_somebody_who_has_it_open(store: BlockStore, root: Path) -> None:
    before = (root / "data.mdb").stat().st_ino
    with pytest.raises(StoreAccessError, match="in use"):
        salvage(root)
    assert (root / "data.mdb").stat().st_ino == before
    assert get(store, range(10)) == [HIT] * 10
