"""Encrypted tiers whose keys change and whose tenant is purged while four processes read and write them.

No wrong byte, no error; and of what was sealed for the tenant nothing is on the disk, not even as noise, whichever of
its keys it was under. A sealed block says which: its first eight bytes are looked for in the raw files.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from purge_helpers import found, in_use

import kvstore
from kvstore.purging import Receipt, Request, purge
from kvstore.rekeying import keyrings_of, reseal
from kvstore.sealing import Keyring, KeySource
from kvstore.testing.supply import SPACE, get, keys, write
from kvstore.url import TierURL

if TYPE_CHECKING:
    from pathlib import Path

USERS = 4
NUMBERS = range(48)
MAGIC = b"KVSEAL1\n"
QUIET = {"put stored", "put exists", "put refused", "put full", "get hit", "get miss"}


def sealed_on_disk(tier: Path) -> dict[bytes, int]:
    """How many sealed blocks stand in the files of the tier, by the id of their data key, whether in use or not."""
    counts: dict[bytes, int] = {}
    for path in (path for path in tier.rglob("*") if path.is_file()):
        data, place = path.read_bytes(), -1
        while (place := data.find(MAGIC, place + 1)) >= 0:
            key_id = data[place + 16 : place + 32]
            counts[key_id] = counts.get(key_id, 0) + 1
    return counts


def of(tenant: str, keyring: Keyring) -> set[bytes]:
    """The ids of the tenant's data keys."""
    return {key_id for key_id, whose in keyring.ring().tenants.items() if whose == tenant}


def _purge_beside_rekey(url: str, tier: Path, keyring: Keyring, *, changes: int) -> None:
    tenants, parsed = ("acme", "zeta"), TierURL.parse(url)
    receipts: list[Receipt] = []
    with in_use(url, NUMBERS, USERS, tenants=tenants) as users:
        users.wait_for_work(USERS)
        of_acme = of("acme", keyring)
        assert of_acme & sealed_on_disk(tier).keys()
        for _ in range(changes):
            report = reseal([parsed], keyrings_of([parsed]))
            assert report.dropped
            of_acme |= of("acme", keyring)
        purging = threading.Thread(target=lambda: receipts.append(purge([url], Request(tenant="acme"), dry_run=False)))
        purging.start()
        reseal([parsed], keyrings_of([parsed]))  # one in the midst of the other
        purging.join()
        users.wait_for_more(USERS)
    counts = sum(map(Counter, users.counts), Counter[str]())
    assert set(counts) <= QUIET, counts
    assert counts["put stored"]
    assert counts["get hit"]
    (receipt,) = receipts[0].tiers
    assert (receipt.erasable, receipt.failed) == (True, [])
    gone = of_acme & keyring.ring().destroyed
    assert gone
    with kvstore.open_store(url) as store:
        assert "wrong bytes" not in get(store, NUMBERS)  # what a batch under way has sealed with a lost key goes here
        store.finish_purge()
        assert {whose for whose in store.sealed_with(SPACE, keys(NUMBERS)) if whose} <= keyring.ring().keys.keys()
    assert not gone & sealed_on_disk(tier).keys()
    assert found(tier, NUMBERS) == set()


def sealed(kind: str, folder: Path) -> tuple[str, Keyring]:
    """The URL of an encrypted tier, and its keyring."""
    (folder / "operator.key").write_text(secrets.token_hex(32))
    source, path = f"file:{folder}/operator.key", folder / "keyring.json"
    url = f"{kind}://{folder}/kv?encryption={source}&keyring={path}"
    with kvstore.open_store(url) as store:
        store.put_many(SPACE, [write(1, tenant="acme"), write(2, tenant="zeta")])
    return url, Keyring.open(path, KeySource.parse(source).read(), create=False)


@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_keys_change_and_a_tenant_goes_while_four_processes_put_and_get(kind: str, tmp_path: Path) -> None:
    url, keyring = sealed(kind, tmp_path)
    with keyring:
        _purge_beside_rekey(url, tmp_path / "kv", keyring, changes=1)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_so_they_do_over_and_over(kind: str, number: int, tmp_path: Path) -> None:
    url, keyring = sealed(kind, tmp_path)
    with keyring:
        _purge_beside_rekey(url, tmp_path / "kv", keyring, changes=number)
