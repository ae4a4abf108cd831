"""`kvstore bench`: figures for work that was done, at every size, beside the bare device."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from cli_helpers import KEYS, QUICK, machine

import kvstore
from kvstore.bench import MemoryCopy, RawFiles, TierUnderTest, Workload, runner, steps
from kvstore.bench.runner import OPERATIONS
from kvstore.cli import EXIT_OK, EXIT_USAGE, run
from kvstore.demo.worker import WorkerFailed
from kvstore.errors import ConfigurationError, InvalidOptionError, StoreNotFoundError, TierUnavailable
from kvstore.url import TierURL


def test_bench_of_a_tier_that_must_not_be_written_is_refused(shipped: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", f"{shipped}?readonly=true", *QUICK]) == EXIT_USAGE
    assert "a benchmark writes: leave out readonly" in capsys.readouterr().err


def test_a_share_of_no_disk_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidOptionError, match="in bytes"):
        kvstore.open_store("memory://x?capacity=80%")
    assert run(["bench", "memory://x?capacity=80%", *QUICK]) == EXIT_USAGE
    capsys.readouterr()


# bench
KEYS_OF_A_FIGURE = {
    "op",
    "contestant",
    "block_bytes",
    "threads",
    "gb_per_s",
    "gb_per_s_min",
    "gb_per_s_max",
    "cpu_s_per_gb",
    "ratio",
}


def test_bench_measures_the_tier_and_the_bare_device_at_every_size(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = machine(
        capsys, "bench", f"{scheme}://{tmp_path}/new/kv", "--against", "raw", *QUICK, "--block-bytes", "5000"
    )
    figures = told["results"]
    assert [(figure["block_bytes"], figure["op"], figure["contestant"]) for figure in figures] == [
        (nbytes, op, contestant) for nbytes in (65536, 5000) for op in OPERATIONS for contestant in ("kvstore", "raw")
    ]
    for figure in figures:
        assert set(figure) == KEYS_OF_A_FIGURE
        assert 0 < figure["gb_per_s_min"] <= figure["gb_per_s"] <= figure["gb_per_s_max"]
        assert figure["cpu_s_per_gb"] > 0
        assert figure["threads"] == 3
    assert all(figure["ratio"] == 1 for figure in figures if figure["contestant"] == "raw")
    assert all(figure["ratio"] > 0 for figure in figures)
    assert any("page cache" in note for note in told["notes"])
    apart = [note for note in told["notes"] if "load_warm is timed in a process of its own" in note]
    assert len(apart) == (scheme == "lmdb")
    assert any(note.startswith("raw: ") and ("direct" in note or "buffered" in note) for note in told["notes"])


def test_bench_tells_people_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "memory://bench", *QUICK]) == EXIT_OK
    shown = capsys.readouterr().out
    for expected in ("load_cold", "kvstore", "raw", "64 KiB", "ratio", "note: page cache", "note: kvstore: memory"):
        assert expected in shown


def test_bench_reports_no_figure_for_blocks_that_were_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "memory://small?capacity=200KiB", *QUICK]) == EXIT_USAGE
    assert "lower --total, raise capacity or make room" in capsys.readouterr().err


def test_bench_refuses_sizes_that_make_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    for bad in (
        ("--total", "1KiB"),
        ("--block-bytes", "2XB"),
        ("--threads", "0"),
        ("--rounds", "0"),
        ("--against", "x"),
        ("--io-process",),  # without --step
    ):
        assert run(["bench", "memory://x", *bad]) == EXIT_USAGE
    capsys.readouterr()


def test_the_bare_device_moves_blocks_whole_and_leaves_nothing(tmp_path: Path) -> None:
    page = memoryview(mmap.mmap(-1, 4096))
    page[:] = b"\5" * 4096
    with RawFiles(tmp_path, 4096) as raw:
        raw.store(KEYS[:1], [page])
        (file,) = raw.files()
        assert file.read_bytes() == bytes(page)
        os.truncate(file, 100)
        with pytest.raises(OSError, match="100 of 4096 bytes"):
            raw.load(KEYS[:1], [page])
    assert list(tmp_path.iterdir()) == []


def test_a_tier_under_test_reports_what_went_wrong_instead_of_a_figure(scheme: str, tmp_path: Path) -> None:
    url = TierURL.parse(f"{scheme}://{tmp_path}/kv")
    with TierUnderTest(url, 4096, 1 << 20) as tier, pytest.raises(TierUnavailable, match="miss instead of hit"):
        tier.load(KEYS[:1], [memoryview(bytearray(4096))])
    with pytest.raises(StoreNotFoundError):
        kvstore.open_store(url, readonly=True)
    with pytest.raises(ConfigurationError):
        TierUnderTest(TierURL.parse("memory://x?nope=1"), 4096, 1 << 20)


def test_several_contestants_take_part_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = machine(capsys, "bench", f"file://{tmp_path}/kv", "--against", "crc", "--against", "copy", *QUICK)
    assert [(figure["op"], figure["contestant"]) for figure in told["results"]] == [
        (op, contestant) for op in OPERATIONS for contestant in ("kvstore", "crc", "copy")
    ]
    assert all(figure["ratio"] == 1 for figure in told["results"] if figure["contestant"] == "crc")
    assert told["against"] == ["crc", "copy"]
    assert not list(tmp_path.iterdir())


def test_the_page_cache_is_dropped_while_the_tier_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[bool] = []

    def settle(contestant: object) -> str:
        if isinstance(contestant, TierUnderTest):
            mapped.append(f"{tmp_path}/kv/data.mdb" in Path("/proc/self/maps").read_text())
        return "dropped"

    monkeypatch.setattr(runner, "_settle", settle)
    assert run(["bench", f"lmdb://{tmp_path}/kv", *QUICK, "--json"]) == EXIT_OK
    assert mapped
    assert not any(mapped)


@pytest.mark.parametrize("interrupted", [False, True])
def test_nothing_of_a_tier_is_mapped_while_the_page_cache_is_dropped(tmp_path: Path, interrupted: bool) -> None:
    """What is mapped stays there; and what is interrupted goes on with an open tier, which it has to empty."""
    block = memoryview(bytes(range(256)) * 16)

    def mapped() -> bool:
        return f"{tmp_path}/kv/data.mdb" in Path("/proc/self/maps").read_text()

    with TierUnderTest(TierURL.parse(f"lmdb://{tmp_path}/kv"), 4096, 1 << 20) as tier:
        tier.store(KEYS[:1], [block])
        assert mapped()
        with suppress(KeyboardInterrupt), tier.cooling():
            assert not mapped()
            if interrupted:
                raise KeyboardInterrupt
        assert mapped()
        into = memoryview(bytearray(4096))
        tier.load(KEYS[:1], [into])
        assert into == block
    assert not list(tmp_path.iterdir())


def test_the_tier_of_vllm_wants_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where a folder happens to have its name, as one of the tests' does: Python takes that for a package."""
    if any(importlib.metadata.distributions(name="vllm")):
        pytest.skip("vLLM is installed here")
    assert run(["bench", f"file://{tmp_path}/kv", "--against", "vllm-fs", *QUICK]) == EXIT_USAGE
    assert "pip install vllm" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_copy_brings_the_same_bytes_back_and_keeps_nothing() -> None:
    with MemoryCopy(5000) as copy:
        copy.expect(KEYS[:2])
        copy.store(KEYS[:2], [memoryview(bytes([number]) * 5000) for number in (7, 8)])
        into = [memoryview(bytearray(5000)) for _ in range(2)]
        copy.load(KEYS[:2], into)
        assert [bytes(block) for block in into] == [b"\7" * 5000, b"\10" * 5000]
        copy.clear(KEYS[:2])
        with pytest.raises(KeyError):
            copy.load(KEYS[:1], into[:1])


def test_a_process_of_its_own_that_does_not_find_a_block_gives_no_figure(tmp_path: Path) -> None:
    load = Workload.of(block_bytes=4096, total=8192, threads=2, batch_bytes=4096, rounds=1)
    with TierUnderTest(TierURL.parse(f"lmdb://{tmp_path}/kv"), 4096, 1 << 20) as tier:
        tier.store(KEYS[:1], [memoryview(bytes(4096))])
        with pytest.raises(WorkerFailed, match="not every block is there"):
            tier.warm_elsewhere(load, KEYS[:2], 1)


def test_a_step_is_timed_idle_and_beside_everybody(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "SLICE_S", 0.1)
    quick = ("--against", "copy", "--step", "--total", "8MiB", "--block-bytes", "64KiB", "--threads", "2")
    told = machine(capsys, "bench", f"{scheme}://{tmp_path}/kv", *quick, "--rounds", "1", "--io-process")
    figures = told["steps"]
    assert [(figure["rest_ms"], figure["contestant"]) for figure in figures] == [
        (rest, contestant) for rest in (1, 0) for contestant in ("kvstore", "kvstore, io_process", "copy")
    ]
    for figure in figures:
        assert 0.2 < figure["idle_p50_ms"] <= figure["idle_p99_ms"]
        assert 0.2 < figure["busy_p50_ms"] <= figure["busy_p99_ms"]
        assert figure["p99_to_idle"] == pytest.approx(figure["busy_p99_ms"] / figure["idle_p99_ms"])
        assert figure["share_kept"] == pytest.approx(figure["busy_gb_per_s"] / figure["solo_gb_per_s"])
        assert figure["solo_gb_per_s"] > 0
    assert "results" not in told
    assert not list(tmp_path.iterdir())


def test_steps_are_told_to_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SLICE_S", 0.02)
    quick = ("--against", "copy", "--step", "--total", "1MiB", "--block-bytes", "64KiB", "--threads", "1")
    assert run(["bench", "memory://bench", *quick, "--rounds", "1"]) == EXIT_OK
    shown = capsys.readouterr().out
    for expected in ("a scheduler's step", "rest ms", "kept", "%", "note: kvstore: memory"):
        assert expected in shown
    assert "load_warm" not in shown


def test_a_transfer_that_fails_gives_no_figure_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--against", "copy", "--step", "--total", "4MiB", "--block-bytes", "64KiB", "--rounds", "1")
    assert run(["bench", "memory://small?capacity=200KiB", *small]) == EXIT_USAGE
    assert "not every block was moved" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "begin"), [("speed.png", b"\x89PNG"), ("speed.svg", b"<?xml")])
def test_throughput_is_drawn(name: str, begin: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--block-bytes", "64KiB", "--block-bytes", "5000", "--plot", str(tmp_path / name))
    small = ("--total", "64KiB", "--rounds", "1", "--threads", "1")
    assert run(["bench", "memory://bench", "--against", "copy", *small, *sizes]) == EXIT_OK
    drawn = (tmp_path / name).read_bytes()
    assert drawn.startswith(begin)
    if name.endswith("svg"):
        for expected in (b"memory://bench", b"load warm 1", b"5000 B", b"64 KiB", b"copy"):
            assert expected in drawn
    capsys.readouterr()


def test_what_cannot_be_drawn_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["bench", "memory://x", *QUICK, "--plot", str(tmp_path / "speed.pdf")]) == EXIT_USAGE
    assert ".png, .svg" in capsys.readouterr().err
    assert run(["bench", "memory://x", *QUICK, "--step", "--plot", str(tmp_path / "speed.png")]) == EXIT_USAGE
    assert "leave out --step" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(["bench", "memory://x", *QUICK, "--plot", str(tmp_path / "speed.png")]) == EXIT_USAGE
    assert 'pip install "kvstore-tiers[inspect]"' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
