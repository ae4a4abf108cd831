"""A power cut: `durability=fsync` keeps what it acknowledged, `none` may lose it, neither ever serves a torn block."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest
from power import machine, run, writer
from worker import SPACE, block_key, expected

from kvstore import BlockRead, BlockWrite, GetOutcome, open_store
from kvstore.testing.supply import buffer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from power import Machine

    from kvstore import BlockStore

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS
AT_ONCE = 6


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Machine]:
    try:
        with machine(tmp_path) as made:
            yield made
    except OSError as error:
        pytest.skip(f"no disk of its own is to be had here: {error}")


@pytest.fixture(params=["file", "lmdb"])
def scheme(request: pytest.FixtureRequest) -> str:
    scheme: str = request.param
    return scheme


def found(store: BlockStore, numbers: Sequence[int]) -> list[GetOutcome]:
    """What gets say; every HIT has the block's bytes."""
    keys = [block_key(number) for number in numbers]
    reads = [BlockRead(key, bytearray(SPACE.block_bytes(key.group))) for key in keys]
    outcomes = store.get_many_into(SPACE, reads)
    for read, outcome in zip(reads, outcomes, strict=True):
        assert outcome is not HIT or read.into == expected(read.key).tobytes()
    return outcomes


def put(store: BlockStore, numbers: Sequence[int]) -> None:
    keys = [block_key(number) for number in numbers]
    outcomes = store.put_many(SPACE, [BlockWrite(key, buffer(expected(key))) for key in keys])
    assert all(outcome.present for outcome in outcomes)


def cut_and_look(disk: Machine, scheme: str, numbers: Sequence[int]) -> list[GetOutcome]:
    """Cut the power; what the tier has of the blocks when the machine is up again. It takes blocks as before."""
    with disk.after_a_cut("tier") as root, open_store(f"{scheme}://{root}") as store:
        outcomes = found(store, numbers)
        usage = store.usage()
        assert (usage.blocks, usage.used) == (
            len(infos := list(store.scan(SPACE))),
            sum(i.stored_bytes for i in infos),
        )
        put(store, range(300, 306))
        assert found(store, range(300, 306)) == [HIT] * 6
    return outcomes


def test_what_was_acknowledged_with_fsync_is_there_after_every_cut(disk: Machine, scheme: str) -> None:
    stored: list[int] = []
    with writer(f"{scheme}://{disk.disk}/tier", "fsync") as process:
        for number in range(4):
            stored += process.put(range(number * AT_ONCE, (number + 1) * AT_ONCE))
            assert cut_and_look(disk, scheme, stored) == [HIT] * len(stored)
        assert len(stored) == 4 * AT_ONCE


def test_what_was_not_synced_may_be_lost_and_is_never_torn(disk: Machine, scheme: str) -> None:
    stored: list[int] = []
    outcomes: list[GetOutcome] = []
    with writer(f"{scheme}://{disk.disk}/tier", "none") as process:
        for number in range(4):
            stored += process.put(range(number * AT_ONCE, (number + 1) * AT_ONCE))
            if number == 2:
                run("sync", "-f", disk.disk)  # from here on a part is there for sure, and a part is not
            outcomes = cut_and_look(disk, scheme, stored)
            assert set(outcomes) <= {HIT, MISS, GetOutcome.CORRUPT}
            if number == 2:
                assert outcomes.count(HIT) == len(stored)
        assert len(stored) == 4 * AT_ONCE
        assert outcomes.count(HIT) < len(stored)  # or the kernel has synced it all by itself, and this shows nothing


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("durability", ["none", "fsync"])
def test_cuts_in_the_midst_of_puts_and_evictions(disk: Machine, scheme: str, durability: str) -> None:
    chance = random.Random()
    last: dict[int, int] = {}
    with writer(f"{scheme}://{disk.disk}/tier?capacity=24MB", durability) as process:
        for number in range(60):
            before, numbers = dict(last), chance.sample(range(200), 8)
            process.begin(numbers)
            time.sleep(chance.uniform(0, 0.05))
            outcomes = cut_and_look(disk, scheme, range(200))
            if durability == "fsync":  # the youngest are there, whatever is under way
                youngest = sorted(before, key=lambda block: before[block])[-16:]
                assert [outcomes[block] for block in youngest] == [HIT] * len(youngest)
            last |= dict.fromkeys(process.stored(numbers), number)
