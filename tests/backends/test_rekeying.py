"""`kvstore rekey`: what becomes of blocks, keys and keyrings, and that no key goes before its blocks have another."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from sealing_helpers import key_file, keyring, sealed

import kvstore.rekeying
import kvstore_lmdb
from kvstore import BlockStore, GetOutcome, MarkOutcome, PutOutcome, open_store
from kvstore.cli import EXIT_NOT_INTACT, EXIT_OK, EXIT_USAGE, run
from kvstore.errors import ConfigurationError, KeyringError, StoreNotFoundError, TierUnavailable
from kvstore.integrity import crc32c
from kvstore.marks import Mark
from kvstore.purging import Request, purge
from kvstore.rekeying import PASSES, keyrings_of, reseal
from kvstore.sealing import SEAL_BYTES
from kvstore.testing.supply import SPACE, get, key, keys, write, writes
from kvstore.url import TierURL
from kvstore_zarr.metadata import NamespaceTree
from kvstore_zarr.store import LocalZarrStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore import BlockKey, Namespace
    from kvstore.rekeying import Resealed

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS
STORES: dict[str, type[BlockStore]] = {"file": LocalZarrStore, "lmdb": kvstore_lmdb.LMDBStore}


@pytest.fixture(params=["file", "lmdb"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(scheme: str, tmp_path: Path) -> str:
    """A tier with four blocks: the first two of acme, both with marks, one of them pinned."""
    made = sealed(f"{scheme}://{tmp_path}/tier", tmp_path)
    with open_store(made) as store:
        put = [*(write(number, tenant="acme") for number in (0, 1)), *writes([2, 3])]
        assert store.put_many(SPACE, put) == [PutOutcome.STORED] * 4
        store.mark_many(SPACE, keys([0, 1]), Mark("handbook", tenant="acme"))
        store.mark_many(SPACE, keys([1]), Mark("prices", pinned=True))
    return made


def resealed(*urls: str) -> Resealed:
    tiers = [TierURL.parse(url) for url in urls]
    return reseal(tiers, keyrings_of(tiers))


def outcomes(url: str) -> list[GetOutcome | str]:
    with open_store(url) as store:
        return get(store, range(4))


def nothing_goes(_: BlockStore, __: Namespace, gone: Sequence[BlockKey]) -> list[bool]:
    """As on a read-only mount."""
    return [False] * len(gone)


class TestOldKeys:
    def test_a_read_only_url_changes_nothing(self, url: str, tmp_path: Path) -> None:
        before = (tmp_path / "keyring.json").read_bytes()
        with pytest.raises(ConfigurationError, match="read-only"):
            resealed(f"{url}&readonly=true")
        assert (tmp_path / "keyring.json").read_bytes() == before
        assert outcomes(url) == [HIT] * 4

    def test_nor_does_a_path_with_no_tier(self, url: str, tmp_path: Path) -> None:
        before = (tmp_path / "keyring.json").read_bytes()
        with pytest.raises(StoreNotFoundError):
            resealed(url, url.replace("/tier?", "/teir?"))
        assert not (tmp_path / "teir").exists()
        assert (tmp_path / "keyring.json").read_bytes() == before
        assert outcomes(url) == [HIT] * 4

    def test_they_stay_while_blocks_under_them_can_be_read(
        self, scheme: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(STORES[scheme], "reseal_many", BlockStore.reseal_many)
            patch.setattr(STORES[scheme], "delete_many", nothing_goes)
            with pytest.raises(TierUnavailable, match=f"4 blocks .* last of {PASSES} passes.* old keys were kept"):
                resealed(url)
        assert outcomes(url) == [HIT] * 4
        assert len(keyring(tmp_path).old_keys()) == 2
        report = resealed(url)
        assert (report.resealed, report.lost, report.dropped) == (4, 0, 2)
        assert outcomes(url) == [HIT] * 4

    def test_what_cannot_be_read_holds_nothing_up_and_is_counted_once(self, url: str, tmp_path: Path) -> None:
        path = tmp_path / "keyring.json"
        document = json.loads(path.read_text())
        (acme,) = (entry for entry in document["keys"] if entry["tenant"] == "acme")
        acme["wrapped"] = acme["wrapped"][::-1]
        path.write_text(json.dumps(document))
        report = resealed(url)
        assert (report.resealed, report.lost, report.dropped) == (2, 2, 2)
        assert outcomes(url) == [MISS, MISS, HIT, HIT]


@pytest.mark.parametrize("when", ["before the put", "in the put"])
def test_a_tenant_purged_while_its_blocks_are_away_does_not_come_back(
    when: str, scheme: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipts: list[Any] = []

    def purge_once() -> None:
        if not receipts:
            receipts.extend(purge([url], Request(tenant="acme"), dry_run=False, refuse_s=0).tiers)

    cls = STORES[scheme]
    delete_many, put_many = cls.delete_many, cls.put_many

    def delete(self: BlockStore, *args: Any) -> Any:
        gone = delete_many(self, *args)
        if when == "before the put":
            purge_once()
        return gone

    def put(self: BlockStore, *args: Any) -> Any:
        purge_once()
        return put_many(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(cls, "reseal_many", BlockStore.reseal_many)
        patch.setattr(cls, "delete_many", delete)
        patch.setattr(cls, "put_many", put)
        resealed(url)
    assert [(one.erasable, one.failed) for one in receipts] == [(True, [])]
    assert outcomes(url) == [MISS, MISS, HIT, HIT]


def test_a_tenant_purged_while_its_blocks_are_read_does_not_come_back(
    scheme: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = STORES[scheme]
    check_many = cls.check_many

    def check(self: BlockStore, *args: Any) -> Any:
        outcomes = check_many(self, *args)
        keyring(tmp_path).destroy("acme")
        return outcomes

    with monkeypatch.context() as patch:
        patch.setattr(cls, "check_many", check)
        resealed(url)
    assert outcomes(url) == [MISS, MISS, HIT, HIT]


class TestMarks:
    def test_they_and_the_tenants_are_the_ones_from_before(self, url: str, tmp_path: Path) -> None:
        with open_store(url) as store:
            before = {info.key: (info.marks, info.position) for info in store.scan(SPACE)}
            assert resealed(url).unmarked == 0
            assert {info.key: (info.marks, info.position) for info in store.scan(SPACE)} == before
            assert before[key(1)][0] == (Mark("handbook", tenant="acme"), Mark("prices", pinned=True))
            keyring(tmp_path).destroy("acme")
            assert get(store, range(4)) == [MISS, MISS, HIT, HIT]

    def test_those_that_cannot_be_given_back_are_counted(
        self, scheme: str, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mark_many = STORES[scheme].mark_many

        def full_of_pins(self: BlockStore, space: Namespace, keys: Sequence[BlockKey], mark: Mark) -> list[MarkOutcome]:
            return [MarkOutcome.UNPINNED] * len(keys) if mark.pinned else mark_many(self, space, keys, mark)

        monkeypatch.setattr(STORES[scheme], "reseal_many", BlockStore.reseal_many)
        monkeypatch.setattr(STORES[scheme], "mark_many", full_of_pins)
        assert resealed(url).unmarked == 1


class TestCommand:
    def test_several_tiers_of_one_keyring_get_new_keys_in_one_go(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        bare = [f"{scheme}://{tmp_path}/{scheme}?keyring={tmp_path}/keyring.json" for scheme in ("file", "lmdb")]
        old, new = (f"file:{key_file(tmp_path, name)}" for name in ("operator.key", "new.key"))
        for number, url in enumerate(bare):
            with open_store(f"{url}&encryption={old}") as store:
                store.put_many(SPACE, [write(number, tenant="acme"), write(number + 2)])
        ring = keyring(tmp_path).ring()
        code = run(["rekey", *bare, "--encryption", old, "--new-encryption", new, "--data", "--yes", "--json"])
        told = json.loads(capsys.readouterr().out)
        assert code == EXIT_OK
        assert told == {
            "keyrings": [str(tmp_path / "keyring.json")], "rewrapped": True, "resealed": 4, "lost": 0, "dropped": 2,
            "unmarked": 0, "kept": 0, "unseen": [], "not_here": [], "dry_run": False,
        }  # fmt: skip
        with pytest.raises(KeyringError, match="another operator's key"):
            keyring(tmp_path)
        for number, url in enumerate(bare):
            with open_store(f"{url}&encryption={new}") as store:
                assert get(store, [number, number + 2]) == [HIT, HIT]
                assert not set(store.sealed_with(SPACE, keys([number, number + 2]))) & set(ring.keys)

    def test_wrapping_anew_touches_no_block(self, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with open_store(url) as store:
            before = store.sealed_with(SPACE, keys(range(4)))
        new = f"file:{key_file(tmp_path, 'new.key')}"
        assert run(["rekey", url, "--new-encryption", new]) == EXIT_OK
        assert f"wrapped by {new}" in re.sub(r"\s+", " ", capsys.readouterr().out)
        with open_store(re.sub("encryption=[^&]*", f"encryption={new}", url)) as store:
            assert store.sealed_with(SPACE, keys(range(4))) == before
            assert get(store, range(4)) == [HIT] * 4

    def test_what_was_done_is_said(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["rekey", url, "--data", "--yes"]) == EXIT_OK
        told = capsys.readouterr().out
        assert told == "4 blocks sealed under new data keys, 0 lost, 2 old data keys dropped\n"

    def test_without_yes_it_says_what_it_would_do_and_does_nothing(
        self, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        keyring(tmp_path).data_key("elsewhere")
        before, new = (tmp_path / "keyring.json").read_bytes(), f"file:{key_file(tmp_path, 'new.key')}"
        assert run(["rekey", url, "--data", "--new-encryption", new]) == EXIT_OK
        told = re.sub(r"\s+", " ", capsys.readouterr().out)
        assert "4 blocks would be sealed under new data keys, and 2 data keys be dropped; --yes does it" in told
        assert "Every other tier that shares a keyring has to be named" in told
        assert run(["rekey", url, "--data", "--json"]) == EXIT_OK
        answer = json.loads(capsys.readouterr().out)
        assert (answer["dry_run"], answer["blocks"], answer["unseen"]) == (True, 4, [])
        assert {(use["tenant"], use["blocks"]) for use in answer["drop"]} == {("acme", 2), ("", 2)}
        assert [(use["tenant"], use["blocks"]) for use in answer["keep"]] == [("elsewhere", 0)]
        assert (tmp_path / "keyring.json").read_bytes() == before

    def test_keys_of_tenants_whose_blocks_are_in_another_tier_stay_and_are_named(
        self, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = sealed(f"lmdb://{tmp_path}/other", tmp_path)
        with open_store(other) as store:
            store.put_many(SPACE, [write(9, tenant="elsewhere")])
        kept = keyring(tmp_path).data_key("elsewhere").id
        for _ in range(2):  # a key that stays does not count as one that an interruption has left
            before = set(keyring(tmp_path).ring().keys)
            assert run(["rekey", url, "--data", "--yes"]) == EXIT_OK
            told = re.sub(r"\s+", " ", capsys.readouterr().out)
            assert "4 blocks sealed under new data keys, 0 lost, 2 old data keys dropped" in told
            assert f"kept: the data key {kept.hex()} of tenant 'elsewhere'" in told
            assert before & set(keyring(tmp_path).ring().keys) == {kept}
        with open_store(other) as store:
            assert get(store, [9]) == [HIT]
        assert outcomes(url) == [HIT] * 4

    def test_an_interrupted_one_is_foreseen_and_ended_for_those_tenants_alone(
        self, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        keyring(tmp_path).data_key("elsewhere")
        left = keyring(tmp_path).renew({"acme", "elsewhere"})
        assert run(["rekey", url, "--data", "--json"]) == EXIT_OK
        assert {use["tenant"] for use in json.loads(capsys.readouterr().out)["drop"]} == {"acme", ""}
        assert run(["rekey", url, "--data", "--yes", "--json"]) == EXIT_OK
        answer = json.loads(capsys.readouterr().out)
        assert (answer["resealed"], answer["dropped"]) == (4, 2)
        assert {use["tenant"] for use in answer["not_here"]} == {"elsewhere"}
        assert len(left & set(keyring(tmp_path).ring().keys)) == 1
        assert outcomes(url) == [HIT] * 4

    def test_what_cannot_be_done_is_an_error(
        self, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for code, says, args in (
            (EXIT_USAGE, "what is to change", [url]),
            (EXIT_USAGE, "names no encryption=", [f"lmdb://{tmp_path}/plain", "--data"]),
            (EXIT_USAGE, "env:NAME", [url, "--new-encryption", "secret"]),
            (EXIT_USAGE, "read-only", [f"{url}&readonly=true", "--data"]),
            (EXIT_USAGE, "teir", [url.replace("/tier?", "/teir?"), "--data"]),
        ):
            assert run(["rekey", *args]) == code, says
            told = re.sub(r"\s+", " ", capsys.readouterr().err)
            assert says in told
            assert "secret" not in told
        assert outcomes(url) == [HIT] * 4


@pytest.mark.parametrize("options", ["", "?remote=true&lookup_ttl=0"])
def test_old_keys_stay_while_a_namespace_cannot_be_looked_into(
    options: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, other = sealed(f"file://{tmp_path}/tier{options}", tmp_path), replace(SPACE, revision="another")
    with open_store(url) as store:
        store.put_many(SPACE, writes(range(4)))
        store.put_many(other, writes(range(4), other))
    document = tmp_path / "tier" / SPACE.name / "zarr.json"
    sound = document.read_bytes()
    document.write_text("{")

    def rekeyed() -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = run(["rekey", url, "--data", "--yes", "--json"])
        return code, json.loads(capsys.readouterr().out)

    code, told = rekeyed()
    assert (code, told["resealed"], told["dropped"], told["kept"], told["lost"]) == (EXIT_NOT_INTACT, 4, 0, 1, 0)
    assert [one["namespace"] for one in told["unseen"]] == [SPACE.name]
    if options:
        document.write_bytes(sound)
    else:
        assert run(["verify", url, "--repair"]) == EXIT_OK
    assert outcomes(url) == [HIT] * 4
    code, told = rekeyed()
    assert (code, told["resealed"], told["dropped"], told["unseen"]) == (EXIT_OK, 4, 1, [])
    assert outcomes(url) == [HIT] * 4


def made_by_a_later_version(path: Path, what: str) -> None:
    """The version of the seal, or of the tail, is another one, under sound checksums."""
    data, size = bytearray(path.read_bytes()), SPACE.block_bytes(0) + SEAL_BYTES
    (tail,) = struct.unpack_from("<Q", data, len(data) - 12)
    struct.pack_into("<H", data, (0 if what == "seal" else tail) + 8, 2)
    struct.pack_into("<I", data, size, crc32c(bytes(data[:size])))
    struct.pack_into("<I", data, len(data) - 24, crc32c(bytes(data[tail - 4 : -24])))
    path.write_bytes(data)


def test_what_a_later_version_made_is_named_in_each_tier_all_of_it_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvstore.rekeying, "BATCH_BYTES", SPACE.block_bytes(0))
    later = {"seal": [0, 2, 3], "tail": [0, 1]}
    urls = {name: sealed(f"file://{tmp_path}/{name}", tmp_path) for name in later}
    for name, numbers in later.items():
        with open_store(urls[name]) as store:
            store.put_many(SPACE, writes(range(5)))
        for number in numbers:
            made_by_a_later_version(tmp_path / name / NamespaceTree(SPACE).block(key(number)), name)
    done = resealed(*urls.values())
    assert (done.resealed, done.lost, done.kept, done.dropped) == (5, 0, 1, 0)
    told = [(one.why.split("?")[0], one.namespace, one.blocks, one.later) for one in done.unseen]
    assert told == [(f"file://{tmp_path}/{name}", SPACE.name, len(numbers), True) for name, numbers in later.items()]
