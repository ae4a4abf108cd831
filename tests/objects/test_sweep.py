"""The sweep of a bucket: one process does it, another takes over, and it ends with its store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING

from kvstore import open_store
from kvstore.objects import connect
from kvstore.testing.patience import PATIENCE, wait_for, within
from kvstore.testing.supply import SPACE, get, held, keys, writes
from kvstore.types import GetOutcome
from kvstore.url import TierURL
from kvstore_zarr.objects import ObjectZarrStore
from kvstore_zarr.objects.lease import FOLDER, Lease, standing

if TYPE_CHECKING:
    from collections.abc import Generator

    from kvstore.objects.client import ObjectClient
    from kvstore.testing.clock import MovableClock
    from kvstore.testing.servers import S3Server

SWEEPER = Path(__file__).with_name("sweeper.py")


def sweeping(url: str) -> ObjectZarrStore:
    store = open_store(url)
    assert isinstance(store, ObjectZarrStore)
    return store


def client_of(place: str) -> closing[ObjectClient]:
    # What is asked here is who wins, and not how fast the server of the tests is beside all others.
    return closing(connect(TierURL.parse(place, timeout=PATIENCE).validated(ObjectZarrStore.options)))


class Sweeping:
    """A process with the tier open, and the number of sweeps it has told of."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._lines.get(timeout=PATIENCE).startswith("open")
        self.sweeps = 0

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def look(self) -> int:
        """How often it has swept by now."""
        try:
            while True:
                self.sweeps = int(self._lines.get_nowait().split()[1])
        except Empty:
            return self.sweeps


@contextmanager
def another(url: str) -> Generator[Sweeping]:
    with subprocess.Popen(
        [sys.executable, SWEEPER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Sweeping(process)
        finally:
            process.kill()


def test_two_processes_elect_one_and_when_it_is_killed_the_other_takes_over(place: str) -> None:
    with ExitStack() as stack, client_of(place) as client:
        pair = [stack.enter_context(another(f"{place}?ttl=1s&sweep=1s")) for _ in range(2)]
        assert wait_for(lambda: any(one.look() >= 2 for one in pair))
        busy, idle = sorted(pair, key=lambda one: -one.look())
        lease = standing(client)
        assert lease is not None
        assert idle.look() == 0
        with open_store(place) as store:
            store.put_many(SPACE, writes(range(3)))
            assert wait_for(lambda: not held(store))
        busy.process.send_signal(signal.SIGKILL)
        busy.process.wait()
        done = busy.look()
        assert wait_for(lambda: idle.look() >= 1)
        after = standing(client)
        assert after is not None
        assert (after.number, after.owner != lease.owner) == (lease.number + 1, True)
        assert len([entry for page in client.list(FOLDER) for entry in page]) == 1
        assert busy.look() == done


def test_a_sweep_removes_what_has_expired_and_goes_below_an_exceeded_capacity(place: str, server: S3Server) -> None:
    prefix = place.removeprefix(f"s3://{server.bucket}/")
    server.objects.put(f"{prefix}/notes.txt", b"mine")
    server.objects.put(f"{prefix}-beside/{SPACE.name}/zarr.json", b"not of this tier")
    nbytes = 40 * SPACE.block_bytes()
    with sweeping(f"{place}?capacity={nbytes}&sweep=1s") as store:
        store.put_many(SPACE, writes(range(50)))
        assert wait_for(lambda: store.usage().used <= nbytes)
        usage = store.usage()
        assert 0.8 * nbytes < usage.used + usage.overhead <= 0.9 * nbytes
        assert usage.capacity == nbytes
        assert wait_for(lambda: store.sweeps.over == 50 - store.usage().blocks)
        assert set(get(store, range(50))) == {GetOutcome.HIT, GetOutcome.MISS}
        assert not store.capabilities.capacity_is_exact
    names = {meta["path"] for page in server.objects.list(prefix.rpartition("/")[0]) for meta in page}
    assert {f"{prefix}/notes.txt", f"{prefix}-beside/{SPACE.name}/zarr.json"} <= names


def test_a_store_that_is_closed_sweeps_no_more_and_lets_others_have_the_lease(place: str) -> None:
    before = threading.active_count()
    with client_of(place) as client:
        store = sweeping(f"{place}?ttl=1h&sweep=1s")
        assert wait_for(lambda: store.sweeps.sweeps >= 1)
        with within(0.5):
            store.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "kvstore-sweep"]
        lease = standing(client)
        assert lease is not None
        assert lease.released
        swept = store.sweeps.sweeps
        with sweeping(f"{place}?ttl=1h&sweep=1s") as other:
            assert wait_for(lambda: other.sweeps.sweeps >= 1)
        assert store.sweeps.sweeps == swept
    assert wait_for(lambda: threading.active_count() <= before)


def test_a_forked_child_does_not_sweep_and_closing_there_takes_nothing_away(place: str) -> None:
    with sweeping(f"{place}?ttl=1h&sweep=1s&client=fsspec") as store:
        assert wait_for(lambda: store.sweeps.sweeps >= 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            alone = [thread.name for thread in threading.enumerate()]
            store.close()
            os._exit("kvstore-sweep" in alone)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        swept = store.sweeps.sweeps
        assert wait_for(lambda: store.sweeps.sweeps > swept)


def test_a_read_only_store_does_not_sweep(place: str) -> None:
    with open_store(place) as store:
        store.put_many(SPACE, writes(range(2)))
    with sweeping(f"{place}?ttl=1s&sweep=1s&readonly=true") as store:
        time.sleep(1.5)
        assert store.sweeps.sweeps == 0
        assert held(store) == set(keys(range(2)))


def test_a_store_that_overwrites_is_swept_all_the_same(
    overwriting_server: S3Server, second_profile: str, serial: int
) -> None:
    url = f"{overwriting_server.url(f'test-{serial}')}?profile={second_profile}&ttl=1s&sweep=1s"
    with sweeping(url) as one, sweeping(url) as two:
        one.put_many(SPACE, writes(range(5)))
        assert wait_for(lambda: not held(one))
        assert wait_for(lambda: one.sweeps.expired + two.sweeps.expired >= 5)
        assert one.sweeps.failed == two.sweeps.failed == 0


def test_of_many_candidates_one_has_the_lease_and_keeps_it_while_it_renews(place: str, clock: MovableClock) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(client_of(place)) for _ in range(6)]
        leases = [Lease(client, 100.0) for client in clients]
        won: list[bool] = [False] * 6

        def take(number: int) -> None:
            won[number] = leases[number].take()

        threads = [threading.Thread(target=take, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert won.count(True) == 1
        holder, other = leases[won.index(True)], leases[won.index(False)]
        for _ in range(3):
            clock.advance(250)
            assert holder.renew()
            assert not other.take()
        clock.advance(301)
        assert other.take()
        assert not holder.renew()
        other.release()
        assert holder.take()
