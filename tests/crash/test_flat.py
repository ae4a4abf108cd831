"""The centre of `make soak`: eight processes on one tier for KVSTORE_SOAK_S seconds, half an hour if nothing is said.
On an encrypted one it is a third of that.

    make soak TESTS=tests/crash/test_flat.py ARGS="-s -k eight"

Four of them are killed over and over, a scrub runs, and on `file://` bytes of stored blocks are flipped. The four that
live on must end as large as they were once they had warmed up: memory of their own, descriptors, threads; and so must
the tier. No get ever sees a wrong byte.
"""

from __future__ import annotations

import os
import random
import secrets
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import checker
import pytest
from harness import SEATS, Crew, Site
from observer import occupied
from unsealing import read_keys

from kvstore import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from disks import Disk

DURATION_S = float(os.environ.get("KVSTORE_SOAK_S", "1800"))
CAPACITY = 48 << 20
LIVING, DYING = range(SEATS // 2), range(SEATS // 2, SEATS)
BETWEEN_KILLS_S, BETWEEN_FLIPS_S = 2.0, 1.0
SAMPLES = 60
WARM = SAMPLES // 5
"""Samples until caches, pools and the interpreter have what they keep."""


@dataclass(frozen=True)
class Sample:
    """Of the four that live, in sum: bytes of memory of their own, descriptors, threads. Of the tier: bytes, files."""

    memory: int
    descriptors: int
    threads: int
    disk: int
    records: int

    @classmethod
    def take(cls, pids: list[int], site: Site) -> Sample:
        status = [dict(_fields(Path(f"/proc/{pid}/status"))) for pid in pids]
        records = [path for path in site.root.rglob("*") if "lease" in path.name or "draft" in str(path)]
        return cls(
            memory=sum(int(fields["RssAnon"].split()[0]) * 1024 for fields in status),
            descriptors=sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids),
            threads=sum(int(fields["Threads"]) for fields in status),
            disk=occupied(site.root),
            records=len(records),
        )


def _fields(path: Path) -> list[tuple[str, str]]:
    return [(name, value.strip()) for name, _, value in (line.partition(":") for line in path.read_text().splitlines())]


def flip_a_byte(root: Path, chance: random.Random) -> int:
    """Of some block's file, if there is one at the moment; how many were flipped."""
    folders = [folder for folder in root.glob("*/g*/??") if folder.is_dir()]
    files = [path for folder in folders for path in folder.iterdir() if path.name != "zarr.json"]
    if not files:
        return 0
    try:
        with chance.choice(files).open("r+b") as file:
            place = chance.randrange(os.fstat(file.fileno()).st_size)
            byte = os.pread(file.fileno(), 1, place)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << chance.randrange(8)]), place)
    except (FileNotFoundError, ValueError, IndexError):  # it was evicted meanwhile
        return 0
    return 1


def run(
    crew: Crew, site: Site, fault: Callable[[], int], duration: float = DURATION_S
) -> tuple[list[Sample], int, int]:
    """Samples at even distances, kills, and faults that were done, within `duration` seconds."""
    samples: list[Sample] = []
    kills = faults = 0
    begun = time.monotonic()
    crew.start()
    crew.wait_until_open(list(range(SEATS)))
    pids = crew.pids(list(LIVING))
    while (passed := time.monotonic() - begun) < duration:
        if passed >= len(samples) * duration / SAMPLES:
            samples.append(Sample.take(pids, site))
            print(f"{passed:6.0f} s  {samples[-1]}", flush=True)
        if passed >= kills * BETWEEN_KILLS_S:
            crew.kill([crew.chance.choice(DYING)])
            crew.start()
            kills += 1
        if passed >= faults * BETWEEN_FLIPS_S:
            faults += fault()
        time.sleep(0.05)
    assert crew.pids(list(LIVING)) == pids
    return samples, kills, faults


@pytest.mark.soak
@pytest.mark.timeout(DURATION_S * 1.5 + 300)
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_eight_processes_stay_as_large_as_they_were(scheme: str, encrypted: bool, disk: Disk, tmp_path: Path) -> None:
    root, complaints, operator_key = disk.path / "tier", tmp_path / "complaints", secrets.token_bytes(32)
    complaints.mkdir()
    (tmp_path / "operator.key").write_text(operator_key.hex())
    seal = {"encryption": f"file:{tmp_path}/operator.key", "keyring": f"{tmp_path}/keyring.json"} if encrypted else {}
    site = Site(f"{scheme}://{root}", root, CAPACITY, complaints, disk.own, {"scrub": "5MB/s", **seal})
    chance, seconds = random.Random(), DURATION_S / 3 if encrypted else DURATION_S
    with open_store(site.url, **site.open_options()):
        pass
    crew = Crew(site, chance.getrandbits(32))
    try:
        fault = (lambda: flip_a_byte(root, chance)) if scheme == "file" else (lambda: 1)
        samples, kills, faults = run(crew, site, fault, seconds)
    finally:
        crew.dismiss()
    counts = crew.counts()
    flips, how = faults if scheme == "file" else 0, " encrypted" if encrypted else ""
    print(f"{scheme}{how}: {seconds:.0f} s, {kills} kills, {flips} flips, {counts}")
    assert [path.read_text() for path in complaints.iterdir()] == []
    assert counts["wrong"] == counts["failed"] == 0
    assert counts["corrupt"] == 0 or scheme == "file"
    assert kills > seconds / BETWEEN_KILLS_S / 3
    assert min(counts["stored"], counts["hit"]) > kills
    assert grown(samples) == set()
    with open_store(site.url, **site.open_options()) as store:
        assert store.usage().reserved == 0
        scrubbed = store.scrubbed()
        assert scrubbed is not None
        assert scrubbed.blocks > 0
        print(f"{scheme}: {scrubbed}")
    catalogue = root / ".kvstore" / "catalogue"
    keys = read_keys(tmp_path / "keyring.json", operator_key) if encrypted else None
    if scheme == "lmdb":
        assert checker.check_lmdb_tier(root, True, keys).wrong == []
    else:
        wrong = checker.check_file_tier(root, True, keys, catalogue=catalogue).wrong
        assert len(wrong) <= faults  # those of which nobody asked yet


def grown(samples: list[Sample]) -> set[str]:
    """Of what the last third has more than what came after the warming up, but for noise; and `disk` over its cap."""
    before, after = samples[WARM : len(samples) // 2], samples[-len(samples) // 3 :]

    def middle(part: list[Sample], name: str) -> float:
        return float(statistics.median(getattr(sample, name) for sample in part))

    def most(part: list[Sample], name: str) -> int:
        return int(max(getattr(sample, name) for sample in part))

    flat = {
        "memory": middle(after, "memory") <= middle(before, "memory") + len(LIVING) * (2 << 20),
        "descriptors": middle(after, "descriptors") <= middle(before, "descriptors") + len(LIVING),
        "threads": most(after, "threads") <= most(before, "threads"),
        "disk": most(samples, "disk") <= CAPACITY,
        "records": most(after, "records") <= 3 * SEATS + most(before, "records"),
    }
    return {name for name, is_flat in flat.items() if not is_flat}


@pytest.mark.soak
@pytest.mark.parametrize("scheme", ["file", "lmdb"])
@pytest.mark.parametrize("kind", ["memory", "descriptors", "threads", "disk", "records"])
def test_whatever_a_process_leaks_is_seen_within_a_minute(kind: str, scheme: str, disk: Disk, tmp_path: Path) -> None:
    root, complaints = disk.path / "tier", tmp_path / "complaints"
    complaints.mkdir()
    site = Site(f"{scheme}://{root}", root, CAPACITY, complaints, disk.own, {"scrub": "5MB/s"}, leaks=kind)
    with open_store(site.url, **site.open_options()):
        pass
    crew = Crew(site, 1)
    try:
        samples, _, _ = run(crew, site, lambda: 1, 45)
    finally:
        crew.dismiss()
    assert kind in grown(samples)
