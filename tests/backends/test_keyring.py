"""The keyring: one document for many processes, whole at every moment, without what was destroyed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np
import pytest

import kvstore.sealing.keyring
from kvstore import BlockKey
from kvstore.errors import InvalidOptionError, KeyringError
from kvstore.registry import backend_class
from kvstore.rekeying import rewrap
from kvstore.sealing import (
    SEAL_BYTES,
    DataKey,
    Keyring,
    KeySource,
    Sealer,
    Unsealed,
    keyring_of,
    open_sealer,
    seal_into,
    unseal_into,
)
from kvstore.testing.patience import PATIENCE
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY, OTHER = bytes(range(7, 39)), bytes(range(140, 172))
SPACE, BLOCK = b"n" * 16, BlockKey(b"d" * 32, group=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keyring.json"


class TestOperatorKeys:
    @pytest.mark.parametrize("text", [base64.b64encode(KEY).decode(), KEY.hex(), KEY.hex().upper()])
    def test_they_come_from_the_environment_or_a_file_in_base64_or_hex(
        self, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OPERATOR_KEY", text)
        (tmp_path / "key").write_text(f"{text}\n")
        assert KeySource.parse("env:OPERATOR_KEY").read() == KEY == KeySource.parse(f"file:{tmp_path}/key").read()

    @pytest.mark.parametrize(
        "weak",
        [
            "", "short", base64.b64encode(bytes(16)).decode(), base64.b64encode(bytes(32)).decode(), "ab" * 32,
            base64.b64encode(b"correct horse battery staple 012").decode(), "!" * 44,
        ],
    )  # fmt: skip
    def test_weak_ones_are_refused_with_a_remedy_and_never_shown(
        self, weak: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OPERATOR_KEY", weak)
        with pytest.raises(InvalidOptionError, match="openssl rand -base64 32") as error:
            KeySource.parse("env:OPERATOR_KEY").read()
        assert not weak or weak not in str(error.value)
        assert weak or "the key that the tier was made with" in str(error.value), "a new key opens no old tier"

    @pytest.mark.parametrize("text", [KEY.hex(), f"env:{KEY.hex()}", "env:9x", "file:relative", "vault:x", "env:A B"])
    def test_what_names_no_key_is_refused_without_being_shown(self, text: str) -> None:
        with pytest.raises(ValueError, match="env:NAME") as error:
            KeySource.parse(text)
        assert text not in str(error.value)


class TestDocument:
    def test_every_process_finds_a_tenants_key_and_each_tenant_has_its_own(self, path: Path) -> None:
        one, other = Keyring.open(path, KEY), Keyring.open(path, KEY)
        made = one.data_key("acme")
        assert other.data_key("acme") == made == Keyring.open(path, KEY).data_key("acme")
        assert other.data_key("") != made
        assert one.tenants() == ["", "acme"]
        assert one.key(made.id) == made.key
        assert one.key(bytes(16)) is None

    def test_its_files_are_for_the_owner_and_have_no_key_in_the_clear(self, path: Path) -> None:
        made = Keyring.open(path, KEY).data_key("acme")
        assert sorted(file.name for file in path.parent.iterdir()) == ["keyring.json", "keyring.json.lock"]
        for file in path.parent.iterdir():
            assert file.stat().st_mode & 0o777 == 0o600
        text = path.read_text()
        assert made.key.hex() not in text
        assert KEY.hex() not in text
        assert made.key.hex() not in repr(made)

    def test_another_operators_key_opens_nothing(self, path: Path) -> None:
        Keyring.open(path, KEY)
        with pytest.raises(KeyringError, match="another operator's key"):
            Keyring.open(path, OTHER)

    def test_what_is_no_keyring_is_left_as_it_is(self, path: Path) -> None:
        for text in ("", "{}", "[]", '{"kvstore_keyring": 1}', "\0"):
            path.write_text(text)
            with pytest.raises(KeyringError, match="restore it"):
                Keyring.open(path, KEY)
            assert path.read_text() == text
        path.write_text('{"kvstore_keyring": 2}')
        with pytest.raises(KeyringError, match="upgrade"):
            Keyring.open(path, KEY)

    def test_no_entry_can_be_passed_off_as_another_tenants(self, path: Path) -> None:
        keyring = Keyring.open(path, KEY)
        keyring.data_key("acme")
        document = json.loads(path.read_text())
        document["keys"][0]["tenant"] = "evil"
        path.write_text(json.dumps(document))
        fresh = Keyring.open(path, KEY)
        assert fresh.tenants() == []
        assert not fresh.ring().keys

    def test_one_that_is_not_there_is_made_only_where_that_is_asked(self, path: Path) -> None:
        with pytest.raises(KeyringError, match="not there"):
            Keyring.open(path, KEY, create=False)
        assert not path.exists()

    def test_a_file_that_nobody_may_write_serves_the_tenants_that_it_has(self, path: Path) -> None:
        keyring = Keyring.open(path, KEY)
        made = keyring.data_key("acme")
        (path.parent / "keyring.json.lock").unlink()
        (path.parent / "keyring.json.lock").mkdir()  # as a folder that cannot be written to
        assert keyring.data_key("acme") == made
        with pytest.raises(KeyringError, match="cannot be changed"):
            keyring.data_key("other")


class TestItsFile:
    def test_who_names_it_by_a_link_changes_the_same_file(self, path: Path) -> None:
        (path.parent / "elsewhere").mkdir()
        link = path.parent / "elsewhere" / "link.json"
        link.symlink_to(path)
        made_by_link = Keyring.open(link, KEY)
        one = Keyring.open(path, KEY, create=False)
        made = one.data_key("acme")
        assert made_by_link.data_key("acme") == made
        assert made_by_link.destroy("acme")
        assert link.is_symlink()
        assert one.key(made.id) is None
        assert [file.name for file in link.parent.iterdir()] == ["link.json"]
        assert sorted(file.name for file in path.parent.glob("*.*")) == ["keyring.json", "keyring.json.lock"]

    def test_a_link_that_is_set_to_another_version_of_it_is_followed(self, path: Path) -> None:
        versions = [path.parent / "1.json", path.parent / "2.json"]
        made = Keyring.open(versions[0], KEY).data_key("acme")
        versions[1].write_bytes(versions[0].read_bytes())
        Keyring.open(versions[1], KEY).destroy("acme")
        path.symlink_to(versions[0])
        reader = Keyring.open(path, KEY)
        assert reader.key(made.id) == made.key
        path.with_name("new").symlink_to(versions[1])
        path.with_name("new").rename(path)
        versions[0].unlink()
        assert reader.key(made.id) is None
        assert made.id in reader.ring().destroyed

    def test_what_is_written_anew_has_the_owner_and_permissions_of_what_was_there(self, path: Path) -> None:
        keyring = Keyring.open(path, KEY)
        lock = path.with_name("keyring.json.lock")
        lock.unlink()
        path.chmod(0o640)
        owner = (1234, 4321) if os.geteuid() == 0 else (os.getuid(), os.getgroups()[-1])
        os.chown(path, *owner)
        before = path.stat().st_ino
        keyring.data_key("acme")
        assert path.stat().st_ino != before
        for file in (path, lock):
            status = file.stat()
            assert (status.st_mode & 0o777, status.st_uid, status.st_gid) == (0o640, *owner)
        lock.chmod(0o666)  # as somebody wants it
        keyring.destroy("acme")
        assert lock.stat().st_mode & 0o777 == 0o666

    def test_reading_waits_for_nobody_who_writes(self, path: Path) -> None:
        keyring = Keyring.open(path, KEY)
        made = keyring.data_key("acme")
        with (path.parent / "keyring.json.lock").open("r+b") as lock, ThreadPoolExecutor(2) as pool:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process, stopped while it writes
            new = pool.submit(keyring.data_key, "new")
            try:
                with pytest.raises(TimeoutError):
                    new.result(0.2)
                assert pool.submit(keyring.key, made.id).result(60) == made.key
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)
            assert new.result(60) == keyring.data_key("new")

    def test_who_wants_to_write_waits_no_longer_than_its_patience_and_then_hardly_at_all(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kvstore.sealing.keyring, "PATIENCE_S", 2.0)
        keyring = Keyring.open(path, KEY)
        with (path.parent / "keyring.json.lock").open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            waited: list[float] = []
            for _ in range(2):
                began = time.monotonic()
                with pytest.raises(KeyringError, match=r"locked for 2 s.*fuser"):
                    keyring.data_key("new")
                waited.append(time.monotonic() - began)
            assert waited[0] >= 2.0
            assert waited[1] < 2.0
        assert keyring.data_key("new")
        assert keyring.tenants() == ["new"]

    def test_once_closed_it_is_not_opened_by_being_asked(self, path: Path) -> None:
        keyring = Keyring.open(path, KEY)
        keyring.data_key("acme")
        keyring.close()
        for call in (keyring.ring, keyring.tenants, lambda: keyring.data_key("acme"), lambda: keyring.destroy("acme")):
            with pytest.raises(KeyringError, match="closed"):
                call()
        assert Keyring.open(path, KEY).tenants() == ["acme"]


def test_one_is_looked_up_while_another_is_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPERATOR_KEY", KEY.hex())
    url = TierURL.parse(f"file:///nowhere?encryption=env:OPERATOR_KEY&keyring={path}")
    url = url.validated(backend_class(url).options)
    sealers: list[Sealer | None] = []
    opening = threading.Thread(target=lambda: sealers.append(open_sealer(url, [])))

    class Busy(WeakSet[Keyring]):
        """Gone through slowly enough for another thread."""

        def __iter__(self) -> Iterator[Keyring]:
            for keyring in super().__iter__():
                if not opening.ident:
                    opening.start()
                    opening.join(0.2)
                yield keyring

    monkeypatch.setattr("kvstore.sealing.sealer._open", Busy())
    sealers += [open_sealer(url, []), open_sealer(url, [])]
    assert keyring_of("another") is None
    opening.join()
    assert len(sealers) == 3
    with Keyring.open(path, KEY) as keyring:
        assert keyring_of(keyring.id) is not None
        for sealer in sealers:
            assert sealer is not None
            sealer.close()
        assert keyring_of(keyring.id) is None


class TestDestruction:
    def test_a_destroyed_key_serves_nobody_from_the_next_batch_on(self, path: Path) -> None:
        one, other = Keyring.open(path, KEY), Keyring.open(path, KEY)
        made, kept = one.data_key("acme"), one.data_key("")
        assert other.key(made.id) == made.key
        assert one.destroy("acme") is True
        assert other.key(made.id) is None
        assert made.id in other.ring().destroyed
        assert other.key(kept.id) == kept.key
        assert one.destroy("acme") is False
        assert other.data_key("acme").id != made.id
        assert made.id.hex() in path.read_text()
        assert not re.search(f'"id": "{made.id.hex()}"', path.read_text())

    def test_a_keyring_that_is_gone_opens_nothing_and_is_not_made_anew(self, path: Path) -> None:
        keyring = Keyring.open(path, KEY)
        made = keyring.data_key("acme")
        path.unlink()
        assert keyring.key(made.id) is None
        with pytest.raises(KeyringError):
            keyring.data_key("acme")
        assert not path.exists()

    def test_one_that_was_put_in_its_place_opens_nothing(self, path: Path) -> None:
        keyring = Keyring.open(path, KEY)
        made = keyring.data_key("acme")
        path.unlink()
        Keyring.open(path, KEY).data_key("acme")
        assert keyring.key(made.id) is None
        with pytest.raises(KeyringError, match="another keyring"):
            keyring.data_key("new")


class TestRewrapping:
    def test_who_has_it_open_goes_on_with_what_it_knows(self, path: Path) -> None:
        keyring = Keyring.open(path, KEY)
        made = keyring.data_key("acme")
        rewrap({str(path): KEY}, OTHER)
        rewrap({str(path): KEY}, OTHER)  # again, as after an interruption
        assert keyring.data_key("acme") == made == Keyring.open(path, OTHER).data_key("acme")
        with pytest.raises(KeyringError, match="changed meanwhile"):
            keyring.data_key("new")
        with pytest.raises(KeyringError, match="another operator's key"):
            Keyring.open(path, KEY)
        Keyring.open(path, OTHER).destroy("acme")
        assert keyring.key(made.id) is None

    def test_of_neither_key_it_is_left(self, path: Path) -> None:
        Keyring.open(path, KEY)
        with pytest.raises(KeyringError, match="another operator's key"):
            rewrap({str(path): os.urandom(32)}, OTHER)


def _make_keys(path: str, tenants: list[str]) -> dict[str, DataKey]:
    keyring = Keyring.open(path, KEY_OF_CHILDREN)
    Path(f"{path}.{os.getpid()}.ready").touch()
    while len(list(Path(path).parent.glob("*.ready"))) < CHILDREN:  # all of them at once
        time.sleep(0.0005)
    return {tenant: keyring.data_key(tenant) for tenant in tenants}


CHILDREN = 4
KEY_OF_CHILDREN = bytes(range(100, 132))


def test_processes_that_make_keys_at_once_agree_on_them(path: Path) -> None:
    tenants = [f"tenant-{number}" for number in range(12)]
    with ProcessPoolExecutor(CHILDREN, mp_context=get_context("spawn")) as pool:
        found = [
            job.result()
            for job in [pool.submit(_make_keys, str(path), tenants[shift:] + tenants[:shift]) for shift in (0, 3, 6, 9)]
        ]
    assert found[0] == found[1] == found[2] == found[3]
    assert Keyring.open(path, KEY_OF_CHILDREN).tenants() == sorted(tenants)


WRITER = """
import sys
from kvstore.sealing import Keyring
keyring = Keyring.open(sys.argv[1], bytes(range(100, 132)))
print("ready", flush=True)
for number in range(100000):
    keyring.data_key(f"{sys.argv[2]}-{number}")
    print(number, flush=True)
"""


def test_a_process_killed_while_it_writes_leaves_a_whole_keyring(path: Path) -> None:
    kept = Keyring.open(path, KEY_OF_CHILDREN).data_key("")
    for run in range(6):
        command = [sys.executable, "-c", WRITER, str(path), str(run)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(0.003 * (run + 1))
            writer.send_signal(signal.SIGKILL)
            told = [int(line) for line in writer.stdout.read().split()]
        after = Keyring.open(path, KEY_OF_CHILDREN)
        assert after.data_key("") == kept
        assert {f"{run}-{number}" for number in told} <= set(after.tenants())


def test_who_reads_while_another_writes_never_sees_half_a_keyring(path: Path) -> None:
    reader = Keyring.open(path, KEY_OF_CHILDREN)
    kept = reader.data_key("")
    command = [sys.executable, "-c", WRITER, str(path), "busy"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        began, looks = time.monotonic(), 0
        while time.monotonic() < began + 0.5 or looks <= 10 or len(reader.tenants()) <= 10:
            assert time.monotonic() < began + PATIENCE
            assert reader.ring().current[""] == kept
            Keyring.open(path, KEY_OF_CHILDREN, create=False).close()
            looks += 1
        writer.kill()


class TestSealedBlocks:
    def test_each_sealing_differs_and_opens_to_the_same(self, path: Path) -> None:
        keyring = Keyring.open(path, KEY)
        payload, data_key = np.arange(5000, dtype=np.uint8), keyring.data_key("acme")
        one, other, into = (np.zeros(size, np.uint8) for size in (5000 + SEAL_BYTES, 5000 + SEAL_BYTES, 5000))
        for sealed in (one, other):
            seal_into(sealed, payload, data_key, SPACE, BLOCK)
            assert unseal_into(keyring.ring(), sealed, into, SPACE, BLOCK) is Unsealed.GOOD
            assert np.array_equal(into, payload)
        assert not np.array_equal(one[128:], other[128:])

    def test_no_bit_of_it_can_change_nor_can_it_be_another_blocks(self, path: Path) -> None:
        keyring = Keyring.open(path, KEY)
        data_key, into = keyring.data_key("acme"), np.zeros(300, np.uint8)
        sealed = np.zeros(300 + SEAL_BYTES, np.uint8)
        seal_into(sealed, into, data_key, SPACE, BLOCK)
        of_others = {9, 14, *range(16, 32)}  # a later version, a flag not known, another data key: others may open it
        for byte in range(sealed.nbytes):
            damaged = sealed.copy()
            damaged[byte] ^= 1 << byte % 8
            found = unseal_into(keyring.ring(), damaged, into, SPACE, BLOCK)
            assert found is (Unsealed.UNKNOWN if byte in of_others else Unsealed.DAMAGED), byte
        ring = keyring.ring()
        assert unseal_into(ring, sealed, into, b"m" * 16, BLOCK) is Unsealed.DAMAGED
        assert unseal_into(ring, sealed, into, SPACE, BlockKey(BLOCK.digest, 2)) is Unsealed.DAMAGED
        assert unseal_into(ring, sealed, into, SPACE, BlockKey(b"e" * 32, 3)) is Unsealed.DAMAGED
        assert unseal_into(ring, sealed, into, SPACE, BLOCK, key_id=bytes(16)) is Unsealed.DAMAGED
        assert unseal_into(ring, sealed[:-1].copy(), into, SPACE, BLOCK) is Unsealed.DAMAGED
