"""Locations that cannot be used: each is a clear error of its own class that names the place and what to do."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

import other_process
import pytest
import raw

from kvstore import GetOutcome, PutOutcome, open_store
from kvstore.cli import EXIT_USAGE
from kvstore.errors import (
    CapacityMismatchError,
    InvalidURLError,
    NewerFormatError,
    NotAStoreError,
    StoreAccessError,
    StoreFullError,
    StoreNotFoundError,
    StoreOpenError,
    UnknownOptionError,
)
from kvstore.testing.supply import KIB, MIB, SPACE, get, writes

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor
    from pathlib import Path

    from tiers import Tier

LOCAL = ("file", "lmdb")


@pytest.fixture(params=LOCAL)
def scheme(request: pytest.FixtureRequest) -> str:
    scheme: str = request.param
    return scheme


def refused(url: str, kind: type[StoreOpenError], *said: str, **options: object) -> str:
    """Opening raises exactly `kind`; its message, which must contain each text of `said`."""
    with pytest.raises(StoreOpenError) as caught:
        open_store(url, **options)
    assert type(caught.value) is kind, f"{type(caught.value).__name__}: {caught.value}"
    message = str(caught.value)
    for text in said:
        assert text in message
    return message


def tree_of(path: Path) -> dict[str, bytes | None]:
    return {str(entry): entry.read_bytes() if entry.is_file() else None for entry in sorted(path.rglob("*"))}


class TestSomethingElse:
    def test_a_file_where_a_directory_should_be(self, scheme: str, tmp_path: Path) -> None:
        path = tmp_path / "notes.txt"
        path.write_text("mine")
        refused(f"{scheme}://{path}", NotAStoreError, str(path))
        assert path.read_text() == "mine"

    def test_below_a_file(self, scheme: str, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(StoreOpenError, match=r"notes\.txt"):
            open_store(f"{scheme}://{tmp_path}/notes.txt/tier")

    def test_a_directory_that_holds_something_else(self, scheme: str, tmp_path: Path) -> None:
        (tmp_path / "photos").mkdir()
        (tmp_path / "photos" / "cat.jpg").write_bytes(b"\xff\xd8")
        before = tree_of(tmp_path)
        refused(f"{scheme}://{tmp_path}/photos", NotAStoreError, f"{tmp_path}/photos")
        refused(f"{scheme}://{tmp_path}/photos", NotAStoreError, readonly=True)
        assert tree_of(tmp_path) == before

    def test_a_tier_of_the_other_format(self, scheme: str, tmp_path: Path) -> None:
        path = tmp_path / "tier"
        other = next(name for name in LOCAL if name != scheme)
        with open_store(f"{other}://{path}") as store:
            store.put_many(SPACE, writes([1]))
        refused(f"{scheme}://{path}", NotAStoreError, str(path))
        with open_store(f"{other}://{path}") as store:
            assert get(store, [1]) == [GetOutcome.HIT]

    def test_an_empty_directory_becomes_a_tier(self, scheme: str, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        with open_store(f"{scheme}://{tmp_path}/empty") as store:
            assert store.put_many(SPACE, writes([1])) == [PutOutcome.STORED]

    def test_missing_parents_are_made(self, scheme: str, tmp_path: Path) -> None:
        with open_store(f"{scheme}://{tmp_path}/a/b/tier") as store:
            assert store.put_many(SPACE, writes([1])) == [PutOutcome.STORED]

    def test_nothing_there_and_read_only(self, scheme: str, tmp_path: Path) -> None:
        refused(f"{scheme}://{tmp_path}/tier", StoreNotFoundError, f"{tmp_path}/tier", readonly=True)
        assert list(tmp_path.iterdir()) == []

    def test_a_host_or_a_relative_path(self, scheme: str) -> None:
        with pytest.raises(InvalidURLError, match="three slashes"):
            open_store(f"{scheme}://relative/path")

    def test_an_unknown_option(self, scheme: str, tmp_path: Path) -> None:
        with pytest.raises(UnknownOptionError, match=r"(?s)capcity.*capacity"):
            open_store(f"{scheme}://{tmp_path}/tier?capcity=1GB")
        assert list(tmp_path.iterdir()) == []


class TestFormat:
    def test_a_tier_of_a_newer_format(self, scheme: str, tmp_path: Path, stranger: Executor) -> None:
        from tiers import Tier

        tier = Tier(f"{scheme}://{tmp_path}/tier", tmp_path / "tier")
        with tier.open() as store:
            store.put_many(SPACE, writes([1]))
        stranger.submit(raw.set_info, b"format", struct.pack("<I", 99), raw.catalogue_of(tier)).result()
        for readonly in (False, True):
            refused(tier.url, NewerFormatError, str(tier.path), "99", "upgrade", readonly=readonly)
        stranger.submit(raw.set_info, b"format", struct.pack("<I", 1), raw.catalogue_of(tier)).result()
        with tier.open() as store:
            assert get(store, [1]) == [GetOutcome.HIT]


class TestCapacity:
    def test_another_cap_than_the_tier_has_while_somebody_uses_it(
        self, persistent_tier: Tier, stranger: Executor
    ) -> None:
        with persistent_tier.open(capacity=64 * MIB):
            for capacity in (32 * MIB, 128 * MIB):
                job = stranger.submit(other_process.put, persistent_tier, [1], {"capacity": capacity})
                error = job.exception()
                assert type(error) is CapacityMismatchError
                for said in (str(persistent_tier.path), "capacity"):
                    assert said in str(error)
            assert stranger.submit(other_process.put, persistent_tier, [1], {"capacity": 64 * MIB}).result()
            assert stranger.submit(other_process.put, persistent_tier, [2]).result() == [PutOutcome.STORED]

    def test_another_cap_within_one_process(self, persistent_tier: Tier) -> None:
        with persistent_tier.open(capacity=64 * MIB):
            refused(persistent_tier.url, CapacityMismatchError, str(persistent_tier.path), capacity=32 * MIB)

    def test_who_is_alone_may_lower_the_cap_and_is_under_it_at_once(self, persistent_tier: Tier) -> None:
        """Field report 2: a directory over its cap is trimmed before the first store."""
        with persistent_tier.open(capacity=64 * MIB) as store:
            store.put_many(SPACE, writes(range(400)))
            assert store.usage().used > 16 * MIB
        with persistent_tier.open(capacity=16 * MIB) as store:
            usage = store.usage()
            assert usage.capacity == 16 * MIB
            assert usage.used + usage.reserved + usage.overhead <= 16 * MIB
            assert get(store, [399]) == [GetOutcome.HIT]

    @pytest.mark.parametrize("capacity", [4 * KIB, "0.0000001%"])
    def test_a_cap_too_small_for_an_empty_tier(self, scheme: str, tmp_path: Path, capacity: int | str) -> None:
        refused(f"{scheme}://{tmp_path}/deep/tier", StoreFullError, f"{tmp_path}/deep/tier", capacity=capacity)
        assert tree_of(tmp_path) == {}


def as_nobody(code: str, imports: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python code in a process without privileges: root is not kept out by permissions."""
    if os.geteuid() != 0:
        prefix = ""
    else:
        prefix = "import os; os.setgroups([]); os.setresgid(65533, 65533, 65533); os.setresuid(65533, 65533, 65533)\n"
    source = f"import kvstore, kvstore.registry, kvstore_zarr, kvstore_lmdb, lmdb{imports}\n{prefix}{code}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


class TestPermissions:
    @pytest.mark.parametrize("mode", [0o000, 0o500, 0o600], ids=["unreadable", "not writable", "not searchable"])
    def test_a_directory_without_permission(self, scheme: str, open_folder: Path, mode: int) -> None:
        path = open_folder / "tier"
        path.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(path, 65533, 65533)
        path.chmod(mode)
        done = as_nobody(f"kvstore.open_store('{scheme}://{path}')")
        path.chmod(0o700)
        assert done.stderr.strip().splitlines()[-1].startswith("kvstore.errors.StoreAccessError"), done.stderr
        assert str(path) in done.stderr.strip().splitlines()[-1]

    def test_a_parent_in_which_nothing_can_be_made(self, scheme: str, open_folder: Path) -> None:
        (open_folder / "locked").mkdir(mode=0o555)
        (open_folder / "locked").chmod(0o555)
        done = as_nobody(f"kvstore.open_store('{scheme}://{open_folder}/locked/tier')")
        assert done.stderr.strip().splitlines()[-1].startswith("kvstore.errors.StoreAccessError"), done.stderr

    def test_a_tier_of_somebody_else(self, scheme: str, open_folder: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("somebody else's files take root")
        with open_store(f"{scheme}://{open_folder}/tier") as store:
            store.put_many(SPACE, writes([1]))
        for option in ("", "?readonly=true"):
            done = as_nobody(f"kvstore.open_store('{scheme}://{open_folder}/tier{option}')")
            assert done.stderr.strip().splitlines()[-1].startswith("kvstore.errors.StoreAccessError"), done.stderr

    @pytest.mark.parametrize("command", ["verify", "stat", "gc"])
    def test_commands_say_that_a_tier_is_somebody_elses(self, scheme: str, open_folder: Path, command: str) -> None:
        if os.geteuid() != 0:
            pytest.skip("somebody else's files take root")
        with open_store(f"{scheme}://{open_folder}/tier") as store:
            store.put_many(SPACE, writes([1]))
        (open_folder / "tier").chmod(0o700)
        done = as_nobody(
            f"raise SystemExit(kvstore.cli.run(['{command}', '{scheme}://{open_folder}/tier']))",
            ", kvstore.cli.verify, kvstore.cli.stat, kvstore.cli.gc, rich.table, rich.markup, kvstore.lmdb_files",
        )
        assert (done.returncode, "Traceback" in done.stderr) == (EXIT_USAGE, False), done.stderr
        assert "check owner, permissions and mount" in done.stderr

    def test_files_are_private_unless_mode_widens_them(self, persistent_tier: Tier) -> None:
        assert persistent_tier.path is not None
        with persistent_tier.open() as store:
            store.put_many(SPACE, writes([1]))
            entries = [persistent_tier.path, *persistent_tier.path.rglob("*")]
            assert {oct(entry.stat().st_mode & 0o777) for entry in entries if entry.is_file()} == {"0o600"}
            assert {oct(entry.stat().st_mode & 0o777) for entry in entries if entry.is_dir()} == {"0o700"}


class TestFullDisk:
    def test_a_disk_without_room_for_an_empty_tier(self, scheme: str, small_disk: Callable[[int], Path]) -> None:
        disk = small_disk(1 * MIB)
        (disk / "filler").write_bytes(bytes(1 * MIB))
        refused(f"{scheme}://{disk}/tier", StoreFullError, str(disk))

    def test_a_disk_that_fills_up_is_full_block_by_block_and_the_rest_stays_readable(
        self, scheme: str, small_disk: Callable[[int], Path], stranger: Executor
    ) -> None:
        from tiers import Tier

        disk = small_disk(12 * MIB)
        tier = Tier(f"{scheme}://{disk}/tier", disk / "tier")
        stored = stranger.submit(other_process.fill, tier, 400).result()
        assert 20 <= len(stored) < 400
        assert stranger.submit(other_process.read, tier, stored).result() == [GetOutcome.HIT] * len(stored)
        _, digests, usage = stranger.submit(other_process.look, tier).result()
        assert (len(digests), usage.blocks, usage.reserved) == (len(stored), len(stored), 0)
        assert all(stranger.submit(other_process.delete, tier, stored[:10]).result())
        assert stranger.submit(other_process.put, tier, stored[:3]).result() == [PutOutcome.STORED] * 3

    def test_a_read_only_mount(self, scheme: str, small_disk: Callable[[int], Path], stranger: Executor) -> None:
        from tiers import Tier

        disk = small_disk(64 * MIB)
        tier = Tier(f"{scheme}://{disk}/tier", disk / "tier")
        stranger.submit(other_process.put, tier, [1]).result()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True, capture_output=True)
        refused(tier.url, StoreAccessError, str(disk), "readonly=true")
        refused(f"{scheme}://{disk}/another", StoreAccessError, str(disk))
        with tier.open(readonly=True) as store:
            assert get(store, [1, 2]) == [GetOutcome.HIT, GetOutcome.MISS]
