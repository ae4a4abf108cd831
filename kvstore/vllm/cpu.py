"""The whole vLLM engine without a GPU: the stock tiering spec with a worker that copies within host memory.

vLLM refuses to offload on its CPU platform, for one reason: the worker that copies blocks between the KV cache and the
primary tier issues GPU copies. This spec replaces that worker and nothing else; manager, primary region, secondary
tiers and connector are vLLM's own::

    "kv_connector_extra_config": {
        "spec_name": "CPUTieringSpec",
        "spec_module_path": "kvstore.vllm.cpu",
        "cpu_bytes_to_use": ..., "secondary_tiers": [...],
    }

It is there to try and to test tiers: on a CPU the primary tier lies in the same memory as the KV cache itself. CPU
attention wants `block_size` in multiples of 32.

The bytes of a row of the primary tier are those that vLLM's own worker would write (`CanonicalKVCaches`, in
`vllm/v1/kv_offload/base.py`), in its direct and in its canonical layout.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstore.errors import ConfigurationError
from kvstore.vllm._worker import (
    CopyRun,
    OffloadingWorker,
    SharedOffloadRegion,
    TieringOffloadingSpec,
    TransferResult,
    current_platform,
    row_count,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvstore.vllm._worker import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalPageMapping,
        GPULoadStoreSpec,
        LoadStoreSpec,
    )

    Indices = NDArray[np.int64]
    Bytes = NDArray[np.int8]

__all__ = ["CPUTieringSpec", "CPUWorker"]


class CPUTieringSpec(TieringOffloadingSpec):
    """vLLM's tiering spec, on the CPU platform. Raises `ConfigurationError` on any other, where the stock one works."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker of this process, made on the first call."""
        if current_platform.device_type != "cpu":
            raise ConfigurationError(
                f"CPUTieringSpec is for vLLM's CPU platform, and this is {current_platform.device_type or 'none'}:"
                ' use vLLM\'s own, "spec_name": "TieringOffloadingSpec" without a spec_module_path'
            )
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: CanonicalKVCaches) -> CPUWorker:
        """A worker over the primary region, which it owns from then on."""
        canonical = self.config.canonical_layout
        if canonical:
            self._validate_canonical_refs(kv_caches)
        # By position: the names of two of them changed with 0.30.
        region = SharedOffloadRegion(
            self.config.engine_id,
            row_count(self),
            0 if self.replicated_layout else self.config.parallel.rank,
            self.kv_bytes_per_chunk,
            self.cpu_page_size_per_worker,
        )
        try:
            return CPUWorker(kv_caches, region, self.blocks_per_chunk, canonical=canonical)
        except BaseException:
            region.cleanup()
            raise


class CPUWorker(OffloadingWorker):
    """Copies blocks between the KV cache and the rows of the primary region.

    A copy is done when its submit returns and is reported by the next `get_finished`. vLLM submits a step's stores
    after that step, and the CPU platform computes in the calling thread: nothing is left to wait for.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        region: SharedOffloadRegion,
        blocks_per_chunk: int,
        *,
        canonical: bool = False,
    ) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = _pieces(kv_caches, region, blocks_per_chunk, canonical=canonical)
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """KV cache to primary tier."""
        self._run(job_id, src_spec, dst_spec, store=True)
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Primary tier to KV cache. `expedited` (from 0.33 on) asks for what is so anyway."""
        del expedited
        self._run(job_id, dst_spec, src_spec, store=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        """What was copied since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Returns at once: what was submitted is copied."""

    def shutdown(self) -> None:
        """Give the region back; idempotent. No transfer may be submitted afterwards."""
        self._groups = []
        self._region.cleanup()

    def _run(self, job_id: int, blocks: GPULoadStoreSpec, rows: LoadStoreSpec, *, store: bool) -> None:
        start = time.perf_counter()
        nbytes = 0
        for group, places in enumerate(self._places(blocks, rows)):
            nbytes += sum(piece.copy(*places, store=store) for piece in self._groups[group])
        self._finished.append(TransferResult(job_id, True, nbytes, time.perf_counter() - start))

    def _places(self, blocks: GPULoadStoreSpec, rows: LoadStoreSpec) -> Iterator[tuple[Indices, Indices, Indices]]:
        """Per group: blocks of the KV cache, and for each its row and its place in that row.

        The first block of a group may stand in the middle of a row (`block_indices` is its place in the request).
        """
        block_ids, row_ids = blocks.block_ids.astype(np.int64), rows.block_ids.astype(np.int64)
        for size, first in zip(blocks.group_sizes, blocks.block_indices, strict=True):
            behind = first % self._blocks_per_chunk + np.arange(size)
            count = int(behind[-1]) // self._blocks_per_chunk + 1 if size else 0
            if count > len(row_ids):
                raise ValueError(
                    f"{len(rows.block_ids)} rows of the primary tier cannot hold {blocks.block_ids.size} blocks"
                )
            yield block_ids[:size], row_ids[:count][behind // self._blocks_per_chunk], behind % self._blocks_per_chunk
            block_ids, row_ids = block_ids[size:], row_ids[count:]
        if len(row_ids):
            raise ValueError(f"{len(row_ids)} rows of the primary tier have no block")


@dataclass(frozen=True, slots=True)
class _Piece:
    """One layer's bytes (a run of them, in the canonical layout) on both sides.

    `cache`: (block, fragment, byte) of the KV cache; `primary`: (row, place in it, fragment, byte).
    """

    cache: Bytes
    primary: Bytes
    mapping: CanonicalPageMapping | None

    def copy(self, blocks: Indices, rows: Indices, places: Indices, *, store: bool) -> int:
        """Copy these blocks; how many bytes that were."""
        if store and self.mapping is not None and self.mapping.num_writers > 1:
            # Ranks that hold the same bytes take turns, by the block's number in the whole region.
            page = rows * self.primary.shape[1] + places
            mine = page % self.mapping.num_writers == self.mapping.writer_index
            blocks, rows, places = blocks[mine], rows[mine], places[mine]
        if store:
            self.primary[rows, places] = self.cache[blocks]
        else:
            self.cache[blocks] = self.primary[rows, places]
        return int(len(blocks) * self.cache[0].size)


def _pieces(
    kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, per_row: int, *, canonical: bool
) -> list[list[_Piece]]:
    """Per group: what to copy, as views. Those of the region are carved in the order of the tensors, as vLLM does."""
    caches = [one.tensor.view(torch.int8).view(-1, one.page_size_bytes) for one in kv_caches.tensors]
    pages = [one.page_size_bytes for one in kv_caches.tensors]
    carve: Callable[[int], torch.Tensor] = region.create_next_worker_view
    if canonical:
        pages = _canonical_pages(kv_caches.group_data_refs, len(pages))
        carve = region.create_next_canonical_view
    views = [carve(page * per_row) for page in pages]
    return [
        [
            _piece(caches[ref.tensor_idx], views[ref.tensor_idx], run, per_row, mapping)
            for ref in refs
            for mapping in [ref.mapping if canonical else None]
            for run in (mapping.runs if mapping else [_whole(ref)])
        ]
        for refs in kv_caches.group_data_refs
    ]


def _piece(
    cache: torch.Tensor, view: torch.Tensor, run: CopyRun, per_row: int, mapping: CanonicalPageMapping | None
) -> _Piece:
    count, size = run.num_fragments, run.fragment_size
    return _Piece(
        cache.as_strided(
            (cache.shape[0], count, size),
            (cache.stride(0), run.local_stride, 1),
            cache.storage_offset() + run.local_offset,
        ).numpy(),
        view.as_strided(
            (view.shape[0], per_row, count, size),
            (view.stride(0), view.shape[1] // per_row, run.canonical_stride, 1),
            view.storage_offset() + run.canonical_offset,
        ).numpy(),
        mapping,
    )


def _whole(ref: CanonicalKVCacheRef) -> CopyRun:
    """A page as it is, without its padding: the direct layout."""
    return CopyRun(0, 0, ref.page_size_bytes, 1, ref.page_size_bytes, ref.page_size_bytes)


def _canonical_pages(groups: Sequence[Sequence[CanonicalKVCacheRef]], tensors: int) -> list[int]:
    """Bytes of a block of each tensor in the canonical layout."""
    pages = [0] * tensors
    for ref in (ref for refs in groups for ref in refs):
        if ref.mapping is None:
            raise ConfigurationError("the canonical layout needs a mapping for every layer: remove canonical_layout")
        pages[ref.tensor_idx] = max(pages[ref.tensor_idx], ref.mapping.canonical_page_size_bytes)
    return pages
