"""`kvstore archive` and `kvstore warm`, as they are typed."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from archive_helpers import BLOCKS, IDS, KEYS, LABEL, SPACE, STEP, fill, filled, held

from kvstore import BlockLayout, Mark, PutOutcome, open_store
from kvstore.archive import create
from kvstore.archive.local import LocalClient
from kvstore.cli import EXIT_FULL, EXIT_NOT_INTACT, EXIT_OK, EXIT_USAGE, run
from kvstore.testing.faults import FaultyStore, lying

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore import Namespace


def machine(capsys: pytest.CaptureFixture[str], *words: str, code: int = EXIT_OK) -> Any:
    """The JSON that a command prints."""
    capsys.readouterr()
    assert run([*words, "--json"]) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said of a command that cannot be done."""
    capsys.readouterr()
    assert run(words) == EXIT_USAGE
    return capsys.readouterr().err


def test_from_a_tier_into_an_archive_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tier, root = filled(tmp_path / "source"), f"file://{tmp_path}/archives"
    made = machine(capsys, "archive", "create", f"{root}/one", "--from", tier, "--label", LABEL)
    assert (made["blocks"], made["tokens"], made["label"], made["token_ids"]) == (BLOCKS, len(IDS), LABEL, False)
    assert machine(capsys, "archive", "list", root) == {"archives": [made], "damaged": {}}
    assert machine(capsys, "archive", "show", f"{root}/one") == made
    assert machine(capsys, "archive", "verify", f"{root}/one")["ok"] is True
    target = f"lmdb://{tmp_path}/target"
    back = machine(capsys, "archive", "restore", f"{root}/one", "--to", target)
    assert (back["restored"], back["complete"], back["labelled"]) == (BLOCKS, True, BLOCKS)
    again = machine(capsys, "warm", "--to", target, "--namespace", SPACE.name[:6], f"{root}/one")
    assert [(one["restored"], one["already_there"]) for one in again] == [(0, BLOCKS)]
    with open_store(target) as store:
        assert all(held(store, SPACE, KEYS))
    assert machine(capsys, "archive", "rm", f"{root}/one") == {"removed": f"{root}/one"}
    assert "there is no archive" in refused(capsys, "archive", "show", f"{root}/one")


def test_warm_takes_no_archive_of_a_namespace_that_the_tier_has_not_and_restore_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive, target = archived(tmp_path, capsys), f"file://{tmp_path}/target"
    other = replace(SPACE, revision="revision-2")
    with open_store(target) as store:
        fill(store, replace(SPACE, model="org/another", revision="9", block_tokens=STEP))
        fill(store, other)
    said = refused(capsys, "warm", "--to", target, archive)
    assert "revision: 'revision-1' there, 'revision-2' here" in said
    assert "org/another" not in said  # the one that is most alike is compared
    with open_store(target) as store:
        assert SPACE not in store.namespaces()
    assert machine(capsys, "archive", "restore", archive, "--to", target)["complete"]
    assert machine(capsys, "warm", "--to", target, archive)[0]["already_there"] == BLOCKS
    assert machine(capsys, "warm", "--to", f"lmdb://{tmp_path}/empty", archive)[0]["restored"] == BLOCKS


@pytest.mark.parametrize("command", [("archive", "restore"), ("warm",)], ids=" ".join)
def test_whose_the_blocks_are_and_that_they_stay_is_said_where_they_are_restored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    archive, target = archived(tmp_path, capsys), f"file://{tmp_path}/target"
    said = machine(capsys, *command, archive, "--to", target, "--tenant", "acme", "--pin")
    report = said if command[0] == "archive" else said[0]
    assert (report["labelled"], report["pinned"], report["complete"]) == (BLOCKS, BLOCKS, True)
    with open_store(target) as store:
        assert {info.marks for info in store.scan(SPACE)} == {(Mark(LABEL, pinned=True, tenant="acme"),)}


def test_what_cannot_be_pinned_is_said_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive, unnamed = archived(tmp_path, capsys), f"file://{tmp_path}/archives/unnamed"
    with open_store(f"file://{tmp_path}/source") as store:
        create(unnamed, store, SPACE, KEYS)
    target = f"file://{tmp_path}/target"
    assert "has no label" in refused(capsys, "warm", archive, unnamed, "--to", target, "--pin")
    assert "128 bytes" in refused(capsys, "archive", "restore", archive, "--to", target, "--tenant", "a" * 129)
    objects = f"zarr+memory://{tmp_path.name}"
    assert "neither tenants nor pins" in refused(capsys, "archive", "restore", archive, "--to", objects, "--pin")
    for url in (target, objects):
        with open_store(url) as store:
            assert store.namespaces() == []


def test_more_than_may_be_pinned_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = replace(SPACE, layouts=(BlockLayout.opaque(1 << 20),))
    archive = archived(tmp_path, capsys, large)
    target = f"file://{tmp_path}/target?capacity=9MiB"
    report = machine(capsys, "archive", "restore", archive, "--to", target, "--pin", code=EXIT_NOT_INTACT)
    assert (report["restored"], report["labelled"]) == (BLOCKS, BLOCKS)
    assert 0 < report["pinned"] < BLOCKS


def archived(folder: Path, capsys: pytest.CaptureFixture[str], space: Namespace = SPACE) -> str:
    """An archive of the prefix: its URL."""
    archive = f"file://{folder}/archives/one"
    machine(capsys, "archive", "create", archive, "--from", filled(folder / "source", space), "--label", LABEL)
    return archive


def test_people_read_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tier, root = filled(tmp_path / "source"), f"file://{tmp_path}/archives"
    words = ("archive", "create", f"{root}/one", "--from", tier, "--label", LABEL, "--keep-until", "2999-01-01")
    assert run(words) == EXIT_OK
    for command in (("list", root), ("show", f"{root}/one"), ("verify", f"{root}/one"),
                    ("restore", f"{root}/one", "--to", tier)):  # fmt: skip
        assert run(["archive", *command]) == EXIT_OK
    out = capsys.readouterr().out
    assert "7 of 7 blocks are intact" in out
    assert "2999-01-01" in out
    assert LABEL in out


@pytest.mark.parametrize("way", ["tokens", "json tokens", "keys", "text"])
def test_a_prefix_is_named_by_tokens_keys_or_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str) -> None:
    tier, given = filled(tmp_path / "source"), tmp_path / "given"
    words = {"tokens": ["--tokens"], "json tokens": ["--tokens"], "keys": ["--keys"], "text": ["--text"]}[way]
    given.write_text(
        {
            "tokens": " ".join(map(str, IDS)),
            "json tokens": json.dumps(IDS),
            "keys": "\n".join(key.digest.hex() for key in KEYS),
            "text": " ".join(f"w{number}" for number in IDS),
        }[way]
    )
    tail = ["--tokenizer", word_tokenizer(tmp_path)] if way == "text" else []
    include = [] if way == "keys" else ["--include-tokens"]
    url = f"file://{tmp_path}/archives/one"
    made = machine(capsys, "archive", "create", url, "--from", tier, *words, str(given), *tail, *include)
    assert (made["blocks"], made["token_ids"], made["label"]) == (BLOCKS, way != "keys", "")


def word_tokenizer(folder: Path) -> str:
    """A real tokenizer.json: each word a token, w100 the hundredth."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(200)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_what_is_said_of_words_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tier, url = filled(tmp_path / "source"), f"file://{tmp_path}/archives/one"
    create = ("archive", "create", url, "--from", tier)
    ids = tmp_path / "ids"
    ids.write_text("1 2 three")
    assert "which prefix?" in refused(capsys, *create)
    assert "JSON list of token ids" in refused(capsys, *create, "--tokens", str(ids))
    assert "--tokenizer go together" in refused(capsys, *create, "--text", str(ids))
    assert "is no digest" in refused(capsys, *create, "--keys", str(ids))
    assert "a date such as" in refused(capsys, *create, "--label", LABEL, "--keep-until", "soon")
    assert "--include-tokens needs" in refused(capsys, *create, "--label", LABEL, "--include-tokens")
    assert "no block of namespace" in refused(capsys, *create, "--label", "another")
    with open_store(tier) as store:
        fill(store, type(SPACE)("org/second", "1", SPACE.layouts, STEP))
    assert "say which namespace" in refused(capsys, *create, "--label", LABEL)
    assert machine(capsys, *create, "--label", LABEL, "--namespace", SPACE.name)["blocks"] == BLOCKS


def test_a_kept_archive_is_not_removed_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tier, url = filled(tmp_path / "source"), f"file://{tmp_path}/archives/one"
    machine(capsys, "archive", "create", url, "--from", tier, "--label", LABEL, "--keep-until", "90d")
    assert "to be kept until" in refused(capsys, "archive", "rm", url)
    machine(capsys, "archive", "rm", url, "--force")


def test_damage_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kvstore.archive.document import MANIFEST_NAME

    tier, root = filled(tmp_path / "source"), f"file://{tmp_path}/archives"
    machine(capsys, "archive", "create", f"{root}/one", "--from", tier, "--label", LABEL)
    folder = tmp_path / "archives" / "one"
    shard = next(iter(folder.glob("g0/c/*/*/*/*/*")))
    data = bytearray(shard.read_bytes())
    data[7] ^= 1
    shard.write_bytes(data)
    found = machine(capsys, "archive", "verify", f"{root}/one", code=EXIT_NOT_INTACT)
    assert [one["digest"] for one in found["corrupt"]] == [KEYS[0].digest.hex()]
    back = machine(capsys, "archive", "restore", f"{root}/one", "--to", "memory://cli", code=EXIT_NOT_INTACT)
    assert (back["corrupt"], back["restored"], back["complete"]) == (1, BLOCKS - 1, False)
    (folder / MANIFEST_NAME).write_text("{}")
    assert list(machine(capsys, "archive", "list", root, code=EXIT_NOT_INTACT)["damaged"]) == [f"{root}/one"]


def test_a_tier_without_room_is_exit_code_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, url = filled(tmp_path / "source"), f"file://{tmp_path}/archives/one"
    machine(capsys, "archive", "create", url, "--from", tier, "--label", LABEL)
    full = FaultyStore(open_store("memory://archive-full"))
    full.plan["put"] = lying(PutOutcome.FULL)
    monkeypatch.setattr("kvstore.cli._common.open_store", lambda _: full)
    back = machine(capsys, "archive", "restore", url, "--to", "memory://archive-full", code=EXIT_FULL)
    assert (back["full"], back["refused"], back["complete"]) == (True, BLOCKS, False)


def test_an_archive_that_finds_no_room_is_exit_code_4_and_goes_on_when_there_is_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, url = filled(tmp_path / "source"), f"file://{tmp_path}/archives/one"
    command = ["archive", "create", url, "--from", tier, "--label", LABEL]

    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(LocalClient, "_write", full)
        assert run(command) == EXIT_FULL
    assert "make room and do the same again" in capsys.readouterr().err
    assert run(command) == EXIT_OK


def test_who_loses_to_another_that_makes_the_same_archive_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, url = filled(tmp_path / "source"), f"file://{tmp_path}/archives/one"
    command = ["archive", "create", url, "--from", tier, "--label", LABEL]
    write, codes = LocalClient._write, list[int]()

    def overtaken(self: LocalClient, path: str, parts: Sequence[Any]) -> None:
        write(self, path, parts)
        if "/g0/" in path and "/c/" not in path and not codes:  # the draft of zarr.json
            codes.append(-1)
            codes.append(run(command))

    monkeypatch.setattr(LocalClient, "_write", overtaken)
    assert run(command) == EXIT_USAGE
    assert codes == [-1, EXIT_OK]
    assert "another process has just made an archive of this name" in capsys.readouterr().err
    assert run(["archive", "verify", url]) == EXIT_OK


def test_what_is_to_be_kept_and_until_when_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tier, url = filled(tmp_path / "source"), f"file://{tmp_path}/archives/one"
    command = ["archive", "create", url, "--from", tier, "--label", LABEL, "--keep-until"]
    assert run([*command, "2020-01-01"]) == EXIT_USAGE
    assert "that is past" in capsys.readouterr().err
    assert run(["archive", "list", f"file://{tmp_path}/archives"]) == EXIT_OK
    assert "no archive stands directly below it" in capsys.readouterr().err
    assert run([*command, "90d"]) == EXIT_OK
    assert run(["archive", "rm", url]) == EXIT_USAGE
    assert "--force" in capsys.readouterr().err
    assert run(["archive", "rm", url, "--force"]) == EXIT_OK
