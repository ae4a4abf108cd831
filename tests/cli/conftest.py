"""Tiers to look at: files that a test can damage with its own hands, and one on each backend that is shipped."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from cli_helpers import KEYS, LARGE, MODEL, OTHER, source_tree
from readme_backend import install

import kvstore
from kvstore import BlockWrite, block_keys

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"))


@pytest.fixture
def scheme(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The README's backend: files that a test can damage with its own hands."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *map(str, source_tree())]))
    yield "dir"
    sys.modules.pop("kvstore_dir", None)


@pytest.fixture
def tier(scheme: str, tmp_path: Path) -> str:
    """A tier with ten blocks in two groups of one namespace and two blocks in another."""
    url = f"{scheme}://{tmp_path}/kv"
    with kvstore.open_store(url) as store:
        store.put_many(MODEL, [BlockWrite(key, np.full(8192, 7, np.uint8)) for key in KEYS[:6]])
        store.put_many(MODEL, [BlockWrite(key, bytes(4096)) for key in block_keys(range(16), 4, group=1)])
        store.put_many(OTHER, [BlockWrite(key, bytes(4096)) for key in KEYS[:2]])
    return url


@pytest.fixture(params=["file", "lmdb"])
def shipped(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A tier of two blocks on a shipped backend; the second is filled with nines."""
    url = f"{request.param}://{tmp_path}/tier"
    with kvstore.open_store(url) as store:
        blocks = [BlockWrite(key, np.full(65536, fill, np.uint8)) for key, fill in zip(KEYS[:2], (1, 9), strict=True)]
        store.put_many(LARGE, blocks)
    return url
