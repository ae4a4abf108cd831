"""A backend made of hooks, from its opening to its end: what is read-only, unusable, closed or forked."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from keyvalue_helpers import CORRUPT, FAILED, HIT, ONE, DictStore, opened

from kvstore import inuse
from kvstore.errors import (
    KVStoreError,
    NotAStoreError,
    StoreAccessError,
    StoreClosedError,
    StoreFullError,
    StoreNotFoundError,
)
from kvstore.layout import BlockLayout
from kvstore.testing.supply import SPACE, get, keys, writes
from kvstore.url import READONLY, TierURL

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def store() -> Iterator[DictStore]:
    with opened() as it:
        yield it


# Read-only


def test_a_read_only_store_calls_neither_write_nor_remove() -> None:
    with opened() as owner:
        owner.put_many(SPACE, writes([1, 2]))
    owner.values[ONE] = b"damaged"
    with opened(owner.values, readonly=True) as store:
        assert store.put_many(SPACE, writes([1, 3])) == [FAILED, FAILED]
        assert store.delete_many(SPACE, keys([1, 2])) == [False, False]
        assert get(store, [1, 2]) == [CORRUPT, HIT]
        assert not {"write", "remove"} & set(store.calls)
        assert store.readonly


# Opening and closing


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (FileNotFoundError("gone"), StoreNotFoundError),
        (NotADirectoryError("a file"), NotAStoreError),
        (FileExistsError("a file"), NotAStoreError),
        (IsADirectoryError("a folder"), NotAStoreError),
        (OSError(errno.ENOSPC, "full"), StoreFullError),
        (PermissionError("no"), StoreAccessError),
        (sqlite3.DatabaseError("file is not a database"), StoreAccessError),
        (StoreFullError("said so itself"), StoreFullError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_location_that_cannot_be_used_is_an_error_of_its_own_class(
    fault: Exception, kind: type[KVStoreError]
) -> None:
    class Unusable(DictStore):
        def connect(self) -> None:
            raise fault

    with pytest.raises(KVStoreError) as caught:
        Unusable(TierURL.parse("dict://x").validated([READONLY]))
    assert type(caught.value) is kind
    if caught.value is not fault:
        assert str(caught.value).startswith(f"dict://x cannot be opened: {fault}")


def test_where_a_hook_names_nothing_but_a_path_the_error_says_what_is_the_matter_with_it() -> None:
    class Missing(DictStore):
        def connect(self) -> None:
            raise FileNotFoundError("/kv/none.db")

    with pytest.raises(StoreNotFoundError, match=r"^dict://x cannot be opened: /kv/none\.db does not exist$"):
        Missing(TierURL.parse("dict://x").validated([READONLY]))


def test_disconnect_is_called_once_and_its_errors_are_nobodys_business() -> None:
    store = opened()
    store.faults = {"disconnect": sqlite3.OperationalError("busy")}
    store.close()
    store.close()
    assert store.calls.count("disconnect") == 1


def test_disconnect_waits_for_the_hooks_that_are_at_work() -> None:
    store = opened()
    reading, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def slow(name: str, nbytes: int) -> None:  # noqa: ARG001
        reading.set()
        go_on.wait(30)
        order.append("read")

    store.read = slow  # type: ignore[method-assign, assignment]
    store.disconnect = lambda: order.append("disconnect")  # type: ignore[method-assign]
    reader, closer = threading.Thread(target=get, args=(store, [1])), threading.Thread(target=store.close)
    reader.start()
    assert reading.wait(30)
    closer.start()
    while not refuses(store):
        time.sleep(0.001)
    assert order == []
    go_on.set()
    reader.join()
    closer.join()
    assert order == ["read", "disconnect"]


def test_what_a_hook_still_uses_when_time_is_up_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inuse, "CLOSE_TIMEOUT_S", 0.01)
    store = opened()
    with store._use:
        store.close()
    assert refuses(store)
    assert "disconnect" not in store.calls


def test_a_forked_child_that_closes_leaves_the_connection_to_its_parent() -> None:
    with opened() as store:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later: fork beside threads
            child = os.fork()
        if child == 0:
            store.close()
            os._exit(store.calls.count("disconnect"))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def refuses(store: DictStore) -> bool:
    try:
        store.usage()
    except StoreClosedError:
        return True
    return False


def test_a_scan_that_is_half_done_ends_with_the_store() -> None:
    store = opened()
    store.put_many(small := replace(SPACE, layouts=(BlockLayout.opaque(1),)), writes(range(300), small))
    scan = store.scan(small)
    next(scan)
    store.close()
    with pytest.raises(StoreClosedError):
        list(scan)
