"""Folders that were left of a namespace, removed while others remove them, too, or put into them."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
from local_helpers import HIT, STORED

import kvstore_zarr.abandoned
from kvstore import open_store
from kvstore.testing.supply import SPACE, get, writes
from kvstore_zarr import LocalZarrStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore import BlockStore


@pytest.fixture
def left(root: Path) -> Path:
    """What a namespace of 60 blocks leaves whose drop was killed, long ago."""
    with open_store(f"file://{root}") as store:
        store.put_many(SPACE, writes(range(60)))
        store.delete_many(SPACE, [one.key for one in writes(range(60))])
        assert isinstance(store, LocalZarrStore)
        with store._tier.catalog.write() as change:
            change.drop_namespace(SPACE.fingerprint)
    folder = root / SPACE.fingerprint.hex()
    (folder / "zarr.json").unlink()
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (1e9, 1e9))
    return folder


def whole(left: Path, store: BlockStore, outcomes: list[Any]) -> bool:
    """Whether blocks that were put are there, in folders that say what they are."""
    undescribed = [path for path in (left, *left.rglob("*")) if path.is_dir() and not (path / "zarr.json").exists()]
    return outcomes == [STORED] * 60 and get(store, range(60)) == [HIT] * 60 and not undescribed


def before_unlink(monkeypatch: pytest.MonkeyPatch, act: Callable[[str], object]) -> None:
    really, main = os.unlink, threading.get_ident()

    def unlink(path: Any, **options: Any) -> None:
        if str(path).endswith("zarr.json") and threading.get_ident() == main:
            act(str(path))
        really(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)


def test_what_another_removes_by_hand_is_gone(root: Path, left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(f"file://{root}") as store:
        really = os.unlink
        before_unlink(monkeypatch, lambda path: really(path))
        assert [one.place for one in store.leftovers(remove=True)] == [f"{left.name}/"]
        assert not left.exists()


def test_two_that_remove_it_at_once_say_so_once(root: Path, left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(f"file://{root}") as store, open_store(f"file://{root}") as other:
        really, said = kvstore_zarr.abandoned._is_removed, list[Any]()  # pyright: ignore[reportPrivateUsage]

        def is_removed(*given: Any) -> bool:
            monkeypatch.undo()
            said.extend(other.leftovers(remove=True))
            return really(*given)

        monkeypatch.setattr(kvstore_zarr.abandoned, "_is_removed", is_removed)
        assert store.leftovers(remove=True) == []
        assert len(said) == 1
        assert not left.exists()


def test_a_put_that_comes_meanwhile_comes_before_or_after(
    root: Path, left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(f"file://{root}") as store, open_store(f"file://{root}") as engine:
        outcomes: list[Any] = []
        putting = threading.Thread(target=lambda: outcomes.extend(engine.put_many(SPACE, writes(range(60)))))

        def put(_: str) -> None:
            if not putting.ident:
                putting.start()
                putting.join(0.5)

        before_unlink(monkeypatch, put)
        assert len(store.leftovers(remove=True)) == 1
        putting.join(30)
        assert whole(left, engine, outcomes)


@pytest.mark.parametrize("ended", [False, True], ids=["under way", "ended"])
def test_what_is_put_into_after_the_look_stays(
    root: Path, left: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    from kvstore_zarr import steps

    with open_store(f"file://{root}") as store, open_store(f"file://{root}") as engine:
        outcomes: list[Any] = []
        begun, go_on = threading.Event(), threading.Event()
        putting = threading.Thread(target=lambda: outcomes.extend(engine.put_many(SPACE, writes(range(60)))))
        really = kvstore_zarr.abandoned._is_removed  # pyright: ignore[reportPrivateUsage]

        def checkpoint(step: str) -> None:
            if step == "reserved":
                begun.set()
                assert go_on.wait(30)

        def is_removed(*given: Any) -> bool:
            putting.start()
            assert begun.wait(30)
            if ended:
                go_on.set()
                putting.join(30)
            return really(*given)

        monkeypatch.setattr(steps, "checkpoint", checkpoint)
        monkeypatch.setattr(kvstore_zarr.abandoned, "_is_removed", is_removed)
        assert store.leftovers(remove=True) == []
        assert list(left.rglob("zarr.json"))
        go_on.set()
        putting.join(30)
        assert whole(left, engine, outcomes)
