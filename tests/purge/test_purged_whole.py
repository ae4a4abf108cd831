"""A namespace that one process purges as a whole, as its document cannot be read, while another one serves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore import PutOutcome, open_store
from kvstore.testing.supply import SPACE, held, keys, writes

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from pathlib import Path


def purge_unseen(url: str) -> None:
    with open_store(url) as store:
        assert [one.namespace for one in store.purge_unseen(names=[SPACE.name], refuse_s=0)] == [SPACE.name]


def test_what_is_stored_after_it_is_found_and_counted(tmp_path: Path, fresh_process: Executor) -> None:
    url = f"file://{tmp_path}/kv"
    with open_store(url) as store:
        assert store.put_many(SPACE, writes([1])) == [PutOutcome.STORED]
        (tmp_path / "kv" / SPACE.name / "zarr.json").write_bytes(b"{")
        fresh_process.submit(purge_unseen, url).result()
        assert store.put_many(SPACE, writes([2])) == [PutOutcome.STORED]
        assert store.namespaces() == [SPACE]
        with open_store(url) as other:
            assert other.namespaces() == [SPACE]
            assert held(other) == set(keys([2]))
        usage = store.usage()
        counted = usage.used + usage.overhead
    top = tmp_path / "kv"
    assert counted >= sum(
        path.lstat().st_blocks * 512 for path in (top, *top.rglob("*")) if ".kvstore" not in str(path)
    )
