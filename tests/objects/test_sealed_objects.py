"""An encrypted tier on a real S3 server: the contract, stock zarr, wrong keys, and tenants whose keys are destroyed."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore import open_store
from kvstore.errors import KeyringError, StoreSealedError
from kvstore.layout import BlockLayout, as_bytes
from kvstore.namespace import Namespace
from kvstore.purging import Request, purge
from kvstore.rekeying import keyrings_of, reseal
from kvstore.testing import StoreTests, run_against_a_dictionary
from kvstore.testing.blocks import BlockTests
from kvstore.testing.damage import DamageTests
from kvstore.testing.hooks import StoreHooks
from kvstore.testing.supply import SPACE, buffer, content, get, held, key, keys, write, writes
from kvstore.types import BlockWrite, GetOutcome, PutOutcome
from kvstore.url import TierURL
from kvstore_zarr.format import DigestWords
from kvstore_zarr.metadata import NamespaceTree

if TYPE_CHECKING:
    from kvstore import BlockKey
    from kvstore.testing.servers import S3Server

HIT, MISS, STORED = GetOutcome.HIT, GetOutcome.MISS, PutOutcome.STORED
READER = Path(__file__).parents[1] / "backends" / "read_sealed.py"
LAYOUT = BlockLayout.canonical(layers=2, tokens=16, heads=3, head_dim=64, dtype="float16")
WRITERS = pytest.mark.parametrize("client", ["obstore", pytest.param("fsspec", marks=pytest.mark.soak)])
TYPED = Namespace("model", "revision-1", (LAYOUT,), block_tokens=16)


def key_in(folder: Path, name: str = "operator.key") -> str:
    """What names an operator's key; made, if it is not there."""
    path = folder / name
    if not path.exists():
        path.write_text(secrets.token_hex(32))
    return f"file:{path}"


@pytest.fixture
def url(place: str, client: str, tmp_path: Path) -> str:
    """An encrypted tier with nothing in it."""
    return sealed(f"{place}?client={client}", tmp_path)


def sealed(url: str, folder: Path, *, operator: str = "operator.key", keyring: str = "keyring.json") -> str:
    joint = "&" if "?" in url else "?"
    return f"{url}{joint}encryption={key_in(folder, operator)}&keyring={folder}/{keyring}"


def below(place: str, server: S3Server) -> dict[str, bytes]:
    """Every object of the tier at `place`, by its path below it."""
    prefix = place.removeprefix(f"s3://{server.bucket}/")
    found = [meta["path"] for page in server.objects.list(f"{prefix}/") for meta in page]
    return {path.removeprefix(f"{prefix}/"): bytes(server.objects.get(path).bytes()) for path in found}


class _SealedOnS3(StoreHooks):
    """Blocks are damaged through the server itself."""

    objects: S3Server

    @pytest.fixture(params=["obstore", pytest.param("fsspec", marks=pytest.mark.soak)])
    def url(self, request: pytest.FixtureRequest, place: str, server: S3Server, tmp_path: Path) -> str:
        type(self).objects = server
        # Without client= a forked child takes another one than obstore, which outlives no fork.
        return sealed(place if request.param == "obstore" else f"{place}?client=fsspec", tmp_path)

    def raw_get(self, url: str, namespace: Namespace, key: BlockKey) -> bytes:
        return bytes(self.objects.objects.get(self._path(url, namespace, key)).bytes())

    def raw_set(self, url: str, namespace: Namespace, key: BlockKey, data: bytes | None) -> None:
        path = self._path(url, namespace, key)
        if data is None:
            self.objects.objects.delete(path)
        else:
            self.objects.objects.put(path, data)

    @staticmethod
    def _path(url: str, namespace: Namespace, key: BlockKey) -> str:
        return f"{TierURL.parse(url).location.partition('/')[2]}/{NamespaceTree(namespace).block(key)}"


@pytest.mark.soak
class TestSealedDamage(_SealedOnS3, BlockTests, DamageTests):
    """What is different where blocks are sealed: their bytes on the way in and out, and damage."""


@pytest.mark.soak
class TestSealedContract(_SealedOnS3, StoreTests):
    """All of the contract."""

    def test_a_store_answers_as_a_dictionary_would(self, url: str) -> None:
        run_against_a_dictionary(url, runs=4)  # each step some ten requests

    @pytest.mark.skip(reason="connections close on threads of their own: test_object_conformance looks at that")
    def test_a_closed_store_leaves_no_descriptor_open(self) -> None:
        """As in the suite."""


def test_no_byte_of_a_block_is_in_the_bucket_and_both_clients_read_it(
    url: str, place: str, client: str, server: S3Server
) -> None:
    with open_store(url) as store:
        assert store.capabilities.sealed
        assert store.put_many(SPACE, [write(1, tenant="acme"), write(2)]) == [STORED] * 2
        assert get(store, [1, 2]) == [HIT] * 2
    stored = b"".join(below(place, server).values())
    for number in (1, 2):
        data = content(number).tobytes()
        assert not any(data[start : start + 32] in stored for start in range(0, len(data) - 32, 500))
    other = "fsspec" if client == "obstore" else "obstore"
    with open_store(url.replace(f"client={client}", f"client={other}")) as store:
        assert get(store, [1, 2]) == [HIT] * 2


def test_a_wrong_key_or_none_is_an_error_at_opening_and_nothing_changes(
    url: str, place: str, client: str, server: S3Server, tmp_path: Path
) -> None:
    with open_store(url) as store:
        store.put_many(SPACE, writes(range(2)))
    before = below(place, server)
    plain = f"{place}?client={client}"
    with pytest.raises(KeyringError, match="another operator's key"):
        open_store(sealed(plain, tmp_path, operator="other.key"))
    with pytest.raises(StoreSealedError, match="give encryption="):
        open_store(plain)
    with pytest.raises(KeyringError, match="not there"):
        open_store(sealed(plain, tmp_path, keyring="lost.json"))
    with open_store(sealed(f"{place}-2?client={client}", tmp_path, keyring="second.json")) as store:
        store.put_many(SPACE, writes([1]))
    with pytest.raises(StoreSealedError, match="another keyring"):
        open_store(sealed(plain, tmp_path, keyring="second.json"))
    assert below(place, server) == before
    with open_store(url, readonly=True) as store:
        assert get(store, range(3)) == [HIT, HIT, MISS]


@WRITERS
def test_of_a_copy_that_was_made_before_no_block_of_a_purged_tenant_can_be_read(
    url: str, place: str, server: S3Server
) -> None:
    url += "&lookup_ttl=0"
    with open_store(url) as store:
        store.put_many(SPACE, [write(number, tenant="acme" if number < 3 else "zeta") for number in range(5)])
    objects = below(place, server)
    prefix = place.removeprefix(f"s3://{server.bucket}/")
    for path, data in objects.items():
        server.objects.put(f"{prefix}-copy/{path}", data)
    copy = url.replace(place, f"{place}-copy")
    with open_store(copy) as store:
        assert get(store, range(5)) == [HIT] * 5
    with open_store(url) as engine:  # somebody uses it meanwhile
        assert get(engine, range(5)) == [HIT] * 5
        (receipt,) = purge([url], Request(tenant="acme"), dry_run=False).tiers
        assert (receipt.erasable, receipt.complete, receipt.blocks) == (True, True, 3)
        assert get(engine, range(5)) == [MISS] * 3 + [HIT] * 2
        assert held(engine) == {key(3), key(4)}
    with open_store(copy) as store:
        assert get(store, range(5)) == [MISS] * 3 + [HIT] * 2
        assert store.put_many(SPACE, [write(1, tenant="acme")]) == [STORED]  # under a key that is new
        assert get(store, [1]) == [HIT]
    for path, data in objects.items():  # the old objects once more, from a backup, over what is there now
        server.objects.put(f"{prefix}-copy/{path}", data)
    with open_store(copy) as store:
        assert get(store, range(5)) == [MISS] * 3 + [HIT] * 2


@WRITERS
def test_stock_zarr_reads_it_over_s3fs_with_the_keys_and_not_without(
    url: str, place: str, server: S3Server, tmp_path: Path
) -> None:
    values = np.random.default_rng(1).standard_normal(LAYOUT.shape).astype(LAYOUT.numpy_dtype)
    with open_store(url) as store:
        blocks = [BlockWrite(key(number), buffer(as_bytes(buffer(values)))) for number in (1, 2)]
        assert store.put_many(TYPED, blocks) == [STORED] * 2
    np.save(tmp_path / "expected.npy", values)
    path = f"{place.removeprefix(f's3://{server.bucket}/')}/{NamespaceTree(TYPED).block(key(2))}"
    data = bytearray(server.objects.get(path).bytes())
    data[300] ^= 1
    server.objects.put(path, bytes(data))

    def look(number: int, **environment: str) -> dict[str, object]:
        return {
            "folder": f"{place}/{NamespaceTree(TYPED).folder(key(number))}",
            "place": DigestWords(32).index(key(number).digest),
            "expected": f"{tmp_path}/expected.npy",
            "environment": environment,
        }

    named = {"KVSTORE_ENCRYPTION": key_in(tmp_path), "KVSTORE_KEYRING": f"{tmp_path}/keyring.json"}
    done = subprocess.run(
        [sys.executable, str(READER)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        input=json.dumps([look(1), look(1, **named), look(2, **named)]),
        capture_output=True,
        text=True,
        check=True,
        timeout=90,
    )
    without, with_keys, of_damaged = done.stdout.splitlines()
    assert without.startswith("KeyringError these blocks are encrypted")
    assert with_keys == "equal"
    assert "checksum" in of_damaged


@WRITERS
def test_new_data_keys_for_a_bucket_leave_nothing_under_the_old_ones(url: str) -> None:
    url += "&lookup_ttl=0"
    with open_store(url) as store:
        store.put_many(
            SPACE, [write(number, tenant="acme" if number < 3 else "", position=number) for number in range(5)]
        )
        before = set(store.sealed_with(SPACE, keys(range(5))))
    tier = TierURL.parse(url)
    report = reseal([tier], keyrings_of([tier]))
    assert (report.resealed, report.lost, report.dropped) == (5, 0, 2)
    with open_store(url) as store:
        assert not set(store.sealed_with(SPACE, keys(range(5)))) & before
        assert get(store, range(5)) == [HIT] * 5
