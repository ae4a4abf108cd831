"""The worker's side of vLLM's offloading as far as `cpu.py` uses it, with types; `_compat.py` has the manager's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

    class CopyRun:
        """Fragments of equal size that stand at regular distances, in a worker's page and in the canonical one."""

        local_offset: int
        canonical_offset: int
        fragment_size: int
        num_fragments: int
        local_stride: int
        canonical_stride: int

        def __init__(self, *values: int) -> None: ...

    class CanonicalPageMapping:
        """How a worker's page maps into the canonical one; ranks with the same bytes take turns in writing them."""

        canonical_page_size_bytes: int
        runs: Sequence[CopyRun]
        num_writers: int
        writer_index: int

    class CanonicalKVCacheTensor:
        """Shape (blocks, …), `page_size_bytes` for each block, padding included."""

        tensor: torch.Tensor
        page_size_bytes: int

    class CanonicalKVCacheRef:
        """One layer's share of a tensor, without padding."""

        tensor_idx: int
        page_size_bytes: int
        mapping: CanonicalPageMapping | None

    class CanonicalKVCaches:
        """The KV cache: its tensors, and for each group its layers."""

        tensors: Sequence[CanonicalKVCacheTensor]
        group_data_refs: Sequence[Sequence[CanonicalKVCacheRef]]

    class LoadStoreSpec:
        """Rows of the primary tier."""

        block_ids: NDArray[np.int32]

    class GPULoadStoreSpec(LoadStoreSpec):
        """Blocks of the KV cache, group after group; `block_indices`: where each group starts in its request."""

        group_sizes: Sequence[int]
        block_indices: Sequence[int]

    class TransferResult:
        """The report on a copy."""

        def __init__(self, job_id: int, success: bool, transfer_size: int, transfer_time: float) -> None: ...

    class OffloadingWorker:
        """What the connector calls."""

    class SharedOffloadRegion:
        """The primary tier, mapped into this process."""

        def __init__(self, *values: Any) -> None: ...
        def create_next_worker_view(self, tensor_page_size: int) -> torch.Tensor:
            """Shape (rows, bytes): this worker's part of each row that belongs to the next tensor."""
            ...

        def create_next_canonical_view(self, tensor_page_size: int) -> torch.Tensor:
            """The same, of the part that all workers share."""
            ...

        def cleanup(self) -> None:
            """Unmap it."""

    class TieringOffloadingSpec:
        """vLLM's own."""

        config: Any
        blocks_per_chunk: int
        replicated_layout: bool
        kv_bytes_per_chunk: int
        cpu_page_size_per_worker: int
        _worker: OffloadingWorker | None

        def _validate_canonical_refs(self, kv_caches: CanonicalKVCaches) -> None: ...

    class Platform:
        """What vLLM found to compute on."""

        device_type: str

    current_platform: Platform

else:
    from vllm.platforms import current_platform
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalPageMapping,
        CopyRun,
        GPULoadStoreSpec,
        LoadStoreSpec,
        OffloadingWorker,
        TransferResult,
    )
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = [
    "CanonicalKVCacheRef",
    "CanonicalKVCaches",
    "CanonicalPageMapping",
    "CopyRun",
    "GPULoadStoreSpec",
    "LoadStoreSpec",
    "OffloadingWorker",
    "SharedOffloadRegion",
    "TieringOffloadingSpec",
    "TransferResult",
    "current_platform",
    "row_count",
]


def row_count(spec: TieringOffloadingSpec) -> int:
    """Rows of the primary tier; vLLM 0.28 and 0.29 call them blocks, later versions chunks."""
    return int(getattr(spec, "num_chunks" if hasattr(spec, "num_chunks") else "num_blocks"))
