"""What a tier takes of its process and its machine is bounded: descriptors, shared memory; and PID namespaces apart."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from local_helpers import HIT

from kvstore import open_store
from kvstore.testing.supply import SPACE, get, writes

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])

FEW_DESCRIPTORS = """
import resource, sys, threading, time
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from pathlib import Path
from tiering_helpers import SPACE, check, engine_load, engine_store, keys
from kvstore.tiering import SecondaryTier, TieringManager

most = 0
def watch():
    global most
    while True:
        most = max(most, len(list(Path("/proc/self/fd").iterdir())))
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()

urls = [f"{scheme}://{sys.argv[1]}/{scheme}?scrub=1MB/s" for scheme in ("file", "lmdb")]
tiers = [SecondaryTier(url, SPACE, threads=16) for url in urls]
with TieringManager(SPACE, tiers, primary_slots=64) as manager:
    for prompt in "abcdef":
        assert len(engine_store(manager, keys(48, prompt))) == 48
        assert manager.drain(60)
    for prompt in "abcdef":
        assert engine_load(manager, keys(48, prompt)) == 48
    check(manager)
    maps = Path("/proc/self/maps").read_text()
    stats = [(tier.stores, tier.failed_stores, tier.corrupt) for tier in manager.stats().tiers]
print(most, "/dev/shm" in maps or "SYSV" in maps, stats)
"""


def test_a_manager_with_16_threads_over_both_tiers_gets_along_with_256_descriptors(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FEW_DESCRIPTORS, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": HERE}, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    most, shared, stats = done.stdout.split(maxsplit=2)
    assert int(most) < 200
    assert shared == "False"  # no memory that outlives the process
    assert stats.strip() == str([(288, 0, 0)] * 2)


EVICTING = """
import os, resource, sys, threading, time
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from concurrent.futures import ThreadPoolExecutor
from kvstore import BlockKey, BlockLayout, BlockWrite, Namespace, open_store

SPACE = Namespace("small", "1", (BlockLayout.opaque(8192),), block_tokens=16)
def put(start, count):
    keys = [BlockKey(number.to_bytes(4, "big") * 8) for number in range(start, start + count)]
    return [outcome.name for outcome in store.put_many(SPACE, [BlockWrite(key, key.digest * 256) for key in keys])]

most, over = 0, False
def watch():
    global most
    while not over:
        most = max(most, len(os.listdir("/proc/self/fd")))
        time.sleep(0.001)

with open_store(f"file://{sys.argv[1]}?capacity=16MB") as store:
    for start in range(0, 1500, 100):
        put(start, 100)
    full = store.usage().blocks
    watching = threading.Thread(target=watch)
    watching.start()
    with ThreadPoolExecutor(8) as pool:
        outcomes = set(sum(pool.map(lambda start: put(start, 300), range(10_000, 18_000, 1000)), []))
    over = True
    watching.join()
    after = store.usage().blocks
    hogged = [os.open("/dev/null", os.O_RDONLY) for _ in range(256 - len(os.listdir("/proc/self/fd")) - 9)]
    # whatever number of victims: also as many as there are descriptors left
    with_few = {outcome for count in range(1, 25) for outcome in put(50_000 + 100 * count, count)}
    print(most, full, after, store.usage().blocks, outcomes, with_few)
"""


def test_evictions_leave_descriptors_and_take_nothing_that_they_cannot_replace(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EVICTING, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": HERE}, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    most, full, after, in_the_end, outcomes = done.stdout.split(maxsplit=4)
    assert outcomes.strip() == "{'STORED'} {'STORED'}"
    assert int(most) < 160
    assert int(full) > 900
    assert int(after) > 0.9 * int(full)
    assert int(in_the_end) > 0.9 * int(full)


IN_A_NAMESPACE = """
import sys
from kvstore import open_store
from kvstore.testing.supply import SPACE, get, writes
try:
    with open_store(sys.argv[1]) as store:
        numbers = [int(sys.argv[2]), *range(4)]
        store.put_many(SPACE, writes(numbers))
        print([outcome.name for outcome in get(store, numbers)], flush=True)
        sys.stdin.readline()
        print([outcome.name for outcome in get(store, numbers)], flush=True)
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


@pytest.fixture(params=["root", "user"])
def unshare(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The command before one that is to have a PID namespace of its own, as two containers have."""
    command = ["unshare", "--pid", "--fork", "--kill-child"]
    command += ["--user", "--map-root-user"] if request.param == "user" else []
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("PID namespaces are not permitted here")
    return command


def test_two_pid_namespaces_on_one_tier_work_or_are_told_why_not(scheme: str, root: Path, unshare: list[str]) -> None:
    def start(number: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*unshare, sys.executable, "-c", IN_A_NAMESPACE, f"{scheme}://{root}", str(number)],
            env={**os.environ, "PYTHONPATH": HERE}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    first = start(10)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == str(["HIT"] * 5) + "\n"
        told = start(11).communicate("\n", timeout=60)[0]
        assert told == f"{['HIT'] * 5}\n" * 2 or ("StoreAccessError" in told and "PID namespace" in told)
        assert first.communicate("\n", timeout=60)[0] == str(["HIT"] * 5) + "\n"
    finally:
        first.kill()
        first.communicate()
    with open_store(f"{scheme}://{root}") as store:
        assert get(store, [10, *range(4)]) == [HIT] * 5
        assert store.usage().blocks == len(list(store.scan(SPACE)))
        assert all(outcome.present for outcome in store.put_many(SPACE, writes(range(20, 24))))


READING = """
import sys, time
from kvstore import open_store
with open_store(sys.argv[1]) as store, store._tier.catalog.read() as snapshot:
    snapshot.totals()
    print("reading", flush=True)
    time.sleep(60)
"""


def test_the_reader_slots_of_the_killed_are_freed_while_others_work_on(scheme: str, root: Path) -> None:
    with open_store(f"{scheme}://{root}") as store:
        store.put_many(SPACE, writes(range(4)))
        environment = store._tier.environment  # type: ignore[attr-defined]
        for _ in range(3):
            process = subprocess.Popen(
                [sys.executable, "-c", READING, f"{scheme}://{root}"],
                env={**os.environ, "PYTHONPATH": HERE}, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert process.stdout is not None
            assert process.stdout.readline() == "reading\n"
            process.kill()
            process.communicate()
        before = environment._opened.env.info()["num_readers"]
        time.sleep(1.1)  # a process looks for the dead once a second
        store.put_many(SPACE, writes(range(4, 8)))
    with open_store(f"{scheme}://{root}") as store:
        store.put_many(SPACE, writes(range(8, 12)))
        readers = store._tier.environment._opened.env.readers()  # type: ignore[attr-defined]
        assert before >= 3
        assert len([line for line in readers.splitlines() if line.strip()]) <= 2, readers
        assert not list(root.rglob("lease-*"))[1:]
