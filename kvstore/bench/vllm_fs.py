"""vLLM's own `fs` tier, as installed: its real `FileSystemTierManager`, on rows of the race's memory.

vLLM drives a tier from one thread: jobs go in, and the next step asks what has ended. So all calls of the race's
threads go in under one lock, and one more thread asks, every 0.3 ms while something is under way (at other times it
sleeps, for another contestant has its lap then). The tier checks nothing of what it reads. Where vLLM was built for
another machine than this one, its C extension cannot be loaded and plain Python does its work: `notes` say so.
"""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import tempfile
import threading
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvstore.bench.contestant import Contestant, Traffic
from kvstore.errors import MissingDependencyError, StoreAccessError, TierUnavailable
from kvstore.integrity import address_in_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore.types import BlockKey

__all__ = ["VllmFs"]

_POLL_S = 0.0003
_LONGEST_CALL_S = 120.0


class VllmFs(Contestant):
    """Its files are in a folder of their own under `directory`, which must exist. Its threads: 16 and 16, its default.

    Raises `MissingDependencyError` where no vLLM of 0.28 or later can be imported.
    """

    name: ClassVar[str] = "vllm-fs"

    def __init__(self, directory: Path) -> None:
        self._vllm = _Vllm()
        self.notes = [f"vllm-fs: vLLM {self._vllm.version}, {self._vllm.way}, no checks"]
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=".kvstore-bench-", dir=directory))
        except OSError as error:
            raise StoreAccessError(f"{directory}: no folder for vLLM's files can be made here: {error}") from error
        self._manager: Any = None
        self._lock = threading.Lock()
        self._numbers = count()
        self._waiting: dict[int, _Answer] = {}
        self._busy = threading.Event()
        self._over = False
        self._asks = threading.Thread(target=self._ask, name="kvstore-bench-vllm", daemon=True)

    def lend(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._manager = self._vllm.manager(memory, self._folder)
        self._asks.start()

    def traffic(self, memory: NDArray[np.uint8], threads: int) -> Traffic:
        del threads
        self._memory = memory
        self._manager = self._vllm.manager(memory, self._folder)
        return _ThroughItsManager(self._manager, self._vllm, memory)

    def store(self, keys: Sequence[BlockKey], sources: Sequence[memoryview]) -> None:
        self._call(keys, sources, promotion=False)

    def load(self, keys: Sequence[BlockKey], targets: Sequence[memoryview]) -> None:
        self._call(keys, targets, promotion=True)

    def clear(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            Path(self._manager.file_mapper.get_file_name(self._vllm.key(key))).unlink(missing_ok=True)

    def close(self) -> None:
        self._over = True
        self._busy.set()
        manager, self._manager = self._manager, None
        if manager is not None:
            if self._asks.ident is not None:
                self._asks.join()
            manager.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    def files(self) -> list[Path]:
        return [path for path in self._folder.rglob("*.bin") if path.is_file()]

    def _call(self, keys: Sequence[BlockKey], blocks: Sequence[memoryview], *, promotion: bool) -> None:
        number, answer = next(self._numbers), _Answer()
        rows = [_row(np.frombuffer(block, np.uint8), self._memory) for block in blocks]
        job = self._vllm.job(number, [self._vllm.key(key) for key in keys], rows, promotion=promotion)
        with self._lock:
            self._waiting[number] = answer
            self._busy.set()
            (self._manager.submit_load if promotion else self._manager.submit_store)(job)
        if not answer.given.wait(_LONGEST_CALL_S) or not answer.success:
            raise TierUnavailable(f"vllm-fs: {len(keys)} blocks were not moved; vLLM's log says why")

    def _ask(self) -> None:
        while self._busy.wait() and not self._over:
            time.sleep(_POLL_S)
            with self._lock:
                ended = list(self._manager.get_finished_jobs())
                answers = [(result, self._waiting.pop(result.job_id)) for result in ended]
                if not self._waiting:
                    self._busy.clear()
            for result, answer in answers:
                answer.success = result.success
                answer.given.set()


class _ThroughItsManager(Traffic):
    """Its jobs, on the thread that drives it: nothing lies between."""

    def __init__(self, manager: Any, vllm: _Vllm, memory: NDArray[np.uint8]) -> None:
        self._manager, self._vllm, self._memory = manager, vllm, memory
        self._numbers = count()
        self._under_way: dict[int, int] = {}

    def submit(self, job: int, keys: Sequence[BlockKey], rows: NDArray[np.uint8], *, is_store: bool) -> None:
        number = next(self._numbers)
        first = _row(rows[0], self._memory)
        names, places = [self._vllm.key(key) for key in keys], list(range(first, first + len(keys)))
        described = self._vllm.job(number, names, places, promotion=not is_store)
        (self._manager.submit_store if is_store else self._manager.submit_load)(described)
        self._under_way[number] = job

    def ended(self) -> list[int]:
        results = list(self._manager.get_finished_jobs())
        if not all(result.success for result in results):
            raise TierUnavailable("vllm-fs: not every block was moved; vLLM's log says why")
        return [self._under_way.pop(result.job_id) for result in results]

    def close(self) -> None:
        self._manager.drain_jobs()


def _row(block: NDArray[np.uint8], memory: NDArray[np.uint8]) -> int:
    """Which row of `memory` begins with `block`."""
    return (address_in_memory(block) - address_in_memory(memory)) // memory.strides[0]


class _Answer:
    """What becomes of a job."""

    def __init__(self) -> None:
        self.given = threading.Event()
        self.success = False


class _Vllm:
    """The installed one, and what it calls things."""

    def __init__(self) -> None:
        try:
            self.version: str = importlib.import_module("vllm").__version__
            self._base = importlib.import_module("vllm.v1.kv_offload.base")
            self._tiering = importlib.import_module("vllm.v1.kv_offload.tiering.base")
            self._config = importlib.import_module("vllm.v1.kv_offload.config")
            self._spec = importlib.import_module("vllm.v1.kv_offload.tiering.spec")
            self._fs = importlib.import_module("vllm.v1.kv_offload.tiering.fs.manager")
            io = importlib.import_module("vllm.v1.kv_offload.tiering.fs.io")
        except (ImportError, AttributeError) as error:  # no version: a folder of that name, which is no vLLM
            raise MissingDependencyError(
                f"--against vllm-fs needs vLLM 0.28 or later in this Python ({error}): pip install vllm, or run the"
                " command in vLLM's environment with kvstore-tiers installed there"
            ) from error
        c = getattr(io, "_HAS_FSIO_C", False)
        self.way = "its C extension" if c else "plain Python, because its C extension cannot be loaded here"

    def key(self, key: BlockKey) -> bytes:
        """What vLLM calls that block."""
        named: bytes = self._base.make_offload_key(key.digest, key.group)
        return named

    def job(self, number: int, keys: list[bytes], rows: list[int], *, promotion: bool) -> Any:
        """A transfer of whole rows."""
        row_ids = np.asarray(rows, np.int64)
        return _made(
            self._tiering.TransferJob,
            job_id=number,
            keys=keys,
            chunk_ids=row_ids,
            block_ids=row_ids,
            is_promotion=promotion,
            req_context=self._base.ReqContext(req_id=str(number)),
        )

    def manager(self, memory: NDArray[np.uint8], folder: Path) -> Any:
        """The `fs` tier, with `memory` (blocks, bytes) as vLLM's primary tier."""
        spec = self._spec.TieringOffloadingSpec(self._configuration(memory.strides[0], memory.nbytes, folder))
        return self._fs.FileSystemTierManager(spec, memory.data, "fs", str(folder))

    def _configuration(self, row_bytes: int, nbytes: int, folder: Path) -> Any:
        config = self._config
        sizes = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1)
        parallel = _made(
            config.OffloadingParallelConfig,
            rank=0,
            data_parallel_index=0,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
            **sizes,
        )
        group = _made(config.OffloadingGroupConfig, tokens_per_block=16, layer_names=("layer.0",), group_id=0)
        tiers = [{"type": "fs", "root_dir": str(folder)}]
        return _made(
            config.OffloadingConfig,
            groups=(group,),
            worker_kv_bytes_per_block=row_bytes,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": nbytes, "secondary_tiers": tiers},
            engine_id=folder.name,
            model=_made(config.OffloadingModelConfig, name="kvstore/bench", dtype="bfloat16", max_model_len=0),
            cache=_made(config.OffloadingCacheConfig, tokens_per_hash=16, blocks_per_chunk=1),
            parallel=parallel,
            kv_cache_layout="NHD",
        )


def _made(kind: Any, **values: Any) -> Any:
    """Of a dataclass that has fewer fields in older versions."""
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})
