"""What a purge cannot see it does not call gone: namespaces without documents, files that no catalogue knows."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import secrets
import shlex
import shutil
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb
import pytest
from purge_helpers import found, machine

import kvstore
from kvstore import GetOutcome, Mark, PutOutcome
from kvstore.catalog import address_of
from kvstore.change import Change
from kvstore.cli import EXIT_NOT_INTACT, EXIT_OK, run
from kvstore.errors import TierUnavailable
from kvstore.objects.client import Listed
from kvstore.testing.servers import valkey
from kvstore.testing.supply import SPACE, get, key, keys, write, writes
from kvstore.url import TierURL
from kvstore_lmdb import LMDBStore
from kvstore_zarr.metadata import NamespaceTree
from kvstore_zarr.names import NameLocks
from kvstore_zarr.store import LocalZarrStore

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from kvstore import Namespace
    from kvstore.testing.servers import RedisServer

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS
OTHER = dataclasses.replace(SPACE, revision="another")
_numbers = itertools.count()


def file_of(root: Path, number: int) -> Path:
    return root / NamespaceTree(SPACE).block(key(number))


def stored(url: str, numbers: range = range(5), tenant: str = "acme") -> None:
    with kvstore.open_store(url) as store:
        assert set(store.put_many(SPACE, writes(numbers))) == {PutOutcome.STORED}
        store.mark_many(SPACE, keys(numbers), Mark(tenant=tenant))


@pytest.mark.parametrize("asked", [("--tenant", "acme"), ("--all",)])
def test_blocks_of_a_namespace_without_its_document_go_as_the_catalogue_knows_where_they_are(
    tmp_path: Path, asked: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    url, root = f"file://{tmp_path}/kv", tmp_path / "kv"
    stored(url)
    (root / SPACE.name / "zarr.json").unlink()
    code, told = machine(capsys, "purge", url, *asked, "--yes")
    (tier,) = told["tiers"]
    assert (code, told["complete"], tier["blocks"]) == (EXIT_OK, True, 5)
    assert tier["overwritten"] >= 5 * SPACE.block_bytes()
    assert found(root, range(5)) == set()
    with kvstore.open_store(url) as store:
        assert get(store, range(5)) == [MISS] * 5


class Behind:
    """A tier's files or objects, behind its back."""

    def __init__(self, root: Path | None, objects: Any = None, prefix: str = "") -> None:
        self._root, self._objects, self._prefix = root, objects, prefix

    def write(self, path: str, data: bytes) -> None:
        if self._root is not None:
            (self._root / path).write_bytes(data)
        else:
            self._objects.put(f"{self._prefix}/{path}", data)

    def read(self, path: str) -> bytes:
        if self._root is not None:
            return (self._root / path).read_bytes()
        return bytes(self._objects.get(f"{self._prefix}/{path}").bytes())

    def remove(self, path: str) -> None:
        if self._root is not None:
            (self._root / path).unlink()
        else:
            self._objects.delete(f"{self._prefix}/{path}")

    def blocks(self) -> int:
        """How many files have the name of a block."""
        if self._root is not None:
            paths = [str(path) for path in self._root.rglob("*") if path.is_file()]
        else:
            paths = [meta["path"] for page in self._objects.list(self._prefix) for meta in page]
        return sum(re.fullmatch(r".*/g0/[0-9a-f]{2}/[0-9.]+", path) is not None for path in paths)


@pytest.fixture(params=["file", "remote", "s3"])
def tier(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Behind]:
    """Two namespaces of five blocks each, and what is behind them."""
    root = tmp_path / "kv"
    behind, url = Behind(root), f"file://{root}"
    if request.param == "remote":
        url += "?remote=true&lookup_ttl=0"
    elif request.param == "s3":
        server = request.getfixturevalue("s3_server")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        prefix = f"overlooked-{next(_numbers)}"
        behind, url = Behind(None, server.objects, prefix), f"{server.url(prefix)}?lookup_ttl=0"
    for space in (SPACE, OTHER):
        with kvstore.open_store(url) as store:
            assert set(store.put_many(space, writes(range(5), space))) == {PutOutcome.STORED}
    return url, behind


def forget(url: str, name: str) -> None:
    """Of a local tier: the catalogue knows the namespace no more, as where it was copied there."""
    folder = Path(url.partition("://")[2]) / ".kvstore" / "catalogue"
    if url.startswith("file") and folder.exists():
        with lmdb.open(str(folder), max_dbs=16, map_size=1 << 30) as environment:
            handle = environment.open_db(b"namespaces", create=False)
            with environment.begin(write=True, db=handle) as txn:
                assert txn.delete(bytes.fromhex(name))


DAMAGES = ["damaged", "damaged and unknown", "missing"]


def damage(url: str, behind: Behind, how: str, space: Namespace = SPACE) -> None:
    if how == "missing":
        behind.remove(f"{space.name}/zarr.json")
    else:
        behind.write(f"{space.name}/zarr.json", b"{")
    if how != "damaged":
        forget(url, space.name)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("asked", [("--all",), ("--namespace", SPACE.name[:12])])
def test_a_purge_removes_namespaces_that_are_set_aside_or_have_no_manifest(
    tier: tuple[str, Behind], how: str, asked: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    url, behind = tier
    damage(url, behind, how)
    goes = 10 if asked == ("--all",) else 5
    code, told = machine(capsys, "purge", url, *asked)
    assert sum(one["blocks"] for one in told["tiers"][0]["spaces"] + told["tiers"][0]["unseen"]) == goes
    code, told = machine(capsys, "purge", url, *asked, "--yes", "--refuse", "0")
    assert (code, told["complete"], told["tiers"][0]["blocks"]) == (EXIT_OK, True, goes)
    assert behind.blocks() == 10 - goes
    with kvstore.open_store(url) as store:
        assert store.unseen() == []
        store.put_many(SPACE, writes([9]))
        assert get(store, range(5)) == [MISS] * 5
        assert get(store, range(5), OTHER) == [HIT if goes == 5 else MISS] * 5


def test_what_somebody_keeps_in_a_namespace_without_a_manifest_stays(
    tier: tuple[str, Behind], capsys: pytest.CaptureFixture[str]
) -> None:
    url, behind = tier
    damage(url, behind, "missing")
    others = [f"{SPACE.name}/notes.txt", f"{SPACE.name}/g0/notes.txt", f"{SPACE.name}/g0/00.txt"]
    for path in others:
        behind.write(path, path.encode())
    code, told = machine(capsys, "purge", url, "--all", "--yes", "--refuse", "0")
    assert (code, told["complete"], told["tiers"][0]["blocks"], behind.blocks()) == (EXIT_OK, True, 10, 0)
    assert [behind.read(path) for path in others] == [path.encode() for path in others]


@pytest.mark.parametrize("asked", [(), ("--keep-bytes",)])
def test_what_dead_writers_left_goes_with_a_purge_and_what_may_be_under_way_is_named(
    tmp_path: Path, asked: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/kv?remote=true"
    stored(url)
    folder = file_of(tmp_path / "kv", 1).parent
    dead, young = folder / ".kvstore-draft-dead", folder / ".kvstore-draft-young"
    for draft in (dead, young):
        draft.write_bytes(b"kv" * 500)
    os.utime(dead, (time.time() - 4000,) * 2)
    os.link(dead, tmp_path / "bytes")
    code, told = machine(capsys, "purge", url, "--all", "--yes", "--refuse", "0", *asked)
    (named,) = [one for one in told["tiers"][0]["remains"] if "1 drafts" in one["what"]]
    assert (code, told["complete"], named["nbytes"]) == (EXIT_OK, True, 1000)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [young.name]
    assert (tmp_path / "bytes").read_bytes() == (b"kv" * 500 if asked else bytes(1000))


@pytest.mark.parametrize("how", DAMAGES[1:])
def test_a_purge_by_age_is_not_complete_where_a_namespace_was_not_looked_into(
    tier: tuple[str, Behind], how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url, behind = tier
    damage(url, behind, how)
    code, told = machine(capsys, "purge", url, "--older-than", "0s", "--yes", "--refuse", "0")
    (unseen,) = told["tiers"][0]["unseen"]
    assert (code, told["complete"], unseen["namespace"], unseen["blocks"]) == (EXIT_NOT_INTACT, False, SPACE.name, 5)
    assert SPACE.name in unseen["why"]
    assert behind.blocks() == 5


def test_a_later_versions_namespace_is_left_alone_and_the_purge_not_complete(
    tier: tuple[str, Behind], capsys: pytest.CaptureFixture[str]
) -> None:
    url, behind = tier
    later = {"zarr_format": 3, "node_type": "group", "attributes": {"kvstore": {"format": 2, "namespace": {"x": 1}}}}
    behind.write(f"{SPACE.name}/zarr.json", json.dumps(later).encode())
    code, told = machine(capsys, "purge", url, "--all", "--yes", "--refuse", "0")
    (unseen,) = told["tiers"][0]["unseen"]
    assert (code, unseen["later"], unseen["namespace"]) == (EXIT_NOT_INTACT, True, SPACE.name)
    assert behind.blocks() == 5


@pytest.mark.parametrize("how", DAMAGES)
def test_every_command_says_what_it_did_not_look_into(
    tier: tuple[str, Behind], how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, behind = tier
    damage(url, behind, how)
    if how == "missing":
        assert run(["gc", url]) == EXIT_OK
        assert SPACE.name in capsys.readouterr().out
    for command, code in (("stat", EXIT_OK), ("verify", EXIT_NOT_INTACT), ("gc", EXIT_OK)):
        got, told = machine(capsys, command, url)
        (unseen,) = told["not_looked_into"]
        assert (got, unseen["namespace"], unseen["blocks"]) == (code, SPACE.name, 5), command
        assert told.get("ok", False) is False
        run([command, url])
        assert "not looked into: 5 blocks" in capsys.readouterr().out or command == "verify"
    code, told = machine(capsys, "cp", url, f"file://{tmp_path}/copy")
    assert (code, told["ok"], told["copied"], len(told["not_looked_into"])) == (EXIT_NOT_INTACT, False, 5, 1)
    code, told = machine(capsys, "cp", url, f"file://{tmp_path}/copy", "--namespace", OTHER.name)
    assert (code, told["already_there"]) == (EXIT_OK, 5)


def test_files_that_the_catalogue_does_not_know_go_with_all_and_are_named_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = f"file://{tmp_path}/one", f"file://{tmp_path}/two"
    stored(one)
    stored(two, range(5, 10))
    shutil.copytree(tmp_path / "two" / SPACE.name, tmp_path / "one" / SPACE.name, dirs_exist_ok=True)
    code, told = machine(capsys, "verify", one)
    assert (code, [one["blocks"] for one in told["not_looked_into"]]) == (EXIT_OK, [5])
    code, told = machine(capsys, "purge", one, "--tenant", "acme", "--yes")
    assert (code, told["tiers"][0]["blocks"]) == (EXIT_OK, 5)
    assert any("5 files" in residue["what"] and "reindex" in residue["what"] for residue in told["tiers"][0]["remains"])
    assert found(tmp_path / "one", range(10)) == set(range(5, 10))
    code, told = machine(capsys, "purge", one, "--all", "--yes", "--refuse", "0")
    assert (code, told["tiers"][0]["blocks"]) == (EXIT_OK, 5)
    assert told["tiers"][0]["overwritten"] >= 5 * SPACE.block_bytes()
    assert found(tmp_path / "one", range(10)) == set()


def test_what_is_no_whole_block_goes_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, root = f"file://{tmp_path}/kv", tmp_path / "kv"
    stored(url)
    block = file_of(root, 3)
    torn = block.read_bytes()[:-4096]
    with kvstore.open_store(url) as store:
        store.delete_many(SPACE, keys([3]))
    block.write_bytes(torn)
    code, told = machine(capsys, "purge", url, "--all", "--yes")
    assert (code, told["tiers"][0]["blocks"]) == (EXIT_OK, 5)
    assert found(root, range(5)) == set()


@pytest.mark.parametrize(("after", "outcome"), [(1, PutOutcome.STORED), (2, PutOutcome.REFUSED)])
def test_a_block_that_an_engine_stores_while_unknown_files_go_is_there_or_buried(
    after: int, outcome: PutOutcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, hold, put, held = f"file://{tmp_path}/kv", NameLocks.hold, list[PutOutcome](), 0
    stored(url)
    with kvstore.open_store(url) as store, kvstore.open_store(url) as engine:
        assert isinstance(store, LocalZarrStore)
        names, address = store._tier.names, address_of(SPACE, key(1))
        with store._tier.catalog.write() as change:
            change.discard([address])

        @contextmanager
        def holding(self: NameLocks, addresses: Iterable[bytes]) -> Generator[None]:
            nonlocal held
            with hold(self, addresses):
                yield
            held += self is names
            if self is names and held == after:
                put.extend(engine.put_many(SPACE, writes([1])))

        monkeypatch.setattr(NameLocks, "hold", holding)
        gone = store.purge_unseen(names=[SPACE.name], refuse_s=600, overwrite=False)
        assert put == [outcome]
        is_there = outcome is PutOutcome.STORED
        assert [one.blocks for one in gone] == ([] if is_there else [1])
        assert store.contains_many(SPACE, keys([1])) == [is_there]
        assert file_of(tmp_path / "kv", 1).exists() == is_there
        with store._tier.catalog.read() as snapshot:
            assert (address in snapshot.tombs.buried([address])) != is_there


@pytest.mark.parametrize("came", ["before it was dropped", "after"])
def test_a_dropped_namespace_keeps_its_manifest_over_files_that_are_there(tmp_path: Path, came: str) -> None:
    url, root = f"file://{tmp_path}/kv", tmp_path / "kv"
    stored(url)
    block = file_of(root, 3)
    kept = block.read_bytes()
    with kvstore.open_store(url) as store:
        store.delete_many(SPACE, keys(range(5)))
        if came == "after":
            assert store.drop_namespace(SPACE) == 0
        block.write_bytes(kept)
        if came != "after":
            assert store.drop_namespace(SPACE) == 0
    with kvstore.open_store(url) as store:
        assert [one.blocks for one in store.unseen()] == [1]
        store.repair()
        assert get(store, [3]) == [HIT]


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with valkey() as running:
        yield running


@pytest.mark.parametrize("kind", ["redis", "remote, without dates", "remote, encrypted"])
def test_a_later_versions_block_that_does_not_say_whether_it_was_asked_for_is_named(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    url, asked = f"file://{tmp_path}/kv?remote=true&lookup_ttl=0", ("--older-than", "0s")
    if kind == "redis":
        url = request.getfixturevalue("redis_server").url()
    elif kind == "remote, encrypted":
        (tmp_path / "operator.key").write_text(secrets.token_hex(32))
        url += f"&encryption=file:{tmp_path}/operator.key&keyring={tmp_path}/keyring.json"
        asked = ("--tenant", "acme")
    else:
        monkeypatch.setattr("kvstore.objects.directory_client.Listed", lambda path, size, _: Listed(path, size, 0.0))
    with kvstore.open_store(url) as store:
        store.put_many(SPACE, [write(number, tenant="acme") for number in range(5)])
        with monkeypatch.context() as later:
            for module in ("kvstore.values", "kvstore_zarr.format"):
                later.setattr(f"{module}.FORMAT_VERSION", 2)
            store.put_many(SPACE, [write(5, tenant="acme")])
        assert store.contains_many(SPACE, keys(range(6))) == [True] * 6
        assert get(store, [4, 5]) == [HIT, MISS]
    for how in ((), ("--yes", "--refuse", "0")):
        code, told = machine(capsys, "purge", url, *asked, *how)
        (named,) = [one for one in told["tiers"][0]["remains"] if "do not say" in one["what"]]
        assert (code, told["complete"], told["tiers"][0]["blocks"]) == (EXIT_OK, True, 5)
        assert f"namespace {SPACE.name}: 1 blocks" in named["what"]
        assert named["nbytes"] > SPACE.block_bytes()
    code, told = machine(capsys, *shlex.split(named["remedy"])[1:], url, "--yes", "--refuse", "0")
    assert (code, told["complete"], told["tiers"][0]["blocks"]) == (EXIT_OK, True, 1)


@pytest.mark.parametrize("kind", ["lmdb", "redis"])
def test_blocks_without_a_manifest_go_from_every_other_tier(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"lmdb://{tmp_path}/kv" if kind == "lmdb" else request.getfixturevalue("redis_server").url()
    with kvstore.open_store(url) as store:
        store.put_many(SPACE, writes(range(5)))
        store.put_many(OTHER, writes(range(5), OTHER))
        if kind == "redis":
            assert store.remove(f"manifest-{SPACE.name}")  # type: ignore[attr-defined]
    if kind == "lmdb":
        with lmdb.open(f"{tmp_path}/kv", max_dbs=16, map_size=1 << 30) as environment:
            handle = environment.open_db(b"namespaces", create=False)
            with environment.begin(write=True, db=handle) as txn:
                assert txn.delete(SPACE.fingerprint)
    code, told = machine(capsys, "verify", url)
    assert (code, [one["blocks"] for one in told["not_looked_into"]]) == (EXIT_NOT_INTACT, [5])
    code, told = machine(capsys, "purge", url, "--older-than", "0s", "--yes", "--refuse", "0")
    assert (code, told["tiers"][0]["blocks"]) == (EXIT_NOT_INTACT, 5)
    code, told = machine(capsys, "purge", url, "--all", "--yes", "--refuse", "0")
    assert (code, told["tiers"][0]["blocks"]) == (EXIT_OK, 5)
    with kvstore.open_store(url) as store:
        store.put_many(SPACE, writes([9]))
        assert get(store, range(5)) == [MISS] * 5


def test_nothing_is_deleted_from_the_catalogue_alone_where_a_document_is_gone(tmp_path: Path) -> None:
    url, root = f"file://{tmp_path}/kv", tmp_path / "kv"
    stored(url)
    (root / SPACE.name / "zarr.json").unlink()
    with kvstore.open_store(url) as store:
        assert store.delete_many(SPACE, keys([1])) == [True]
        assert found(root, range(5)) == {0, 2, 3, 4}
        assert store.purge_many(SPACE, keys([2])) == [True]
        assert found(root, range(5)) == {0, 3, 4}


def test_files_that_the_catalogue_does_not_know_go_by_their_age(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, root = f"file://{tmp_path}/kv", tmp_path / "kv"
    stored(url)
    copied = file_of(root, 3).read_bytes()
    with kvstore.open_store(url) as store:
        store.delete_many(SPACE, keys([3]))
    file_of(root, 3).write_bytes(copied)
    code, told = machine(capsys, "purge", url, "--older-than", "0s", "--yes")
    assert (code, told["tiers"][0]["blocks"]) == (EXIT_OK, 5)
    assert found(root, range(5)) == set()


def test_a_purge_that_failed_midway_says_all_the_same_what_it_left_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LMDBStore(TierURL.parse(f"lmdb://{tmp_path}/kv").validated(LMDBStore.options)) as store:
        assert set(store.put_many(SPACE, writes(range(5)))) == {PutOutcome.STORED}
        with store._tier.catalog.environment.write() as txn:
            assert txn.delete(SPACE.fingerprint, db=store._tier.environment.databases["namespaces"])
        with monkeypatch.context() as patch:
            patch.setattr(Change, "drop_namespace", failing)
            with pytest.raises(TierUnavailable):
                store.purge_unseen(names=[SPACE.name])
        assert "less than 4 KB" in store.finish_purge()[0].what
        assert "less than 4 KB" not in store.finish_purge()[0].what


def failing(*_: object) -> bool:
    raise TierUnavailable("the device fails")
