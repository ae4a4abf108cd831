"""The one place where every backend meets the contract: the suite of `kvstore.testing`, over all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tiers import PastTheStore

from kvstore import PutOutcome
from kvstore.testing import StoreTests, run_against_a_dictionary
from kvstore.testing.damage import CORRUPT, SMALL, Damager, flipped, place
from kvstore.testing.supply import get, write

if TYPE_CHECKING:
    from kvstore import BlockStore


class TestEveryBackend(PastTheStore, StoreTests):
    """memory, file with and without O_DIRECT, lmdb, the example of `backends/README.md`, and one on SQLite."""

    @pytest.fixture
    def url(self, backend_url: str) -> str:
        return backend_url

    @pytest.fixture
    def damager(self, url: str) -> Damager:
        if url.startswith("memory"):
            pytest.skip("nothing goes past a store into memory (tests/test_memory_store.py has what can be done)")
        return Damager(self, url)

    @pytest.mark.soak
    def test_a_store_answers_as_a_dictionary_would_for_long(self, url: str) -> None:
        run_against_a_dictionary(url, runs=500, steps=60)

    @pytest.mark.soak
    def test_every_single_bit(self, store: BlockStore, damager: Damager) -> None:
        store.put_many(SMALL, [write(1, SMALL)])
        size = len(damager.read(place(1)))
        for bit in range(8 * size):
            damager.put(place(1), flipped(damager.read(place(1)), bit))
            assert get(store, [1], SMALL) == [CORRUPT], f"bit {bit}"
            assert store.put_many(SMALL, [write(1, SMALL)]) == [PutOutcome.STORED]
