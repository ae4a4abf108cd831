"""The contract of a backend, kept by a store in another process: the suite of `kvstore.testing`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstore import registry
from kvstore.apart import StoreApart
from kvstore.testing import blocks, damage, facts, hooks, lifetime, marks, model, purge
from kvstore.testing.blocks import BlockTests
from kvstore.testing.damage import DamageTests
from kvstore.testing.facts import FactTests
from kvstore.testing.hooks import StoreHooks
from kvstore.testing.lifetime import LifetimeTests
from kvstore.testing.marks import MarkTests
from kvstore.testing.model import ModelTests
from kvstore.testing.purge import PurgeTests
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore import BlockStore
    from kvstore.testing.clock import MovableClock

MODULES = (blocks, damage, facts, hooks, lifetime, marks, model, purge)


def open_apart(url: str | TierURL, **options: Any) -> BlockStore:
    return StoreApart(TierURL.parse(url, **options))


class Apart(StoreHooks):
    """Each opening of a test's own is a process of its own. Bytes of their buffers are sent along."""

    @pytest.fixture(autouse=True)
    def apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in MODULES:
            if getattr(module, "open_store", None) is registry.open_store:
                monkeypatch.setattr(module, "open_store", open_apart)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockStore]:
    with StoreApart(f"file://{tmp_path_factory.mktemp('apart')}/tier") as store:
        yield store


class TestBlocksApart(Apart, BlockTests):
    """What is most of the contract, on one backend; one process for all of it."""

    @pytest.fixture
    def url(self, opened: BlockStore) -> str:
        return str(opened.url)

    @pytest.fixture
    def store(self, opened: BlockStore) -> BlockStore:
        for space in opened.namespaces():
            opened.drop_namespace(space)
        return opened


class TestLifetimeApart(Apart):
    """What a process of its own has most to do with, on one backend."""

    test_a_closed_store_refuses_every_verb_and_closes_twice = (
        LifetimeTests.test_a_closed_store_refuses_every_verb_and_closes_twice
    )
    test_a_closed_store_leaves_no_descriptor_open = LifetimeTests.test_a_closed_store_leaves_no_descriptor_open
    test_a_forked_child_is_refused_and_the_parent_goes_on = (
        LifetimeTests.test_a_forked_child_is_refused_and_the_parent_goes_on
    )

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/tier"


@pytest.mark.soak
class TestApart(Apart, BlockTests, FactTests, LifetimeTests, MarkTests, PurgeTests, ModelTests, DamageTests):
    """All of it, on both, but what moves the clock: that is another one there."""

    @pytest.fixture
    def url(self, location: str) -> str:
        return location

    @pytest.fixture
    def clock(self) -> MovableClock:
        pytest.skip("its clock is another one")

    def test_a_store_answers_as_a_dictionary_would(self, url: str) -> None:
        model.run_against_a_dictionary(url, runs=5)
