"""The secondary tier that vLLM's manager sees: its calls, in terms of `kvstore.tiering.SecondaryTier`.

::

    lookup                        ─► Lookups ─► SecondaryTier.ask
    submit_load, submit_store     ─► Jobs: one Slot for each row ─► SecondaryTier.load, store
    on_schedule_end               ─► SecondaryTier.submit
    get_finished_jobs             ◄─ SecondaryTier.poll: answers to Lookups, slots to Jobs, stored blocks to events
    drain_jobs, reset, shutdown   ─► until no slot is lent any more; bounded where calls can hang on a network

Nothing that a backend does raises here after construction. vLLM has no time-out of its own for a load: one that is
never reported leaves its request pending for ever. So a load that hangs on a network is parted from its rows and
reported as failed. One that hangs in the kernel on a local device cannot be: its job is never reported and its rows are
never reused, which is the truth.
"""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.errors import ShutdownTimeout
from kvstore.namespace import MAX_DIGEST_BYTES, MIN_DIGEST_BYTES
from kvstore.tiering.primary import Slot
from kvstore.vllm._compat import (
    Locality,
    LookupResult,
    Medium,
    RequestOffloadingContext,
    SecondaryTierManager,
    base_arguments,
    check_version,
    chunk_tokens,
    positions_of,
    rows_of,
    stored_event,
)
from kvstore.vllm.jobs import Jobs
from kvstore.vllm.lookups import Lookups, block_key, offload_key
from kvstore.vllm.metrics import Metrics, definitions, of_archives
from kvstore.vllm.options import TierOptions
from kvstore.vllm.requests import Requests
from kvstore.vllm.sizing import last_token, warn_if_small

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from numpy.typing import NDArray

    from kvstore.archive.warming import Warming
    from kvstore.namespace import Namespace
    from kvstore.tiering.report import TierReport
    from kvstore.vllm._compat import (
        JobResult,
        OffloadingConnectorStats,
        OffloadingEvent,
        OffloadingMetricMetadata,
        OffloadingSpec,
        ReqContext,
        ScheduleEndContext,
        TransferJob,
    )

__all__ = ["KVStoreTier"]

log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT = 4.0
"""Seconds for everything that is still to be stored, and for threads to end: vLLM kills an engine after five."""
STORE_PATIENCE = 1.0
"""Seconds that a request waits for stores to give back the rows that it needs. Nearly always cheaper than computing."""
POLL_BUDGET = 100e-6
"""Seconds of a scheduler step for what transfers have finished; the rest waits for the next step."""
PAUSE = 500e-6
"""Seconds between two looks of a call that waits."""
PATIENCE = 5.0
"""Seconds after which a call that waits says so, and again after as many more."""


class KVStoreTier(SecondaryTierManager):
    """One URL as a secondary tier of vLLM; `options` are those of `kvstore.vllm.options.TierOptions`.

    Raises a `ConfigurationError` or a `StoreOpenError` when it cannot be opened as configured, and nothing afterwards
    but a `ShutdownTimeout` from `shutdown`, which tells vLLM to keep primary memory mapped.
    Threads: any, one at a time (vLLM's manager holds its lock); `drain_jobs` and `shutdown` wait, nothing else does.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: object = None,
        **options: Any,
    ) -> None:
        check_version()
        super().__init__(*base_arguments(offloading_spec, primary_kv_view, tier_type, backpressure_detector))
        self._options = chosen = TierOptions.of(options)
        self.locality = None if chosen.locality is None else Locality(chosen.locality)
        rows, row_bytes = primary_kv_view.shape or (0, 0)
        self._namespace = _namespace(offloading_spec, row_bytes, chosen.namespace)
        self._warmings: list[Warming] = []
        self._tier = chosen.open(self._namespace, primary_kv_view)
        try:
            self._set_up(offloading_spec, rows, row_bytes)
        except BaseException:
            for warming in self._warmings:
                warming.stop(SHUTDOWN_TIMEOUT)
            self._tier.cancel()
            self._tier.close(SHUTDOWN_TIMEOUT)
            raise
        # After everything that can fail: an error's traceback would keep vLLM's memory from being unmapped.
        self._rows: NDArray[np.uint8] | None = np.frombuffer(primary_kv_view, np.uint8).reshape(rows, row_bytes)

    def _set_up(self, offloading_spec: OffloadingSpec, rows: int, row_bytes: int) -> None:
        chosen = self._options
        self.url = self._tier.url
        warn_if_small(offloading_spec, rows, row_bytes)
        self._lookups = Lookups(self._tier.ask, rows, self._beyond_primary)
        self._last_token = last_token(offloading_spec, rows)
        self._jobs = Jobs()
        self._requests = Requests(self._tier, chunk_tokens(offloading_spec), allow_pins=chosen.allow_pins)
        self._metrics = Metrics(chosen.url)
        self._seen_keys = False
        self._events: list[OffloadingEvent] | None = [] if _announces(offloading_spec, chosen) else None
        self._warm()

    @property
    def warming(self) -> Warming | None:
        """Of the option `archives`: how far that is."""
        return self._warmings[-1] if self._warmings else None

    # Requests.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Blocks are stored as they are computed; nothing more is asked for."""
        self._requests.begin(req_context)
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        """RETRY until the store has answered, or has not in time; and while stores hold the rows to load into."""
        self._see(key)
        found = self._lookups.find(key, req_context)
        if found is None:
            return LookupResult.RETRY
        if not found:
            return LookupResult.MISS
        if self._lookups.held_back(req_context.req_id, self._jobs.storing, STORE_PATIENCE):
            return LookupResult.RETRY
        return LookupResult.HIT if self._lookups.find(key, req_context) else LookupResult.MISS

    def touch(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """A use; up to vLLM 0.30 somebody calls this."""
        self._see(*islice(keys, 1))
        self._requests.touched(req_context, keys)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """What was asked for it is forgotten; its blocks were used, wherever it found them."""
        self._lookups.forget(req_context.req_id)
        self._requests.finish(req_context)

    # Transfers.

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Load the job's blocks into its rows; begins with `on_schedule_end`, which follows at once."""
        slots = self._slots(job_metadata)
        self._jobs.start(job_metadata, slots)
        for slot in slots:
            self._tier.load(slot)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Store the job's blocks; those that the tier has no time for are shed, and the job counts as failed."""
        slots = self._slots(job_metadata)
        context = job_metadata.req_context
        mark = self._requests.mark_of(context)
        for slot, place in zip(slots, self._requests.places(context, job_metadata.keys), strict=False):
            (slot.position, slot.parent), slot.mark = place, mark
        self._jobs.start(job_metadata, slots)
        self._jobs.came_back([slot for slot in slots if not self._tier.store(slot)], success=False)
        self._tier.submit()  # the next step may be a long computation away

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs of which every slot has come back."""
        self._take(self._tier.poll(POLL_BUDGET))
        return self._jobs.finished()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Hand to the threads what this step has asked for."""
        del context
        self._tier.submit()

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Blocks that can be loaded from the tier since the last call."""
        if self._events is not None:
            yield from self._events
            self._events.clear()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """The metrics of every kvstore tier; they have its URL as a label."""
        del extra_config
        return definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was added since the last call."""
        return self._metrics.observe(
            self._tier.stats(),
            blocks_in_flight=len(self._jobs),
            refused_params=self._requests.refused,
            **of_archives(self._warmings),
        )

    # Ends.

    def drain_jobs(self) -> None:
        """Until no transfer touches primary memory and every job can be reported.

        Where calls can hang on a network that is `load_timeout` at most. A local read that is stuck in the kernel is
        waited for, since its rows cannot be given to anybody else; the log says so.
        """
        begin = told = time.monotonic()
        self._tier.submit()
        while self._tier.holds_memory:
            self._take(self._tier.poll())
            self._tier.submit()
            time.sleep(PAUSE)
            if time.monotonic() - told > PATIENCE:
                told = time.monotonic()
                log.warning(
                    "%s: waiting for transfers that hold primary memory, for %.0f s now; a read that is stuck in the"
                    " kernel ends only when its device answers",
                    self.url,
                    told - begin,
                )
        self._take(self._tier.poll())

    def shutdown(self) -> None:
        """Let queued stores finish, close the store, in `SHUTDOWN_TIMEOUT` seconds; a second call does nothing.

        Raises `ShutdownTimeout` when a transfer still holds primary memory by then: vLLM keeps it mapped, as it must.
        """
        if self._rows is None:
            return
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT
        if self.warming is not None:
            self.warming.stop(SHUTDOWN_TIMEOUT * 0.1)  # a daemon's: it touches no row of primary memory
        if not self._wait_idle(SHUTDOWN_TIMEOUT * 0.75):
            log.warning("%s: what could not be stored within %.1f s is dropped", self.url, SHUTDOWN_TIMEOUT * 0.75)
        self._take(self._tier.cancel())
        self._tier.close(max(0.0, deadline - time.monotonic()))
        self._take(self._tier.poll())
        if self._tier.holds_memory:
            raise ShutdownTimeout(
                f"{self.url}: a transfer did not end within {SHUTDOWN_TIMEOUT:.1f} s and still holds rows of vLLM's"
                " primary memory, which must stay mapped until it does"
            )
        self._let_go()

    def _wait_idle(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        self._tier.submit()
        while not self._tier.idle:
            if time.monotonic() > deadline:
                return False
            self._take(self._tier.poll())
            self._tier.submit()
            time.sleep(PAUSE)
        return True

    def _let_go(self) -> None:
        """Of primary memory: vLLM is about to unmap it, which fails while anything refers to it."""
        self._rows = None
        gc.collect()  # an exception that is part of a cycle may have a row in its frames

    def _see(self, *keys: bytes) -> None:
        """How long digests are is a guess where the plugin has not seen the engine; the first key tells."""
        if self._seen_keys or not keys:
            return
        self._seen_keys = True
        digest_bytes = len(block_key(keys[0]).digest)
        if MIN_DIGEST_BYTES <= digest_bytes <= MAX_DIGEST_BYTES and digest_bytes != self._namespace.digest_bytes:
            self._namespace = replace(self._namespace, digest_bytes=digest_bytes)
            self._tier.use(self._namespace)
            if self.warming is not None:  # it compared archives with the guess
                self.warming.stop(0.0)
                self._warm()

    def _warm(self) -> None:
        """Begin with the option's archives, compared with the namespace of now."""
        warming = self._options.begin_warming(self._namespace)
        if warming is not None:
            self._warmings.append(warming)

    def _beyond_primary(self, key: bytes, request: ReqContext) -> bool:
        return positions_of(request).get(key, 0) > self._last_token

    def _slots(self, job: TransferJob) -> list[Slot]:
        rows = self._rows
        if rows is None:  # after shutdown nothing is lent
            return []
        self._see(*islice(job.keys, 1))
        return [Slot(row, block_key(key), rows[row]) for key, row in zip(job.keys, rows_of(job), strict=True)]

    def _take(self, report: TierReport) -> None:
        """What the threads have finished, to those who wait for it."""
        if report.answers:
            self._lookups.answered(report.answers)
        if report.loaded:
            self._jobs.came_back(report.loaded, success=True)
        lost = report.failed + report.overdue
        if lost:
            self._lookups.failed([offload_key(slot.key) for slot in lost])
            self._jobs.came_back(report.failed, success=False)
        if report.released:
            self._jobs.came_back(report.dropped, success=False)
            self._jobs.came_back(report.released, success=True)
        if report.stored and self._events is not None:
            self._events.append(stored_event(map(offload_key, report.stored), self.locality))


def _announces(spec: OffloadingSpec, chosen: TierOptions) -> bool:
    wanted = chosen.enable_kv_events
    published = bool(spec.kv_events_config.enable_kv_cache_events)
    if wanted and not published:
        log.warning("%s: enable_kv_events is set, but vLLM publishes no KV events (kv_events_config)", chosen.url)
    return wanted and published


def _namespace(spec: OffloadingSpec, row_bytes: int, override: str | None) -> Namespace:
    from kvstore.vllm.identity import namespace_of

    return namespace_of(spec, row_bytes, override=override)
