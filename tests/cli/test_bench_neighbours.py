"""`kvstore bench` where others have blocks: theirs are left, none of its own stay, whatever ends it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_helpers import KEYS, OTHER, QUICK, machine, source_tree, tree

import kvstore
from kvstore import BlockWrite
from kvstore.bench import TierUnderTest
from kvstore.cli import EXIT_USAGE, run
from kvstore.url import TierURL


def test_bench_evicts_no_blocks_of_others_and_changes_no_capacity(
    shipped: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = (*QUICK, "--namespace", "mine")
    assert run(["bench", f"{shipped}?capacity=50MB", *named]) == EXIT_USAGE
    assert "which has none" in capsys.readouterr().err
    with kvstore.open_store(f"{shipped}?capacity=1500kB"):
        pass
    assert run(["bench", f"{shipped}?capacity=1500kB", *named, "--total", "2MiB"]) == EXIT_USAGE
    assert "would evict blocks of others" in capsys.readouterr().err
    assert machine(capsys, "stat", shipped)["usage"]["blocks"] == 2


@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_bench_of_a_shipped_backend_leaves_nothing_behind(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mount").mkdir()
    for name in ("new", "mount"):
        told = machine(capsys, "bench", f"{scheme}://{tmp_path}/{name}", *QUICK)
        assert len(told["results"]) == 8
    assert list(tmp_path.rglob("*")) == [tmp_path / "mount"]


def test_bench_beside_blocks_of_others_on_a_shipped_backend_leaves_theirs(
    shipped: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", shipped, *QUICK]) == EXIT_USAGE
    assert "--namespace NAME" in capsys.readouterr().err
    machine(capsys, "bench", shipped, *QUICK, "--namespace", "mine")
    told = machine(capsys, "verify", shipped)
    assert (told["blocks"], told["intact"]) == (2, 2)
    assert [path for path in tmp_path.rglob("*") if "kvstore-bench" in path.name] == []


@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_bench_at_a_mount_point_leaves_what_stood_there_before(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rescued = tmp_path / "mount/lost+found/rescued"
    rescued.parent.mkdir(parents=True)
    rescued.write_bytes(b"precious")
    machine(capsys, "bench", f"{scheme}://{tmp_path}/mount", *QUICK)
    assert rescued.read_bytes() == b"precious"
    assert list(tmp_path.rglob("*")) == [tmp_path / "mount", rescued.parent, rescued]


OPEN_ELSEWHERE = """
import sys, kvstore
from kvstore import BlockLayout, BlockWrite, Namespace, block_keys
with kvstore.open_store(sys.argv[1]) as store:
    if sys.argv[2] == "put":
        space = Namespace("org/late", "r", (BlockLayout.opaque(4096),), block_tokens=4)
        print(store.put_many(space, [BlockWrite(block_keys(range(4), 4)[0], bytes(4096))]), flush=True)
        sys.exit()
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("scheme", ["file", "lmdb"])
@pytest.mark.parametrize("there_before", [True, False])
@pytest.mark.parametrize("does", ["put", "stay"])
def test_bench_leaves_a_tier_that_another_process_uses_by_its_end(
    scheme: str, there_before: bool, does: str, tmp_path: Path
) -> None:
    if there_before:
        (tmp_path / "kv").mkdir()
    url = TierURL.parse(f"{scheme}://{tmp_path}/kv")
    with TierUnderTest(url, 65536, 1 << 20) as bench:
        bench.store(KEYS[:2], [memoryview(bytes(65536))] * 2)
        command = [sys.executable, "-c", OPEN_ELSEWHERE, str(url), does]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, source_tree()))}
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert other.stdout is not None
        assert other.stdout.readline()
        if does == "put":
            other.communicate()
    try:
        expected = "another process " + ("has it open" if does == "stay" else "stored 1 blocks there")
        assert any(f"{url} stays" in note and expected in note for note in bench.notes)
        with kvstore.open_store(url, readonly=True) as store:
            assert store.usage().blocks == (1 if does == "put" else 0)
            assert [space.model for space in store.namespaces() if any(store.scan(space))] == ["org/late"] * (
                does == "put"
            )
    finally:
        other.communicate()


@pytest.mark.parametrize("options", [(), ("--namespace", "mine")])
def test_bench_refuses_blocks_without_a_catalogue_whose_owners_cannot_be_told(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/kv"
    with kvstore.open_store(url) as store:
        store.put_many(OTHER, [BlockWrite(key, bytes(4096)) for key in KEYS])
    shutil.rmtree(tmp_path / "kv/.kvstore")
    before = tree(tmp_path)
    assert run(["bench", f"{url}?capacity=1MiB", *QUICK, *options]) == EXIT_USAGE
    assert "whose blocks are there cannot be told" in capsys.readouterr().err
    assert tree(tmp_path) == before


@pytest.mark.parametrize(("number", "says"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")])
@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_bench_that_is_told_to_end_leaves_nothing_behind(
    scheme: str, number: signal.Signals, says: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "kvstore", "bench", f"{scheme}://{tmp_path}/kv", *QUICK[:-1], "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            deadline = time.monotonic() + 60
            while not any(path.name.startswith(".kvstore-bench-") for path in tmp_path.iterdir()):
                assert time.monotonic() < deadline
                assert running.poll() is None
                time.sleep(0.01)
            time.sleep(0.3)
            running.send_signal(number)
            out, err = running.communicate(timeout=60)
        finally:
            running.kill()
    assert (out, err.splitlines()[-1], running.returncode) == ("", f"kvstore: {says}", 128 + number)
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_bench_removes_everything_where_nothing_was(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(tmp_path)
    machine(capsys, "bench", f"{scheme}://{tmp_path}/deep/er/kv", *QUICK)
    assert tree(tmp_path).keys() == before.keys()


def test_bench_refuses_a_tier_with_blocks_of_others(
    tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(tmp_path)
    assert run(["bench", tier, *QUICK]) == EXIT_USAGE
    assert "--namespace NAME" in capsys.readouterr().err
    assert tree(tmp_path) == before


def test_bench_beside_blocks_of_others_leaves_theirs_and_none_of_its_own(
    tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: facts for path, facts in tree(tmp_path).items() if Path(path).is_file()}
    machine(capsys, "bench", tier, *QUICK, "--namespace", "mine")
    after = tree(tmp_path)
    assert {path: after[path] for path in before} == before
    assert [path for path in after.keys() - before.keys() if "0-" in path or ".kvstore-bench" in path] == []
    assert machine(capsys, "stat", tier)["usage"]["blocks"] == 12


def test_bench_never_evicts_blocks_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    url = "memory://shared?capacity=512KiB"
    with kvstore.open_store(url) as store:
        store.put_many(OTHER, [BlockWrite(KEYS[0], bytes(4096))])
        assert run(["bench", url, *QUICK, "--namespace", "mine"]) == EXIT_USAGE
        assert "would evict blocks of others (org/other)" in capsys.readouterr().err
        assert store.contains_many(OTHER, KEYS[:1]) == [True]


def test_bench_removes_what_a_killed_one_left(scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = TierURL.parse(f"{scheme}://{tmp_path}/kv")
    with kvstore.open_store(url):
        pass
    killed = TierUnderTest(url, 65536, 1 << 20)
    killed.store(KEYS[:2], [memoryview(bytes(65536))] * 2)
    with kvstore.open_store(url) as store:
        assert store.usage().blocks == 2
        machine(capsys, "bench", str(url), *QUICK)
        assert store.usage().blocks == 0
    killed.close()


def test_bench_that_is_interrupted_removes_what_it_had_written(scheme: str, tmp_path: Path) -> None:
    url = f"{scheme}://{tmp_path}/kv"
    with kvstore.open_store(url) as store:
        with TierUnderTest(TierURL.parse(url), 65536, 1 << 20) as interrupted:
            interrupted.store(KEYS[:2], [memoryview(bytes(65536))] * 2)
            assert store.usage().blocks == 2
        assert store.usage().blocks == 0
