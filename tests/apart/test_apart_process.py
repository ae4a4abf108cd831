"""The process of a store apart: it dies and comes back, ends with its owner however that ends, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from apart_helpers import alive, descriptors, get, process_of, put, rows
from tiering_helpers import PATIENCE, PROMPT, SPACE, content, fill, writes

from kvstore import BlockWrite, GetOutcome, PutOutcome, open_store
from kvstore.apart import StoreApart
from kvstore.errors import (
    ConfigurationError,
    InvalidBlockError,
    NotAStoreError,
    StoreClosedError,
    StoreOpenError,
    StoreSealedError,
    TierUnavailable,
    UnknownOptionError,
    UnknownSchemeError,
)
from kvstore.testing.patience import wait_for, within

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

EIGHT = PROMPT[:8]


@pytest.fixture
def memory() -> NDArray[np.uint8]:
    return rows(16)


@pytest.fixture
def store(tmp_path: Path, memory: NDArray[np.uint8]) -> Iterator[StoreApart]:
    with StoreApart(f"file://{tmp_path}/tier", [memory.data]) as opened:
        yield opened


def test_blocks_go_through_shared_memory_and_are_what_an_ordinary_store_finds(
    location: str, memory: NDArray[np.uint8]
) -> None:
    with StoreApart(location, [memory.data]) as store:
        assert put(store, EIGHT, memory) == [PutOutcome.STORED] * 8
        assert store.contains_many(SPACE, PROMPT[:9]) == [True] * 8 + [False]
        assert get(store, EIGHT, memory[8:]) == [GetOutcome.HIT] * 8
        assert np.array_equal(memory[:8], memory[8:])
        own = np.zeros((8, memory.shape[1]), np.uint8)  # not lent
        assert get(store, EIGHT, own) == [GetOutcome.HIT] * 8
        assert np.array_equal(own, memory[:8])
        assert {info.key for info in store.scan(SPACE)} == set(EIGHT)
        with open_store(location) as same:
            assert same.usage() == store.usage()
            assert same.capabilities == store.capabilities


def test_a_scan_comes_in_parts(store: StoreApart) -> None:
    names = [type(PROMPT[0])(os.urandom(32)) for _ in range(1003)]
    block = content(PROMPT[0])
    store.put_many(SPACE, [BlockWrite(name, block.data) for name in names])
    scan = store.scan(SPACE)
    first = next(scan)
    store.delete_many(SPACE, names[:2])
    found = {first.key, *(info.key for info in scan)}
    assert set(names[2:]) <= found <= set(names)


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("file://{}/tier?capcity=1GB", UnknownOptionError),
        ("fil://{}/tier", UnknownSchemeError),
        ("file://{}", NotAStoreError),
        ("file://{}/sealed", StoreSealedError),
    ],
)
def test_what_is_wrong_with_a_url_is_said_as_ever(
    tmp_path: Path, url: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis.txt").write_text("of somebody")
    monkeypatch.setenv("KEY", os.urandom(32).hex())
    open_store(f"file://{tmp_path}/sealed?encryption=env:KEY&keyring={tmp_path}/ring").close()
    with pytest.raises(kind) as there:
        StoreApart(url.format(tmp_path))
    with pytest.raises(kind) as here:
        open_store(url.format(tmp_path))
    assert str(there.value) == str(here.value)


def test_secrets_of_a_url_are_shown_to_nobody(tmp_path: Path) -> None:
    with StoreApart(f"file://{tmp_path}/tier") as store:
        command = Path(f"/proc/{store.process}/cmdline").read_text()
        assert str(tmp_path) not in command
    with pytest.raises(StoreOpenError, match=r"\*\*\*@") as unavailable:
        StoreApart("redis://user:geheim@127.0.0.1:1/0")
    assert "geheim" not in str(unavailable.value)


def test_what_does_not_fit_is_refused_before_anything_is_done(store: StoreApart, memory: NDArray[np.uint8]) -> None:
    with pytest.raises(InvalidBlockError, match="has 100 bytes"):
        store.put_many(SPACE, [BlockWrite(EIGHT[0], memory[0, :100].data)])
    readonly = memory[:1].view()
    readonly.flags.writeable = False
    with pytest.raises(InvalidBlockError, match="read-only"):
        get(store, EIGHT, readonly)


def test_private_memory_is_refused_at_the_start_and_leaves_no_process(tmp_path: Path) -> None:
    before, threads = descriptors(), threading.active_count()
    with pytest.raises(ConfigurationError, match="private"):
        StoreApart(f"file://{tmp_path}/tier", [np.zeros(4096, np.uint8).data])
    wait_for(lambda: threading.active_count() == threads)
    assert descriptors() == before


def test_a_call_in_a_killed_process_fails_and_the_next_one_has_a_new_one(
    store: StoreApart, memory: NDArray[np.uint8]
) -> None:
    put(store, EIGHT, memory)
    first = process_of(store)
    os.kill(first, signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        under_way = [pool.submit(get, store, EIGHT, memory[8:]) for _ in range(4)]
        time.sleep(0.1)
        assert not any(call.done() for call in under_way), "a process that hangs is waited for"
        os.kill(first, signal.SIGKILL)
        for call in under_way:
            assert isinstance(call.exception(PATIENCE), TierUnavailable)
    memory[8:] = 0
    assert get(store, EIGHT, memory[8:]) == [GetOutcome.HIT] * 8, "lent memory and namespaces are known there, too"
    assert np.array_equal(memory[:8], memory[8:])
    assert store.restarts == 1
    assert process_of(store) != first


def test_nothing_grows_over_many_restarts(store: StoreApart, memory: NDArray[np.uint8]) -> None:
    put(store, EIGHT, memory)
    open_before, threads = descriptors(), threading.active_count()
    for _ in range(5):
        os.kill(process_of(store), signal.SIGKILL)
        wait_for(lambda: store.process is None)
        assert get(store, EIGHT, memory[8:]) == [GetOutcome.HIT] * 8
    wait_for(lambda: descriptors() <= open_before)
    assert threading.active_count() <= threads


OWNER = """
import os, sys, time
from kvstore.apart import StoreApart
store = StoreApart(sys.argv[1])
if sys.argv[2] == "forked" and os.fork() == 0:
    time.sleep(60)  # has all that the owner had open
print(store.process, flush=True)
if sys.argv[2] == "ends":
    sys.exit(0)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["killed", "forked", "ends"])
def test_it_ends_with_its_owner_however_that_ends(tmp_path: Path, how: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, f"file://{tmp_path}/tier", how], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert owner.stdout is not None
        process = int(owner.stdout.readline())
        if how != "ends":
            assert alive(process)
            owner.kill()
        owner.wait()
        wait_for(lambda: not alive(process))
    finally:
        os.killpg(owner.pid, signal.SIGKILL) if how == "forked" else owner.kill()
        owner.communicate()


def test_signals_to_the_whole_group_do_not_end_it_before_its_owner(store: StoreApart) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(process_of(store), number)
    assert store.usage().blocks == 0
    assert store.restarts == 0


@pytest.mark.parametrize("call", [True, False], ids=["in a call", "idle"])
def test_closing_ends_it_though_it_hangs(
    call: bool, tmp_path: Path, memory: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.apart.store.CLOSE_S", 0.2)
    store = StoreApart(f"file://{tmp_path}/tier", [memory.data])
    process = process_of(store)
    os.kill(process, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        if call:
            under_way = pool.submit(store.usage)
            time.sleep(0.1)
        with within(0.2):
            store.close()
        if call:
            assert isinstance(under_way.exception(PATIENCE), TierUnavailable)
    assert not alive(process)
    assert store.process is None
    for verb in (store.usage, store.namespaces, lambda: store.contains_many(SPACE, EIGHT)):
        with pytest.raises(StoreClosedError, match="open it again"):
            verb()
    store.close()


def test_who_forgets_to_close_it_keeps_no_process(tmp_path: Path) -> None:
    store = StoreApart(f"file://{tmp_path}/tier")
    process = process_of(store)
    del store
    wait_for(lambda: not alive(process))


def test_a_forked_child_is_told_and_cannot_end_it(store: StoreApart) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store.usage()
        except StoreClosedError:
            store.close()
            store._finalizer()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert store.usage().blocks == 0
    assert store.restarts == 0


def test_one_that_cannot_be_started_again_says_why(tmp_path: Path) -> None:
    fill(f"file://{tmp_path}/tier", EIGHT)
    with StoreApart(f"file://{tmp_path}/tier") as store:
        os.kill(process_of(store), signal.SIGKILL)
        wait_for(lambda: store.process is None)
        (tmp_path / "tier").rename(tmp_path / "away")
        (tmp_path / "tier").write_text("something else")
        with pytest.raises(TierUnavailable, match=r"cannot be started again.*tier"):
            store.put_many(SPACE, writes(PROMPT[8:9]))
        (tmp_path / "tier").unlink()
        (tmp_path / "away").rename(tmp_path / "tier")
        assert store.contains_many(SPACE, EIGHT) == [True] * 8
    with open_store(f"file://{tmp_path}/tier") as again:
        assert again.contains_many(SPACE, PROMPT[8:9]) == [False], "who was told no is not served later"
