"""`kvstore bench s3://… --against client`: a tier beside bare obstore and s3fs, and the server in memory for that."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cli_helpers import QUICK, machine
from obstore.exceptions import AlreadyExistsError

from kvstore import open_store
from kvstore.cli import EXIT_USAGE, run
from kvstore.testing.servers import S3Server
from kvstore.testing.supply import SPACE, get, keys, writes
from kvstore.types import GetOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server of `benchmarks/`, to which the standard variables lead."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    memory_s3 = pytest.importorskip("memory_s3")
    if memory_s3.compiler() is None:
        pytest.skip("no C compiler here")
    with memory_s3.memory_s3() as port:
        for name, value in memory_s3.environment(port).items():
            monkeypatch.setenv(name, value)
        yield S3Server(port, 0, "any")
    sys.modules.pop("memory_s3", None)


def test_a_tier_is_measured_beside_both_clients_and_nothing_stays(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    told = machine(capsys, "bench", s3_server.url("bench/kv"), "--against", "client", *QUICK)
    assert [(figure["op"], figure["contestant"]) for figure in told["results"]] == [
        (op, contestant) for op in ("store", "load_cold") for contestant in ("kvstore", "obstore", "s3fs")
    ]
    assert all(figure["gb_per_s"] > 0 and figure["cpu_s_per_gb"] > 0 for figure in told["results"])
    assert all(figure["ratio"] == 1 for figure in told["results"] if figure["contestant"] == "obstore")
    left = [meta["path"] for meta in s3_server.objects.list().collect()]
    assert not [path for path in left if path.startswith(".kvstore-bench")]
    assert not [path for path in left if path.startswith("bench/")], left


def test_bare_clients_are_for_s3_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", f"file://{tmp_path}/kv", "--against", "client", *QUICK]) == EXIT_USAGE
    assert "--against raw" in capsys.readouterr().err


def test_the_server_in_memory_holds_a_tier(benchmark_server: S3Server) -> None:
    url = benchmark_server.url("some/kv")
    for client in ("obstore", "fsspec"):
        with open_store(url, client=client) as store:
            store.put_many(SPACE, writes(range(20)))
            assert store.contains_many(SPACE, keys(range(21))) == [True] * 20 + [False]
            assert get(store, range(20)) == [GetOutcome.HIT] * 20
            assert {info.key for info in store.scan(SPACE)} == set(keys(range(20)))
            assert store.delete_many(SPACE, keys([0])) == [True]
            assert get(store, [0, 1]) == [GetOutcome.MISS, GetOutcome.HIT]


def test_the_server_in_memory_lists_in_pages_and_keeps_conditions(benchmark_server: S3Server) -> None:
    objects = replace(benchmark_server, bucket="another").objects
    for number in range(1001):
        objects.put(f"many/{number}", b"x")
    objects.put("other/thing", b"0123456789")
    assert len(objects.list("many").collect()) == 1001
    assert sorted(objects.list_with_delimiter()["common_prefixes"]) == ["many", "other"]
    assert bytes(objects.get_range("other/thing", start=2, length=3)) == b"234"
    with pytest.raises(AlreadyExistsError):
        objects.put("other/thing", b"", mode="create")
    with pytest.raises(FileNotFoundError):
        objects.get("other/nothing")
    assert benchmark_server.objects.list().collect() == []
