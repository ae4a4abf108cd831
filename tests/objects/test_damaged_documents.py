"""A bucket of which a manifest is damaged opens; whoever stores there writes it anew, for it is known then."""

from __future__ import annotations

import itertools
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from kvstore import GetOutcome, PutOutcome, open_store
from kvstore.cli import EXIT_NOT_INTACT, EXIT_OK, run
from kvstore.errors import StoreOpenError, StoreSealedError
from kvstore.testing.supply import SPACE, get, writes
from kvstore_zarr.metadata import NamespaceTree, seal_said_by_array

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HIT = GetOutcome.HIT
STORED, EXISTS, FAILED = PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.FAILED
MANIFEST = f"{SPACE.name}/zarr.json"
DAMAGES = [b"{", b"", b"\xff\xfe", b'{"attributes": {"kvstore": {"namespace": {}}}}', b"[]"]
_numbers = itertools.count()


@pytest.fixture(params=["remote", "s3"])
def tier(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Callable[[str, bytes], object]]:
    """A URL where nothing is yet, and what writes there behind the tier's back."""
    root = tmp_path / "kv"
    if request.param == "s3":
        server = request.getfixturevalue("s3_server")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        prefix = f"damaged-{next(_numbers)}"
        objects = server.objects
        return f"{server.url(prefix)}?lookup_ttl=0", lambda path, data: objects.put(f"{prefix}/{path}", data)
    return f"file://{root}?remote=true&lookup_ttl=0", lambda path, data: (root / path).write_bytes(data)


@pytest.mark.parametrize("damaged", DAMAGES)
def test_a_tier_of_one_damaged_manifest_opens_and_the_next_put_mends_it(
    tier: tuple[str, Callable[[str, bytes], object]], damaged: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    url, write = tier
    with open_store(url) as store:
        store.put_many(SPACE, writes(range(3)))
    write(MANIFEST, damaged)
    for command, code in (
        (["stat", url], EXIT_OK),
        (["verify", url], EXIT_NOT_INTACT),
        (["gc", url, "--yes"], EXIT_OK),
    ):
        assert run([*command, "--json"]) == code, command
        assert json.loads(capsys.readouterr().out)["not_looked_into"][0]["blocks"] == 3
    with open_store(url) as store, open_store(url, readonly=True) as reader:
        assert store.contains_many(SPACE, [block.key for block in writes(range(3))]) == [False] * 3
        assert reader.put_many(SPACE, writes([2, 3])) == [FAILED] * 2
        assert store.put_many(SPACE, writes([2, 3])) == [EXISTS, STORED]
        assert get(store, range(4)) == [HIT] * 4
        assert store.unseen() == []
    with open_store(url) as store:
        assert store.namespaces() == [SPACE]
        assert get(store, range(4)) == [HIT] * 4
    assert run(["verify", url]) == EXIT_OK
    capsys.readouterr()


def test_another_process_goes_by_what_was_mended(tier: tuple[str, Callable[[str, bytes], object]]) -> None:
    url, write = tier
    with open_store(url) as store:
        store.put_many(SPACE, writes(range(3)))
    write(MANIFEST, b"{")
    with open_store(url) as one, open_store(url) as other:
        assert one.put_many(SPACE, writes([0])) == [EXISTS]
        assert other.put_many(SPACE, writes([1, 5])) == [EXISTS, STORED]
        assert get(other, [0, 1, 5]) == [HIT] * 3


def test_what_another_version_wrote_is_no_damage(tier: tuple[str, Callable[[str, bytes], object]]) -> None:
    url, write = tier
    with open_store(url) as store:
        store.put_many(SPACE, writes(range(3)))
    write(MANIFEST, json.dumps({"attributes": {"kvstore": {"format": 2, "namespace": {"model": 3}}}}).encode())
    with pytest.raises(StoreOpenError):
        open_store(url)
    write(MANIFEST, b"{")
    with open_store(url) as store:
        write(MANIFEST, json.dumps({"attributes": {"kvstore": {"format": 2, "namespace": {"model": 3}}}}).encode())
        assert store.put_many(SPACE, writes([7])) == [FAILED]


def test_a_sealed_tier_of_one_damaged_manifest_stays_sealed(
    tier: tuple[str, Callable[[str, bytes], object]], tmp_path: Path
) -> None:
    url, write = tier
    (tmp_path / "key").write_text(os.urandom(32).hex())
    options: dict[str, Any] = {"encryption": f"file:{tmp_path}/key", "keyring": f"{tmp_path}/ring.json"}
    with open_store(url, **options) as store:
        store.put_many(SPACE, writes(range(3)))
    write(MANIFEST, b"{")
    with pytest.raises(StoreSealedError):
        open_store(url)
    with open_store(url, **options) as store:
        assert store.put_many(SPACE, writes([2, 3])) == [EXISTS, STORED]
        assert get(store, range(4)) == [HIT] * 4
    with open_store(url, **options) as store:
        assert get(store, range(4)) == [HIT] * 4


def test_what_an_array_says_of_its_seal() -> None:
    (plain,) = {
        text for path, text in NamespaceTree(SPACE).documents(writes([0])[0].key).items() if path.count("/") == 3
    }
    (sealed,) = {
        text
        for path, text in NamespaceTree(SPACE, "ab" * 16).documents(writes([0])[0].key).items()
        if path.count("/") == 3
    }
    assert (seal_said_by_array(plain), seal_said_by_array(sealed)) == ("", "ab" * 16)
    for damaged in (b"", b"{", b"[]", b'{"codecs": []}', b'{"codecs": [3]}', b"3"):
        assert seal_said_by_array(damaged) is None
