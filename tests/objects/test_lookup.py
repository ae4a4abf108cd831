"""Existence at the price of a list: how many requests a lookup costs, what is remembered, and what ends that."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from kvstore import open_store
from kvstore.inuse import InUse
from kvstore.objects.client import Listed, ObjectClient
from kvstore.objects.faults import Kind, RequestFailed
from kvstore.objects.side import side_by_side
from kvstore.testing.proxy import FaultProxy
from kvstore.testing.supply import SPACE, get, key, keys, write, writes
from kvstore.types import GetOutcome, PutOutcome
from kvstore_zarr.metadata import NamespaceTree
from kvstore_zarr.objects import ObjectZarrStore
from kvstore_zarr.objects.lookup import Lookup

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore import BlockStore
    from kvstore.testing.servers import S3Server
    from kvstore.types import BlockKey

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS
TREE = NamespaceTree(SPACE)


class Bucket(ObjectClient):
    """A bucket that is a set of names: what a lookup asks of it, without a server that takes minutes to fill."""

    name = "names"

    def __init__(self, names: set[str]) -> None:
        super().__init__(4.0)
        self.quickest = 0.03  # as over a network: however busy this machine is, no listing is late
        self.names = sorted(names)
        self._there = names

    def _exists(self, path: str) -> bool:
        return path in self._there

    def _pages(self, folder: str, after: str) -> Iterator[Sequence[Listed]]:
        found = [name for name in self.names if name.startswith(f"{folder}/") and name > after]
        for start in range(0, len(found), 1000):
            yield [Listed(name, 1, 0.0) for name in found[start : start + 1000]]

    def _get(self, path: str, start: int) -> Any:
        raise NotImplementedError

    def _put(self, path: str, parts: Any, *, new: bool) -> None:
        raise NotImplementedError

    def _delete(self, path: str) -> None:
        raise NotImplementedError

    def _folders(self) -> Sequence[str]:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def fault_of(self, error: Exception) -> RequestFailed:
        return RequestFailed(Kind.REFUSED, str(error))


def requests_of(store: BlockStore) -> dict[str, int]:
    assert isinstance(store, ObjectZarrStore)
    return store.requests()


def bucket_of(objects: int) -> Bucket:
    """So many objects, the documents of the arrays among them."""
    names: set[str] = set()
    number = 0
    while len(names) < objects:
        name = key(number)
        names |= {TREE.block(name), f"{TREE.folder(name)}/zarr.json"}
        number += 1
    return Bucket(set(sorted(names)[:objects]))


def asked(bucket: Bucket, number: int = 1000) -> list[BlockKey]:
    """Half of them are there, where there are enough, the other half nowhere."""
    there = [found for name in bucket.names if (found := TREE.key_at(name)) is not None][
        :: max(1, len(bucket.names) // 600)
    ]
    return [*there[: number // 2], *keys(range(10_000_000, 10_000_000 + number - len(there[: number // 2])))]


@pytest.mark.parametrize("objects", [1, 300, 1000, 1500, 2000])
def test_up_to_two_thousand_objects_a_thousand_keys_cost_at_most_two_lists(objects: int) -> None:
    bucket = bucket_of(objects)
    names = asked(bucket)
    assert Lookup(bucket, 30).present(TREE, names) == [TREE.block(name) in bucket.names for name in names]
    sent = bucket.requests.snapshot()
    print(f"{objects} objects, 1,000 keys: {sent}")
    assert sent == {"LIST": max(1, -(-objects // 1000))}


@pytest.mark.parametrize("objects", [5_000, 20_000, 100_000])
def test_a_listing_is_left_as_soon_as_asking_is_cheaper(objects: int) -> None:
    bucket = bucket_of(objects)
    there = set(bucket.names)
    names = asked(bucket)
    lookup = Lookup(bucket, 0)
    assert lookup.present(TREE, names) == [TREE.block(name) in there for name in names]
    sent = bucket.requests.snapshot()
    print(f"{objects} objects, 1,000 keys: {sent}")
    assert 32 * sent.get("LIST", 0) + sent.get("HEAD", 0) <= 1000 + 32  # in HEADs: what asking for each would cost
    lookup.present(TREE, names)
    again = bucket.requests.snapshot()
    if objects == 100_000:
        assert again["LIST"] == 1  # known by now to be too many


class Slow(Bucket):
    """Of which a page of a listing takes as long as asking for so many objects."""

    def __init__(self, names: set[str], page_s: float, ask_s: float) -> None:
        super().__init__(names)
        self.page_s, self.ask_s = page_s, ask_s

    def _exists(self, path: str) -> bool:
        time.sleep(self.ask_s)
        return super()._exists(path)

    def _pages(self, folder: str, after: str) -> Iterator[Sequence[Listed]]:
        for page in super()._pages(folder, after):
            time.sleep(self.page_s)
            yield page


def test_a_store_that_lists_slowly_is_asked_and_one_that_answers_slowly_is_listed() -> None:
    names = bucket_of(12_000).names
    slow_lists, slow_answers = Slow(set(names), 0.1, 0.001), Slow(set(names), 0.001, 0.02)
    wanted = asked(slow_lists)
    sent: list[dict[str, int]] = []
    for bucket, believed in ((slow_lists, 0.02), (slow_answers, 0.5)):
        lookup = Lookup(bucket, 0)
        lookup._page_s, lookup._ask_s = believed, 0.001
        for _ in range(4):
            lookup.present(TREE, wanted)
        before = Counter(bucket.requests.snapshot())
        lookup.present(TREE, wanted)
        sent.append(Counter(bucket.requests.snapshot()) - before)
    assert sent[0] == {"HEAD": 1000}
    assert sent[1]["LIST"] > 6  # of 12, or fewer where this machine is so busy that they are late
    assert sent[1].get("HEAD", 0) < 500


class Held(Bucket):
    """Of which a listing gets no page until it is let go, from page number `page` on."""

    def __init__(self, names: set[str], page: int = 0, ask_s: float = 0.0) -> None:
        super().__init__(names)
        self.page, self.ask_s, self.let_go, self.begun = page, ask_s, threading.Event(), 0

    def _exists(self, path: str) -> bool:
        time.sleep(self.ask_s)
        return super()._exists(path)

    def _pages(self, folder: str, after: str) -> Iterator[Sequence[Listed]]:
        self.begun += 1
        for number, page in enumerate(super()._pages(folder, after)):
            if number >= self.page:
                assert self.let_go.wait(60)
            yield page


def let_go(bucket: Held, lookup: Lookup) -> None:
    """Have what was held come, and wait until that has been seen."""
    before = dict(lookup._pages)
    bucket.let_go.set()
    deadline = time.monotonic() + 60
    while lookup._pages == before and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.parametrize(("objects", "page"), [(100_000, 0), (2_000, 1)])
def test_a_listing_that_does_not_come_is_not_waited_for(objects: int, page: int) -> None:
    bucket = Held(bucket_of(objects)._there, page)
    there = set(bucket.names)
    names = asked(bucket)
    lookup = Lookup(bucket, 0)
    right = [TREE.block(name) in there for name in names]
    assert lookup.present(TREE, names) == right  # although nothing was let go
    sent = bucket.requests.snapshot()
    print(f"{objects} objects, 1,000 keys, page {page} does not come: {sent}")
    assert sent.get("LIST", 0) == page  # what is under way is not counted yet
    reached = [name for name in bucket.names if name.startswith(TREE.group_folder(0))][: page * 1000]
    assert sent["HEAD"] == sum(TREE.block(name) > max(reached, default="") for name in names)
    assert lookup.present(TREE, names) == right
    again = Counter(bucket.requests.snapshot()) - Counter(sent)
    assert again == {"HEAD": 1000}
    assert bucket.begun == 1  # one that has not come yet is not asked for twice
    let_go(bucket, lookup)
    assert bucket.requests.snapshot()["LIST"] == 1 + page  # the rest is nobody's any more
    (pages,) = (pages for pages, _ in lookup._pages.values())
    assert pages == pytest.approx(objects / 1000, rel=0.2)  # but how many there are is known by now


def test_what_a_late_page_says_is_not_believed() -> None:
    bucket = Held(bucket_of(900)._there)
    lookup = Lookup(bucket, 30)
    lookup.present(TREE, keys(range(10_000_000, 10_001_000)))
    removed = next(name for name in bucket.names if TREE.key_at(name) is not None)
    lookup.forget(removed)
    let_go(bucket, lookup)
    assert not lookup.believes(removed)


def test_a_page_that_comes_while_the_keys_are_asked_for_saves_the_rest_of_the_requests() -> None:
    class Freed(Held):
        def _exists(self, path: str) -> bool:
            if self.requests.snapshot()["HEAD"] >= 50:
                self.let_go.set()
            return super()._exists(path)

    bucket = Freed(bucket_of(900)._there, ask_s=0.02)
    there = set(bucket.names)
    names = asked(bucket)
    assert Lookup(bucket, 0).present(TREE, names) == [TREE.block(name) in there for name in names]
    sent = bucket.requests.snapshot()
    assert sent["LIST"] == 1
    assert 50 <= sent["HEAD"] < 900


def test_a_store_is_not_closed_under_a_listing_that_nobody_waits_for() -> None:
    bucket, inside = Held(bucket_of(900)._there), InUse("the bucket")
    lookup = Lookup(bucket, 0, inside=inside)
    with inside:
        lookup.present(TREE, asked(bucket))
    closing = threading.Thread(target=inside.end)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    bucket.let_go.set()
    closing.join(60)
    assert not closing.is_alive()


def test_a_listing_that_fails_is_no_matter_and_a_request_that_fails_ends_the_look_up() -> None:
    class Refusing(Held):
        def _pages(self, folder: str, after: str) -> Iterator[Sequence[Listed]]:
            self.begun += 1
            raise RequestFailed(Kind.DENIED, f"no listing of {folder}/{after}")

    class Failing(Held):
        def _exists(self, path: str) -> bool:
            if self.requests.snapshot()["HEAD"] >= 100:
                raise RequestFailed(Kind.DENIED, f"no HEAD of {path}")
            return super()._exists(path)

    bucket = Refusing(bucket_of(900)._there)
    names, lookup = asked(bucket), Lookup(bucket, 0)
    for _ in range(2):
        assert lookup.present(TREE, names) == [TREE.block(name) in bucket._there for name in names]
    assert bucket.begun == 1  # for a while it is not tried again
    bucket = Failing(bucket_of(10)._there, ask_s=0.01)
    lookup = Lookup(bucket, 0)
    with pytest.raises(RequestFailed, match="no HEAD"):
        lookup.present(TREE, keys(range(1000)))
    assert bucket.requests.snapshot()["HEAD"] < 500
    let_go(bucket, lookup)


def test_a_mistake_in_a_listing_is_raised() -> None:
    class Broken(Bucket):
        def list(self, folder: str = "") -> Iterator[Sequence[Listed]]:
            raise ZeroDivisionError(folder)

    with pytest.raises(ZeroDivisionError):
        Lookup(Broken(set()), 0).present(TREE, keys(range(1000)))


def test_few_keys_are_asked_for_one_by_one() -> None:
    bucket = bucket_of(500)
    Lookup(bucket, 30).present(TREE, asked(bucket, 20))
    assert bucket.requests.snapshot() == {"HEAD": 20}


def test_what_somebody_else_keeps_among_the_blocks_is_no_matter() -> None:
    folder = TREE.group_folder(0)
    bucket = bucket_of(500)
    foreign = {
        f"{folder}/{name}" for name in ("README", "zz/top", "0/x", *(f"a{number:04d}" for number in range(1500)))
    }
    mixed = Bucket(foreign | set(bucket.names))
    names = asked(bucket)
    there = set(bucket.names)
    assert Lookup(mixed, 30).present(TREE, names) == [TREE.block(name) in there for name in names]


def test_the_server_counts_as_many_requests_as_the_store(server: S3Server, place: str, client: str) -> None:
    with open_store(place) as store:
        store.put_many(SPACE, writes(range(40)))
    with FaultProxy(server.port) as proxy, open_store(place, client=client, endpoint=proxy.endpoint) as store:
        before = proxy.counts
        asked_before = requests_of(store)
        assert isinstance(store, ObjectZarrStore)
        store._tier.lookup._ask_s = 0.01  # however busy this machine is, the listing is not late
        there = store.contains_many(SPACE, keys(range(1000)))
        assert there == [True] * 40 + [False] * 960
        assert proxy.counts - before == {"LIST": 1}
        sent = requests_of(store)
        assert sent["LIST"] - asked_before["LIST"] == 1
        assert sent.get("HEAD", 0) == asked_before.get("HEAD", 0)


def test_a_lookup_is_remembered_for_its_time_and_a_failed_load_ends_it(
    server: S3Server, place: str, client: str
) -> None:
    with (
        open_store(place) as other,
        FaultProxy(server.port) as proxy,
        open_store(place, client=client, endpoint=proxy.endpoint, lookup_ttl="60s") as store,
    ):
        other.put_many(SPACE, writes(range(4)))
        assert store.contains_many(SPACE, keys(range(4))) == [True] * 4
        before = proxy.counts
        assert store.contains_many(SPACE, keys(range(4))) == [True] * 4
        assert proxy.counts == before
        other.delete_many(SPACE, keys([1]))
        assert store.contains_many(SPACE, keys([1])) == [True]  # believed
        assert get(store, [1]) == [MISS]
        assert store.contains_many(SPACE, keys([1])) == [False]  # asked


def test_what_is_remembered_is_asked_again_when_its_time_is_over(place: str, client: str) -> None:
    with open_store(place) as other, open_store(place, client=client, lookup_ttl="200ms") as store:
        other.put_many(SPACE, writes([1]))
        assert store.contains_many(SPACE, keys([1])) == [True]
        other.delete_many(SPACE, keys([1]))
        time.sleep(0.25)
        assert store.contains_many(SPACE, keys([1])) == [False]


def test_what_another_process_stores_is_found_at_once(place: str, client: str) -> None:
    with open_store(place) as other, open_store(place, client=client) as store:
        assert store.contains_many(SPACE, keys(range(3))) == [False] * 3
        other.put_many(SPACE, writes(range(3)))
        assert store.contains_many(SPACE, keys(range(3))) == [True] * 3


def test_a_block_that_is_believed_in_and_gone_is_stored_anew(place: str, client: str) -> None:
    with open_store(place) as other, open_store(place, client=client) as store:
        store.put_many(SPACE, [write(1)])
        other.delete_many(SPACE, keys([1]))
        assert store.put_many(SPACE, [write(1)]) == [PutOutcome.STORED]
        assert get(store, [1]) == [HIT]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_among_a_hundred_thousand_objects_a_lookup_takes_no_longer_than_asking(server: S3Server, place: str) -> None:
    prefix = place.removeprefix(f"s3://{server.bucket}/")
    with open_store(place) as store:
        store.put_many(SPACE, [write(0)])
    names = [f"{prefix}/{TREE.block(key(number))}" for number in range(1, 100_000)]
    side_by_side(lambda name: server.objects.put(name, b"."), names)
    wanted = keys(range(99_500, 100_500))
    times: list[tuple[float, float]] = []
    for _ in range(5):
        began = time.perf_counter()
        side_by_side(lambda name: exists(server, f"{prefix}/{TREE.block(name)}"), wanted)
        heads = time.perf_counter() - began
        with open_store(place, lookup_ttl=0) as fresh:
            began = time.perf_counter()
            assert sum(fresh.contains_many(SPACE, wanted)) == 500
            times.append((time.perf_counter() - began, heads))
            print(f"lookup {times[-1][0]:.3f} s, 1,000 HEADs {heads:.3f} s, {requests_of(fresh)}")
    assert statistics.median(taken / heads for taken, heads in times) <= 1.5


def exists(server: S3Server, path: str) -> bool:
    try:
        server.objects.head(path)
    except FileNotFoundError:
        return False
    return True
