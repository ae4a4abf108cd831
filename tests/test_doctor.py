"""`kvstore doctor`: what a place lacks is said with what to do about it, and looking leaves no trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from readme_backend import install_wheel

from kvstore import open_store
from kvstore.cli import EXIT_NOT_INTACT, EXIT_OK, EXIT_USAGE, run
from kvstore.doctor import Finding, Grade, examine
from kvstore.sealing import Keyring, KeySource
from kvstore.testing.supply import SPACE, get, writes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

OK, WARNING, PROBLEM = Grade.OK, Grade.WARNING, Grade.PROBLEM


@pytest.fixture(params=["file", "lmdb"])
def scheme(request: pytest.FixtureRequest) -> str:
    scheme: str = request.param
    return scheme


@pytest.fixture
def tier(scheme: str, tmp_path: Path) -> str:
    """A tier with twenty blocks and a capacity."""
    url = f"{scheme}://{tmp_path}/tier"
    with open_store(url, capacity="200MB") as store:
        store.put_many(SPACE, writes(range(20)))
    return url


def found(url: str, check: str, *, write: bool = False) -> Finding:
    """The one finding of that check."""
    (finding,) = [finding for finding in examine(url, write=write) if finding.check == check]
    return finding


def tree(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything in `folder` with times, modes and contents, but LMDB's table of readers, which every reader writes."""
    paths = [folder, *sorted(path for path in folder.rglob("*") if path.name != "lock.mdb")]
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in paths
    }


def elsewhere(url: str, *, before: str = "", prefix: tuple[str, ...] = ()) -> dict[str, Finding]:
    """What another process finds, which first runs the statements `before`; the findings by their check."""
    source = (
        f"import json, os, resource, sys\n{before}\nfrom kvstore.cli import run\nrun(['doctor', {url!r}, '--json'])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*prefix, sys.executable, "-c", source],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)["findings"]
    return {each["check"]: Finding(each["check"], Grade(each["grade"]), each["found"], each["remedy"]) for each in told}


class TestAGoodPlace:
    def test_a_place_where_a_tier_could_be_made_is_fine_and_stays_as_it_is(
        self, scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = tree(tmp_path)
        assert run(["doctor", f"{scheme}://{tmp_path}/deep/er/tier?capacity=50MB"]) == EXIT_OK
        assert tree(tmp_path) == before
        shown = capsys.readouterr().out
        for check in ("location", "file system", "space", "other users", "clock", "address space", "open files"):
            assert f"ok       {check}: " in shown
        assert f"can make it in {tmp_path}" in shown
        assert shown.splitlines()[-1].endswith("0 problems, 0 warnings")

    def test_looking_at_a_tier_changes_nothing_and_tells_how_full_it_is(self, tier: str, tmp_path: Path) -> None:
        before = tree(tmp_path)
        assert {finding.grade for finding in examine(tier)} == {OK}
        assert tree(tmp_path) == before
        assert "20 blocks" in next(finding.found for finding in examine(tier) if finding.check == "opening")
        assert "capacity 200.0 MB" in found(tier, "space").found

    def test_machines_are_told_the_same(self, tier: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["doctor", tier, "--json"]) == EXIT_OK
        out, err = capsys.readouterr()
        told: dict[str, Any] = json.loads(out)
        assert err == ""
        assert (told["url"], told["ok"]) == (tier, True)
        expected = [(finding.check, finding.grade, finding.remedy) for finding in examine(tier)]
        assert [(each["check"], each["grade"], each["remedy"]) for each in told["findings"]] == expected

    def test_direct_io_is_tried_and_buffered_asked_for_is_no_fault(self, tmp_path: Path) -> None:
        said = found(f"file://{tmp_path}/tier", "O_DIRECT")
        with open_store(f"file://{tmp_path}/tier") as store:
            assert (said.grade is OK) == (store.capabilities.io == "direct")
        assert said.grade is WARNING or "multiples of 4096 bytes" in said.found
        said = found(f"file://{tmp_path}/tier?io=buffered", "O_DIRECT")
        assert (said.grade, "asked for" in said.found) == (OK, True)


class TestABadPlace:
    def test_a_file_is_no_location(self, scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "notes").write_text("mine")
        assert run(["doctor", f"{scheme}://{tmp_path}/notes"]) == EXIT_NOT_INTACT
        shown = capsys.readouterr().out
        assert "PROBLEM  location: " in shown
        assert "is not a directory" in shown

    def test_something_else_in_the_folder_is_said_in_the_words_of_the_opening(
        self, scheme: str, tmp_path: Path
    ) -> None:
        (tmp_path / "cat.jpg").write_bytes(b"\xff\xd8")
        said = found(f"{scheme}://{tmp_path}", "opening")
        assert said.grade is PROBLEM
        assert "cat.jpg" in said.found

    def test_who_may_not_write_there_is_told_whose_it_is(self, scheme: str, open_folder: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("another user takes root")
        warm = f"from kvstore.doctor import examine; list(examine('{scheme}://{open_folder}/x'))"
        become = f"{warm}; import kvstore.cli.doctor; os.setgroups([]); os.setresuid(65533, 65533, 65533)"
        said = elsewhere(f"{scheme}://{open_folder}/tier", before=become)["location"]
        assert said.grade is PROBLEM
        assert f"uid 65533 cannot write {open_folder} (owned by uid 0" in said.found
        assert "chown" in said.remedy

    def test_a_tier_that_everybody_may_enter_is_a_warning(self, tier: str, tmp_path: Path) -> None:
        assert not [finding for finding in examine(tier) if finding.check == "permissions"]
        (tmp_path / "tier").chmod(0o755)
        said = found(tier, "permissions")
        assert (said.grade, "0755" in said.found, "chmod" in said.remedy) == (WARNING, True, True)

    def test_a_network_file_system_is_a_problem(
        self, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in ("kvstore.lmdb_files", "kvstore.doctor.local"):
            monkeypatch.setattr(f"{module}.filesystem_of", lambda _: "nfs4")
        said = found(f"{scheme}://{tmp_path}/tier", "file system")
        assert (said.grade, "is on nfs4" in said.found) == (PROBLEM, True)

    @pytest.mark.parametrize(
        ("kind", "grade", "says"),
        [("overlay", WARNING, "container"), ("xfs", OK, "local"), ("hfsplus", WARNING, "not tried")],
    )
    def test_other_file_systems_are_told_apart(
        self, kind: str, grade: Grade, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvstore.doctor.local.filesystem_of", lambda _: kind)
        said = found(f"lmdb://{tmp_path}/tier", "file system")
        assert (said.grade, says in said.found) == (grade, True)

    def test_memory_is_not_a_disk_and_a_small_one_holds_no_large_capacity(
        self, scheme: str, small_disk: Callable[[int], Path]
    ) -> None:
        disk = small_disk(8 << 20)
        assert found(f"{scheme}://{disk}/tier", "file system").grade is WARNING
        said = found(f"{scheme}://{disk}/tier?capacity=50MB", "space")
        assert (said.grade, "less than its capacity, 50.0 MB" in said.found) == (WARNING, True)
        assert "8.4 MB" in said.remedy
        assert found(f"{scheme}://{disk}/tier?capacity=80%", "space").grade is OK
        (disk / "neighbour").write_bytes(bytes(8 << 20))
        said = found(f"{scheme}://{disk}/tier?capacity=80%", "space")
        assert (said.grade, said.remedy) == (PROBLEM, "make room")

    def test_what_the_tier_has_already_counts_as_room_for_it(
        self, scheme: str, small_disk: Callable[[int], Path]
    ) -> None:
        disk = small_disk(8 << 20)
        url = f"{scheme}://{disk}/tier?capacity=7MB"
        with open_store(url) as store:
            store.put_many(SPACE, writes(range(60)))
        assert os.statvfs(disk).f_bavail * 4096 < 6_000_000
        assert found(url, "space").grade is OK

    def test_no_capacity_is_a_warning(self, scheme: str, tmp_path: Path) -> None:
        said = found(f"{scheme}://{tmp_path}/tier", "space")
        assert (said.grade, said.remedy) == (WARNING, "add capacity=80%")

    def test_another_capacity_than_the_tiers_is_a_warning(self, tier: str) -> None:
        said = found(f"{tier}?capacity=100MB", "capacity")
        assert (said.grade, "of 200.0 MB" in said.found) == (WARNING, True)

    def test_too_few_inodes_for_the_room(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.statvfs(tmp_path)

        def few_inodes(_: Path) -> os.statvfs_result:
            return os.statvfs_result((*real[:5], 1000, 10, 10, *real[8:10]))

        monkeypatch.setattr("kvstore.doctor.local.os.statvfs", few_inodes)
        said = found(f"file://{tmp_path}/tier", "inodes")
        assert (said.grade, said.found.startswith("10 free"), "lmdb://" in said.remedy) == (WARNING, True, True)
        assert not [finding for finding in examine(f"lmdb://{tmp_path}/tier") if finding.check == "inodes"]

    @pytest.fixture
    def ramfs(self, tmp_path: Path) -> Iterator[Path]:
        """A file system that refuses O_DIRECT and does not tell its size."""
        if os.geteuid() != 0:
            pytest.skip("mounting a file system takes root")
        if subprocess.run(["mount", "-t", "ramfs", "kvstore-test", tmp_path], check=False).returncode:
            pytest.skip("mounting is not permitted here")
        yield tmp_path
        subprocess.run(["umount", tmp_path], check=True)

    def test_where_direct_io_is_refused_auto_is_warned_and_direct_is_a_problem(self, ramfs: Path) -> None:
        assert found(f"file://{ramfs}/tier", "O_DIRECT").grade is WARNING
        said = found(f"file://{ramfs}/tier?io=direct", "O_DIRECT")
        assert (said.grade, "refuses O_DIRECT" in said.found, "ext4" in said.remedy) == (PROBLEM, True, True)
        assert found(f"file://{ramfs}/tier", "space").grade is WARNING


class TestOthers:
    def test_a_process_that_has_the_tier_open_is_named(self, tier: str) -> None:
        assert "none" in found(tier, "other users").found
        with open_store(tier):
            said = elsewhere(tier)["other users"]
        assert (said.grade, f"open in process {os.getpid()} (" in said.found) == (OK, True)
        assert "none" in found(tier, "other users").found

    def test_a_user_in_another_pid_namespace_is_a_problem(self, tier: str) -> None:
        own = ("unshare", "--fork", "--pid", "--mount-proc")
        if subprocess.run([*own, "true"], check=False, capture_output=True).returncode:
            pytest.skip("a PID namespace cannot be made here")
        with open_store(tier):
            said = elsewhere(tier, prefix=own)["other users"]
        assert (said.grade, "another PID namespace" in said.found) == (PROBLEM, True)
        assert "a directory each" in said.remedy
        assert "a container's own" in elsewhere(tier, prefix=own)["other users"].found

    def test_a_tier_that_the_machine_went_down_with_is_a_warning(self, tier: str, tmp_path: Path) -> None:
        assert not [finding for finding in examine(tier) if finding.check == "last use"]
        (state,) = tmp_path.rglob("state")
        state.write_text("dirty 00000000-another-boot".ljust(63) + "\n")
        said = found(tier, "last use")
        assert (said.grade, "before traffic comes" in said.remedy) == (WARNING, True)

    def test_files_from_the_future_are_a_warning(self, tier: str, tmp_path: Path) -> None:
        (state,) = tmp_path.rglob("state")
        os.utime(state.parent, (time.time() + 500, time.time() + 500))
        said = found(tier, "clock")
        assert (said.grade, "ahead of" in said.found, "chrony" in said.remedy) == (WARNING, True, True)


class TestLimits:
    @pytest.mark.parametrize(("files", "grade"), [(64, PROBLEM), (500, WARNING), (2000, OK)])
    def test_open_files(self, scheme: str, tmp_path: Path, files: int, grade: Grade) -> None:
        limit = f"resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))"
        said = elsewhere(f"{scheme}://{tmp_path}/tier", before=limit)["open files"]
        assert (said.grade, str(files) in said.found) == (grade, True)

    def test_address_space_is_tried_for_the_map_that_the_tier_would_have(self, scheme: str, tmp_path: Path) -> None:
        limit = "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))"
        said = elsewhere(f"{scheme}://{tmp_path}/tier", before=limit)["address space"]
        assert (said.grade, "16.0 TiB does not fit (ulimit -v: 8 GiB" in said.found) == (PROBLEM, True)
        assert "ulimit -v" in said.remedy
        said = elsewhere(f"{scheme}://{tmp_path}/tier?capacity=50MB", before=limit)["address space"]
        assert said.grade is (OK if scheme == "lmdb" else PROBLEM)


BACKEND = """
from kvstore import GetOutcome
from kvstore.doctor import warning
from kvstore_memory import MemoryStore

class Own(MemoryStore):
    @classmethod
    def diagnose(cls, url, usage):
        yield warning("temperature", f"{url.location} is warm", "open a window")
        raise OSError("the thermometer broke")

class Lying(MemoryStore):
    def get_many_into(self, namespace, blocks):
        return [GetOutcome.HIT for _ in blocks]
"""


class TestARoundTrip:
    def test_it_leaves_nothing_where_nothing_was(self, scheme: str, tmp_path: Path) -> None:
        before = sorted(tmp_path.rglob("*"))
        said = found(f"{scheme}://{tmp_path}/deep/tier?capacity=100MB", "round trip", write=True)
        assert (said.grade, "bytes equal" in said.found, "MB/s" in said.found) == (OK, True, True)
        assert sorted(tmp_path.rglob("*")) == before

    def test_it_leaves_the_blocks_of_a_tier_as_they_are_and_none_of_its_own(self, tier: str) -> None:
        said = [finding for finding in examine(tier, write=True) if finding.check == "round trip"]
        assert {finding.grade for finding in said} == {OK}
        with open_store(tier) as store:
            assert store.usage().blocks == 20
            assert {outcome.name for outcome in get(store, range(20))} == {"HIT"}

    def test_it_evicts_nobody(self, scheme: str, tmp_path: Path) -> None:
        url = f"{scheme}://{tmp_path}/tier?capacity=8MB"
        with open_store(url) as store:
            store.put_many(SPACE, writes(range(20)))
        said = found(url, "round trip", write=True)
        assert (said.grade, "would evict blocks of others" in said.found) == (WARNING, True)
        with open_store(url) as store:
            assert store.usage().blocks == 20

    def test_a_tier_for_reading_is_not_written(self, tier: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["doctor", f"{tier}?readonly=true"]) == EXIT_OK
        assert run(["doctor", f"{tier}?readonly=true", "--write"]) == EXIT_USAGE
        assert "leave out readonly" in capsys.readouterr().err

    def test_wrong_bytes_are_a_problem(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        wheel = install_wheel(tmp_path, "liar", {"kvstore_liar.py": BACKEND}, {"liar": "kvstore_liar:Lying"})
        monkeypatch.syspath_prepend(wheel)
        said = found("liar://x", "round trip", write=True)
        assert (said.grade, "16 of 16 blocks came back with other bytes" in said.found) == (PROBLEM, True)
        sys.modules.pop("kvstore_liar")


class TestAnyBackend:
    def test_its_own_checks_are_shown_and_what_they_raise_is_a_finding(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        wheel = install_wheel(tmp_path, "own", {"kvstore_own.py": BACKEND}, {"own": "kvstore_own:Own"})
        monkeypatch.syspath_prepend(wheel)
        assert run(["doctor", "own://x"]) == EXIT_NOT_INTACT
        shown = capsys.readouterr().out
        assert "warning  temperature: x is warm\n" in shown
        assert "-> open a window" in shown
        assert "the thermometer broke" in shown
        sys.modules.pop("kvstore_own")

    def test_a_wrong_url_is_a_usage_error_without_a_password_in_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        for url in ("nope://x", "file:///x?capacty=1", "nope://user:hunter2@host/x", "no url"):
            assert run(["doctor", url, "--json"]) == EXIT_USAGE
            out, err = capsys.readouterr()
            assert out == ""
            assert err.startswith("kvstore: ")
            assert "hunter2" not in err

    def test_a_tier_that_is_to_be_read_and_is_not_there_is_a_problem(self, scheme: str, tmp_path: Path) -> None:
        url = f"{scheme}://{tmp_path}/tier?readonly=true"
        assert {found(url, check).grade for check in ("location", "opening")} == {PROBLEM}


class TestEncryptionOfATierThatIsNotMadeYet:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ("encryption=env:KVSTORE_NO_SUCH_KEY&keyring={folder}/k.json", "variable is not set"),
            ("encryption=file:{folder}/operator.key", "wants keyring="),
            ("encryption=file:{folder}/operator.key&keyring={folder}/none/k.json", "cannot be made by uid"),
            ("encryption=file:{folder}/other.key&keyring={folder}/keyring.json", "another operator's key"),
        ],
    )
    def test_what_no_engine_could_open_is_a_problem(
        self, scheme: str, options: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("operator", "other"):
            (tmp_path / f"{name}.key").write_text(os.urandom(32).hex())
        Keyring.open(tmp_path / "keyring.json", KeySource("file", f"{tmp_path}/operator.key").read()).close()
        url = f"{scheme}://{tmp_path}/tier?capacity=50MB&{options.format(folder=tmp_path)}"
        assert run(["doctor", url]) == EXIT_NOT_INTACT
        assert says in capsys.readouterr().out

    def test_keys_that_are_there_or_can_be_made_are_fine_and_stay_as_they_are(
        self, scheme: str, tmp_path: Path
    ) -> None:
        (tmp_path / "operator.key").write_text(os.urandom(32).hex())
        url = f"{scheme}://{tmp_path}/tier?encryption=file:{tmp_path}/operator.key&keyring={tmp_path}/keyring.json"
        before = tree(tmp_path)
        assert "the first opening makes it" in found(url, "encryption").found
        assert tree(tmp_path) == before
        Keyring.open(tmp_path / "keyring.json", KeySource("file", f"{tmp_path}/operator.key").read()).close()
        assert found(url, "encryption").grade is OK


def test_a_mount_that_is_read_only_is_called_that(scheme: str, tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o ro none {tmp_path}"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], check=False, capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    prefix = ("unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh")
    told = elsewhere(f"{scheme}://{tmp_path}/tier", prefix=prefix)["location"]
    assert (told.grade, told.found) == (PROBLEM, f"{tmp_path} is mounted read-only")
    assert "chown" not in told.remedy
