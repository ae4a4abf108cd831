"""Records of a tier that are damaged, or removed while it is open: every verb says so in kvstore's own errors."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest
from local_helpers import HIT, TINY, catalogue_of, use

from kvstore import open_store
from kvstore.errors import StoreDamagedError, TierUnavailable
from kvstore.testing.supply import SPACE, get, keys, writes

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor
    from pathlib import Path


class TestDamagedCatalogue:
    def test_whichever_page_it_is_errors_are_ours_and_say_what_to_do(
        self, scheme: str, root: Path, tmp_path: Path, fresh_process: Executor
    ) -> None:
        path = tmp_path / "whole"
        with open_store(f"{scheme}://{path}") as store:
            store.put_many(TINY, writes(range(300), TINY))
        pages = catalogue_of(path).stat().st_size // 4096
        for page in range(2, pages, max(1, pages // 8)):
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(path, root)
            with catalogue_of(root).open("r+b") as file:
                os.pwrite(file.fileno(), b"\xff" * 4096, page * 4096)
            said = fresh_process.submit(use, f"{scheme}://{root}").result()
            assert not [text for text in said if "owner" in text or "close" in text]
            assert all(("emove the" if scheme == "lmdb" else "no block is lost") in text for text in said), said
            again = fresh_process.submit(use, f"{scheme}://{root}").result()
            assert again == []

    def test_what_opening_a_file_tier_finds_damaged_it_makes_anew(self, root: Path) -> None:
        with open_store(f"file://{root}") as store:
            store.put_many(SPACE, writes(range(10)))
        with catalogue_of(root).open("r+b") as file:
            for page in range(2, os.fstat(file.fileno()).st_size // 4096):
                os.pwrite(file.fileno(), b"\xff" * 4096, page * 4096)
        with pytest.raises(StoreDamagedError, match=r"it is rebuilt\. No block is lost"):
            open_store(f"file://{root}", readonly=True)
        with open_store(f"file://{root}") as store:
            assert "made anew" in store.capabilities.notes[-1]
            assert get(store, range(10)) == [HIT] * 10


class TestRemovedWhileOpen:
    @pytest.mark.parametrize("readonly", [False, True])
    @pytest.mark.parametrize("again", [False, True], ids=["gone", "and another tier made there"])
    def test_every_verb_says_so_and_close_ends_well(
        self, scheme: str, root: Path, stranger: Executor, readonly: bool, again: bool
    ) -> None:
        with open_store(f"{scheme}://{root}") as store:
            store.put_many(SPACE, writes(range(3)))
        store = open_store(f"{scheme}://{root}", readonly=readonly)
        shutil.rmtree(root)
        if again:
            assert stranger.submit(use, f"{scheme}://{root}").result() == []
            before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
        verbs: list[Callable[[], object]] = [
            lambda: store.put_many(SPACE, writes([1])),
            lambda: get(store, [1]),
            lambda: store.contains_many(SPACE, keys([1])),
            lambda: list(store.scan(SPACE)),
            store.usage,
            store.namespaces,
            lambda: store.delete_many(SPACE, keys([1])),
        ]
        for verb in verbs[1:-1] if readonly else verbs:
            with pytest.raises(TierUnavailable, match="open it again"):
                verb()
        store.close()
        assert root.exists() == again
        if again:
            assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
            assert stranger.submit(use, f"{scheme}://{root}").result() == []
