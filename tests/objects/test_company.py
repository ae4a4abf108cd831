"""Others in the bucket, other writers, other processes: nobody's objects are touched, and one block is one object."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING

import pytest

from kvstore import open_store
from kvstore.errors import StoreOpenError
from kvstore.objects.side import side_by_side
from kvstore.testing.proxy import FaultProxy
from kvstore.testing.supply import SPACE, get, held, key, keys, write, writes
from kvstore.types import GetOutcome, PutOutcome
from kvstore_zarr.metadata import NamespaceTree

if TYPE_CHECKING:
    from kvstore.testing.servers import S3Server

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS
STORED, EXISTS = PutOutcome.STORED, PutOutcome.EXISTS
TREE = NamespaceTree(SPACE)


def test_a_thousand_objects_of_somebody_else_are_no_matter_and_stay(server: S3Server, place: str, client: str) -> None:
    prefix = place.removeprefix(f"s3://{server.bucket}/")
    with open_store(place) as store:
        store.put_many(SPACE, writes(range(3)))
    folder = f"{prefix}/{SPACE.name}"
    foreign = [
        *(f"{prefix}/{number:04d}.parquet" for number in range(1000)),
        *(f"{prefix}-next/door", f"{prefix}/README.md", f"{prefix}/{'0' * 32}/not-ours", f"{prefix}/deep/er/file"),
        *(f"{folder}/note", f"{folder}/g0/note", f"{folder}/g7/a7/1.2.3", f"{folder}/g0/zz/1.2.3.4.5.0"),
        f"{prefix}/{TREE.folder(key(0))}/backup of {TREE.block(key(0)).rpartition('/')[2]}",
    ]
    side_by_side(lambda name: server.objects.put(name, b"somebody's"), foreign)
    with open_store(place, client=client) as store:
        assert store.namespaces() == [SPACE]
        assert held(store) == set(keys(range(3)))
        assert store.usage().blocks == 3
        assert store.contains_many(SPACE, keys(range(100))) == [True] * 3 + [False] * 97
        assert get(store, range(4)) == [HIT, HIT, HIT, MISS]
        assert store.put_many(SPACE, [write(3)]) == [STORED]
        assert store.delete_many(SPACE, keys(range(4))) == [True] * 4
    for name in (foreign[0], *foreign[1000:]):
        assert bytes(server.objects.get(name).bytes()) == b"somebody's"


def put_all(url: str, client: str) -> list[PutOutcome]:
    """In a process of its own: put the same eight blocks as everybody else."""
    with open_store(url, client=client) as store:
        return store.put_many(SPACE, writes(range(8)))


def test_sixteen_writers_of_the_same_keys_leave_one_intact_object_each(place: str) -> None:
    """Field report 9. Four processes with four threads each, both clients."""
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(put_all, place, ("obstore", "fsspec")[number % 2]) for number in range(16)]
        outcomes = [job.result() for job in jobs]
    for number in range(8):
        assert [outcome[number] for outcome in outcomes].count(STORED) == 1
    with open_store(place) as store:
        assert get(store, range(8)) == [HIT] * 8
        assert store.usage().blocks == 8


def test_writers_on_a_server_that_overwrites_leave_one_intact_object_each(
    overwriting_server: S3Server, second_profile: str, serial: int
) -> None:
    url = f"{overwriting_server.url(f'writers-{serial}')}?profile={second_profile}"
    with open_store(url) as store, ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda _: store.put_many(SPACE, writes(range(4))), range(8)))
        assert {outcome for outcome_of_all in outcomes for outcome in outcome_of_all} <= {STORED, EXISTS}
        assert get(store, range(4)) == [HIT] * 4
        assert store.put_many(SPACE, writes(range(4))) == [EXISTS] * 4
        assert store.usage().blocks == 4


def test_a_server_that_overwrites_is_found_out_and_asked_first(
    overwriting_server: S3Server, second_profile: str, client: str, serial: int
) -> None:
    url = overwriting_server.url(f"asked-{serial}")
    with (
        FaultProxy(overwriting_server.port) as proxy,
        open_store(url, profile=second_profile, endpoint=proxy.endpoint, client=client, lookup_ttl=0) as store,
    ):
        store.put_many(SPACE, [write(1)])
        before = proxy.counts
        assert store.put_many(SPACE, [write(1)]) == [EXISTS]
        assert proxy.counts - before == {"HEAD": 1}


def test_what_one_process_stores_another_hits(place: str, client: str) -> None:
    with (
        open_store(place, client=client) as store,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as elsewhere,
    ):
        elsewhere.submit(put_all, place, client).result()
        assert store.contains_many(SPACE, keys(range(9))) == [True] * 8 + [False]
        assert get(store, range(8)) == [HIT] * 8


# Forks and ends

FORKED = """
import os, sys
from kvstore import open_store
from kvstore.errors import StoreClosedError
from kvstore.testing.supply import SPACE, get, writes
url, client = sys.argv[1:]
store = open_store(url, client=client)
store.put_many(SPACE, writes(range(3)))
child = os.fork()
if child == 0:
    try:
        get(store, [0])
    except StoreClosedError:
        pass
    else:
        os._exit(1)
    try:
        with open_store(url) as own:
            through = own.capabilities.notes[0]
            os._exit(0 if {one.value for one in get(own, range(3))} == {"hit"} and through == "client: fsspec" else 2)
    finally:
        os._exit(3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
LEFT_OPEN = """
import sys, threading
from kvstore import open_store
from kvstore.testing.supply import SPACE, get, writes
store = open_store(sys.argv[1], client=sys.argv[2])
store.put_many(SPACE, writes(range(4)))
threading.Thread(target=lambda: [get(store, range(4)) for _ in range(1000)], daemon=True).start()
print(*(one.value for one in get(store, range(4))))
"""


def run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_forked_child_is_refused_and_opens_one_of_its_own_through_fsspec(place: str) -> None:
    done = run(FORKED, place, "obstore")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_that_insists_on_obstore_is_told_why_not(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore.objects import obstore_client

    monkeypatch.setattr(obstore_client, "_used_by", 1)  # as in a child of process 1
    with pytest.raises(StoreOpenError, match=r"forked.*spawn.*client=fsspec"):
        open_store(place, client="obstore")


@pytest.mark.parametrize("runs", [pytest.param(2, id="twice"), pytest.param(20, id="often", marks=pytest.mark.soak)])
def test_a_process_that_leaves_a_busy_store_open_ends_at_once_and_well(place: str, client: str, runs: int) -> None:
    for _ in range(runs):
        done = run(LEFT_OPEN, place, client)
        assert (done.returncode, done.stdout, done.stderr) == (0, "hit hit hit hit\n", "")
