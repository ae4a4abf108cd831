"""A `capacity=` in a command's URL: none makes a tier smaller or evicts for it, unless that is what it is for."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from cli_helpers import LARGE, machine

from kvstore import BlockWrite, Mark, block_keys, open_store
from kvstore.archive import create, select
from kvstore.cli import EXIT_OK, EXIT_USAGE, run
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

KEYS = block_keys(range(160), 4)
OWN, OTHER = "8MiB", "2MiB"
BENCH = ("--total", "64KiB", "--block-bytes", "64KiB", "--threads", "1", "--rounds", "1", "--namespace", "mine")
COMMANDS: dict[str, Sequence[str]] = {
    "verify": ("verify", "TIER", "--repair"),
    "reindex": ("reindex", "TIER"),
    "pin": ("pin", "TIER", "--label", "handbook"),
    "unpin": ("unpin", "TIER", "--label", "handbook"),
    "purge": ("purge", "TIER", "--label", "handbook", "--yes", "--refuse", "0"),
    "cp": ("cp", "SOURCE", "TIER"),
    "warm": ("warm", "--to", "TIER", "ARCHIVE"),
    "restore": ("archive", "restore", "ARCHIVE", "--to", "TIER"),
    "bench": ("bench", "TIER", *BENCH),
    "rekey": ("rekey", "TIER", "--data", "--yes"),
}


@pytest.fixture(params=["file", "lmdb"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A tier of 40 blocks, 2.6 MB, under a capacity of 8 MiB."""
    url = f"{request.param}://{tmp_path}/full"
    with open_store(f"{url}?capacity={OWN}") as store:
        store.put_many(LARGE, [BlockWrite(key, bytes(65536)) for key in KEYS])
        store.mark_many(LARGE, KEYS[:2], Mark("handbook"))
    return url


@pytest.fixture
def words(tmp_path: Path) -> dict[str, str]:
    """Another tier, of one block, and an archive of it."""
    with open_store(f"file://{tmp_path}/source") as store:
        store.put_many(LARGE, [BlockWrite(KEYS[0], bytes(65536), position=0)])
        create(f"file://{tmp_path}/archives/one", store, LARGE, select(store, LARGE, keys=KEYS[:1]))
    return {"SOURCE": f"file://{tmp_path}/source", "ARCHIVE": f"file://{tmp_path}/archives/one"}


def facts(url: str) -> tuple[int, int | None]:
    with open_store(url, readonly=True) as store:
        return store.usage().blocks, store.usage().capacity


@pytest.mark.parametrize("command", COMMANDS)
def test_another_capacity_than_the_tiers_own_is_an_error_that_names_both(
    command: str, full: str, words: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    keys = ""
    if command == "rekey":
        monkeypatch.setenv("OPERATORS_KEY", bytes(range(32)).hex())
        keys = f"&encryption=env:OPERATORS_KEY&keyring={tmp_path}/keyring"
        shutil.rmtree(TierURL.parse(full).location)
        with open_store(f"{full}?capacity={OWN}{keys}") as store:
            store.put_many(LARGE, [BlockWrite(key, bytes(65536)) for key in KEYS])
    before = facts(full + keys.replace("&", "?", 1))
    assert before == (40, 8 << 20)
    tier = {"TIER": f"{full}?capacity={OTHER}{keys}"}
    assert run([(words | tier).get(word, word) for word in COMMANDS[command]]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert f"capacity={OTHER} (2.1 MB (2097152 bytes))" in said
    assert "8.4 MB (8388608 bytes)" in said
    assert "leave capacity= out" in said
    assert facts(full + keys.replace("&", "?", 1)) == before


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("bench", "rekey", "reindex")])
@pytest.mark.parametrize("given", ["", f"?capacity={OWN}"])
def test_the_tiers_own_capacity_may_be_given_and_left_out(
    command: str, given: str, full: str, words: dict[str, str]
) -> None:
    used = words | {"TIER": full + given}
    assert run([used.get(word, word) for word in COMMANDS[command]]) == EXIT_OK
    assert facts(full) == (38 if command == "purge" else 40, 8 << 20)


def test_a_new_tier_gets_the_capacity_of_the_url(tmp_path: Path, words: dict[str, str]) -> None:
    for kind in ("file", "lmdb"):
        assert run(["cp", words["SOURCE"], f"{kind}://{tmp_path}/{kind}?capacity={OTHER}"]) == EXIT_OK
        assert facts(f"{kind}://{tmp_path}/{kind}") == (1, 2 << 20)


def test_a_tier_that_lost_its_records_is_repaired_without_evicting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/kv"
    with open_store(url) as store:
        store.put_many(LARGE, [BlockWrite(key, bytes(65536)) for key in KEYS])
    shutil.rmtree(tmp_path / "kv" / ".kvstore")
    assert run(["verify", f"{url}?capacity={OTHER}", "--repair"]) == EXIT_OK
    assert "cannot be told any more" in capsys.readouterr().err
    assert facts(url) == (40, None)


def test_a_round_trip_of_the_doctor_evicts_nothing(full: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = machine(capsys, "doctor", f"{full}?capacity={OTHER}", "--write")["findings"]
    assert ["not tried" in one["found"] for one in said if one["check"] == "round trip"] == [True]
    assert facts(full) == (40, 8 << 20)


def test_gc_takes_a_capacity_of_the_url_for_its_own(full: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The dry run shows what would go, the run says what went, and the tier's own capacity stays."""
    url = f"{full}?capacity={OTHER}"
    shown = machine(capsys, "gc", url)
    assert shown == machine(capsys, "gc", full, "--capacity", OTHER) | {"url": url}
    assert 0 < shown["to_go"]["blocks"] < 40
    assert facts(full)[0] == 40
    done = machine(capsys, "gc", url, "--yes")
    assert done["removed"]["over"] == shown["to_go"]["blocks"]
    assert facts(full) == (40 - shown["to_go"]["blocks"], 8 << 20)


def test_gc_of_an_engines_url_removes_nothing_for_the_capacity(full: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert machine(capsys, "gc", f"{full}?capacity={OWN}", "--yes")["removed"]["over"] == 0
    assert facts(full) == (40, 8 << 20)


def test_a_read_only_opening_blames_nobody(full: str) -> None:
    with pytest.raises(OSError, match="which a read-only opening does not change"):
        open_store(f"{full}?capacity={OTHER}", readonly=True)
