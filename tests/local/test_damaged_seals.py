"""A byte changed anywhere in what an encrypted tier consists of: its blocks, its documents, and the keyring beside it.

No wrong byte is served, and whoever cannot open the tier is told why not and what to do. Pages of LMDB and the files of
locks: `test_damaged_pages`.
"""

from __future__ import annotations

import json
import logging
import random
import re
import secrets
import shutil
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from local_helpers import CORRUPT, HIT, MISS, file_of

from kvstore import GetOutcome, PutOutcome, open_store
from kvstore.cli import EXIT_OK, run
from kvstore.errors import KeyringError, StoreOpenError, StoreSealedError
from kvstore.sealing import Keyring
from kvstore.testing.supply import SPACE, get, key, keys, write
from kvstore_zarr.metadata import NamespaceTree

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

OPERATOR = bytes(range(140, 172))
REMEDIES = "restore it from a copy|upgrade it"
DOCUMENTS = "give the one it was made with|use another location|give encryption=|move its folder away|move it away"
SIZE = SPACE.block_bytes()
TAIL = 128 + SIZE + 16
PLACES = {
    "seal: magic": 0, "seal: version": 8, "seal: group": 10, "seal: digest length": 12, "seal: zeros": 14,
    "seal: id of the data key": 20, "seal: nonce": 35, "seal: more zeros": 45, "seal: fingerprint": 50,
    "seal: digest": 70, "seal: behind the digest": 110, "ciphertext": 128, "ciphertext within": 128 + SIZE // 2,
    "ciphertext's end": TAIL - 17, "tag": TAIL - 16, "tag's end": TAIL - 1, "checksum": TAIL, "tail: magic": TAIL + 4,
    "tail: version": TAIL + 12, "tail: flags": TAIL + 14, "tail: group": TAIL + 16, "tail: digest length": TAIL + 18,
    "tail: parent's length": TAIL + 19, "tail: size": TAIL + 20, "tail: generation": TAIL + 28,
    "tail: created": TAIL + 36, "tail: position": TAIL + 44, "tail: fingerprint": TAIL + 52, "tail: digest": TAIL + 70,
    "tail: parent": TAIL + 140, "tail: id of the data key": TAIL + 196, "zeros": TAIL + 212, "tail: checksum": -24,
    "index: offset": -20, "index: size": -12, "index: checksum": -1,
}  # fmt: skip
"""An offset into each field of a sealed block's file, as docs/formats.md has them; from its end if negative."""


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    """Where the keyring of the tests is."""
    (tmp_path / "operator.key").write_text(OPERATOR.hex())
    return tmp_path / "keyring.json"


def url_of(place: str, folder: Path) -> str:
    joint = "&" if "?" in place else "?"
    return f"{place}{joint}encryption=file:{folder}/operator.key&keyring={folder}/keyring.json"


def filled(url: str, count: int = 3) -> str:
    with open_store(url) as store:
        put = [write(number, tenant=("acme", "")[number % 2]) for number in range(count)]
        assert store.put_many(SPACE, put) == [PutOutcome.STORED] * count
    return url


def flip(path: Path, place: int, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


@contextmanager
def why_not(error: type[Exception], remedies: str) -> Generator[None]:
    """If the body ends by that error, it says what to do."""
    try:
        yield
    except error as raised:
        if not re.search(remedies, str(raised)):
            raise


@pytest.mark.parametrize("remote", ["", "?remote=true"])
def test_a_byte_in_any_field_of_a_sealed_block_is_damage_and_the_next_store_replaces_it(
    remote: str, ring: Path, root: Path
) -> None:
    url = filled(url_of(f"file://{root}{remote}", ring.parent))
    path, chance = root / NamespaceTree(SPACE).block(key(1)), random.Random()
    with open_store(url) as store:
        for name, place in PLACES.items():
            flip(path, place, chance)
            assert get(store, range(3)) == [HIT, CORRUPT, HIT], name
            assert not path.exists(), name
            assert store.put_many(SPACE, [write(1)]) == [PutOutcome.STORED], name
            assert get(store, range(3)) == [HIT] * 3, name


def test_so_it_is_whichever_byte_of_its_header_its_tag_or_its_end(ring: Path, root: Path) -> None:
    url, chance = filled(url_of(f"file://{root}", ring.parent)), random.Random()
    path = file_of(root, 1)
    whole = path.read_bytes()
    with open_store(url) as store:
        for place in [*range(0, 128, 3), *range(TAIL - 16, len(whole), 31)]:
            path.write_bytes(whole)
            flip(path, place, chance)
            assert get(store, [1]) == [CORRUPT], place
            assert store.put_many(SPACE, [write(1)]) == [PutOutcome.STORED]
            path.write_bytes(whole)
            assert get(store, [1])[0] in (HIT, CORRUPT)  # a copy from before: of another generation
            store.put_many(SPACE, [write(1)])


@pytest.mark.parametrize("remote", ["", "?remote=true"])
def test_any_byte_of_a_document_serves_nothing_wrong_and_is_repaired(remote: str, ring: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    filled(url_of(f"file://{whole}{remote}", ring.parent))
    chance = random.Random(11)
    documents = sorted((whole / SPACE.name).rglob("zarr.json"))
    for number, document in enumerate([one for one in documents for _ in range(2)]):
        root = tmp_path / str(number)
        shutil.copytree(whole, root)
        path, text = root / document.relative_to(whole), document.read_bytes()
        place = chance.randrange(len(text))
        if number % 2 and b"keyring" in text:
            place = text.index(b"keyring") + chance.randrange(20)  # what says that the blocks are sealed, and how
        flip(path, place, chance)
        url = url_of(f"file://{root}{remote}", ring.parent)
        with why_not(StoreOpenError, DOCUMENTS), open_store(url) as store:
            assert set(get(store, range(3))) <= {HIT, MISS}
        if not remote:
            assert run(["verify", url, "--repair"]) == EXIT_OK
            assert path.read_bytes() == text
            with open_store(url) as store:
                assert get(store, range(3)) == [HIT] * 3


@pytest.mark.parametrize("word", ["sealed", "keyring", "id"])
def test_a_manifest_that_says_of_its_keyring_what_its_arrays_do_not_is_set_aside_and_repaired(
    word: str, ring: Path, root: Path
) -> None:
    url = filled(url_of(f"file://{root}", ring.parent))
    manifest = root / SPACE.name / "zarr.json"
    text = manifest.read_bytes()
    keyring = json.loads(text)["attributes"]["kvstore"]["sealed"]["keyring"]
    place = text.index((keyring if word == "id" else word).encode())
    manifest.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
    with pytest.raises(StoreSealedError):
        open_store(f"file://{root}")
    with open_store(url) as store:
        assert get(store, range(3)) == [MISS] * 3
        assert any("set aside" in note for note in store.capabilities.notes)
    assert run(["verify", url, "--repair"]) == EXIT_OK
    assert manifest.read_bytes() == text
    with open_store(url) as store:
        assert get(store, range(3)) == [HIT] * 3


def test_any_byte_of_a_keyring_changes_no_key_and_is_said(ring: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Keyring.open(ring, OPERATOR) as keyring:
        for tenant in ("acme", "", "gone"):
            keyring.data_key(tenant)
        keyring.destroy("gone")
        whole = keyring.ring()
    text, chance = ring.read_bytes(), random.Random()
    told = Counter[str]()
    for place in range(len(text)):
        ring.write_bytes(text)
        flip(ring, place, chance)
        caplog.clear()
        found = None
        with why_not(KeyringError, REMEDIES), Keyring.open(ring, OPERATOR, create=False) as keyring:
            found = keyring.ring()
        if found is None:
            told["error"] += 1
            continue
        assert found.keys.items() <= whole.keys.items()
        for tenant, current in found.current.items():
            assert whole.current[tenant] == current
        damaged = len(found.keys) < len(whole.keys)
        assert ("until the keyring is restored from a copy" in caplog.text) == damaged
        told["damaged" if damaged else "harmless"] += 1
    assert told["error"] > 100
    assert told["damaged"] > 50


@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_where_a_data_key_is_damaged_its_blocks_are_misses_and_stay_until_the_keyring_is_restored(
    scheme: str, ring: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = filled(url_of(f"{scheme}://{root}", ring.parent), 4)
    text = ring.read_text()
    (wrapped,) = (entry["wrapped"] for entry in json.loads(text)["keys"] if entry["tenant"] == "acme")
    ring.write_text(text.replace(wrapped, wrapped[:-1] + ("0" if wrapped[-1] != "0" else "1")))
    with caplog.at_level(logging.WARNING), open_store(url) as store:
        assert "data keys of 'acme' are damaged" in caplog.text
        assert get(store, range(4)) == [MISS, HIT, MISS, HIT]
        assert store.put_many(SPACE, [write(9, tenant="acme")]) == [PutOutcome.FAILED]
        assert store.contains_many(SPACE, keys(range(4))) == [True] * 4
    ring.write_text(text)
    with open_store(url) as store:
        assert get(store, range(4)) == [HIT] * 4


def test_a_byte_of_the_operators_key_is_an_error_that_does_not_show_it(ring: Path, root: Path) -> None:
    url = filled(url_of(f"file://{root}", ring.parent))
    file = ring.parent / "operator.key"
    for place in (0, 31, 63):
        wrong = bytearray(OPERATOR.hex().encode())
        wrong[place] = ord("0") if wrong[place] != ord("0") else ord("1")
        file.write_bytes(wrong)
        with pytest.raises(KeyringError, match="another operator's key") as error:
            open_store(url)
        assert wrong.decode() not in str(error.value)
    file.write_text(secrets.token_hex(32))
    with pytest.raises(KeyringError, match="another operator's key"):
        open_store(url)
    file.write_text(OPERATOR.hex())
    with open_store(url) as store:
        assert set(get(store, range(3))) == {GetOutcome.HIT}
