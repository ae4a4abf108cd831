"""What goes wrong between a store's process and its owner: restarts that hang, forks, ends that come late."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from apart_helpers import alive, descriptors, process_of, put, rows
from tiering_helpers import PATIENCE, PROMPT, SPACE, content, keys

from kvstore import BlockKey, BlockRead, BlockStore, BlockWrite, PutOutcome
from kvstore.apart import StoreApart
from kvstore.apart.link import Answer
from kvstore.background import NICENESS
from kvstore.errors import StoreClosedError, StoreOpenError, TierUnavailable
from kvstore.testing.patience import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

EIGHT = PROMPT[:8]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreApart]:
    with StoreApart(f"file://{tmp_path}/tier") as opened:
        yield opened


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreApart]:
    """One process for the tests that do not end it."""
    with StoreApart(f"file://{tmp_path_factory.mktemp('lasting')}/tier") as opened:
        yield opened


def kill(store: StoreApart) -> None:
    os.kill(process_of(store), signal.SIGKILL)
    wait_for(lambda: store.process is None)


def test_every_verb_is_asked_of_the_store_there(store: StoreApart) -> None:
    verbs = {name for name, _ in inspect.getmembers(BlockStore, inspect.isfunction) if not name.startswith("_")}
    assert verbs <= vars(StoreApart).keys()
    assert store.of_later_version(SPACE, EIGHT) == [False] * 8
    store.ensure_open()
    store.close()
    with pytest.raises(StoreClosedError):
        store.ensure_open()


def test_nothing_of_the_working_directory_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('somebody else wrote this')")
    monkeypatch.chdir(tmp_path)
    StoreApart("memory://x").close()


def test_it_yields_to_its_owner(lasting: StoreApart) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, process_of(lasting)) == min(19, own + NICENESS)


def test_a_scan_that_a_forked_child_drops_says_nothing_in_its_parents_name(lasting: StoreApart) -> None:
    put(lasting, EIGHT, rows(8))
    scan = lasting.scan(SPACE)
    next(scan)
    os.kill(process_of(lasting), signal.SIGSTOP)  # so that an answer to the child would be taken for one to the parent
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            scan.close()  # type: ignore[attr-defined] # a generator
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lasting.contains_many, SPACE, EIGHT)
        time.sleep(0.1)
        os.kill(process_of(lasting), signal.SIGCONT)
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
    scan = store.scan(SPACE)
    kill(store)
    scan.close()  # type: ignore[attr-defined] # a generator
    assert not store._link._asked
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


def test_who_sends_never_waits(lasting: StoreApart) -> None:
    os.kill(process_of(lasting), signal.SIGSTOP)
    names = [BlockKey(os.urandom(32)) for _ in range(512)]
    block, answered = content(PROMPT[0]), Answer()
    lasting.begin("put_many", (SPACE, [BlockWrite(name, block.data) for name in names]), answered)
    sending = threading.Thread(target=lasting.send, daemon=True)
    sending.start()
    sending.join(PATIENCE / 4)
    assert not sending.is_alive()
    os.kill(process_of(lasting), signal.SIGCONT)
    assert answered.wait(PATIENCE)
    assert answered.value() == [PutOutcome.STORED] * 512


def test_what_a_lost_call_begins_is_sent(store: StoreApart) -> None:
    again, told = Answer(), threading.Event()

    def lost(_: object, error: BaseException | None) -> None:
        assert isinstance(error, TierUnavailable)
        store.begin("contains_many", (SPACE, EIGHT), again)
        told.set()

    os.kill(process_of(store), signal.SIGSTOP)
    store.begin("usage", (), lost)
    store.send()
    os.kill(process_of(store), signal.SIGKILL)
    assert told.wait(PATIENCE)
    assert again.wait(PATIENCE)
    assert again.value() == [False] * 8


def test_who_fails_as_it_is_told_keeps_nobody_from_being_told(store: StoreApart) -> None:
    answers = Answer(), Answer()
    os.kill(process_of(store), signal.SIGSTOP)
    for done in (answers[0], fails, answers[1]):
        store.begin("usage", (), done)
    store.send()
    os.kill(process_of(store), signal.SIGKILL)
    assert [answered.wait(PATIENCE) for answered in answers] == [True, True]


def test_an_answer_that_is_none_is_told_too(lasting: StoreApart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.apart.store._delivered", fails)
    answered = Answer()
    lasting.begin("get_many_into", (SPACE, [BlockRead(EIGHT[0], rows(1)[0].data)]), answered)
    lasting.send()
    assert answered.wait(PATIENCE)
    with pytest.raises(ZeroDivisionError):
        answered.value()


def test_a_forked_child_sends_nothing_and_has_nobody_to_work_for_it(lasting: StoreApart) -> None:
    missing, answered = keys(8, "missing"), Answer()
    lasting.begin("contains_many", (SPACE, missing), answered)
    waiting = [*lasting._link._outbox]
    child = os.fork()
    if child == 0:
        lasting.send()
        kept = [*lasting._link._outbox] == waiting
        with contextlib.suppress(StoreClosedError):
            lasting.begin("usage", (), answered)
            os._exit(1)
        os._exit(0 if kept and not lasting.later(os.abort) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lasting.send()
    assert answered.value() == [False] * 8


def test_a_scan_that_nobody_began_is_dropped(lasting: StoreApart, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    begin = lasting._link.begin

    def noting(verb: str, *arguments: Any) -> None:
        asked.append(verb)
        begin(verb, *arguments)

    monkeypatch.setattr(lasting._link, "begin", noting)
    lasting.scan(SPACE)
    gc.collect()
    assert asked == ["scan", "drop"]


@pytest.mark.parametrize("answers", [True, False], ids=["answers", "hangs"])
def test_who_is_interrupted_goes_on_when_its_buffers_are_its_own_again(
    answers: bool, store: StoreApart, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not answers:
        monkeypatch.setattr("kvstore.apart.store.CLOSE_S", 0.2)
    process = process_of(store)
    os.kill(process, signal.SIGSTOP)
    interrupt = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    wake = threading.Timer(0.6, os.kill, (process, signal.SIGCONT))
    begin = time.monotonic()
    interrupt.start()
    if answers:
        wake.start()
    with pytest.raises(KeyboardInterrupt):
        store.usage()
    assert not store._link._asked
    if answers:
        assert time.monotonic() - begin > 0.5
        store.usage()
    else:
        assert not alive(process)


def test_a_process_that_cannot_be_launched_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    before = descriptors()
    with pytest.raises(StoreOpenError, match=r"no I/O process can be started.*nothing"):
        StoreApart("memory://x")
    assert descriptors() == before


def test_a_namespace_that_two_threads_name_at_once_has_one_number_and_the_next_has_another(lasting: StoreApart) -> None:
    spaces = [dataclasses.replace(SPACE, revision=revision) for revision in ("one", "two")]
    number = lasting._link.number
    with ThreadPoolExecutor(4) as pool:
        with lasting._link._naming:  # so that each has looked before it waits
            named = [pool.submit(number, spaces[0]) for _ in range(4)]
            time.sleep(0.1)
        numbers = {future.result(PATIENCE) for future in named}
    assert numbers == {number(spaces[0])}
    assert number(spaces[1]) not in numbers


def test_an_answer_stays_there() -> None:
    answer = Answer()
    assert not answer.wait(0.0)
    answer(7, None)
    assert answer.wait(0.0)
    assert answer.wait(0.0)
    assert answer.value() == 7


def test_closing_lets_go_of_memory_that_was_lent() -> None:
    before = descriptors()
    with StoreApart("memory://x", [rows(1)[0].data]):
        assert descriptors() > before
    assert descriptors() == before


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


def test_memory_that_is_not_mapped_there_is_an_error(lasting: StoreApart) -> None:
    answered = Answer()
    block = (EIGHT[0].digest, 0, 99, 0, SPACE.block_bytes())
    lasting._link.begin("get_many_into", (lasting._link.number(SPACE), [block]), {}, answered)
    lasting.send()
    with pytest.raises(TierUnavailable, match="lend it anew"):
        answered.value()
