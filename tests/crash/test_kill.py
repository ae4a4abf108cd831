"""Kill -9, over and over, eight processes on one tier: nothing torn, nothing wrong, nothing lost, never over the cap.

Field reports 1, 3, 9 and 19. A hundred rounds, or KVSTORE_KILL_ROUNDS, at least half of all kills inside a put; `make
soak` does thousands. What is left is read by `checker`, which knows the formats and imports nothing of kvstore.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

import checker
import pytest
from harness import Campaign, Report, Site

if TYPE_CHECKING:
    from pathlib import Path

    from disks import Disk

CAPACITY = 24 << 20
ROUNDS = int(os.environ.get("KVSTORE_KILL_ROUNDS", "100"))


def campaign(scheme: str, disk: Disk, folder: Path, seed: int) -> Campaign:
    """A campaign on a new tier of this scheme on `disk`."""
    root = disk.path / "tier"
    complaints = folder / "complaints"
    complaints.mkdir()
    site = Site(f"{scheme}://{root}", root, CAPACITY, complaints, own_disk=disk.own)
    if scheme == "lmdb":
        return Campaign(site, checker.check_lmdb_tier, root, root, seed)
    catalogue = root / ".kvstore" / "catalogue"
    return Campaign(
        site, functools.partial(checker.check_file_tier, catalogue=catalogue), catalogue, root / ".kvstore", seed
    )


def judge(report: Report, scheme: str) -> None:
    """All that must hold after a campaign."""
    print(f"\n{scheme}: {report}")
    assert report.wrong == []
    seen, onlooker = report.counts, report.observation
    assert seen["wrong"] == seen["corrupt"] == seen["failed"] == 0
    assert min(seen["stored"], seen["hit"], seen["exists"]) > report.rounds  # there was life between the deaths
    inside = report.intents_of_the_dead if scheme == "file" else report.kills_inside_puts
    assert 2 * inside >= report.kills
    assert onlooker is not None
    assert onlooker.walks > 100
    assert onlooker.walks_over == 0, onlooker
    assert not onlooker.counts_over, onlooker
    assert max(report.openings_s) < 2


@pytest.mark.timeout(max(240, 3 * ROUNDS))
@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_a_hundred_rounds_of_kill_9(scheme: str, disk: Disk, tmp_path: Path) -> None:
    report = campaign(scheme, disk, tmp_path, seed=1).run(ROUNDS)
    judge(report, scheme)
    assert report.rounds == ROUNDS
    assert report.kills >= ROUNDS


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_two_thousand_rounds_of_kill_9(scheme: str, disk: Disk, tmp_path: Path) -> None:
    judge(campaign(scheme, disk, tmp_path, seed=2).run(2000), scheme)
