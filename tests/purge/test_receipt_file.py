"""`kvstore purge --receipt`: a receipt that cannot be written is known before anything goes, or is on stdout."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore import GetOutcome
from kvstore.cli import EXIT_NOT_INTACT, EXIT_OK, EXIT_USAGE, run
from kvstore.cli import _receipt as receipt_file
from kvstore.testing.supply import SPACE, get, writes

if TYPE_CHECKING:
    from collections.abc import Callable

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = f"file://{tmp_path}/kv"
    with kvstore.open_store(made) as store:
        store.put_many(SPACE, writes(range(3)))
    return made


def is_there(url: str) -> list[GetOutcome | str]:
    with kvstore.open_store(url) as store:
        return get(store, range(3))


@pytest.mark.parametrize("place", ["nowhere/x.json", "a-file/x.json", "kv"])
def test_a_receipt_that_cannot_be_written_is_an_error_before_anything_goes(
    url: str, tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a-file").touch()
    assert run(["purge", url, "--all", "--yes", "--receipt", str(tmp_path / place)]) == EXIT_USAGE
    assert place in capsys.readouterr().err
    assert is_there(url) == [HIT] * 3


def test_where_there_is_no_room_for_the_receipt_nothing_goes(
    url: str, small_disk: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    disk = small_disk(128 << 10)
    assert run(["purge", url, "--all", "--yes", "--receipt", str(disk / "x.json")]) == EXIT_USAGE
    assert "No space left" in capsys.readouterr().err
    assert list(disk.iterdir()) == []
    assert is_there(url) == [HIT] * 3


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_receipt_that_cannot_be_written_in_the_end_is_on_stdout(
    url: str, tmp_path: Path, as_json: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(receipt_file.ReceiptFile, "write", full)
    (tmp_path / "x.json").write_text("the receipt of another purge")
    assert run(["purge", url, "--all", "--yes", "--receipt", str(tmp_path / "x.json"), *as_json]) == EXIT_NOT_INTACT
    told = capsys.readouterr()
    assert json.loads(told.out)["tiers"][0]["blocks"] == 3
    assert "No space left" in told.err
    assert (tmp_path / "x.json").read_text() == "the receipt of another purge"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv", "x.json"]
    assert is_there(url) == [MISS] * 3


def test_a_receipt_takes_the_place_of_an_earlier_one_whole_and_follows_links(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text("x" * 100_000)
    (tmp_path / "x.json").chmod(0o640)
    (tmp_path / "link.json").symlink_to("x.json")
    assert run(["purge", url, "--all", "--receipt", str(tmp_path / "link.json")]) == EXIT_OK
    assert json.loads((tmp_path / "x.json").read_text())["dry_run"]
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "link.json").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv", "link.json", "x.json"]
    assert run(["purge", url, "--all", "--receipt", os.devnull]) == EXIT_OK
    capsys.readouterr()


def test_a_receipt_is_on_the_device_and_so_is_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    fsync = os.fsync

    def seen(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())

    monkeypatch.setattr(os, "fsync", seen)
    with receipt_file.ReceiptFile(tmp_path / "x.json") as file:
        file.write("{}")
    draft, folder = synced
    assert draft.parent == folder == tmp_path
