"""Users of a shared tier, one of whom is killed while he makes it: whatever he leaves is open to the others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from local_helpers import HIT, STORED, TINY

import kvstore.files
from kvstore import open_store
from kvstore.testing.supply import get, writes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CALLS = ("mkdir", "chmod", "rename", "link")
GROUP = 65530
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="two users take root")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that anybody may write to, below folders that anybody may pass."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        place = Path(folder, "shared")
        place.mkdir()
        os.chown(place, 0, GROUP)
        place.chmod(0o2777)
        yield place


def become(uid: int, group: int, url: str) -> None:
    """Another user, whose umask shuts everybody out."""
    with tempfile.TemporaryDirectory() as folder:
        scheme, _, rest = url.partition("://")
        with open_store(f"{scheme}://{folder}/t{rest[rest.index('?') :]}") as store:
            store.put_many(TINY, writes([1], TINY)), get(store, [1], TINY)  # imports what that user may not be able to
    os.umask(0o077)
    os.setgroups([GROUP])
    os.setresgid(group, group, group)
    os.setresuid(uid, uid, uid)


def make_and_die(url: str, at: int) -> None:
    """Make a tier and put into it; get killed before the `at`-th of CALLS."""
    become(65533, 65533, url)
    left = at

    def fatal(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for name in CALLS:
        setattr(os, name, fatal(getattr(os, name)))
    kvstore.files.rename_new = fatal(kvstore.files.rename_new)
    with open_store(url) as store:
        assert store.put_many(TINY, writes([0], TINY)) == [STORED]
    os._exit(0)


def use_it(url: str) -> None:
    become(65532, 65532, url)
    with open_store(url) as store:
        outcomes = store.put_many(TINY, writes(range(3), TINY))
        assert all(outcome.present for outcome in outcomes), outcomes
        assert get(store, range(3), TINY) == [HIT] * 3
        assert store.delete_many(TINY, [writes([2], TINY)[0].key]) == [True]
    os._exit(0)


def exit_of(target: Callable[..., None], *arguments: object) -> int | None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_killed_makers", "kvstore_zarr", "kvstore_lmdb"])
    process = context.Process(target=target, args=arguments)
    process.start()
    process.join(30)
    exitcode = process.exitcode
    process.close()
    return exitcode


@pytest.mark.parametrize("mode", ["0666", pytest.param("0660", marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "url", ["file://{}?mode=", "lmdb://{}?mode=", "file://{}?remote=true&mode="], ids=["file", "lmdb", "remote"]
)
def test_a_maker_who_is_killed_shuts_nobody_out(
    url: str, mode: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    for at in count(1, 1 if mode == "0666" else 7):
        root = shared / f"tier{at}"
        place = url.format(root) + mode
        ended = exit_of(make_and_die, place, at)
        assert exit_of(use_it, place) == 0, f"killed before call {at}"
        drafts = [path for path in root.rglob(".new-*") if "remote" not in url]
        assert not drafts, f"killed before call {at}"
        groups = {path.stat().st_gid for path in root.rglob("*")}
        assert groups == {GROUP}, "a folder that a group works in stays one"
        if ended != -signal.SIGKILL:
            break
    assert ended == 0
    assert at > 6
