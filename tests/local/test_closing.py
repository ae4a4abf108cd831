"""Closing a local tier: `clean` is said of what is on disk; what a close cannot do is told in kvstore's own words."""

from __future__ import annotations

import fcntl
import threading
from typing import TYPE_CHECKING

import pytest
from local_helpers import HIT, STORED, catalogue_of

import kvstore.inuse
import kvstore.presence
from kvstore import open_store
from kvstore.errors import StoreClosedError, TierUnavailable
from kvstore.presence import Presence
from kvstore.testing.supply import SPACE, get, write, writes
from kvstore_lmdb import LMDBStore
from kvstore_zarr import LocalZarrStore

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.catalog import Catalog

SCHEMES = pytest.mark.parametrize("scheme", ["file", "lmdb"])


def catalog_of(store: object) -> Catalog:
    assert isinstance(store, LMDBStore | LocalZarrStore)
    return store._tier.catalog  # pyright: ignore[reportPrivateUsage]


@SCHEMES
def test_a_tier_is_called_clean_once_the_last_commit_is_in_it(scheme: str, tmp_path: Path) -> None:
    store = open_store(f"{scheme}://{tmp_path}/tier")
    assert store.put_many(SPACE, writes(range(4))) == [STORED] * 4
    inside, go_on = threading.Event(), threading.Event()

    def write_slowly() -> None:
        with catalog_of(store).write() as change:
            inside.set()
            go_on.wait(20)
            change.set_overhead(12345)

    writer = threading.Thread(target=write_slowly)
    writer.start()
    assert inside.wait(20)
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(0.3)
    assert closing.is_alive()
    go_on.set()
    writer.join()
    closing.join()
    records = catalogue_of(tmp_path / "tier")
    with Presence.opening(next(tmp_path.rglob("gate")).parent) as presence:
        assert presence.untouched(records)
    with presence.closing():
        pass


@SCHEMES
def test_a_tier_in_which_a_call_does_not_end_is_not_called_clean(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvstore.inuse, "CLOSE_TIMEOUT_S", 0.1)
    store = open_store(f"{scheme}://{tmp_path}/tier")
    assert store.put_many(SPACE, writes([1])) == [STORED]
    with catalog_of(store).read(), pytest.raises(TierUnavailable, match="does not end"):
        store.close()
    assert next(tmp_path.rglob("state")).read_text().startswith("dirty ")


@SCHEMES
def test_what_a_close_cannot_do_is_told_in_kvstores_words_and_it_is_closed(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvstore.presence, "GATE_TIMEOUT_S", 0.1)
    store = open_store(f"{scheme}://{tmp_path}/tier")
    assert store.put_many(SPACE, writes([1])) == [STORED]
    with next(tmp_path.rglob("gate")).open("r+b") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        with pytest.raises(TierUnavailable, match="locked"):
            store.close()
    store.close()
    with pytest.raises(StoreClosedError):
        store.put_many(SPACE, [write(2)])
    with open_store(f"{scheme}://{tmp_path}/tier") as store:
        assert get(store, [1]) == [HIT]
