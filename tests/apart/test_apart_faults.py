"""What goes wrong between a store's process and its owner: restarts that hang, forks, ends that come late."""

from __future__ import annotations

import inspect
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from apart_helpers import alive, process_of, put, rows, wait_for
from tiering_helpers import PATIENCE, PROMPT, SPACE, content

from kvstore import BlockKey, BlockStore, BlockWrite, PutOutcome
from kvstore.apart import StoreApart
from kvstore.apart.link import Answer
from kvstore.background import NICENESS
from kvstore.errors import StoreClosedError, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

EIGHT = PROMPT[:8]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreApart]:
    with StoreApart(f"file://{tmp_path}/tier") as opened:
        yield opened


def kill(store: StoreApart) -> None:
    os.kill(process_of(store), signal.SIGKILL)
    wait_for(lambda: store.process is None)


def test_every_verb_is_asked_of_the_store_there(store: StoreApart) -> None:
    verbs = {name for name, _ in inspect.getmembers(BlockStore, inspect.isfunction) if not name.startswith("_")}
    assert verbs - vars(StoreApart).keys() == {"amiss"}, "which follows from `unseen`"
    assert store.of_later_version(SPACE, EIGHT) == [False] * 8
    store.ensure_open()
    store.close()
    with pytest.raises(StoreClosedError):
        store.ensure_open()


def test_nothing_of_the_working_directory_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('somebody else wrote this')")
    monkeypatch.chdir(tmp_path)
    StoreApart("memory://x").close()


def test_it_yields_to_its_owner(store: StoreApart) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, process_of(store)) == min(19, own + NICENESS)


def test_a_scan_that_a_forked_child_drops_says_nothing_in_its_parents_name(store: StoreApart) -> None:
    put(store, EIGHT, rows(8))
    scan = store.scan(SPACE)
    next(scan)
    os.kill(process_of(store), signal.SIGSTOP)  # so that an answer to the child would be taken for one to the parent
    child = os.fork()
    if child == 0:
        try:
            scan.close()  # type: ignore[attr-defined] # a generator
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(store.contains_many, SPACE, EIGHT)
        time.sleep(0.1)
        os.kill(process_of(store), signal.SIGCONT)
        assert asked.result(PATIENCE) == [True] * 8
    assert len([*scan]) == 7


def test_a_scan_of_a_process_that_died_does_not_go_on_with_another_ones(store: StoreApart) -> None:
    names = [BlockKey(os.urandom(32)) for _ in range(1003)]
    block = content(PROMPT[0])
    store.put_many(SPACE, [BlockWrite(name, block.data) for name in names])
    before = store.scan(SPACE)
    next(before)
    kill(store)
    after = store.scan(SPACE)
    first = next(after)
    with pytest.raises(TierUnavailable, match="had this scan has ended"):
        list(before)
    assert {first.key, *(info.key for info in after)} == set(names)


def test_closing_ends_a_process_that_hangs_while_it_is_started_again(
    store: StoreApart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.apart.store.CLOSE_S", 0.2)
    kill(store)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(store.usage)
        wait_for(lambda: store.process is not None)
        second = process_of(store)
        os.kill(second, signal.SIGSTOP)
        store.close()
        assert isinstance(call.exception(PATIENCE), TierUnavailable)
    assert not alive(second)


def test_closing_starts_no_process(store: StoreApart) -> None:
    kill(store)
    store.close()
    assert store.restarts == 0


def test_two_may_close_it_at_once(store: StoreApart) -> None:
    os.kill(process_of(store), signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(store.close)
        wait_for(lambda: not store._finalizer.alive)
        store.close()
        assert alive(process_of(store)), "the other one gives it time"
        os.kill(process_of(store), signal.SIGCONT)
        first.result(PATIENCE)
    assert store.process is None


def fails(_: object, __: object) -> None:
    raise ZeroDivisionError


def waits(entered: threading.Event, go_on: threading.Event, then: Callable[[Any, Any], None], *answer: Any) -> None:
    entered.set()
    go_on.wait(PATIENCE)
    then(*answer)


@pytest.mark.parametrize("then", [fails, lambda *_: None], ids=["fails", "works"])
def test_nobody_is_told_before_the_process_has_let_go_of_everything(
    tmp_path: Path, then: Callable[[Any, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[socket.socket] = []
    pair = socket.socketpair

    def kept(*kind: int) -> tuple[socket.socket, socket.socket]:
        wire, theirs = pair(*kind)
        ends.append(theirs.dup())  # as a thread of the process has it that is stuck in the kernel
        return wire, theirs

    monkeypatch.setattr(socket, "socketpair", kept)
    store = StoreApart(f"file://{tmp_path}/tier")
    entered, go_on, told = threading.Event(), threading.Event(), threading.Event()
    store.begin("usage", (), partial(waits, entered, go_on, then))
    store.send()
    assert entered.wait(PATIENCE)
    os.kill(process_of(store), signal.SIGSTOP)
    store.begin("usage", (), lambda *_: told.set())
    store.send()
    store.abandon()
    go_on.set()
    assert not told.wait(0.3)
    ends[0].close()
    assert told.wait(PATIENCE)


def test_work_that_fails_ends_it_and_is_not_the_end_of_what_waits_behind(store: StoreApart) -> None:
    process, entered, go_on, done = process_of(store), threading.Event(), threading.Event(), threading.Event()
    store.later(partial(waits, entered, go_on, fails, None, None))
    assert entered.wait(PATIENCE)
    store.later(done.set)
    go_on.set()
    assert done.wait(PATIENCE)
    wait_for(lambda: not alive(process))
    with pytest.raises(StoreClosedError):
        store.usage()
    assert not store.later(done.clear)
    assert done.is_set()


def test_who_sends_never_waits(store: StoreApart) -> None:
    os.kill(process_of(store), signal.SIGSTOP)
    names = [BlockKey(os.urandom(32)) for _ in range(512)]
    block, answered = content(PROMPT[0]), Answer()
    store.begin("put_many", (SPACE, [BlockWrite(name, block.data) for name in names]), answered)
    sending = threading.Thread(target=store.send, daemon=True)
    sending.start()
    sending.join(PATIENCE / 4)
    assert not sending.is_alive()
    os.kill(process_of(store), signal.SIGCONT)
    assert answered.wait(PATIENCE)
    assert answered.value() == [PutOutcome.STORED] * 512


def test_an_answer_stays_there() -> None:
    answer = Answer()
    assert not answer.wait(0.0)
    answer(7, None)
    assert answer.wait(0.0)
    assert answer.wait(0.0)
    assert answer.value() == 7


def test_memory_that_could_not_be_lent_is_not(store: StoreApart) -> None:
    memory = rows(2)
    os.kill(process_of(store), signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        lending = pool.submit(store.lend, memory.reshape(-1).data)
        wait_for(lambda: store._link.lent.place(memory[0]))
        os.kill(process_of(store), signal.SIGKILL)
        assert isinstance(lending.exception(PATIENCE), TierUnavailable)
    assert store._link.lent.place(memory[0]) is None
    assert put(store, EIGHT[:2], memory) == [PutOutcome.STORED] * 2


def test_memory_that_is_not_mapped_there_is_an_error(store: StoreApart) -> None:
    answered = Answer()
    block = (EIGHT[0].digest, 0, 99, 0, SPACE.block_bytes())
    store._link.begin("get_many_into", (store._link.number(SPACE), [block]), {}, answered)
    store.send()
    with pytest.raises(TierUnavailable, match="lend it anew"):
        answered.value()


def test_memory_is_lent_in_any_order_and_found(store: StoreApart) -> None:
    area = rows(4)
    for row in (2, 0, 3):
        store.lend(area[row].data)
    assert [store._link.lent.place(row) for row in area] == [(1, 0), None, (0, 0), (2, 0)]
