"""Objects of many blocks, such as an archive's: sent and received in pieces, and held in memory once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.archive.places import ArchivePlace
from kvstore.layout import as_bytes
from kvstore.objects.faults import RequestFailed
from kvstore.objects.s3fs_client import STREAMED
from kvstore.testing.proxy import FaultProxy, cutting, resetting, times, truncating

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvstore.testing.proxy import Fault
    from kvstore.testing.servers import S3Server

LENGTHS = (STREAMED, 1, 70_001)
"""Of three parts: together no multiple of anything."""


@pytest.fixture(scope="module")
def parts() -> list[NDArray[np.uint8]]:
    random = np.random.default_rng(1)
    return [random.integers(0, 256, length, np.uint8) for length in LENGTHS]


def test_of_several_parts_there_and_back_and_not_overwritten(
    place: str, client: str, parts: list[NDArray[np.uint8]]
) -> None:
    whole = np.concatenate(parts)
    with ArchivePlace.of(f"{place}?client={client}").client(writes=True) as objects:
        assert objects.put("large", parts, new=True)
        assert not objects.put("large", parts[::-1], new=True)
        found = objects.get("large")
        assert found is not None
        assert np.array_equal(as_bytes(found), whole)
        end = objects.get("large", whole.nbytes - 5)
        assert end is not None
        assert bytes(end) == whole[-5:].tobytes()
        assert objects.get("larger") is None
        assert objects.put("large", parts[::-1], new=False)
        found = objects.get("large")
        assert found is not None
        assert np.array_equal(as_bytes(found), np.concatenate(parts[::-1]))


@pytest.mark.parametrize(
    ("verb", "fault"),
    [("GET", truncating(STREAMED // 2)), ("GET", resetting(STREAMED // 2)), ("PUT", cutting(STREAMED // 2))],
    ids=["truncated", "reset half-way", "cut upload"],
)
def test_one_that_arrives_in_part_is_asked_for_again_and_never_taken(
    server: S3Server, place: str, client: str, parts: list[NDArray[np.uint8]], verb: str, fault: Fault
) -> None:
    with FaultProxy(server.port) as proxy:
        url = f"{place}?client={client}&endpoint={proxy.endpoint}"
        with ArchivePlace.of(url).client(writes=True) as objects:
            objects.put("large", parts, new=False)
            proxy.plan[verb] = times(1, fault)
            assert objects.put("large", parts, new=False)
            found = objects.get("large")
            assert found is not None
            assert np.array_equal(as_bytes(found), np.concatenate(parts))
            proxy.plan[verb] = fault
            again: dict[str, Callable[[], object]] = {
                "PUT": lambda: objects.put("large", parts, new=False),
                "GET": lambda: objects.get("large"),
            }
            with pytest.raises(RequestFailed):
                again[verb]()


BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "archives.py"
TOTAL = os.environ.get("KVSTORE_ARCHIVE_BUCKET_TOTAL", "512MiB")
MOST_MIB = 256


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_an_archive_in_a_bucket_takes_less_than_256_mib_of_anonymous_memory(
    tmp_path: Path, place: str, client: str
) -> None:
    words = [str(tmp_path), "--total", TOTAL, "--rounds", "1", "--archives", f"{place}?client={client}"]
    done = subprocess.run([sys.executable, BENCHMARK, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    most = {name: int(mib) for name, mib in re.findall(r"^(create|restore) .* (\d+) MiB$", done.stdout, re.MULTILINE)}
    assert most.keys() == {"create", "restore"}
    assert max(most.values()) < MOST_MIB
