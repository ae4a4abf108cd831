"""`kvstore top`: one sample or a line for each, beside an engine that writes, and ended by Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from cli_helpers import KEYS, LARGE, MODEL, OTHER, machine, tree

import kvstore
from kvstore import BlockRead, BlockWrite, Mark, Namespace
from kvstore.cli import EXIT_OK, EXIT_USAGE, run

if TYPE_CHECKING:
    from pathlib import Path


def test_one_sample_says_how_full_a_tier_is_and_what_is_in_it(
    tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(tmp_path / "kv")
    told = machine(capsys, "top", tier, "--once")
    assert (told["url"], told["usage"]["blocks"], told["occupancy"]) == (tier, 12, None)
    assert (told["exact"], told["complete"], told["scanned"], told["evictions_per_s"]) == (True, True, 12, None)
    assert told["stores_per_s"] == pytest.approx(12 / 60)
    assert {space["namespace"]: space["blocks"] for space in told["namespaces"]} == {MODEL.name: 10, OTHER.name: 2}
    assert tree(tmp_path / "kv") == before


@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_people_see_occupancy_pins_and_the_hottest_prefix(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{kind}://{tmp_path}/kv"
    odd = Namespace("[red]model\x1b", "1", LARGE.layouts, block_tokens=4)
    with kvstore.open_store(f"{url}?capacity=10MB") as store:
        for space in (LARGE, odd):
            store.put_many(space, [BlockWrite(key, bytes(65536)) for key in KEYS[:4]])
        for _ in range(3):
            store.get_many_into(LARGE, [BlockRead(KEYS[0], bytearray(65536))])
        store.mark_many(LARGE, KEYS[:2], Mark("[b]handbook", pinned=True))
    assert run(["top", url, "--once"]) == EXIT_OK
    shown = capsys.readouterr().out
    for expected in ("8 blocks", "of 10.0 MB (", "25% of it pinned", KEYS[0].digest.hex()[:16], "[b]handbook, pinned"):
        assert expected in shown
    assert "[red]model\\x1b" in shown
    told = machine(capsys, "top", url, "--once")
    assert (told["hottest"][0]["hits"], told["hottest"][0]["pinned"]) == (3, True)
    assert 0.05 < told["occupancy"] < 0.5


@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_a_line_for_each_sample_beside_a_process_that_writes(kind: str, tmp_path: Path) -> None:
    url = f"{kind}://{tmp_path}/kv"
    command = [sys.executable, "-m", "kvstore", "top", url, "--json", "--interval", "0.2"]
    with kvstore.open_store(url) as store:
        store.put_many(LARGE, [BlockWrite(KEYS[0], bytes(65536))])
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            blocks = [json.loads(child.stdout.readline())["usage"]["blocks"]]
            store.put_many(LARGE, [BlockWrite(key, bytes(65536)) for key in KEYS])
            while blocks[-1] < len(KEYS) and len(blocks) < 50:
                blocks.append(json.loads(child.stdout.readline())["usage"]["blocks"])
            child.send_signal(signal.SIGINT)
            assert child.wait(60) == 130
    assert (blocks[0], blocks[-1]) == (1, len(KEYS))


def test_what_is_not_there_is_not_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([f"file://{tmp_path}/nothing"], [f"file://{tmp_path}/nothing", "--interval", "0.01"]):
        assert run(["top", *words, "--once"]) == EXIT_USAGE
        assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", [["--json"], []])
def test_it_ends_when_nobody_reads_on(form: list[str], tier: str) -> None:
    command = [sys.executable, "-m", "kvstore", "top", tier, "--interval", "0.2", *form]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        try:
            assert process.wait(20) == EXIT_OK
        finally:
            process.kill()
        assert process.stderr is not None
        assert process.stderr.read() == b""
