"""The catalogue's books close in every order of operations, and over processes."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING

from catalog_helpers import LEASE, catalog_at, check_books, entry
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from kvstore.catalog import Catalog

NUMBERS = st.integers(0, 7)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.lists(NUMBERS, max_size=4)),
        st.tuples(st.just("discard"), st.lists(NUMBERS, max_size=3)),
        st.tuples(st.just("note"), st.lists(NUMBERS, max_size=3)),
        st.tuples(st.just("evict"), st.lists(NUMBERS, min_size=1, max_size=1)),
        st.tuples(st.just("reserve"), st.lists(NUMBERS, min_size=1, max_size=1)),
        st.tuples(st.just("release"), st.lists(NUMBERS, min_size=1, max_size=1)),
        st.tuples(st.just("settle"), st.just([])),
    ),
    max_size=15,
)


@given(steps=STEPS)
def test_the_books_close_after_any_operations(
    steps: list[tuple[str, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    there: list[bytes] = []  # the model
    with catalog_at(tmp_path_factory.mktemp("catalog")) as catalog:
        for clock, (name, numbers) in enumerate(steps):
            if name == "note":
                catalog.note([entry(number).address for number in numbers])
            elif name == "settle":
                catalog.settle()
            else:
                apply(catalog, name, numbers, clock, there)
            with catalog.read() as snapshot:
                check_books(snapshot)
                assert {victim.address for victim in snapshot.oldest()} == set(there)


def apply(catalog: Catalog, name: str, numbers: list[int], clock: int, there: list[bytes]) -> None:
    with catalog.read() as snapshot:
        victims = list(snapshot.oldest())[: numbers[0]] if name == "evict" else []
    with catalog.write() as change:
        if name == "publish":
            entries = [entry(number, last_used=clock + 1) for number in numbers]
            fresh = [address for address in dict.fromkeys(e.address for e in entries) if address not in there]
            assert sum(change.publish(entries)) == len(fresh)
            there += fresh
        elif name == "discard":
            for gone in change.discard([entry(number).address for number in numbers]):
                there.remove(gone.address)
        elif name == "evict":
            for victim in change.evict(victims):
                there.remove(victim.address)
        elif name == "reserve":
            change.reserve(LEASE, numbers[0], b"")
        else:
            for intent in change.intents()[: numbers[0]]:
                change.release(intent)


def publish_and_evict(directory: Path, seed: int) -> int:
    with catalog_at(directory, alone=False) as catalog:
        evicted = 0
        for step in range(60):
            with catalog.read() as snapshot:
                victims = list(snapshot.oldest())[:3]
            catalog.note([victim.address for victim in victims[2:]])
            with catalog.write() as change:
                change.publish([entry((seed * 7 + step * 3 + number) % 300) for number in range(3)])
                intent = change.reserve(LEASE, step, b"")
                evicted += len(change.evict(victims[: step % 3]))
                if step % 2:
                    change.release(intent)
        catalog.settle()
    return evicted


def test_the_books_close_over_processes(tmp_path: Path) -> None:
    with catalog_at(tmp_path) as catalog, ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        evicted = list(pool.map(publish_and_evict, [tmp_path] * 4, range(4)))
        assert sum(evicted) > 50
        with catalog.read() as snapshot:
            check_books(snapshot)
            assert len(snapshot.intents()) == 4 * 30
            assert len({intent.number for intent in snapshot.intents()}) == 120
