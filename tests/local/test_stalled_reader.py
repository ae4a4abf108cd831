"""A process that is stopped inside a read of the catalogue keeps every page that is freed since: stores are shed before
the catalogue has driven out the blocks, and taken again when it goes on or ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from local_helpers import FULL, HIT, STORED, occupied

from kvstore import growth, open_store
from kvstore.environment import PAGE
from kvstore.testing.supply import MIB, SPACE, get, keys, writes
from kvstore_zarr import eviction, put
from kvstore_zarr.descriptors import descriptors

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from kvstore import BlockStore

CAPACITY = 16 * MIB
READING = f"""
import sys
sys.path[:0] = {sys.path!r}
from kvstore import open_store
with open_store(sys.argv[1]) as store:
    with store._tier.catalog.read() as snapshot:
        snapshot.totals()
        print("reading", flush=True)
        sys.stdin.readline()
"""


@contextmanager
def stopped_reader(url: str) -> Generator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", READING, url], stdin=-1, stdout=-1, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def full(root: Path) -> Generator[BlockStore]:
    """A tier at its capacity; blocks 300 and later are in it."""
    with open_store(f"file://{root}", capacity=CAPACITY) as store:
        for start in range(0, 400, 20):
            store.put_many(SPACE, writes(range(start, start + 20)))
        yield store


def pages(store: BlockStore) -> int:
    tier: Any = store
    found: int = tier._tier.environment.pages()
    return found


def end(process: subprocess.Popen[str], how: str) -> None:
    process.send_signal(signal.SIGCONT if how == "goes on" else signal.SIGKILL)
    process.communicate("\n")


@pytest.mark.parametrize("how", ["goes on", "is killed"])
def test_the_blocks_stay_and_are_read_and_stores_are_shed_until_it(
    how: str, full: BlockStore, root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "LASTS_S", 0.1)
    before, blocks = pages(full), full.usage().blocks
    with stopped_reader(f"file://{root}") as process:
        outcomes = [
            outcome
            for start in range(400, 1200, 10)
            for outcome in full.put_many(SPACE, writes(range(start, start + 10)))
        ]
        assert set(outcomes[-400:]) == {FULL}
        assert pages(full) <= before + MIB // PAGE + 160
        assert full.usage().blocks >= blocks * 3 // 4
        assert occupied(root) <= CAPACITY
        assert get(full, range(390, 400)) == [HIT] * 10
        monkeypatch.setattr(put, "PATIENCE_S", 1000.0)
        assert set(full.put_many(SPACE, writes(range(1200, 1300)))) == {FULL}, "what lasts is not waited for"
        told = [record.getMessage() for record in caplog.records if "nothing is stored" in record.getMessage()]
        assert len(told) == 1
        assert f"process {process.pid}, which is stopped," in told[0]
        assert f"kill -CONT {process.pid}" in told[0]
        end(process, how)
        assert set(full.put_many(SPACE, writes(range(2000, 2020)))) == {STORED}
        assert "stores again" in caplog.text
        tier: Any = full
        assert not tier._tier.catalog.is_held_up_for_long


def test_notes_of_use_wait_as_well(full: BlockStore, root: Path) -> None:
    tier: Any = full
    catalog, before = tier._tier.catalog, pages(full)
    with stopped_reader(f"file://{root}") as process:
        for _ in range(60):
            full.touch_many(SPACE, keys(range(400)))
            catalog.settle()
        assert pages(full) <= before + MIB // PAGE + 160
        waiting = len(catalog._notes)
        assert waiting > 5
        full.delete_many(SPACE, keys(range(390, 395)))
        assert len(catalog._notes) == waiting, "nor along with what has to be written"
        end(process, "goes on")
        catalog.settle()
        assert not catalog._notes


def test_a_read_that_ends_in_time_sheds_nothing(full: BlockStore) -> None:
    tier: Any = full
    catalog = tier._tier.catalog
    catalog.growth._allowed = 0
    with catalog.read() as snapshot:
        snapshot.totals()
        assert set(full.put_many(SPACE, writes(range(500, 505)))) == {STORED}
        assert not catalog.is_held_up()


def test_no_file_is_opened_within_a_read_of_the_catalogue(full: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    tier: Any = full
    environment, device = tier._tier.environment, tier._tier.device
    opened: list[list[tuple[int, int]]] = []
    really = device.open

    def watched(*args: Any, **options: Any) -> Any:
        opened.append(environment._readers())
        return really(*args, **options)

    monkeypatch.setattr(device, "open", watched)
    full.put_many(SPACE, writes(range(500, 510)))
    assert opened
    assert not any(opened)


def test_one_choice_of_victims_opens_a_bounded_number_of_files(
    full: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much has to go: a process may open 256 files, say."""
    monkeypatch.setattr(eviction, "MOST_LOOKED_AT", 8)
    tier: Any = full
    local = tier._tier
    with local.catalog.read() as snapshot:
        oldest = eviction.oldest(local, snapshot, CAPACITY)
    with descriptors() as share:
        held = eviction.choose(local, oldest, CAPACITY, share)
        try:
            assert len(held) == 8
            assert [one.victim for one in held] == oldest
        finally:
            eviction.let_go(local, held)
