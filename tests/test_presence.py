"""Who has a tier open and how the last user left it, found out by real processes on real files."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore import presence as module
from kvstore.errors import StoreAccessError, StoreFullError
from kvstore.presence import Presence, State, is_presence_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor
    from multiprocessing.process import BaseProcess


def join_and_leave(directory: Path) -> tuple[bool, State]:
    with Presence.opening(directory) as presence:
        found = presence.alone, presence.found
    with presence.closing():
        pass
    return found


def stay(directory: Path, readonly: bool = False) -> None:
    with Presence.opening(directory, readonly=readonly):
        pass
    (directory / "ready").touch()
    time.sleep(60)


def stay_inside(directory: Path) -> None:
    with Presence.opening(directory):
        (directory / "ready").touch()
        time.sleep(60)


def started(target: Callable[..., None], directory: Path, *arguments: object) -> BaseProcess:
    """A process that runs `target` and has come as far as to say so."""
    process = get_context("spawn").Process(target=target, args=(directory, *arguments), daemon=True)
    process.start()
    while not (directory / "ready").exists():
        assert process.is_alive()
        time.sleep(0.005)
    (directory / "ready").unlink()
    return process


def killed(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def state(directory: Path) -> str:
    return (directory / "state").read_text().strip()


def test_the_first_and_only_user_is_alone_and_leaves_it_clean(tmp_path: Path) -> None:
    assert join_and_leave(tmp_path) == (True, State.MISSING)
    assert state(tmp_path) == "clean"
    assert join_and_leave(tmp_path) == (True, State.CLEAN)
    assert {path.name for path in tmp_path.iterdir()} == {"gate", "users", "state"}
    assert all(is_presence_file(path.name) for path in tmp_path.iterdir())


def test_it_is_dirty_of_this_boot_while_somebody_uses_it(tmp_path: Path) -> None:
    with Presence.opening(tmp_path) as presence:
        pass
    assert state(tmp_path) == f"dirty {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    with presence.closing() as last:
        assert last
    assert state(tmp_path) == "clean"


def test_a_clean_tier_is_dirty_before_the_opening_touches_it(tmp_path: Path) -> None:
    join_and_leave(tmp_path)
    with Presence.opening(tmp_path) as presence:
        assert state(tmp_path).startswith("dirty")
    with presence.closing():
        pass


def test_two_users_are_not_alone_and_only_the_last_leaves_it_clean(tmp_path: Path, stranger: Executor) -> None:
    with Presence.opening(tmp_path) as presence:
        pass
    assert stranger.submit(join_and_leave, tmp_path).result() == (False, State.DIRTY)
    assert state(tmp_path).startswith("dirty")
    with Presence.opening(tmp_path) as second:
        assert not second.alone  # within one process too
    with presence.closing() as last:
        assert not last
    with second.closing() as last:
        assert last
    assert state(tmp_path) == "clean"


def test_a_killed_user_is_found_dead_once_and_its_lease_goes(tmp_path: Path) -> None:
    killed(started(stay, tmp_path))
    assert len(list(tmp_path.glob("lease-*"))) == 1
    with Presence.opening(tmp_path) as presence:
        assert (presence.alone, presence.found) == (True, State.DIRTY)
        leases = list(presence.dead())
        assert len(leases) == 1
        assert presence.lease not in leases
        assert list(presence.dead()) == []
    assert [path.name for path in tmp_path.glob("lease-*")] == [f"lease-{presence.lease.hex()}"]
    with presence.closing():
        pass


def test_a_live_user_is_never_found_dead(tmp_path: Path) -> None:
    process = started(stay, tmp_path)
    with Presence.opening(tmp_path) as presence:
        assert not presence.alone
        assert list(presence.dead()) == []
    with presence.closing() as last:
        assert not last
    killed(process)


def test_a_lease_whose_reclaim_failed_stays_for_the_next_try(tmp_path: Path) -> None:
    killed(started(stay, tmp_path))
    with Presence.opening(tmp_path) as presence:
        reclaiming = presence.dead()
        next(reclaiming)
        reclaiming.close()  # as when the caller's loop raises
        assert len(list(presence.dead())) == 1
    with presence.closing():
        pass


def test_nobody_opens_while_another_is_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = started(stay_inside, tmp_path)
    monkeypatch.setattr(module, "GATE_TIMEOUT_S", 0.2)
    with pytest.raises(StoreAccessError, match=r"gate.*lslocks"), Presence.opening(tmp_path):
        pass
    killed(process)
    assert join_and_leave(tmp_path)[0]


def test_an_opening_that_fails_lets_everything_go(tmp_path: Path, stranger: Executor) -> None:
    with pytest.raises(RuntimeError), Presence.opening(tmp_path):
        raise RuntimeError("the body failed")
    assert list(tmp_path.glob("lease-*")) == []
    assert stranger.submit(join_and_leave, tmp_path).result()[0]


def test_a_repair_that_did_not_end_is_seen_by_the_next(tmp_path: Path) -> None:

    def die_rebuilding() -> None:
        with Presence.opening(tmp_path) as presence:
            presence.mark(State.REBUILDING)
            raise RuntimeError("died while rebuilding")

    with pytest.raises(RuntimeError):
        die_rebuilding()
    assert join_and_leave(tmp_path) == (True, State.REBUILDING)
    assert state(tmp_path) == "clean"


@pytest.mark.parametrize("line", ["dirty 00000000-0000-0000-0000-000000000000", "", "dirty", "cle", "\0\0\0"])
def test_another_boot_or_a_torn_line_is_suspect(tmp_path: Path, line: str) -> None:
    (tmp_path / "state").write_text(line)
    assert join_and_leave(tmp_path) == (True, State.SUSPECT)


def test_a_closing_that_fails_leaves_it_dirty(tmp_path: Path) -> None:
    with Presence.opening(tmp_path) as presence:
        pass
    with pytest.raises(RuntimeError), presence.closing():
        raise RuntimeError("could not sync")
    assert state(tmp_path).startswith("dirty")
    with presence.closing() as last:
        assert not last


def test_a_read_only_user_writes_nothing_and_keeps_others_from_being_alone(tmp_path: Path, stranger: Executor) -> None:
    with Presence.opening(tmp_path, readonly=True) as presence:
        assert presence.alone
    with presence.closing():
        pass
    assert list(tmp_path.iterdir()) == []
    join_and_leave(tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with Presence.opening(tmp_path, readonly=True) as presence:
        pass
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert not stranger.submit(join_and_leave, tmp_path).result()[0]
    with presence.closing() as last:
        assert not last


def test_a_forked_child_keeps_nothing_alive(tmp_path: Path) -> None:
    with Presence.opening(tmp_path) as presence:
        pass
    there, here = os.pipe()
    child = os.fork()
    if not child:
        os.write(here, b"!")
        time.sleep(20)
        os._exit(0)
    try:
        assert os.read(there, 1) == b"!"  # until it runs, it has what it inherited
        with presence.closing() as last:
            assert last
        assert join_and_leave(tmp_path)[0]
    finally:
        os.close(there)
        os.close(here)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_full_disk_is_an_error_at_first_and_no_obstacle_later(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(64 << 10)
    filler = disk / "filler"
    filler.write_bytes(bytes(64 << 10))
    with pytest.raises(StoreFullError), Presence.opening(disk):
        pass
    filler.unlink()
    join_and_leave(disk)
    with pytest.raises(OSError, match="No space"):
        filler.write_bytes(bytes(64 << 10))
    with Presence.opening(disk) as presence:
        assert presence.found is State.CLEAN
        assert state(disk).startswith("dirty")
    with presence.closing():
        pass
    assert state(disk) == "clean"


@pytest.mark.parametrize("mode", [0o600, 0o660])
def test_files_have_the_mode_that_was_asked_for_whatever_the_umask(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o077)
    try:
        with Presence.opening(tmp_path, mode=mode) as presence:
            pass
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {mode}
        with presence.closing():
            pass
    finally:
        os.umask(before)


def test_whether_records_are_as_the_last_user_left_them(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.write_bytes(b"one")

    def used(*, seal: bool = True) -> bool:
        with Presence.opening(tmp_path) as presence:
            untouched = presence.untouched(records)
        with presence.closing():
            if seal:
                presence.seal(records)
        return untouched

    assert not used(), "nobody has said yet"
    assert used()
    records.write_bytes(b"two")
    assert not used()
    assert used(seal=False)
    assert not used(), "who left it last did not say"
    copy = records.rename(tmp_path / "old").read_bytes()
    records.write_bytes(copy)
    assert not used(), "another file"
    assert used()
    records.unlink()
    with Presence.opening(tmp_path) as presence:
        assert not presence.untouched(records)
    with presence.closing():
        pass


def test_a_tier_that_was_not_left_clean_is_not_untouched(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.write_bytes(b"one")
    with Presence.opening(tmp_path) as presence:
        pass
    with presence.closing():
        presence.seal(records)
    (tmp_path / "state").write_text("dirty 0000")
    with Presence.opening(tmp_path) as presence:
        assert not presence.untouched(records)
    with presence.closing():
        pass
