"""What encryption promises of a tier: nothing readable on the device, nothing served that was not sealed, for tenants
one by one.
"""

from __future__ import annotations

import fcntl
import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import raw
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sealing_helpers import key_file, keyring, operator_key, sealed
from tiers import Tier

import kvstore.sealing.keyring
from kvstore import BlockLayout, BlockWrite, GetOutcome, MarkOutcome, PutOutcome, open_store
from kvstore.archive import create
from kvstore.copying import copy
from kvstore.errors import (
    ConfigurationError,
    InvalidOptionError,
    KeyringError,
    StoreOpenError,
    StoreSealedError,
    UnknownOptionError,
)
from kvstore.integrity import crc32c
from kvstore.marks import Mark
from kvstore.sealing import Keyring, KeySource
from kvstore.testing.elsewhere import in_another_process
from kvstore.testing.supply import SPACE, content, get, key, keys, write, writes
from kvstore.tiering import TieringManager

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.sealing import Ring

HIT, MISS, CORRUPT = GetOutcome.HIT, GetOutcome.MISS, GetOutcome.CORRUPT
STORED, EXISTS, FAILED = PutOutcome.STORED, PutOutcome.EXISTS, PutOutcome.FAILED


@pytest.fixture
def url(plain_url: str, tmp_path: Path) -> str:
    return sealed(plain_url, tmp_path)


def of_tenant(number: int, tenant: str) -> BlockWrite:
    return write(number, tenant=tenant)


def everything_under(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_blocks_of_a_tenant_whose_key_cannot_be_made_in_time_fail_and_others_are_stored(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kvstore.sealing.keyring, "PATIENCE_S", 0.1)
    with open_store(url) as store:
        assert store.put_many(SPACE, [of_tenant(1, "acme")]) == [STORED]
        (lock,) = tmp_path.rglob("*.lock")
        with lock.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # as `kvstore rekey` has it while it is stopped
            for number in (2, 4):
                batch = [of_tenant(number, "new"), of_tenant(number + 1, "acme")]
                assert store.put_many(SPACE, batch) == [FAILED, STORED]
        assert [record.message.count("locked") for record in caplog.records] == [1]
        assert store.put_many(SPACE, [of_tenant(2, "new")]) == [STORED]


class TestOnTheDevice:
    def test_no_byte_of_a_block_stands_there_as_it_is(self, url: str, plain_url: str, tmp_path: Path) -> None:
        marker = content(77, 64)
        data = content(1)
        data[1000:1064] = marker
        data[-64:] = marker
        for one in (plain_url.replace("/tier", "/plain"), url):
            with open_store(one) as store:
                assert store.capabilities.sealed is (one is url)
                assert store.put_many(SPACE, [BlockWrite(key(1), data.data, tenant="acme")]) == [STORED]
        (tmp_path / "all").mkdir()
        for path in tmp_path.glob("tier*"):
            path.rename(tmp_path / "all" / path.name)
        assert marker.tobytes() not in everything_under(tmp_path / "all")
        (tmp_path / "bare").mkdir()
        for path in tmp_path.glob("plain*"):
            path.rename(tmp_path / "bare" / path.name)
        assert marker.tobytes() in everything_under(tmp_path / "bare")

    def test_it_occupies_as_much_as_a_plain_one_of_144_bytes_more(self, url: str, plain_url: str) -> None:
        sizes = (1, 3500, 3900, 4000, 4096, 8000)

        def occupied(url: str, more: int) -> list[int]:
            space = replace(SPACE, layouts=tuple(BlockLayout.opaque(size + more) for size in sizes))
            with open_store(url) as store:
                put = [write(1, space, group) for group in range(len(sizes))]
                assert store.put_many(space, put) == [STORED] * len(sizes)
                found = {info.key.group: info.stored_bytes for info in store.scan(space)}
                assert store.usage().used == sum(found.values())
                return [found[group] for group in range(len(sizes))]

        assert occupied(url, 0) == occupied(plain_url.replace("/tier", "/plain"), 144)


class TestOpening:
    def test_without_the_key_or_with_another_there_is_an_error_and_nothing_changes(
        self, url: str, plain_url: str, tmp_path: Path
    ) -> None:
        with open_store(url) as store:
            store.put_many(SPACE, writes(range(2)))
        before = (tmp_path / "keyring.json").read_bytes()
        Keyring.open(tmp_path / "other.json", KeySource.parse(f"file:{key_file(tmp_path)}").read())
        with pytest.raises(StoreSealedError, match="encryption="):
            open_store(plain_url)
        with pytest.raises(StoreSealedError, match="another keyring"):
            open_store(sealed(plain_url, tmp_path, keyring="other.json"))
        with pytest.raises(KeyringError, match="not there"):
            open_store(sealed(plain_url, tmp_path, keyring="lost.json"))
        with pytest.raises(KeyringError, match="another operator's key"):
            open_store(sealed(plain_url, tmp_path, key="other.key"))
        assert not (tmp_path / "lost.json").exists()
        assert (tmp_path / "keyring.json").read_bytes() == before
        for readonly in (True, False):
            with open_store(url, readonly=readonly) as store:
                assert get(store, [0, 1]) == [HIT, HIT]

    def test_a_tier_of_plain_blocks_is_not_opened_with_a_key(self, url: str, plain_url: str) -> None:
        with open_store(plain_url) as store:
            store.put_many(SPACE, writes([0]))
        with pytest.raises(StoreSealedError, match="not encrypted"):
            open_store(url)
        with open_store(plain_url) as store:
            assert get(store, [0]) == [HIT]

    def test_options_that_cannot_be_meant_are_refused(self, plain_url: str, tmp_path: Path) -> None:
        joint = "&" if "?" in plain_url else "?"
        secret = operator_key()
        for options, says in (
            (f"encryption=file:{key_file(tmp_path)}", "wants keyring="),
            (f"keyring={tmp_path}/keyring.json", "goes with encryption"),
            (f"encryption=file:{key_file(tmp_path)}&keyring={tmp_path}/tier/keyring.json", "lies in the tier"),
            (f"encryption=file:{key_file(tmp_path)}&keyring=relative.json", "absolute path"),
            (f"encryption=file:{tmp_path}/nothing&keyring={tmp_path}/keyring.json", "openssl rand"),
            (f"encryption={secret}&keyring={tmp_path}/keyring.json", "env:NAME"),
        ):
            with pytest.raises(InvalidOptionError, match=says) as error:
                open_store(f"{plain_url}{joint}{options}")
            assert secret not in str(error.value)
        assert not (tmp_path / "tier").exists()
        with pytest.raises(UnknownOptionError, match="encryption"):
            open_store(f"memory://x?encryption=file:{key_file(tmp_path)}&keyring={tmp_path}/keyring.json")


class TestServing:
    def test_a_plain_block_that_was_planted_is_damage(self, url: str, plain_url: str) -> None:
        twin = Tier.at(plain_url.replace("/tier", "/twin"))
        with open_store(twin.url) as store:
            store.put_many(SPACE, writes([1]))
        planted = in_another_process(raw.read, twin, (SPACE, key(1)))
        with open_store(url) as store:
            store.put_many(SPACE, writes([1, 2]))
            in_another_process(raw.put, Tier.at(url), (SPACE, key(1)), planted)
            assert get(store, [1, 2]) == [CORRUPT, HIT]
            assert store.put_many(SPACE, writes([1])) == [STORED]
            assert get(store, [1]) == [HIT]

    def test_a_sealed_block_that_was_planted_among_plain_ones_is_damage(self, url: str, plain_url: str) -> None:
        with open_store(url) as store:
            store.put_many(SPACE, writes([1]))
        planted = in_another_process(raw.read, Tier.at(url), (SPACE, key(1)))
        twin = Tier.at(plain_url.replace("/tier", "/twin"))
        with open_store(twin.url) as store:
            store.put_many(SPACE, writes([1, 2]))
            in_another_process(raw.put, twin, (SPACE, key(1)), planted)
            assert get(store, [1, 2]) == [CORRUPT, HIT]

    def test_of_two_who_begin_a_tier_one_way_and_the_other_the_second_stores_nothing(self, tmp_path: Path) -> None:
        plain = f"file://{tmp_path}/tier?remote=true"
        with open_store(plain) as first, open_store(sealed(plain, tmp_path)) as second:
            assert first.put_many(SPACE, writes([1])) == [STORED]
            assert second.put_many(SPACE, writes([1, 2])) == [FAILED, FAILED]
            assert get(first, [1]) == [HIT]
            assert get(second, [1]) == [MISS]


class TestCosts:
    def test_the_keyring_is_looked_at_once_for_each_batch(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        looks: list[Keyring] = []
        ring = Keyring.ring

        def counted(self: Keyring) -> Ring:
            looks.append(self)
            return ring(self)

        with open_store(url) as store:
            store.put_many(SPACE, writes([0]))
            monkeypatch.setattr(Keyring, "ring", counted)
            assert store.put_many(SPACE, writes(range(1, 6))) == [STORED] * 5
            assert len(looks) == 1
            assert get(store, range(6)) == [HIT] * 6
            assert len(looks) == 2

    @pytest.mark.parametrize("sealing_kind", ["sqlite"], indirect=True)
    def test_where_the_tag_speaks_for_a_value_no_checksum_is_computed_over_it(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        summed: list[int] = []

        def counted(data: bytes | NDArray[np.uint8], start: int = 0) -> int:
            summed.append(len(data))
            return crc32c(data, start)

        with open_store(url) as store:
            store.put_many(SPACE, writes([1]))
            monkeypatch.setattr("kvstore.values.crc32c", counted)
            assert get(store, [1]) == [HIT]
            assert summed
            assert max(summed) < SPACE.block_bytes()


class TestTenants:
    def test_whose_key_is_destroyed_their_blocks_are_misses_and_go(self, url: str, tmp_path: Path) -> None:
        with open_store(url) as store, open_store(url) as other:
            assert store.put_many(SPACE, [of_tenant(1, "acme"), of_tenant(2, "beta"), write(3)]) == [STORED] * 3
            assert len(set(store.sealed_with(SPACE, keys([1, 2, 3])))) == 3
            assert store.sealed_with(SPACE, keys([4])) == [None]
            assert get(other, [1, 2, 3]) == [HIT] * 3
            ring = keyring(tmp_path)
            assert ring.tenants() == ["", "acme", "beta"]
            assert ring.destroy("acme")
            for one in (other, store):
                assert get(one, [1, 2, 3]) == [MISS, HIT, HIT]
            assert store.put_many(SPACE, [of_tenant(1, "acme")]) == [STORED]
            assert get(other, [1]) == [HIT]

    def test_damage_is_told_from_a_key_that_was_destroyed(self, url: str, tmp_path: Path) -> None:
        with open_store(url) as store:
            store.put_many(SPACE, [of_tenant(1, "acme"), of_tenant(2, "acme")])
            keyring(tmp_path).destroy("acme")
            place = (SPACE, key(1))
            stored = in_another_process(raw.read, Tier.at(url), place)
            in_another_process(raw.put, Tier.at(url), place, stored[:3000] + bytes([stored[3000] ^ 1]) + stored[3001:])
            assert get(store, [1, 2]) == [CORRUPT, MISS]

    def test_a_block_that_is_there_under_anothers_key_stays(self, url: str, tmp_path: Path) -> None:
        with open_store(url) as store:
            assert store.put_many(SPACE, [of_tenant(1, "acme")]) == [STORED]
            assert store.put_many(SPACE, [of_tenant(1, "beta")]) == [EXISTS]
            keyring(tmp_path).destroy("beta")
            assert get(store, [1]) == [HIT]

    def test_a_key_that_only_another_process_has_costs_a_miss_and_no_block(self, url: str, tmp_path: Path) -> None:
        with open_store(url) as store:
            store.put_many(SPACE, [of_tenant(1, "acme"), write(2)])
            path, whole = tmp_path / "keyring.json", (tmp_path / "keyring.json").read_text()
            document = whole.replace('"current": true', '"current": false')
            ring = keyring(tmp_path)
            ring.destroy("acme")
            without = path.read_text()
            emptied = without[: without.index('"destroyed": [')] + '"destroyed": []\n}\n'
            path.write_text(emptied)
            assert get(store, [1, 2]) == [MISS, HIT]
            path.write_text(document)
            assert get(store, [1, 2]) == [HIT, HIT]

    def test_for_whom_no_key_can_be_made_nothing_is_stored(self, url: str, tmp_path: Path) -> None:
        with open_store(url) as store:
            store.put_many(SPACE, [of_tenant(1, "acme")])
            (tmp_path / "keyring.json.lock").unlink()
            (tmp_path / "keyring.json.lock").mkdir()
            put = [of_tenant(2, "acme"), of_tenant(3, "new"), of_tenant(4, "acme")]
            assert store.put_many(SPACE, put) == [STORED, FAILED, STORED]
            assert get(store, [1, 2, 3, 4]) == [HIT, HIT, MISS, HIT]

    def test_what_a_manager_stores_is_sealed_for_its_tenant(self, url: str, tmp_path: Path) -> None:
        with TieringManager(SPACE, [url], primary_slots=8) as manager:
            assert manager.store([of_tenant(1, "acme"), write(2)]) == 2
            assert manager.drain(60)
        with open_store(url) as store:
            keyring(tmp_path).destroy("acme")
            assert get(store, [1, 2]) == [MISS, HIT]


class TestCopies:
    def test_they_stand_unencrypted_only_where_that_is_said(self, url: str, plain_url: str, tmp_path: Path) -> None:
        twin = plain_url.replace("/tier", "/twin")
        with open_store(url) as source, open_store(twin) as target:
            source.put_many(SPACE, writes([1, 2]))
            with pytest.raises(ConfigurationError, match="--plaintext"):
                copy(source, target)
            with pytest.raises(ConfigurationError, match="--plaintext"):
                create(f"file://{tmp_path}/archive", source, SPACE, keys([1]))
            assert get(target, [1, 2]) == [MISS, MISS]
            assert copy(source, target, plaintext=True).ok
            assert get(target, [1, 2]) == [HIT, HIT]
            assert not (tmp_path / "archive").exists()

    def test_into_another_sealed_tier_each_goes_under_its_tenants_key(self, tmp_path: Path) -> None:
        source_url = sealed(f"lmdb://{tmp_path}/tier", tmp_path)
        with open_store(source_url) as source, open_store(sealed(f"file://{tmp_path}/twin", tmp_path)) as target:
            source.put_many(SPACE, [of_tenant(1, "acme"), write(2)])
            assert source.mark_many(SPACE, keys([1]), Mark(tenant="acme")) == [MarkOutcome.MARKED]
            assert copy(source, target).ok
            assert source.sealed_with(SPACE, keys([1, 2])) == target.sealed_with(SPACE, keys([1, 2]))
            keyring(tmp_path).destroy("acme")
            assert get(target, [1, 2]) == [MISS, HIT]

    def test_whose_key_a_block_is_under_decides_not_its_marks(self, url: str, tmp_path: Path) -> None:
        target_url = sealed(f"lmdb://{tmp_path}/twin", tmp_path, keyring="twin.json")
        with open_store(url) as source, open_store(target_url) as target:
            source.put_many(SPACE, [of_tenant(1, "acme"), of_tenant(2, "acme"), of_tenant(3, "beta"), write(4)])
            source.mark_many(SPACE, keys([2, 4]), Mark("handbook", tenant="beta"))
            assert copy(source, target).ok
            twin = Keyring.open(tmp_path / "twin.json", KeySource.parse(f"file:{key_file(tmp_path)}").read())
            assert twin.tenants() == ["", "acme", "beta"]
            twin.destroy("acme")
            assert get(target, [1, 2, 3, 4]) == [MISS, MISS, HIT, HIT]
            twin.destroy("beta")
            assert get(target, [3, 4]) == [MISS, HIT]
            assert get(source, [1, 2, 3, 4]) == [HIT] * 4


@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_a_tier_that_is_open_without_a_key_is_not_opened_with_one(scheme: str, tmp_path: Path) -> None:
    plain = f"{scheme}://{tmp_path}/tier"
    with open_store(plain), pytest.raises(StoreOpenError, match="open elsewhere without encryption"):
        open_store(sealed(plain, tmp_path))


def test_a_catalogue_made_anew_knows_that_the_blocks_are_sealed(tmp_path: Path) -> None:
    url = sealed(f"file://{tmp_path}/tier", tmp_path)
    with open_store(url) as store:
        store.put_many(SPACE, writes([1]))
    for path in (tmp_path / "tier" / ".kvstore" / "catalogue").iterdir():
        path.unlink()
    with pytest.raises(StoreSealedError):
        open_store(f"file://{tmp_path}/tier")
    with open_store(url) as store:
        assert get(store, [1]) == [HIT]


@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_blocks_of_a_length_that_is_no_whole_number_of_anything(scheme: str, tmp_path: Path) -> None:
    space = replace(SPACE, layouts=tuple(BlockLayout.opaque(size) for size in (1, 3951, 3952, 4096, 5000)))
    with open_store(sealed(f"{scheme}://{tmp_path}/tier", tmp_path)) as store:
        put = [write(1, space, group) for group in range(5)]
        assert store.put_many(space, put) == [STORED] * 5
        assert len(set(store.sealed_with(space, [block.key for block in put]))) == 1
        assert [get(store, [1], space, group) for group in range(5)] == [[HIT]] * 5


def test_a_block_is_read_with_nothing_but_the_page_on_formats(tmp_path: Path) -> None:
    url = sealed(f"file://{tmp_path}/tier", tmp_path)
    with open_store(url) as store:
        store.put_many(SPACE, [of_tenant(1, "acme")])
    file = next(path for path in (tmp_path / "tier" / SPACE.name).rglob("*.0") if path.is_file()).read_bytes()
    ring = json.loads((tmp_path / "keyring.json").read_text())
    (entry,) = ring["keys"]
    unhex = bytes.fromhex
    operators = AESGCM(KeySource.parse(f"file:{key_file(tmp_path)}").read())
    belongs = b"kvstore-data-key-1:" + unhex(ring["id"]) + unhex(entry["id"]) + entry["tenant"].encode()
    data_key = AESGCM(operators.decrypt(unhex(entry["nonce"]), unhex(entry["wrapped"]), belongs))
    end = SPACE.block_bytes() + 144
    block = data_key.decrypt(file[32:44], file[128:end], file[:128])
    assert block == content(1).tobytes()
    assert (file[:8], file[16:32], file[48:64], file[64:96]) == (
        *(b"KVSEAL1\n", unhex(entry["id"]), SPACE.fingerprint, key(1).digest),
    )
    assert struct.unpack_from("<H", file, end + 4 + 10) == (1,)
    assert file[end + 196 : end + 212] == unhex(entry["id"])
