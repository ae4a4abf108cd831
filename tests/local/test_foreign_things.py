"""Foreign and damaged things in a tier's tree: the namespace or block that has one is set aside, the rest is served."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from local_helpers import CORRUPT, FAILED, HIT, MISS, STORED, file_of, occupied

from kvstore import BlockLayout, Namespace, open_store
from kvstore.errors import NewerFormatError
from kvstore.testing.supply import MIB, SPACE, get, keys, write, writes

if TYPE_CHECKING:
    from collections.abc import Callable

OTHER = Namespace("other", "revision-1", (BlockLayout.opaque(SPACE.block_bytes()),), block_tokens=16)


def contradict(path: Path) -> None:
    path.write_text(path.read_text().replace("other", "another"))


def make_newer(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 1', '"format": 7').replace("revision-1", "another"))


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


class TestOneBadNamespace:
    @pytest.mark.parametrize(
        "harm",
        [
            contradict,
            make_newer,
            lambda path: path.write_text("{"),
            lambda path: path.write_bytes(b"\xff\xfe\x00"),
            lambda path: path.write_text("[1]"),
            make_pipe,
            make_directory,
        ],
        ids=["contradicts its folder", "newer", "no JSON", "no text", "not ours", "pipe", "directory"],
    )
    def test_it_is_set_aside_and_the_others_are_served(
        self, root: Path, harm: Callable[[Path], object], caplog: pytest.LogCaptureFixture
    ) -> None:
        with open_store(f"file://{root}", capacity=16 * MIB) as store:
            store.put_many(OTHER, [write(number, OTHER) for number in range(20)])
            store.put_many(SPACE, writes(range(20)))
        manifest = root / OTHER.name / "zarr.json"
        harm(manifest)
        left = sorted((root / OTHER.name).rglob("*"))
        for again in ("read-only", "with its catalogue", "rebuilt"):
            if again == "rebuilt":
                (root / ".kvstore" / "state").unlink()
            caplog.clear()
            with open_store(f"file://{root}", readonly=again == "read-only") as store:
                assert [OTHER.name in note and "set aside" in note for note in store.capabilities.notes].count(
                    True
                ) == 1
                assert [record.levelno for record in caplog.records] == [logging.WARNING]
                assert store.namespaces() == [SPACE]
                assert get(store, range(20)) == [HIT] * 20
                assert get(store, [1], OTHER) == [MISS]
                assert store.contains_many(OTHER, keys([1])) == [False]
                assert store.put_many(OTHER, [write(1, OTHER)]) == [FAILED]
                assert store.delete_many(OTHER, keys([1])) == [False]
                assert list(store.scan(OTHER)) == []
                assert {info.key for info in store.scan(SPACE)} == set(keys(range(20)))
                usage = store.usage()
                assert occupied(root) <= usage.used + usage.overhead
        with open_store(f"file://{root}", capacity=4 * MIB) as store:
            store.put_many(SPACE, writes(range(20, 200)))
            assert get(store, [199]) == [HIT]
            assert occupied(root) <= 4 * MIB
        assert sorted((root / OTHER.name).rglob("*")) == left

    def test_a_tier_that_is_newer_altogether_is_newer(self, root: Path) -> None:
        with open_store(f"file://{root}") as store:
            store.put_many(SPACE, writes([1]))
            store.put_many(OTHER, [write(1, OTHER)])
        for space in (SPACE, OTHER):
            make_newer(root / space.name / "zarr.json")
        with pytest.raises(NewerFormatError, match="upgrade"):
            open_store(f"file://{root}")

    def test_a_manifest_that_claims_blocks_of_terabytes_costs_no_memory(self, root: Path) -> None:
        with open_store(f"file://{root}") as store:
            store.put_many(SPACE, writes([1]))
        document = json.loads((root / SPACE.name / "zarr.json").read_text())
        claimed = document["attributes"]["kvstore"]
        claimed["namespace"]["layouts"][0] = {"dtype": "uint8", "axes": ["byte"], "shape": [1 << 50]}
        text = json.dumps(claimed["namespace"], sort_keys=True, separators=(",", ":"))
        claimed["fingerprint"] = hashlib.sha256(f"kvstore-namespace-1:{text}".encode()).hexdigest()[:32]
        (root / claimed["fingerprint"]).mkdir()
        (root / claimed["fingerprint"] / "zarr.json").write_text(json.dumps(document))
        with open_store(f"file://{root}") as store:
            assert store.namespaces() == [SPACE]
            assert any(claimed["fingerprint"] in note and "set aside" in note for note in store.capabilities.notes)
            assert get(store, [1]) == [HIT]

    def test_one_that_turns_bad_while_the_tier_is_open_stops_nobody(self, root: Path) -> None:
        with open_store(f"file://{root}", capacity=8 * MIB) as store:
            store.put_many(OTHER, [write(number, OTHER) for number in range(20)])
        with open_store(f"file://{root}") as store:
            contradict(root / OTHER.name / "zarr.json")
            store.put_many(SPACE, writes(range(300)))
            assert get(store, [299]) == [HIT]
            assert occupied(root) <= 8 * MIB
        assert file_of(root, 1, OTHER).exists()

    def test_an_unreadable_manifest_of_an_lmdb_tier_is_said_and_written_anew(self, root: Path) -> None:
        with open_store(f"lmdb://{root}") as store:
            store.put_many(SPACE, writes(range(3)))
            with store._tier.catalog.write() as change:  # type: ignore[attr-defined]
                change.txn.put(SPACE.fingerprint, b"{", db=change._namespaces)
        with open_store(f"lmdb://{root}") as store:
            (note,) = store.capabilities.notes
            assert SPACE.name in note
            assert "3 blocks" in note
            assert get(store, range(3)) == [HIT] * 3
            assert store.put_many(SPACE, writes([4])) == [STORED]
            assert store.namespaces() == [SPACE]


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


class TestNoRegularFile:
    @pytest.mark.parametrize(
        "make",
        [
            os.mkfifo,
            os.mkdir,
            make_socket,
            lambda path: path.symlink_to("/dev/zero"),
            lambda path: path.symlink_to(path.name),
        ],
        ids=["pipe", "directory", "socket", "link to a device", "link to itself"],
    )
    @pytest.mark.parametrize("io", ["auto", "buffered"])
    def test_in_place_of_a_block_it_is_corrupt_and_makes_way(
        self, root: Path, make: Callable[[Path], object], io: str
    ) -> None:
        with open_store(f"file://{root}", capacity=8 * MIB, io=io) as store:
            store.put_many(SPACE, writes(range(3)))
            for number in (0, 1):
                file_of(root, number).unlink()
                make(file_of(root, number))
            assert get(store, [0, 2]) == [CORRUPT, HIT]
            assert get(store, [0]) == [MISS]
            assert store.put_many(SPACE, writes([0])) == [STORED]
            assert get(store, [0]) == [HIT]
            store.put_many(SPACE, writes(range(10, 400)))  # evicts the other
            assert store.contains_many(SPACE, keys([1])) == [False]
            assert store.put_many(SPACE, writes([1])) == [STORED]
            assert get(store, [1]) == [HIT]
            file_of(root, 1).unlink()
            make(file_of(root, 1))
        (root / ".kvstore" / "state").unlink()  # rebuilt
        with open_store(f"file://{root}") as store:
            assert get(store, [1]) == [MISS]
            assert store.put_many(SPACE, writes([1])) == [STORED]

    def test_a_directory_with_something_in_it_stays_and_is_logged_once(
        self, root: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with open_store(f"file://{root}") as store:
            store.put_many(SPACE, writes([1]))
            file_of(root, 1).unlink()
            (file_of(root, 1) / "mine").mkdir(parents=True)
            assert get(store, [1]) == [CORRUPT]
            assert store.put_many(SPACE, writes([1, 2])) == [FAILED, STORED]
            assert store.put_many(SPACE, writes([1])) == [FAILED]
            assert (file_of(root, 1) / "mine").is_dir()
            assert [str(file_of(root, 1)) in record.getMessage() for record in caplog.records] == [True]
