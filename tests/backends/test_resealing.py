"""Every block of a tier under new data keys, while it is in use and after an interruption."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from sealing_helpers import keyring, sealed

from kvstore import BlockStore, GetOutcome, PutOutcome, open_store
from kvstore.marks import Mark
from kvstore.rekeying import keyrings_of, reseal
from kvstore.testing.supply import SPACE, get, key, keys, write, writes
from kvstore.url import TierURL

if TYPE_CHECKING:
    from pathlib import Path

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS
STORED, EXISTS = PutOutcome.STORED, PutOutcome.EXISTS


@pytest.fixture
def url(plain_url: str, tmp_path: Path) -> str:
    return sealed(plain_url, tmp_path)


def ids(store: BlockStore, numbers: range) -> set[bytes | None]:
    return set(store.sealed_with(SPACE, keys(numbers)))


class TestResealing:
    def test_every_block_is_under_new_keys_and_the_old_ones_are_gone(self, url: str, tmp_path: Path) -> None:
        numbers = range(6)
        with open_store(url) as store:
            whose = ["acme" if number % 2 else "" for number in numbers]
            put = [write(number, tenant=whose[number], position=number) for number in numbers]
            assert store.put_many(SPACE, put) == [STORED] * 6
            marks = store.capabilities.marks
            if marks:
                store.mark_many(SPACE, keys([1]), Mark("manual", pinned=True, tenant="acme"))
            before = ids(store, numbers)
            tier = TierURL.parse(url)
            report = reseal([tier], keyrings_of([tier]))
            assert (report.resealed, report.lost, report.dropped) == (6, 0, 2)
            after = ids(store, numbers)
            assert len(after) == 2
            assert not after & before
            assert get(store, list(numbers)) == [HIT] * 6
            infos = {info.key: info for info in store.scan(SPACE)}
            assert [infos[key(number)].position for number in numbers] == list(numbers)
            assert infos[key(1)].marks == ((Mark("manual", pinned=True, tenant="acme"),) if marks else ())
            ring = keyring(tmp_path)
            assert ring.tenants() == ["", "acme"]
            assert set(ring.ring().keys) == after
            assert before <= ring.ring().destroyed
            ring.destroy("acme")
            assert get(store, list(numbers)) == [HIT, MISS] * 3

    def test_what_was_interrupted_goes_on_with_the_same_new_keys(self, url: str, tmp_path: Path) -> None:
        numbers = range(4)
        with open_store(url) as store:
            store.put_many(SPACE, writes(numbers))
            before = ids(store, numbers)
            ring = keyring(tmp_path)
            assert ring.renew() == before  # and killed, once a block was dealt with
            store.delete_many(SPACE, keys([0]))
            store.put_many(SPACE, writes([0]))
            (new,) = ids(store, range(1))
            assert get(store, list(numbers)) == [HIT] * 4
            tier = TierURL.parse(url)
            assert reseal([tier], keyrings_of([tier])).resealed == 3
            assert ids(store, numbers) == {new}
            assert get(store, list(numbers)) == [HIT] * 4


@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_resealing_beside_readers_and_writers_costs_misses_and_nothing_else(scheme: str, tmp_path: Path) -> None:
    url, numbers = sealed(f"{scheme}://{tmp_path}/tier", tmp_path), range(12)
    tier, over = TierURL.parse(url), threading.Event()

    def use(seed: int) -> set[str]:
        chance, seen = random.Random(seed), set[str]()
        with open_store(url) as store:
            while not over.is_set():
                some = chance.sample(numbers, 3)
                seen |= {str(outcome) for outcome in store.put_many(SPACE, writes(some))}
                seen |= {str(outcome) for outcome in get(store, some)}
        return seen

    with open_store(url) as store, ThreadPoolExecutor(3) as pool:
        store.put_many(SPACE, writes(numbers))
        users = [pool.submit(use, seed) for seed in range(3)]
        try:
            reports = [reseal([tier], keyrings_of([tier])) for _ in range(4)]
        finally:
            over.set()
        seen = set[str]().union(*(user.result() for user in users))
        assert seen <= {str(outcome) for outcome in (STORED, EXISTS, HIT, MISS)}
        assert sum(report.resealed for report in reports) > len(numbers)
        store.put_many(SPACE, writes(numbers))
        get(store, list(numbers))  # what a batch has sealed with a key that was dropped meanwhile is taken out
        store.put_many(SPACE, writes(numbers))
        assert get(store, list(numbers)) == [HIT] * len(numbers)
        assert len(ids(store, numbers)) == 1
