"""Encrypted tiers keep the same contract, to the last damaged bit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from sealing_helpers import sealed
from tiers import PastTheStore

from kvstore.testing import StoreTests
from kvstore.testing.blocks import BlockTests
from kvstore.testing.damage import DamageTests

if TYPE_CHECKING:
    from pathlib import Path


SEALED = ("file", "lmdb")
OTHERS = ("sqlite", "remote")


class SealedHooks(PastTheStore):
    """Where sealed tiers are, and how to go past them."""

    @pytest.fixture(params=[*SEALED, *(pytest.param(kind, marks=pytest.mark.soak) for kind in OTHERS)])
    def url(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        if request.param == "sqlite":
            monkeypatch.syspath_prepend(request.getfixturevalue("sqlite_site"))
            monkeypatch.delitem(sys.modules, "kvstore_sqlite", raising=False)
        remote = request.param == "remote"
        url = f"file://{tmp_path}/tier?remote=true" if remote else f"{request.param}://{tmp_path}/tier"
        return sealed(url, tmp_path)


class TestSealedBlocks(SealedHooks, BlockTests, DamageTests):
    """What is different where blocks are sealed: their bytes on the way in and out, and damage."""


@pytest.mark.soak
class TestEverySealedBackend(SealedHooks, StoreTests):
    """All of the contract."""
