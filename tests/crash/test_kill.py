"""Kill -9, over and over, eight processes on one tier: nothing torn, nothing wrong, nothing lost, never over the cap.

Field reports 1, 3, 9 and 19. A hundred rounds, or KVSTORE_KILL_ROUNDS, at least half of all kills inside a put; `make
soak` does thousands. With encryption a tenth of that, and hundreds. What is left is read by `checker`, which knows the
formats, opens sealed blocks by itself, and imports nothing of kvstore.
"""

from __future__ import annotations

import functools
import os
import secrets
from typing import TYPE_CHECKING

import checker
import pytest
from harness import Campaign, Report, Site

if TYPE_CHECKING:
    from pathlib import Path

    from disks import Disk

CAPACITY = 24 << 20
ROUNDS = int(os.environ.get("KVSTORE_KILL_ROUNDS", "100"))


def campaign(scheme: str, disk: Disk, folder: Path, seed: int, *, encrypted: bool = False) -> Campaign:
    """A campaign on a new tier of this scheme on `disk`; its keys, if it is encrypted, are in `folder`."""
    root = disk.path / "tier"
    complaints, keyring, operator_key = folder / "complaints", folder / "keyring.json", secrets.token_bytes(32)
    complaints.mkdir()
    (folder / "operator.key").write_text(operator_key.hex())
    options = {"encryption": f"file:{folder}/operator.key", "keyring": str(keyring)} if encrypted else {}
    site = Site(f"{scheme}://{root}", root, CAPACITY, complaints, own_disk=disk.own, options=options)
    opened_by = (keyring if encrypted else None, operator_key)
    if scheme == "lmdb":
        return Campaign(site, checker.check_lmdb_tier, root, root, seed, *opened_by)
    catalogue = root / ".kvstore" / "catalogue"
    check = functools.partial(checker.check_file_tier, catalogue=catalogue)
    return Campaign(site, check, catalogue, root / ".kvstore", seed, *opened_by)


def judge(report: Report, scheme: str) -> None:
    """All that must hold after a campaign."""
    print(f"\n{scheme}: {report}")
    assert report.wrong == []
    seen, onlooker = report.counts, report.observation
    assert seen["wrong"] == seen["corrupt"] == seen["failed"] == 0
    assert min(seen["stored"], seen["hit"], seen["exists"]) > report.rounds  # there was life between the deaths
    many = report.rounds >= 100  # where chance evens out
    strict = scheme == "file" and many  # the catalogue's word for it
    inside = report.intents_of_the_dead if strict else report.kills_inside_puts
    assert (2 if many else 3) * inside >= report.kills
    assert onlooker is not None
    assert onlooker.walks > report.rounds
    assert onlooker.walks_over == 0, onlooker
    assert not onlooker.counts_over, onlooker
    assert max(report.openings_s) < 1


@pytest.mark.timeout(max(240, 3 * ROUNDS))
@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_a_hundred_rounds_of_kill_9(scheme: str, disk: Disk, tmp_path: Path) -> None:
    report = campaign(scheme, disk, tmp_path, seed=1).run(ROUNDS)
    judge(report, scheme)
    assert report.rounds == ROUNDS
    assert report.kills >= ROUNDS


@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_a_few_rounds_of_kill_9_where_blocks_are_encrypted(scheme: str, disk: Disk, tmp_path: Path) -> None:
    judge(campaign(scheme, disk, tmp_path, seed=3, encrypted=True).run(10), scheme)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_three_hundred_rounds_of_kill_9_where_blocks_are_encrypted(scheme: str, disk: Disk, tmp_path: Path) -> None:
    judge(campaign(scheme, disk, tmp_path, seed=4, encrypted=True).run(300), scheme)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_two_thousand_rounds_of_kill_9(scheme: str, disk: Disk, tmp_path: Path) -> None:
    judge(campaign(scheme, disk, tmp_path, seed=2).run(2000), scheme)
