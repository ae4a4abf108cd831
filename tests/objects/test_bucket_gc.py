"""`kvstore gc` on a real bucket: thousands of objects, one by one where a store takes no batches, and only our own."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvstore import open_store
from kvstore.cli import EXIT_OK, run
from kvstore.collection import Rules, collect, survey
from kvstore.layout import BlockLayout
from kvstore.objects.client import BATCH
from kvstore.testing.clock import standing_clock
from kvstore.testing.supply import SPACE, get, held, keys, write, writes
from kvstore.types import GetOutcome, PutOutcome
from kvstore_zarr.objects import ObjectZarrStore

if TYPE_CHECKING:
    from kvstore import BlockStore
    from kvstore.testing.clock import MovableClock
    from kvstore.testing.servers import S3Server

SMALL = dataclasses.replace(SPACE, layouts=(BlockLayout.opaque(256),))


def gc(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert run(["gc", *args, "--json"]) == EXIT_OK
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def deletes(store: BlockStore) -> int:
    assert isinstance(store, ObjectZarrStore)
    return store.requests().get("DELETE", 0)


def below(server: S3Server, prefix: str) -> set[str]:
    return {meta["path"] for page in server.objects.list(prefix) for meta in page}


@pytest.mark.parametrize("client", ["obstore", pytest.param("fsspec", marks=pytest.mark.soak)])
def test_two_thousand_objects_over_the_capacity_go_in_batches(place: str, server: S3Server, client: str) -> None:
    url = f"{place}?client={client}"
    prefix = place.removeprefix(f"s3://{server.bucket}/")
    with open_store(url) as store:
        store.put_many(SMALL, writes(range(1500), SMALL))
        time.sleep(1.1)  # a store dates to the second, and any of one second may go first
        store.put_many(SMALL, writes(range(1500, 2000), SMALL))
        server.objects.put(f"{prefix}/{SMALL.name}/g0/notes.txt", b"mine")
        server.objects.put(f"{prefix}-beside/{SMALL.name}/zarr.json", b"not of this tier")
        usage = store.usage()
        cap = usage.overhead + usage.used // 4
        before = deletes(store)
        done = collect(store, survey(store, Rules(capacity=cap)))
        after = store.usage()
        assert after.used + after.overhead <= cap
        assert after.blocks == 2000 - done.over == usage.blocks // 4
        assert deletes(store) - before == -(-done.over // BATCH)
        assert set(get(store, range(1500), SMALL)) == {GetOutcome.MISS}
        assert set(get(store, range(1500, 2000), SMALL)) == {GetOutcome.HIT}
        assert store.namespaces() == [SMALL]
        assert store.drop_namespace(SMALL) == after.blocks
        assert store.namespaces() == []
        assert below(server, prefix) == {f"{prefix}/{SMALL.name}/g0/notes.txt"}
        assert below(server, f"{prefix}-beside") == {f"{prefix}-beside/{SMALL.name}/zarr.json"}


def test_a_store_that_takes_no_batches_is_asked_one_by_one(
    overwriting_server: S3Server, second_profile: str, serial: int
) -> None:
    with open_store(f"{overwriting_server.url(f'test-{serial}')}?profile={second_profile}") as store:
        store.put_many(SMALL, writes(range(60), SMALL))
        assert collect(store, survey(store, Rules(ttl=0.001))).expired == 60
        assert store.usage().blocks == 0
        assert get(store, range(60), SMALL) == [GetOutcome.MISS] * 60


def test_the_command_takes_its_rules_from_the_url_and_leaves_what_is_young(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store(place) as store:
        store.put_many(SMALL, writes(range(20), SMALL))
        time.sleep(1.1)  # a store dates to the second
        store.put_many(SMALL, writes(range(20, 25), SMALL))
        dated = sorted(info.created for info in store.scan_ages(SMALL))
        usage = store.usage()
    an_hour_later = (dated[19] + dated[20]) / 2 + 3600
    assert dated[19] < an_hour_later - 3600 < dated[20]
    with standing_clock(int(an_hour_later * 1e9)):
        said = gc(capsys, f"{place}?ttl=1h&sweep=1h")
        assert (said["dry_run"], said["to_go"]["blocks"]) == (True, 20)
        with open_store(place) as store:
            assert len(held(store, SMALL)) == 25
        cap = usage.overhead + usage.used // 5
        said = gc(capsys, f"{place}?ttl=1h", "--ttl", "2h", "--capacity", str(cap), "--yes")
        assert (said["removed"]["expired"], said["removed"]["over"]) == (0, 20)
        with open_store(place) as store:
            assert held(store, SMALL) == set(keys(range(20, 25)))


def test_an_interrupted_collection_is_completed_by_the_next(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvstore.collection.AT_ONCE", 100)
    with open_store(place) as store:
        store.put_many(SMALL, writes(range(150), SMALL))
        with pytest.raises(KeyboardInterrupt):
            collect(store, survey(store, Rules(ttl=0.001)), advance=stop)
        left = store.usage().blocks
        assert left == 50
        assert collect(store, survey(store, Rules(ttl=0.001))).expired == left
        assert store.usage().blocks == 0


def test_a_namespace_is_empty_for_long_before_it_goes_and_orphans_go_too(
    place: str, server: S3Server, clock: MovableClock
) -> None:
    prefix = place.removeprefix(f"s3://{server.bucket}/")
    other = dataclasses.replace(SMALL, revision="another")
    with open_store(place) as store:
        store.put_many(SMALL, [write(1, SMALL)])
        store.put_many(other, [write(1, other), write(2, other)])
        store.delete_many(SMALL, keys([1]))
        server.objects.delete(f"{prefix}/{other.name}/zarr.json")
        clock.advance(1800)
        done = collect(store, survey(store, Rules()))
        assert (done.namespaces, done.leftovers) == (0, 0)
        clock.advance(3600)
        done = collect(store, survey(store, Rules()))
        assert (done.namespaces, done.leftovers) == (1, 0)
        assert not [name for name in below(server, prefix) if SMALL.name in name]
        clock.advance(86400)
        server.objects.put(f"{prefix}/{other.name}/mine.txt", b"mine")
        done = collect(store, survey(store, Rules()))
        assert done.leftovers >= 2
        assert below(server, prefix) == {f"{prefix}/{other.name}/mine.txt"}


def test_a_block_that_expired_is_replaced_by_a_put_and_looked_for_no_more(
    place: str, client: str, clock: MovableClock
) -> None:
    with open_store(f"{place}?client={client}&ttl=1h&lookup_ttl=0") as store:
        assert store.put_many(SPACE, writes(range(40))) == [PutOutcome.STORED] * 40
        assert store.put_many(SPACE, writes([1])) == [PutOutcome.EXISTS]
        clock.advance(2 * 3600)
        assert store.contains_many(SPACE, keys(range(50))) == [False] * 50  # by a listing
        assert store.contains_many(SPACE, keys([1])) == [False]  # by asking for it
        assert store.put_many(SPACE, writes([1])) == [PutOutcome.STORED]
        assert get(store, [1, 2]) == [GetOutcome.HIT, GetOutcome.MISS]


def test_what_this_process_uses_does_not_expire_for_it(place: str, clock: MovableClock) -> None:
    with open_store(f"{place}?ttl=1h") as store:
        store.put_many(SPACE, writes([1, 2, 3]))
        for _ in range(3):
            clock.advance(0.9 * 3600)
            assert get(store, [1]) == [GetOutcome.HIT]
            store.touch_many(SPACE, keys([2]))
        assert get(store, [1, 2, 3]) == [GetOutcome.HIT, GetOutcome.HIT, GetOutcome.MISS]
        found = survey(store, Rules(ttl=3600.0))
        assert found.blocks == 1
    with open_store(f"{place}?ttl=1h") as store:  # another one cannot know
        assert get(store, [1, 2, 3]) == [GetOutcome.MISS] * 3
