"""`kvstore purge`, and the receipt that it gives."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from purge_helpers import found, machine

import kvstore
from kvstore import GetOutcome, Mark, PutOutcome
from kvstore.cli import EXIT_NOT_INTACT, EXIT_OK, EXIT_USAGE, run
from kvstore.purging import Keys, Request, purge
from kvstore.purging.removing import TierPurge
from kvstore.testing.clock import MovableClock, movable_clock
from kvstore.testing.supply import SPACE, get, held, key, keys, write, writes

if TYPE_CHECKING:
    from collections.abc import Iterator

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS
STORED, EXISTS, REFUSED = PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.REFUSED


@pytest.fixture
def clock() -> Iterator[MovableClock]:
    with movable_clock() as clock:
        yield clock


@pytest.fixture(params=["file", "lmdb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A tier with ten blocks: the first six of acme, of which two are zeta's as well and one is pinned."""
    made = f"{request.param}://{tmp_path}/kv"
    with kvstore.open_store(made) as store:
        store.put_many(SPACE, writes(range(10)))
        store.mark_many(SPACE, keys(range(6)), Mark("handbook", tenant="acme"))
        store.mark_many(SPACE, keys(range(4, 8)), Mark("prices", tenant="zeta"))
        store.mark_many(SPACE, keys([0]), Mark("handbook", pinned=True, tenant="acme"))
    return made


def test_without_yes_nothing_is_changed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = machine(capsys, "purge", url, "--tenant", "acme")
    assert (code, told["dry_run"], told["tiers"][0]["url"]) == (EXIT_OK, True, url)
    (space,) = told["tiers"][0]["spaces"]
    assert (space["namespace"], space["blocks"], space["pinned"], space["shared"]) == (SPACE.name, 6, 1, 2)
    assert told["tiers"][0]["remains"] == []
    with kvstore.open_store(url) as store:
        assert get(store, range(10)) == [HIT] * 10


@pytest.mark.parametrize(
    ("asked", "gone"),
    [
        (("--tenant", "acme"), range(6)),
        (("--label", "prices"), range(4, 8)),
        (("--namespace", SPACE.name[:6]), range(10)),
        (("--all",), range(10)),
        (("--older-than", "0s"), range(10)),
        (("--older-than", "1h"), range(0)),
        (("--tenant", "acme", "--namespace", SPACE.name), range(6)),
    ],
)
def test_those_go_to_which_all_that_is_asked_applies(
    url: str, asked: tuple[str, ...], gone: range, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = machine(capsys, "purge", url, *asked, "--yes")
    (tier,) = told["tiers"]
    assert (code, told["complete"], tier["blocks"], tier["left"], tier["failed"]) == (EXIT_OK, True, len(gone), 0, [])
    with kvstore.open_store(url) as store:
        assert get(store, range(10)) == [MISS if number in gone else HIT for number in range(10)]
        assert held(store) == {key(number) for number in range(10) if number not in gone}
        outcomes = store.put_many(SPACE, writes(range(10)))
        assert [outcome is REFUSED for outcome in outcomes] == [number in gone for number in range(10)]


@pytest.mark.parametrize("yes", [(), ("--yes",)])
@pytest.mark.parametrize(
    ("asked", "there"),
    [
        (("--tenant", "acmee"), "no block has the tenant 'acmee'. There are tenants: acme"),
        (("--label", "x", "--older-than", "0s"), "no block has the label 'x'. There are labels: "),
        (("--label", "prices", "--tenant", "acme"), "no block has the label 'prices' and the tenant 'acme'"),
    ],
)
def test_whom_no_block_is_of_gets_no_clean_receipt(
    url: str, asked: tuple[str, ...], there: str, yes: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["purge", url, *asked, *yes, "--json"]) == EXIT_NOT_INTACT
    out, err = capsys.readouterr()
    assert json.loads(out)["nothing_found"]
    assert there in err
    assert run(["purge", url, *asked, *yes]) == EXIT_NOT_INTACT
    assert "not stored again" not in capsys.readouterr().out
    code, told = machine(capsys, "purge", url, "--tenant", "acme", "--older-than", "1h", "--yes")
    assert (code, told["nothing_found"]) == (EXIT_OK, True)
    assert not machine(capsys, "purge", url, "--tenant", "acme")[1]["nothing_found"]


def test_the_receipt_is_what_was_asked_what_went_and_what_remains(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "receipt.json"
    assert run(["purge", url, "--tenant", "acme", "--yes", "--receipt", str(file)]) == EXIT_OK
    said = capsys.readouterr().out
    told: dict[str, Any] = json.loads(file.read_text())
    (tier,) = told["tiers"]
    assert told["asked"] == {"namespaces": None, "label": "", "tenant": "acme", "older_than": None, "all": False}
    assert (told["complete"], told["dry_run"], told["kvstore_purge_receipt"]) == (True, False, 1)
    assert tier["bytes"] >= 6 * SPACE.block_bytes()
    assert tier["overwritten"] >= 6 * SPACE.block_bytes()
    assert tier["erasable"] is None
    assert told["began"] <= told["ended"] < tier["refused_until"]
    assert {"what", "nbytes", "remedy"} == set(tier["remains"][0])
    for words in ("snapshots", "digests, labels and tenants"):
        assert any(words in residue["what"] for residue in tier["remains"])
    assert any("/reset_prefix_cache" in text for text in told["elsewhere"])
    assert "6 blocks" in said
    assert all(text in said for text in told["elsewhere"])
    assert found(tmp_path / "kv", range(6)) == set()


@pytest.mark.parametrize("form", [("--json",), ()])
def test_a_receipt_that_stdout_does_not_take_goes_to_stderr(url: str, form: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "kvstore", "purge", url, "--tenant", "acme", "--yes", *form]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == EXIT_NOT_INTACT
    said, receipt = done.stderr.split("\n", 1)
    assert "stdout cannot be written: No space left on device; the purge is over, and this is its receipt:" in said
    assert [tier["blocks"] for tier in json.loads(receipt)["tiers"]] == [6]


def test_several_tiers_are_purged_whatever_becomes_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    urls = [f"file://{tmp_path}/one", f"file://{tmp_path}/nowhere", f"lmdb://{tmp_path}/two"]
    for url in (urls[0], urls[2]):
        with kvstore.open_store(url) as store:
            store.put_many(SPACE, writes(range(3)))
    code, told = machine(capsys, "purge", *urls, "--all", "--yes")
    assert (code, told["complete"]) == (EXIT_NOT_INTACT, False)
    assert [(tier["blocks"], len(tier["failed"])) for tier in told["tiers"]] == [(3, 0), (0, 1), (3, 0)]
    assert not (tmp_path / "nowhere").exists()
    for url in (urls[0], urls[2]):
        with kvstore.open_store(url) as store:
            store.put_many(SPACE, writes(range(10, 12)))
    code, told = machine(capsys, "purge", *urls, "--namespace", SPACE.name[:6], "--yes")
    assert code == EXIT_NOT_INTACT
    assert sorted((tier["blocks"], len(tier["failed"])) for tier in told["tiers"]) == [(0, 1), (2, 0), (2, 0)]


def test_a_tier_that_keeps_no_tenants_is_not_purged_by_tenant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/kv?remote=true&lookup_ttl=0"
    with kvstore.open_store(url) as store:
        store.put_many(SPACE, [write(1)])
    code, told = machine(capsys, "purge", url, "--tenant", "acme", "--yes")
    assert (code, told["tiers"][0]["blocks"]) == (EXIT_NOT_INTACT, 0)
    assert "keeps no labels and tenants" in told["tiers"][0]["failed"][0]
    code, told = machine(capsys, "purge", url, "--all", "--yes")
    assert (code, told["tiers"][0]["blocks"], told["tiers"][0]["others_know_within"]) == (EXIT_OK, 1, 1.0)


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--all", "--tenant", "acme"),
        ("--namespace", "0123"),
        ("--tenant", "acme", "--refuse", "9d"),
        ("--older-than", "soon"),
    ],
)
def test_what_is_not_clear_is_asked_back(url: str, args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["purge", url, *args, "--yes"]) == EXIT_USAGE
    assert capsys.readouterr().err
    with kvstore.open_store(url) as store:
        assert store.usage().blocks == 10


def test_a_receipt_that_cannot_be_written_is_said_before_anything_goes(url: str, tmp_path: Path) -> None:
    assert run(["purge", url, "--all", "--yes", "--receipt", str(tmp_path / "no" / "receipt.json")]) != EXIT_OK
    with kvstore.open_store(url) as store:
        assert store.usage().blocks == 10


def test_how_long_blocks_are_refused_can_be_said(url: str, clock: MovableClock) -> None:
    assert run(["purge", url, "--all", "--yes", "--refuse", "2h"]) == EXIT_OK
    with kvstore.open_store(url) as store:
        clock.advance(7100)
        assert store.put_many(SPACE, [write(1)]) == [REFUSED]
        clock.advance(120)
        assert store.put_many(SPACE, [write(1)]) == [STORED]
    assert run(["purge", url, "--all", "--yes", "--refuse", "0"]) == EXIT_OK
    with kvstore.open_store(url) as store:
        assert store.put_many(SPACE, [write(1)]) == [STORED]


def test_the_age_is_that_of_storing_however_often_a_block_is_used(url: str, clock: MovableClock) -> None:
    clock.advance(5000)
    with kvstore.open_store(url) as store:
        store.put_many(SPACE, [write(20)])
        get(store, range(5))
    (tier,) = purge([url], Request(older_than=3600), dry_run=False).tiers
    assert tier.blocks == 10
    with kvstore.open_store(url) as store:
        assert held(store) == {key(20)}


def test_a_namespace_that_went_as_a_whole_leaves_no_manifest(url: str) -> None:
    purge([url], Request(all=True), dry_run=False)
    with kvstore.open_store(url) as store:
        assert store.namespaces() == []
        assert store.put_many(SPACE, [write(30)]) == [STORED]
        assert store.namespaces() == [SPACE]


def test_what_others_store_before_they_learn_of_a_purge_goes_as_well(tmp_path: Path) -> None:
    """In a directory that machines share, another one puts a block back that was just purged."""
    url = f"file://{tmp_path}/kv?remote=true&lookup_ttl=1s"
    with kvstore.open_store(url) as other:
        other.put_many(SPACE, writes(range(4)))
        other.contains_many(SPACE, keys(range(4)))  # it has looked for tombstones just now
        back: list[PutOutcome] = []

        def put_back() -> None:
            deadline = time.monotonic() + 60
            while not (tmp_path / "kv/.purged").exists() and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.4)
            other._tier.graves._looked = 1e18  # type: ignore[attr-defined] # as if it had, just before
            back.extend(other.put_many(SPACE, writes(range(4))))

        writer = threading.Thread(target=put_back)
        writer.start()
        (tier,) = purge([url], Request(all=True), dry_run=False).tiers
        writer.join()
        assert STORED in back
        assert (tier.blocks in (4, 8), tier.left, tier.complete) == (True, 0, True)
    with kvstore.open_store(url) as store:
        assert get(store, range(4)) == [MISS] * 4
        assert held(store) == set()


def test_nothing_asked_is_not_everything() -> None:
    with pytest.raises(ValueError, match="which blocks"):
        Request()


# Encrypted tiers


@pytest.fixture(params=["file", "lmdb"])
def sealed_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An encrypted tier with four blocks of acme, the last of which zeta uses as well, and two of zeta."""
    key = tmp_path / "operator.key"
    key.write_text(base64.b64encode(os.urandom(32)).decode())
    made = f"{request.param}://{tmp_path}/kv?encryption=file:{key}&keyring={tmp_path}/keyring.json"
    with kvstore.open_store(made) as store:
        for number in range(6):
            tenant = "acme" if number < 4 else "zeta"
            store.put_many(SPACE, [write(number, tenant=tenant)])
            store.mark_many(SPACE, keys([number]), Mark(tenant=tenant))
        store.mark_many(SPACE, keys([3]), Mark(tenant="zeta"))
    return made


@pytest.fixture
def shared_url(tmp_path: Path) -> str:
    """An encrypted tier that keeps no marks, with four blocks of acme and two of zeta."""
    (tmp_path / "operator.key").write_text(base64.b64encode(os.urandom(32)).decode())
    seal = f"encryption=file:{tmp_path}/operator.key&keyring={tmp_path}/keyring.json"
    url = f"file://{tmp_path}/kv?remote=true&lookup_ttl=0&{seal}"
    with kvstore.open_store(url) as store:
        store.put_many(SPACE, [write(number, tenant="acme" if number < 4 else "zeta") for number in range(6)])
    return url


def test_a_purge_that_ended_once_it_had_destroyed_the_keys_is_ended_by_the_same_again(
    shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("kvstore.purging.removing.TierPurge.run", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            purge([shared_url], Request(tenant="acme"), dry_run=False)
    (tier,) = purge([shared_url], Request(tenant="acme"), dry_run=False).tiers
    assert (tier.blocks, tier.complete, tier.erasable) == (4, True, True)
    with kvstore.open_store(shared_url) as store:
        assert held(store) == {key(4), key(5)}


def test_what_an_engine_stores_again_under_the_tenants_new_key_goes_as_well(
    shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kvstore.open_store(shared_url) as engine:
        assert engine.put_many(SPACE, [write(5, tenant="zeta")]) == [EXISTS]
        vars(engine)["_tier"].graves.seen_s = 60.0  # it has looked for tombstones, and does not know of those that come
        settle = vars(TierPurge)["_settle"]

        def stored_again(self: Any, *args: Any) -> None:
            assert engine.put_many(SPACE, [write(1, tenant="acme")]) == [STORED]
            settle(self, *args)

        monkeypatch.setattr(TierPurge, "_settle", stored_again)
        (tier,) = purge([shared_url], Request(tenant="acme"), dry_run=False).tiers
        assert (tier.blocks, tier.complete) == (5, True)
        assert held(engine) == {key(4), key(5)}


def test_what_a_tenant_stores_after_a_purge_has_ended_the_receipt_counts(
    shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = vars(TierPurge)["_settle"]

    def stored_since(self: Any, *args: Any) -> None:
        settle(self, *args)
        assert self.store.put_many(SPACE, [write(9, tenant="acme")]) == [STORED]

    monkeypatch.setattr(TierPurge, "_settle", stored_since)
    (tier,) = purge([shared_url], Request(tenant="acme"), dry_run=False).tiers
    assert (tier.blocks, tier.left, tier.stored_since) == (4, 0, 1)


@pytest.mark.parametrize("keys_too", [True, False])
def test_of_an_encrypted_tier_without_marks_goes_what_is_under_the_tenants_keys(
    keys_too: bool, shared_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = shared_url
    code, told = machine(capsys, "purge", url, "--tenant", "acme")
    assert (code, told["tiers"][0]["blocks"]) == (EXIT_OK, 4)  # what would go
    code, told = machine(capsys, "purge", url, "--tenant", "acme", "--yes", *(() if keys_too else ("--keys", "keep")))
    (tier,) = told["tiers"]
    assert (code, tier["blocks"], tier["erasable"], tier["left"]) == (EXIT_OK, 4, keys_too, 0)
    assert keys_too == any("stored before the tenant" in residue["what"] for residue in tier["remains"])
    with kvstore.open_store(url) as store:
        assert held(store) == {key(4), key(5)}
        assert get(store, range(6)) == [MISS] * 4 + [HIT] * 2
        assert store.put_many(SPACE, [write(1, tenant="acme")]) == [REFUSED]
    code, told = machine(capsys, "purge", url, "--label", "x", "--yes")
    assert code == EXIT_NOT_INTACT
    assert "keeps no labels" in told["tiers"][0]["failed"][0]


def _copied(tmp_path: Path, url: str) -> str:
    """The URL of a copy of the tier, as a backup has it, keyring and operator's key being where they were."""
    shutil.copytree(tmp_path / "kv", tmp_path / "copy")
    return url.replace(f"{tmp_path}/kv?", f"{tmp_path}/copy?")


def test_the_key_of_a_tenant_is_destroyed_and_no_copy_of_its_blocks_can_be_read(
    sealed_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = _copied(tmp_path, sealed_url)
    code, told = machine(capsys, "purge", sealed_url, "--tenant", "acme", "--yes")
    (tier,) = told["tiers"]
    assert (code, tier["blocks"], tier["erasable"]) == (EXIT_OK, 4, True)
    assert any("1 blocks of other tenants too" in residue["what"] for residue in tier["remains"])
    assert any("keyring" in residue["what"] for residue in tier["remains"])
    for url in (sealed_url, copy):
        with kvstore.open_store(url) as store:
            assert get(store, range(6)) == [MISS] * 4 + [HIT] * 2
    with kvstore.open_store(copy) as store:  # a new key is made for what comes
        assert store.put_many(SPACE, [write(9, tenant="acme")]) == [STORED]
        assert get(store, [9]) == [HIT]


@pytest.mark.parametrize(
    ("args", "erasable"),
    [
        (("--tenant", "acme", "--keys", "keep"), False),
        (("--tenant", "acme", "--older-than", "0s"), False),
        (("--all",), False),
        (("--all", "--keys", "destroy"), True),
    ],
)
def test_keys_are_kept_unless_a_tenant_goes_as_a_whole_or_it_is_asked(
    sealed_url: str, args: tuple[str, ...], erasable: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = _copied(tmp_path, sealed_url)
    code, told = machine(capsys, "purge", sealed_url, *args, "--yes")
    (tier,) = told["tiers"]
    assert (code, tier["erasable"], tier["complete"]) == (EXIT_OK, erasable, True)
    assert any("open every copy" in residue["what"] for residue in tier["remains"]) is not erasable
    with kvstore.open_store(copy) as store:
        assert get(store, range(6)) == [MISS if erasable else HIT] * 6


@pytest.mark.parametrize("more", [("--label", "x"), ("--older-than", "1s"), ("--namespace", SPACE.name)])
def test_no_key_is_destroyed_that_opens_more_than_what_goes(sealed_url: str, more: tuple[str, str]) -> None:
    for asked in (more, ("--tenant", "acme", *more)):
        assert run(["purge", sealed_url, *asked, "--keys", "destroy", "--yes"]) == EXIT_USAGE
    with pytest.raises(ValueError, match="keys"):
        purge([sealed_url], Request(label="x"), dry_run=False, keys=Keys.DESTROY)
    remains = purge([sealed_url], Request(older_than=3600), dry_run=False).tiers[0].remains
    assert [residue.remedy for residue in remains if "data keys" in residue.what] == [""]
    with kvstore.open_store(sealed_url) as store:
        assert get(store, range(6)) == [HIT] * 6


def test_a_dry_run_destroys_no_key(sealed_url: str) -> None:
    purge([sealed_url], Request(tenant="acme"), dry_run=True)
    with kvstore.open_store(sealed_url) as store:
        assert get(store, range(6)) == [HIT] * 6


def test_a_block_that_could_not_be_removed_is_left_though_its_writers_clock_was_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"lmdb://{tmp_path}/kv"
    with movable_clock() as ahead, kvstore.open_store(url) as store:
        ahead.advance(3600)
        store.put_many(SPACE, writes(range(2)))
    monkeypatch.setattr("kvstore_lmdb.LMDBStore.purge_many", lambda *_, **__: [False, False])
    (tier,) = purge([url], Request(all=True), dry_run=False).tiers
    assert (tier.left, tier.stored_since, tier.complete) == (2, 0, False)


def test_a_tenant_whose_blocks_only_keys_tell_of_is_said_to_have_none_without_a_list(
    shared_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["purge", shared_url, "--tenant", "acmee", "--yes"]) == EXIT_NOT_INTACT
    assert capsys.readouterr().err.endswith("no block has the tenant 'acmee'\n")
    assert run(["purge", shared_url, "--tenant", "acme", "--yes"]) == EXIT_OK
