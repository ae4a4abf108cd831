"""Which store a secondary tier opens and closes, and that what was asked in vain leaves none open."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from tiering_helpers import PATIENCE, SPACE

from kvstore import open_store
from kvstore.errors import ConfigurationError, UnknownSchemeError
from kvstore.tiering import SecondaryTier, TierStats

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any


def test_a_url_that_cannot_be_opened_is_an_error_at_once_and_leaves_no_threads() -> None:
    before = threading.active_count()
    with pytest.raises(UnknownSchemeError):
        SecondaryTier("nowhere://x", SPACE)
    assert threading.active_count() == before


@pytest.mark.parametrize("wrong", [{"threads": -1}, {"staging_bytes": 1}, {"memory": bytes(64), "io_process": True}])
def test_what_is_asked_of_a_tier_in_vain_leaves_no_store_open(tmp_path: Path, wrong: dict[str, Any]) -> None:
    threads, kind = threading.active_count(), "zarr+local" if "staging_bytes" in wrong else "file"
    with pytest.raises((ValueError, ConfigurationError)):
        SecondaryTier(f"{kind}://{tmp_path}/kv", SPACE, **wrong)
    deadline = time.monotonic() + PATIENCE
    while threading.active_count() > threads:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)
    if kind == "file":
        assert not list((tmp_path / "kv/.kvstore").glob("lease*"))
        assert (tmp_path / "kv/.kvstore/state").read_text().startswith("clean")


def test_a_tier_closes_the_store_that_it_opened() -> None:
    tier = SecondaryTier("memory://its-own", SPACE)
    with open_store("memory://its-own") as same:
        assert tier.close(PATIENCE)
        assert same.usage().blocks == 0
    assert tier.stats() == TierStats("memory://its-own")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvstore-memory")]
