"""A tier that gets nothing but new prefixes comes to its cap and stays there. Field report 26."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import kvstore
from kvstore import BlockWrite, PutOutcome
from kvstore.testing.supply import MIB, SPACE, content, key

if TYPE_CHECKING:
    from pathlib import Path

CAPACITY = 8 * MIB


def occupied(folder: Path) -> int:
    """What all of it occupies on the disk, in bytes."""
    return sum(path.lstat().st_blocks * 512 for path in (folder, *folder.rglob("*")))


@pytest.mark.parametrize("kind", ["file", "lmdb"])
@pytest.mark.parametrize("times", [5, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_new_prefixes_alone_come_to_the_cap_and_stay_there(kind: str, times: int, tmp_path: Path) -> None:
    folder, data = tmp_path / "kv", content(0)
    rounds, together = times * CAPACITY // SPACE.block_bytes() // 16, 16
    seen: list[int] = []
    with kvstore.open_store(f"{kind}://{folder}?capacity={CAPACITY}") as store:
        for number in range(rounds):
            first = number * together
            parent = key(first).digest
            blocks = [
                BlockWrite(key(first + place), data.data, position=place, parent=parent if place else b"")
                for place in range(together)
            ]
            assert set(store.put_many(SPACE, blocks)) == {PutOutcome.STORED}
            seen.append(occupied(folder))
        usage = store.usage()
    assert max(seen) <= CAPACITY
    late = seen[len(seen) // 2 :]
    assert max(late) - min(late) <= CAPACITY // 8  # one put goes on while it makes room for another
    assert min(late) >= CAPACITY // 2
    assert usage.used + usage.reserved + usage.overhead <= CAPACITY
