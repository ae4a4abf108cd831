"""A real tiering manager of the installed vLLM, stepped as its scheduler does: no GPU, no engine, nothing replaced.

::

    with Driver([{"type": "KVStoreTier", "module_path": "kvstore.vllm", "url": "memory://a"}], rows=16) as engine:
        names = keys(8)
        engine.store(names)           # prepare_store, the bytes, complete_store, steps until the tiers are done
        engine.evict_all()            # nothing is left in primary memory
        assert engine.load(names) == 8  # lookups, promotion, prepare_load; every byte is compared

What differs between the versions of vLLM is in here: names of fields, the manager's lock, positions of keys.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import time
import uuid
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from vllm.v1.kv_offload import config as offload_config
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["PATIENCE", "Call", "Driver", "Request", "content", "keys", "kvstore_tier", "offloading_config"]

PATIENCE = 30.0
"""Seconds after which a test that waits has failed."""
PAUSE = 0.0005
"""Seconds between two steps: what the model would compute for."""


def keys(count: int, prompt: str = "a", group: int = 0, digest_bytes: int = 32) -> list[bytes]:
    """The blocks of one prompt, under the names that vLLM gives them."""
    digests = [hashlib.sha512(f"{prompt} {number}".encode()).digest()[:digest_bytes] for number in range(count)]
    return [make_offload_key(digest, group) for digest in digests]


def content(key: bytes, nbytes: int) -> NDArray[np.uint8]:
    """The bytes that belong to this key and to no other."""
    return np.frombuffer(np.random.default_rng(list(key)).bytes(nbytes), np.uint8)


def kvstore_tier(url: str, **options: Any) -> dict[str, Any]:
    """An entry of `secondary_tiers`; engines of all tests may share blocks."""
    return {"type": "KVStoreTier", "module_path": "kvstore.vllm", "url": url, "namespace": "tests", **options}


def offloading_config(
    tiers: Sequence[dict[str, Any]],
    *,
    rows: int,
    row_bytes: int,
    groups: int = 1,
    tokens_per_block: int = 16,
    tokens_per_hash: int = 16,
    blocks_per_chunk: int = 1,
    events: bool = False,
    engine_id: str = "",
    max_model_len: int = 0,
    **extra: Any,
) -> offload_config.OffloadingConfig:
    """What the connector would make of an engine's configuration: one worker, `rows` of `row_bytes` in primary memory.

    `row_bytes` are those of a chunk; vLLM rounds them up to whole pages.
    """
    parallel = _made(
        offload_config.OffloadingParallelConfig,
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=True,
    )
    stride = -(-row_bytes // 4096) * 4096
    return _made(
        offload_config.OffloadingConfig,
        groups=tuple(
            _made(
                offload_config.OffloadingGroupConfig,
                tokens_per_block=tokens_per_block,
                layer_names=(f"layer.{group}",),
                group_id=group,
            )
            for group in range(groups)
        ),
        worker_kv_bytes_per_block=row_bytes // blocks_per_chunk,
        enable_kv_cache_events=events,
        extra_config={"cpu_bytes_to_use": rows * stride, "secondary_tiers": [dict(tier) for tier in tiers], **extra},
        engine_id=engine_id or f"kvstore-test-{os.getpid()}-{uuid.uuid4().hex[:8]}",
        model=_made(
            offload_config.OffloadingModelConfig, name="test/model", dtype="bfloat16", max_model_len=max_model_len
        ),
        cache=_made(
            offload_config.OffloadingCacheConfig, tokens_per_hash=tokens_per_hash, blocks_per_chunk=blocks_per_chunk
        ),
        parallel=parallel,
        kv_cache_layout="NHD",
    )


def _made(kind: type[Any], **values: Any) -> Any:
    """Of a dataclass that has fewer fields in older versions."""
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call of the manager, and what it took of the scheduler's time."""

    name: str
    seconds: float


class Request:
    """One request: its context and, in order, the keys of its blocks."""

    def __init__(self, names: Sequence[bytes], *, tokens: int = 16, params: dict[str, Any] | None = None) -> None:
        self.id = uuid.uuid4().hex
        self.keys = list(names)
        self.context = ReqContext(req_id=self.id, kv_transfer_params=params)
        place = getattr(self.context, "set_offload_key_position", None)
        for position, key in enumerate(self.keys):
            if place is not None:
                place(key, (position + 1) * tokens)


class Driver:
    """`manager` is the real one. Options are those of `offloading_config`; every call is timed into `calls`.

    Leaving it shuts the manager down and takes away what it may have left in shared memory.
    """

    def __init__(self, tiers: Sequence[dict[str, Any]], **options: Any) -> None:
        self.config = offloading_config(tiers, **{"rows": 16, "row_bytes": 8192, **options})
        self.tokens = options.get("tokens_per_block", 16) * options.get("blocks_per_chunk", 1)
        self.spec = TieringOffloadingSpec(self.config)
        self.calls: list[Call] = []
        self.requests: dict[str, Request] = {}
        self._new: list[str] = []
        self._preempted: list[str] = []
        try:
            self.manager = self.spec.get_manager()
        except BaseException:
            self._remove_leftovers()
            raise
        view = self.manager.primary_tier.get_kv_memoryview()
        self.row_bytes: int = view.strides[0]
        self.rows: NDArray[np.uint8] | None = np.frombuffer(view, np.uint8).reshape(-1, self.row_bytes)
        self.tiers = self.manager.secondary_tiers

    # What the scheduler calls, one by one.

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """What a driver of vLLM 0.33 holds around every call; nothing before that."""
        with getattr(self.manager, "lock", None) or contextlib.nullcontext():
            yield

    def call(self, name: str, *values: Any) -> Any:
        """`manager.name(*values)`, locked and timed."""
        method = getattr(self.manager, name)
        with self.locked():
            begin = time.perf_counter()
            try:
                return method(*values)
            finally:
                self.calls.append(Call(name, time.perf_counter() - begin))

    def arrive(self, names: Sequence[bytes], params: dict[str, Any] | None = None) -> Request:
        """A new request for a prompt with these blocks."""
        request = Request(names, tokens=self.tokens, params=params)
        self.requests[request.id] = request
        self._new.append(request.id)
        self.call("on_new_request", request.context)
        return request

    def lookup(self, request: Request) -> list[LookupResult]:
        """About each of its keys up to the first miss, as the scheduler asks."""
        answers: list[LookupResult] = []
        for key in request.keys:
            answers.append(self.call("lookup", key, request.context))
            if answers[-1] is LookupResult.MISS:
                break
        return answers

    def prepare_store(self, request: Request, names: Sequence[bytes] | None = None) -> list[bytes] | None:
        """Slots for what is to be stored, filled; the keys that `complete_store` is due for. None: no room."""
        output = self.call("prepare_store", request.keys if names is None else names, request.context)
        if output is None:
            return None
        for key, row in zip(output.keys_to_store, chunk_ids(output.store_spec), strict=True):
            np.copyto(self.rows[row], content(key, self.row_bytes))
        return list(output.keys_to_store)

    def complete_store(self, request: Request, names: Iterable[bytes], success: bool = True) -> None:
        """The worker has written them."""
        written = list(names)
        if written:
            self.call("complete_store", written, request.context, success)

    def read(self, request: Request, names: Sequence[bytes]) -> list[bytes]:
        """Pin, compare every byte with what belongs there, unpin; returns keys whose bytes are others."""
        if not names:
            return []
        spec = self.call("prepare_load", names, request.context)
        wrong = [
            key
            for key, row in zip(names, chunk_ids(spec), strict=True)
            if not np.array_equal(self.rows[row], content(key, self.row_bytes))
        ]
        self.call("complete_load", names, request.context)
        return wrong

    def preempt(self, request: Request) -> None:
        """Told to the manager at the end of this step."""
        self._preempted.append(request.id)

    def finish(self, request: Request) -> None:
        """The request has ended, or was aborted."""
        del self.requests[request.id]
        self.call("on_request_finished", request.context)

    def step(self) -> None:
        """The end of a scheduler step, and the time until the next one."""
        context = ScheduleEndContext(new_req_ids=self._new, preempted_req_ids=self._preempted)
        self._new, self._preempted = [], []
        self.call("on_schedule_end", context)
        time.sleep(PAUSE)

    # What is made of them.

    def until(self, condition: Callable[[], Any], timeout: float = PATIENCE) -> Any:
        """Step until the condition is true, and return what it is."""
        deadline = time.monotonic() + timeout
        while not (result := condition()):
            assert time.monotonic() < deadline, f"not within {timeout} s"
            self.step()
        return result

    def settle(self, timeout: float = PATIENCE) -> None:
        """Step until the manager has nothing under way."""
        self.step()
        self.until(lambda: not self.call("has_pending_work"), timeout)

    def store(self, names: Sequence[bytes], *, batch: int | None = None, params: dict[str, Any] | None = None) -> int:
        """A request computes these blocks and ends; returns how many found a slot. Waits until the tiers are done."""
        request = self.arrive(names, params)
        size = batch or max(1, len(self.rows) // 2)
        stored = 0
        for start in range(0, len(request.keys), size):
            part = request.keys[start : start + size]
            written = self.until(lambda part=part: self._written(request, part))
            stored += len(written) - 1
            self.step()
            self.complete_store(request, written[1:])
        self.finish(request)
        self.settle()
        return stored

    def _written(self, request: Request, names: Sequence[bytes]) -> list[bytes] | None:
        written = self.prepare_store(request, names)
        return None if written is None else [b"", *written]

    def load(self, names: Sequence[bytes], timeout: float = PATIENCE, params: dict[str, Any] | None = None) -> int:
        """A request loads the longest prefix that there is and ends; returns its blocks. Bytes are compared."""
        request = self.arrive(names, params)
        try:
            answers = self.until(lambda: self.final(request), timeout)
            hits = request.keys[: sum(1 for _ in takewhile(lambda answer: answer is LookupResult.HIT, answers))]
            wrong = self.read(request, hits)
            assert not wrong, f"{len(wrong)} of {len(hits)} blocks have wrong bytes"
            return len(hits)
        finally:
            self.finish(request)
            self.step()

    def final(self, request: Request) -> list[LookupResult] | None:
        """One round of lookups; None while an answer is still to come."""
        answers = self.lookup(request)
        return None if {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(answers) else answers

    def evict_all(self) -> None:
        """Empty primary memory, as vLLM does it between two uses of an engine; the tiers have all they were given.

        (A store to a network is done for the manager once it has been copied.)
        """
        self.settle()
        self.until(lambda: all(tier._tier.idle for tier in self.tiers if hasattr(tier, "_tier")))
        self.reset_cache()

    def reset_cache(self) -> None:
        """As after a change of weights."""
        self.call("reset_cache")
        with self.locked():
            getattr(self.manager, "on_reset_flushed", lambda: None)()

    def events(self) -> list[Any]:
        """KV events since the last call."""
        with self.locked():
            return list(self.manager.take_events())

    def slow_calls(self, *names: str) -> list[float]:
        """Seconds of the calls of these names (of all but `reset_cache`), sorted."""
        chosen = [call.seconds for call in self.calls if (call.name in names if names else call.name != "reset_cache")]
        return sorted(chosen)

    def shutdown(self) -> None:
        """The manager's, which lets go of primary memory; not locked, as vLLM says."""
        self.rows = None
        self.manager.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if self.rows is not None:
                self.shutdown()
        finally:
            self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        for leftover in Path("/dev/shm").glob(f"vllm_offload_{self.config.engine_id}.mmap*"):
            leftover.unlink(missing_ok=True)

    @property
    def leftovers(self) -> list[Path]:
        """What this manager has in shared memory, by name."""
        return list(Path("/dev/shm").glob(f"vllm_offload_{self.config.engine_id}.mmap*"))


def chunk_ids(spec: Any) -> list[int]:
    """Rows of primary memory, whatever this version calls them."""
    ids = spec.chunk_ids if hasattr(spec, "chunk_ids") else spec.block_ids
    return [int(row) for row in ids]
