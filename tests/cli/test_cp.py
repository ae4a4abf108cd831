"""`kvstore cp`: from tier to tier on the command line; receipts, exit codes, and a copy that was killed goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cli_helpers import KEYS, LARGE, MODEL, OTHER, damage, machine, tree

import kvstore
from kvstore import BlockLayout, BlockWrite, Mark, Namespace, block_keys
from kvstore.archive import create, select
from kvstore.cli import EXIT_FULL, EXIT_NOT_INTACT, EXIT_OK, EXIT_USAGE, run
from kvstore.errors import ConfigurationError
from kvstore.registry import backend_class
from kvstore.url import TierURL

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore import BlockStore
    from kvstore.testing.servers import S3Server
    from kvstore.types import Unseen


@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_a_tier_of_any_backend_is_copied_to_one_of_any_other(
    kind: str, tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"{kind}://{tmp_path}/target"
    before = tree(tmp_path / "kv")
    told = machine(capsys, "cp", tier, target)
    assert told.pop("seconds") > 0
    assert told == {
        "source": tier,
        "target": target,
        "dry_run": False,
        "ok": True,
        "full": False,
        "blocks": 12,
        "copied": 12,
        "bytes": 6 * 8192 + 6 * 4096,
        "already_there": 0,
        "removed_meanwhile": 0,
        "without_room": 0,
        "marks_kept": 0,
        "pins_refused": 0,
        "marks_lost": 0,
        "corrupt": [],
        "missing": [],
        "later": [],
        "failed": [],
        "not_looked_into": [],
        "purged_lately": [],
    }
    assert tree(tmp_path / "kv") == before
    assert machine(capsys, "verify", target)["intact"] == 12
    told = machine(capsys, "cp", tier, target)
    assert (told["copied"], told["already_there"], told["bytes"]) == (0, 12, 0)
    back = machine(capsys, "cp", target, f"memory://{tmp_path.name}")
    assert back["copied"] == 12


def test_a_bucket_is_filled_and_read_and_what_it_cannot_keep_is_said(
    s3_server: S3Server, shipped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    with kvstore.open_store(shipped) as store:
        store.mark_many(LARGE, KEYS[:1], Mark("handbook"))
    bucket = s3_server.url(f"cp/{tmp_path.name}")
    told = machine(capsys, "cp", shipped, bucket, "--dry-run")
    assert (told["copied"], told["already_there"]) == (2, 0)
    assert run(["cp", shipped, bucket, "--json"]) == EXIT_OK
    out, said = capsys.readouterr()
    assert (json.loads(out)["copied"], json.loads(out)["marks_lost"]) == (2, 1)
    assert said == f"note: 1 labels and pins were not kept by {bucket}\n"
    assert machine(capsys, "cp", bucket, f"lmdb://{tmp_path}/back")["copied"] == 2
    assert machine(capsys, "verify", f"lmdb://{tmp_path}/back")["intact"] == 2


def test_people_are_told_the_same(tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cp", tier, f"file://{tmp_path}/target"]) == EXIT_OK
    shown = capsys.readouterr().out
    assert f"{tier} -> file://" in " ".join(shown.split())  # a long title is broken at its spaces
    for expected in (MODEL.name, "org/model", "10", OTHER.name, "GB/s"):
        assert expected in shown


def test_a_damaged_block_stays_behind_and_is_named(
    tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = damage(tier, 1)
    target = f"file://{tmp_path}/target"
    told = machine(capsys, "cp", tier, target, exit_code=EXIT_NOT_INTACT)
    assert (told["ok"], told["copied"], told["blocks"]) == (False, 11, 12)
    assert told["corrupt"] == [{"namespace": MODEL.name, "group": 0, "digest": KEYS[1].digest.hex()}]
    assert file.exists()
    assert run(["cp", tier, target]) == EXIT_NOT_INTACT
    assert f"corrupt: {MODEL.name} group 0 digest {KEYS[1].digest.hex()}" in capsys.readouterr().out


def test_a_namespace_or_a_label_is_copied_alone_with_its_marks(
    shipped: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with kvstore.open_store(shipped) as store:
        store.put_many(OTHER, [BlockWrite(KEYS[0], bytes(4096))])
        store.mark_many(LARGE, KEYS[1:2], Mark("handbook", pinned=True, tenant="acme"))
    target = f"lmdb://{tmp_path}/target"
    told = machine(capsys, "cp", shipped, target, "--label", "handbook")
    assert (told["blocks"], told["copied"], told["marks_kept"]) == (1, 1, 1)
    (block,) = machine(capsys, "ls", target, "--namespace", LARGE.name)["blocks"]
    assert (block["digest"], block["labels"], block["tenants"], block["pinned"]) == (
        KEYS[1].digest.hex(), ["handbook"], ["acme"], True,
    )  # fmt: skip
    told = machine(capsys, "cp", shipped, target, "--namespace", OTHER.name[:10])
    assert (told["blocks"], told["copied"]) == (1, 1)
    assert run(["cp", shipped, target, "--namespace", "zzz"]) == EXIT_USAGE
    assert LARGE.name in capsys.readouterr().err


def test_what_is_in_no_listing_is_looked_for_once(
    shipped: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    backend = backend_class(TierURL.parse(shipped))
    unseen = backend.unseen

    def counted(store: BlockStore) -> list[Unseen]:
        looks.append(str(store.url))
        return unseen(store)

    monkeypatch.setattr(backend, "unseen", counted)
    for asked in ([], ["--namespace", LARGE.name[:10]]):
        looks.clear()
        assert machine(capsys, "cp", shipped, f"lmdb://{tmp_path}/target", *asked)["ok"]
        assert len(looks) == 1


def test_a_dry_run_counts_and_creates_nothing(tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"file://{tmp_path}/target"
    told = machine(capsys, "cp", tier, f"{target}?capacity=1GB", "--dry-run")
    assert (told["dry_run"], told["ok"], told["copied"], told["bytes"]) == (True, True, 12, 6 * 8192 + 6 * 4096)
    assert not (tmp_path / "target").exists()
    machine(capsys, "cp", tier, target, "--namespace", OTHER.name)
    before = tree(tmp_path / "target")
    told = machine(capsys, "cp", tier, target, "--dry-run")
    assert (told["copied"], told["already_there"]) == (10, 2)
    assert blocks(tree(tmp_path / "target")) == blocks(before)


def blocks(files: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Without the locks, in which whoever has the tier open is written down."""
    return {name: facts for name, facts in files.items() if ".kvstore" not in name}


@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_a_full_target_is_said_to_be_full(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = Namespace("org/large", "revision-1", (BlockLayout.opaque(1 << 20),), block_tokens=4)
    source, target = f"file://{tmp_path}/source", f"{kind}://{tmp_path}/target?capacity=12MiB"
    with kvstore.open_store(source) as store:
        store.put_many(space, [BlockWrite(key, bytes(1 << 20)) for key in block_keys(range(80), 4)])
    assert run(["cp", source, target, "--threads", "1", "--json"]) == EXIT_FULL
    out, said = capsys.readouterr()
    told = json.loads(out)
    assert (told["ok"], told["full"]) == (False, True)
    assert 4 <= told["copied"] < 20
    assert said.startswith(f"kvstore: {target} is full: {told['copied']} blocks were copied before. ")
    assert "or let it evict with --evict" in said
    there = machine(capsys, "verify", target)
    assert there["ok"]
    assert there["blocks"] >= 4
    told = machine(capsys, "cp", source, target, "--evict")
    assert (told["ok"], told["full"]) == (True, False)


@pytest.mark.parametrize("kind", ["file", "lmdb"])
@pytest.mark.parametrize("own", [0, 60])
def test_a_copy_into_a_full_target_takes_nothing_away_and_is_over(
    kind: str, own: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --evict: what is copied is there, so is what was, and the same command again comes to its end."""
    source, target = f"file://{tmp_path}/source", f"{kind}://{tmp_path}/target"
    keys = block_keys(range(4 * 200), 4)
    with kvstore.open_store(source) as store:
        store.put_many(LARGE, [BlockWrite(key, bytes(65536)) for key in keys[:140]])
    with kvstore.open_store(f"{target}?capacity=9MiB") as store:
        store.put_many(LARGE, [BlockWrite(key, bytes(65536)) for key in keys[140 : 140 + own]])
    told = machine_of_full(capsys, "cp", source, target)
    with kvstore.open_store(target, readonly=True) as store:
        assert store.usage().blocks == own + told["copied"]
        assert all(store.contains_many(LARGE, keys[140 : 140 + own]))
    assert 90 < own + told["copied"] < 140
    copied = told["copied"]
    for _ in range(5):  # a block may cost less than the one that found no room, and an opening may make some
        more = machine_of_full(capsys, "cp", source, target)["copied"]
        assert more < 10
        copied += more
        if not more:
            break
    assert more == 0
    with kvstore.open_store(target, readonly=True) as store:
        assert store.usage().blocks == own + copied
        assert all(store.contains_many(LARGE, keys[140 : 140 + own]))


def machine_of_full(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    capsys.readouterr()
    assert run([*args, "--json"]) == EXIT_FULL
    out, err = capsys.readouterr()
    assert "is full" in err
    return json.loads(out)


def test_what_makes_no_sense_is_refused(tier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target, why in (
        (tier, "one tier"),
        (tier + "/", "one tier"),
        (f"file://{tmp_path}/target?readonly=true", "leave out readonly"),
        ("nope://x", "no backend"),
    ):
        assert run(["cp", tier, target]) == EXIT_USAGE
        assert why in capsys.readouterr().err
    assert run(["cp", f"file://{tmp_path}/nothing", f"file://{tmp_path}/target"]) == EXIT_USAGE
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_a_copy_that_was_killed_left_nothing_half_and_goes_on_where_it_was(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = Namespace("org/large", "revision-1", (BlockLayout.opaque(1 << 20),), block_tokens=4)
    keys = block_keys(range(4 * 96), 4)
    source, target = f"file://{tmp_path}/source", f"{kind}://{tmp_path}/target"
    with kvstore.open_store(source) as store:
        for at, key in enumerate(keys):
            store.put_many(space, [BlockWrite(key, np.full(1 << 20, at, np.uint8), at)])
        store.mark_many(space, keys, Mark("all"))
    command = [sys.executable, "-m", "kvstore", "cp", source, target, "--threads", "1"]
    for blocks in (1, 40):
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while child.poll() is None and there(target) < blocks:
            time.sleep(0.002)
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert 0 < there(target) < 96, "it was killed too late"
    assert machine(capsys, "verify", target)["ok"]
    told = machine(capsys, "cp", source, target)
    assert (told["ok"], told["blocks"], told["marks_kept"]) == (True, 96, 96)
    assert told["already_there"] + told["copied"] == 96
    assert told["already_there"] > 0
    here, arrived = (
        machine(capsys, "ls", url, "--namespace", "", "--limit", "0")["blocks"] for url in (source, target)
    )
    known = ("digest", "position", "labels")
    assert sorted([block[name] for name in known] for block in arrived) == sorted(
        [block[name] for name in known] for block in here
    )
    assert machine(capsys, "verify", target)["intact"] == 96


def there(url: str) -> int:
    """Blocks of a tier that may not be there yet."""
    try:
        with kvstore.open_store(url, readonly=True) as store:
            return store.usage().blocks
    except kvstore.errors.StoreOpenError:
        return 0


def test_a_copy_says_how_far_it_is(
    tier: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvstore.cli._common.PROGRESS_S", 0.0)
    with kvstore.open_store("memory://progress"):
        assert run(["cp", tier, "memory://progress"]) == EXIT_OK
    assert capsys.readouterr().err.endswith("copying: 12 of 12\n")
    with kvstore.open_store("memory://progress"):
        assert run(["cp", tier, "memory://progress", "--namespace", OTHER.name, "--json"]) == EXIT_OK
    out, err = capsys.readouterr()
    assert json.loads(out)["copied"] == 2
    assert err == "copying: 2\n"


@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_a_copy_that_is_refused_leaves_no_tier(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPERATORS_KEY", bytes(range(32)).hex())
    source = f"file://{tmp_path}/sealed?encryption=env:OPERATORS_KEY&keyring={tmp_path}/keyring"
    with kvstore.open_store(source) as store:
        store.put_many(LARGE, [BlockWrite(KEYS[0], bytes(65536))])
    (tmp_path / "mount").mkdir()
    for place in ("plain", "a/b/plain", "mount"):
        assert run(["cp", source, f"{kind}://{tmp_path}/{place}"]) == EXIT_USAGE
        assert "--plaintext" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"sealed", "keyring", "keyring.lock", "mount"}
    assert list((tmp_path / "mount").iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_a_tier_that_was_there_stays_where_a_copy_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPERATORS_KEY", bytes(range(32)).hex())
    source = f"file://{tmp_path}/sealed?encryption=env:OPERATORS_KEY&keyring={tmp_path}/keyring"
    target = f"{kind}://{tmp_path}/plain"
    for url in (source, target):
        with kvstore.open_store(url) as store:
            store.put_many(LARGE, [BlockWrite(KEYS[0], bytes(65536))] if url == source else [])
    assert run(["cp", source, target]) == EXIT_USAGE
    with kvstore.open_store(target, readonly=True) as store:
        assert store.usage().blocks == 0


@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_a_tier_by_two_names_is_one_and_none_is_made_within_another(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "name").symlink_to(tmp_path / "real")
    source = f"{kind}://{tmp_path}/real/kv"
    with kvstore.open_store(source) as store:
        store.put_many(LARGE, [BlockWrite(KEYS[0], bytes(65536))])
    before = tree(tmp_path)
    for target, why in (
        (f"{kind}://{tmp_path}/name/kv", "source and target are one tier"),
        (f"file://{tmp_path}/name/kv/sub", "the one stands within the other"),
        (f"lmdb://{tmp_path}/real/kv/a/b", "the one stands within the other"),
        (f"file://{tmp_path}/name", "the one stands within the other"),
    ):
        assert run(["cp", source, target]) == EXIT_USAGE
        assert why in capsys.readouterr().err
    assert blocks(tree(tmp_path)).keys() == blocks(before).keys()


@pytest.mark.parametrize("kind", ["file", "lmdb"])
@pytest.mark.parametrize("outer", ["file", "lmdb", "shared", "archive"])
def test_no_tier_is_made_in_a_tier_or_an_archive(kind: str, outer: str, tmp_path: Path) -> None:
    plain = f"{outer}://{tmp_path}/kv" if outer in ("file", "lmdb") else f"zarr+local://{tmp_path}/kv"
    with kvstore.open_store(plain) as store:
        store.put_many(LARGE, [BlockWrite(KEYS[0], bytes(65536), position=0)])
        create(f"file://{tmp_path}/archive", store, LARGE, select(store, LARGE, keys=KEYS[:1]))
    folder = tmp_path / ("archive" if outer == "archive" else "kv")
    deep = [] if outer == "shared" else ["a/b"]
    if outer in ("file", "shared"):
        deep.append(f"{LARGE.name}/x")
    for place in ("sub", *deep):
        with pytest.raises(ConfigurationError, match="who removes the one would take the other along"):
            kvstore.open_store(f"{kind}://{folder}/{place}")
        assert not (folder / place).exists()
    with kvstore.open_store(f"{kind}://{tmp_path}/beside"):
        pass


@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_a_folder_above_that_is_only_named_like_a_tiers_own_is_nobodys_business(kind: str, tmp_path: Path) -> None:
    (tmp_path / ".kvstore").mkdir()
    (tmp_path / "data.mdb").touch()
    with kvstore.open_store(f"{kind}://{tmp_path}/kv") as store:
        assert store.usage().blocks == 0


def test_a_warming_that_is_refused_leaves_no_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with kvstore.open_store("memory://warm") as store:
        store.put_many(LARGE, [BlockWrite(KEYS[0], bytes(65536), position=0)])
        create(f"file://{tmp_path}/archive", store, LARGE, select(store, LARGE, keys=KEYS[:1]))
    one, missing = f"file://{tmp_path}/archive", f"file://{tmp_path}/missing"
    for words in (["warm", one, missing], ["warm", one, "--namespace", "0"], ["archive", "restore", one, "--pin"]):
        assert run([*words, "--to", f"file://{tmp_path}/tier"]) == EXIT_USAGE
        assert not (tmp_path / "tier").exists()
    capsys.readouterr()
