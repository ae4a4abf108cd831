"""The scrub: what nobody asks for is read all the same, at a bounded rate, by one process, and grows no younger."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest
from local_helpers import HIT, MISS, STORED

from kvstore import open_store, scrub
from kvstore.cli import EXIT_OK, run
from kvstore.errors import InvalidOptionError
from kvstore.scrub import Scrubbed
from kvstore.testing.patience import PATIENCE, wait_for
from kvstore.testing.supply import SPACE, get, held, key, keys, writes

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from pathlib import Path

    from kvstore.abc import BlockStore

NUMBERS = range(24)
ALL = 24 * SPACE.block_bytes()


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr(scrub, "_SAVE_S", 0.0)


@pytest.fixture
def url(scheme: str, root: Path) -> str:
    url = f"{scheme}://{root}"
    with open_store(url) as store:
        assert set(store.put_many(SPACE, writes(NUMBERS))) == {STORED}
    return url


def done(store: BlockStore) -> Scrubbed:
    return store.scrubbed() or Scrubbed()


def flip(root: Path, number: int) -> None:
    """A byte in the middle of a block, wherever it is."""
    payload = bytes(writes([number])[0].data)
    for path in root.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(payload[3000:3500])) >= 0:
            with path.open("r+b") as file:
                os.pwrite(file.fileno(), bytes([payload[3000] ^ 1]), at)
            return
    raise AssertionError("no such block")


def test_what_went_bad_is_found_and_removed_although_nobody_asks_for_it(
    url: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(root, 7)
    with open_store(url, scrub="100MB/s") as store:
        wait_for(lambda: done(store).passes == 1)
        assert held(store) == set(keys(NUMBERS)) - {key(7)}
        found = done(store)
        assert (found.blocks, found.bytes, found.corrupt) == (24, ALL, 1)
        assert get(store, [6, 7]) == [HIT, MISS]
    assert [record.levelno for record in caplog.records if key(7).digest.hex() in record.message] == [logging.WARNING]


def test_no_block_grows_younger(url: str) -> None:
    with open_store(url) as store:
        before = {info.key: (info.last_used, info.hits) for info in store.scan(SPACE)}
    with open_store(url, scrub="100MB/s") as store:
        wait_for(lambda: done(store).passes == 1)
    with open_store(url) as store:
        assert {info.key: (info.last_used, info.hits) for info in store.scan(SPACE)} == before


def test_it_keeps_to_its_rate(url: str) -> None:
    rate = 8 * SPACE.block_bytes()
    began = time.monotonic()
    with open_store(url, scrub=rate) as store:
        wait_for(lambda: done(store).blocks >= 8)
        assert time.monotonic() - began > 0.5
        assert done(store).bytes <= rate * (time.monotonic() - began) + rate // 4
        before = time.monotonic()
    assert time.monotonic() - before < scrub.STOP_S / 2


def test_it_goes_on_where_it_was_and_begins_anew_only_after_a_day(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(url, scrub=4 * SPACE.block_bytes()) as store:
        wait_for(lambda: done(store).blocks >= 3)
    with open_store(url) as store:
        before = done(store)
        assert 3 <= before.blocks < 24
        assert before.after
    with open_store(url, scrub="100MB/s") as store:
        wait_for(lambda: done(store).passes == 1)
        assert done(store).blocks == 24
        time.sleep(0.3)
        assert done(store).blocks == 24
    monkeypatch.setattr(scrub, "PASS_EVERY_S", 0.0)
    with open_store(url, scrub="100MB/s") as store:
        wait_for(lambda: done(store).passes >= 2)


def test_a_clock_that_was_set_back_does_not_stop_it(url: str, root: Path) -> None:
    with open_store(url, scrub="100MB/s") as store:
        wait_for(lambda: done(store).passes == 1)
    path = next(root.rglob("scrub"))
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "began": time.time() + 1e8}))
    with open_store(url, scrub="100MB/s") as store:
        wait_for(lambda: done(store).passes == 2)


@pytest.mark.parametrize("text", [b"", b"{", b'{"after": "zz"}', b'{"after": 7}', b'{"x": 1}', bytes(64), b"[]"])
def test_what_it_remembers_may_be_damaged(url: str, root: Path, text: bytes) -> None:
    with open_store(url, scrub="100MB/s") as store:
        wait_for(lambda: done(store).passes == 1)
    next(root.rglob("scrub")).write_bytes(text)
    with open_store(url, scrub="100MB/s") as store:
        wait_for(lambda: done(store).passes == 1)


def scrub_elsewhere(url: str, seconds: float) -> int:
    """How many whole passes there are once another process has tried to end one."""
    with open_store(url, scrub="100MB/s") as store:
        deadline = time.monotonic() + seconds
        while not done(store).passes and time.monotonic() < deadline:
            time.sleep(0.01)
        return done(store).passes


def test_one_process_at_a_time(url: str, stranger: Executor) -> None:
    with open_store(url, scrub=4 * SPACE.block_bytes()) as store:
        wait_for(lambda: done(store).blocks >= 1)
        assert stranger.submit(scrub_elsewhere, url, 0.5).result() == 0
    assert stranger.submit(scrub_elsewhere, url, PATIENCE).result() == 1


def test_a_forked_child_takes_nothing_along(url: str) -> None:
    with open_store(url, scrub=4 * SPACE.block_bytes()) as store:
        wait_for(lambda: done(store).blocks >= 1)
        child = os.fork()
        if not child:
            threads = [thread.name for thread in threading.enumerate()]
            os._exit("kvstore-scrub" in threads)
        assert os.waitpid(child, 0)[1] == 0
        child = os.fork()
        if not child:
            time.sleep(30)
            os._exit(0)
    try:
        with open_store(url, scrub="100MB/s") as store:  # the child holds no lock
            wait_for(lambda: done(store).passes == 1)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_who_only_looks_scrubs_nothing_and_is_told_what_was_done(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(url, scrub="1MB/s", readonly=True) as store:
        assert store.scrubbed() is None
        assert not [thread for thread in threading.enumerate() if thread.name == "kvstore-scrub"]
    assert run(["stat", url]) == EXIT_OK
    assert "scrub: " not in capsys.readouterr().out
    with open_store(url, scrub="100MB/s") as store:
        wait_for(lambda: done(store).passes == 1)
    assert run(["stat", f"{url}?scrub=1MB/s", "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["scrub"]["blocks"] == 24
    assert run(["stat", url]) == EXIT_OK
    assert "scrub: 24 blocks, 1.6 MB, 0 corrupt; the last whole pass ended" in capsys.readouterr().out


def test_what_is_put_into_an_empty_tier_is_scrubbed_today(scheme: str, root: Path) -> None:
    with open_store(f"{scheme}://{root}", scrub="100MB/s") as store:
        wait_for(lambda: bool(list(root.rglob("scrub"))))
        time.sleep(0.2)
        assert done(store).passes == 0
        store.put_many(SPACE, writes(NUMBERS))
        wait_for(lambda: done(store).passes == 1)
        assert done(store).blocks > 0


def test_a_rate_that_is_none_is_an_error(scheme: str, root: Path) -> None:
    for wrong in ("fast", "-1", "1MB/min", True):
        with pytest.raises(InvalidOptionError, match="50MB/s"):
            open_store(f"{scheme}://{root}", scrub=wrong)
    with open_store(f"{scheme}://{root}", scrub=0) as store:
        assert store.scrubbed() is None


def test_who_forgets_to_close_a_store_keeps_no_thread(scheme: str, root: Path) -> None:
    store = open_store(f"{scheme}://{root}", scrub="1MB/s")
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "kvstore-scrub"]
    del store
    thread.join(60)
    assert not thread.is_alive()
