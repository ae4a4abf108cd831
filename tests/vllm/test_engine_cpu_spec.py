"""The CPU spec puts bytes where vLLM's own worker would: its pointer arithmetic is the oracle, its region is used."""

from __future__ import annotations

import ctypes
import random
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import _build_copy_plan, compute_sub_block_ptrs
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvstore.vllm.cpu import CPUWorker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BLOCKS, ROWS = 24, 16


class Bench:
    """A KV cache of two groups with two layers each, over a real region; pages are padded by 16 bytes."""

    def __init__(self, per_row: int, *, canonical: bool = False, writer: int | None = None) -> None:
        self.per_row, self.canonical = per_row, canonical
        self.pages = [96, 160, 96, 64]
        caches = [torch.zeros((BLOCKS, page), dtype=torch.int8) for page in self.pages]
        refs = [
            CanonicalKVCacheRef(index, page - 16, halves(page - 16, writer) if canonical else None)
            for index, page in enumerate(self.pages)
        ]
        self.kv_caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(cache, page) for cache, page in zip(caches, self.pages, strict=True)],
            [refs[:2], refs[2:]],
        )
        self.caches = [cache.numpy() for cache in caches]
        name = f"kvstore-test-{uuid.uuid4().hex[:8]}"
        self.path = Path(f"/dev/shm/vllm_offload_{name}.mmap")
        self.region = SharedOffloadRegion(name, ROWS, 0, 4096, 4096)
        self.primary = self.region._base.numpy().reshape(ROWS, 4096)
        self.worker = CPUWorker(self.kv_caches, self.region, per_row, canonical=canonical)

    def transfer(self, sizes: Sequence[int], firsts: Sequence[int], seed: int) -> tuple[Any, Any]:
        """Blocks and rows at random for groups of these sizes."""
        choose = random.Random(seed)
        rows = sum(self.row_count(size, first) for size, first in zip(sizes, firsts, strict=True))
        blocks = choose.sample(range(BLOCKS), sum(sizes))
        return GPULoadStoreSpec(blocks, sizes, firsts), CPULoadStoreSpec(choose.sample(range(ROWS), rows))

    def row_count(self, size: int, first: int) -> int:
        """Rows that a group of blocks takes, the first of which may stand in the middle of one."""
        return -(-(first % self.per_row + size) // self.per_row) if size else 0

    def stock_moves(self, blocks: Any, rows: Any, *, store: bool) -> Iterator[tuple[int, int, int]]:
        """Source, target and size of every copy that vLLM's worker would order."""
        block_ids, row_ids = blocks.block_ids, rows.block_ids
        for group, (size, first) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
            count = self.row_count(size, first)
            for ref in self.kv_caches.group_data_refs[group] if size else ():
                cache, view = self.kv_caches.tensors[ref.tensor_idx].tensor, self.region._views[ref.tensor_idx]
                ours, theirs = np.empty(size, np.uint64), np.empty(size, np.uint64)
                compute_sub_block_ptrs(block_ids[:size], 1, ours, cache)
                compute_sub_block_ptrs(row_ids[:count], self.per_row, theirs, view, skip_count=first % self.per_row)
                for mine, other in zip(ours.tolist(), theirs.tolist(), strict=True):
                    for local, far, nbytes in fragments(ref):
                        pair = (mine + local, other + far)
                        yield (*(pair if store else pair[::-1]), nbytes)
            block_ids, row_ids = block_ids[size:], row_ids[count:]

    def close(self) -> None:
        self.primary = None
        self.worker.shutdown()


def fragments(ref: CanonicalKVCacheRef) -> list[tuple[int, int, int]]:
    if ref.mapping is None:
        return [(0, 0, ref.page_size_bytes)]
    plan = _build_copy_plan(ref, gpu_to_cpu=True)
    return list(zip(*(array.tolist() for array in plan[:3]), strict=True))


def halves(page: int, writer: int | None) -> CanonicalPageMapping:
    """As for the second of two tensor-parallel ranks: the second half of every token's bytes is its own."""
    token = 16
    run = CopyRun(0, token, token, page // token, token, 2 * token)
    return CanonicalPageMapping(2 * page, page, (run,), 1 if writer is None else 2, writer or 0, True)


@pytest.fixture
def opened() -> Iterator[list[Bench]]:
    benches: list[Bench] = []
    yield benches
    for bench in benches:
        bench.close()
        assert not bench.path.exists()


groups = st.tuples(st.integers(0, 8), st.integers(0, 8))


@settings(max_examples=40, deadline=None)
@given(
    sizes=groups.filter(any),
    firsts=groups,
    per_row=st.sampled_from([1, 2, 4]),
    canonical=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_store_and_a_load_move_the_bytes_that_the_stock_worker_would_move(
    sizes: tuple[int, int], firsts: tuple[int, int], per_row: int, canonical: bool, seed: int
) -> None:
    bench = Bench(per_row, canonical=canonical)
    try:
        blocks, rows = bench.transfer(sizes, firsts, seed)
        noise = np.random.default_rng(seed)
        for store in (True, False):
            for array in (*bench.caches, bench.primary):
                array[:] = noise.integers(-128, 128, array.shape, np.int8)
            before = [array.copy() for array in (*bench.caches, bench.primary)]
            moves = list(bench.stock_moves(blocks, rows, store=store))
            for source, target, nbytes in moves:
                ctypes.memmove(target, source, nbytes)
            expected = [array.copy() for array in (*bench.caches, bench.primary)]
            for array, old in zip((*bench.caches, bench.primary), before, strict=True):
                array[:] = old

            submit = bench.worker.submit_store if store else bench.worker.submit_load
            assert submit(7, *((blocks, rows) if store else (rows, blocks)))

            for array, wanted in zip((*bench.caches, bench.primary), expected, strict=True):
                np.testing.assert_array_equal(array, wanted)
            (result,) = bench.worker.get_finished()
            assert (result.job_id, result.success) == (7, True)
            assert result.transfer_size == sum(nbytes for _, _, nbytes in moves)
    finally:
        bench.close()
    assert not bench.path.exists()


def test_ranks_that_hold_the_same_bytes_write_each_block_once(opened: list[Bench]) -> None:
    written: list[set[int]] = []
    for writer in (0, 1):
        bench = Bench(1, canonical=True, writer=writer)
        opened.append(bench)
        for cache in bench.caches:
            cache[:] = 1
        bench.worker.submit_store(1, GPULoadStoreSpec(list(range(8)), [8, 0], [0, 0]), CPULoadStoreSpec(list(range(8))))
        written.append(set(np.flatnonzero(bench.primary.any(axis=1)).tolist()))
    assert written == [{0, 2, 4, 6}, {1, 3, 5, 7}]


def test_a_finished_copy_is_reported_once(opened: list[Bench]) -> None:
    bench = Bench(1)
    opened.append(bench)
    for job in (1, 2):
        bench.worker.submit_store(job, GPULoadStoreSpec([job], [1, 0], [0, 0]), CPULoadStoreSpec([job]))
    bench.worker.wait({1, 2})
    assert [result.job_id for result in bench.worker.get_finished()] == [1, 2]
    assert bench.worker.get_finished() == []


@pytest.mark.parametrize("rows", [[1], [1, 2, 3]])
def test_rows_that_do_not_fit_the_blocks_are_an_error(opened: list[Bench], rows: list[int]) -> None:
    bench = Bench(1)
    opened.append(bench)
    with pytest.raises(ValueError, match="rows of the primary tier"):
        bench.worker.submit_store(1, GPULoadStoreSpec([1, 2], [2, 0], [0, 0]), CPULoadStoreSpec(rows))
