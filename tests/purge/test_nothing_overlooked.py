"""What a purge cannot see it does not call gone: namespaces without documents, files that no catalogue knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from purge_helpers import found, machine

import kvstore
from kvstore import GetOutcome, Mark, PutOutcome
from kvstore.cli import EXIT_OK
from kvstore.testing.supply import SPACE, get, keys, writes

if TYPE_CHECKING:
    from pathlib import Path

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS


def stored(url: str, numbers: range = range(5), tenant: str = "acme") -> None:
    with kvstore.open_store(url) as store:
        assert set(store.put_many(SPACE, writes(numbers))) == {PutOutcome.STORED}
        store.mark_many(SPACE, keys(numbers), Mark(tenant=tenant))


@pytest.mark.parametrize("asked", [("--tenant", "acme"), ("--all",)])
def test_blocks_of_a_namespace_without_its_document_go_as_the_catalogue_knows_where_they_are(
    tmp_path: Path, asked: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    url, root = f"file://{tmp_path}/kv", tmp_path / "kv"
    stored(url)
    (root / SPACE.name / "zarr.json").unlink()
    code, told = machine(capsys, "purge", url, *asked, "--yes")
    (tier,) = told["tiers"]
    assert (code, told["complete"], tier["blocks"]) == (EXIT_OK, True, 5)
    assert tier["overwritten"] >= 5 * SPACE.block_bytes()
    assert found(root, range(5)) == set()
    with kvstore.open_store(url) as store:
        assert get(store, range(5)) == [MISS] * 5
