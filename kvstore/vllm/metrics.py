"""The tier's counters as vLLM's metrics: declared once by `definitions`, then what was added since the last time.

vLLM adds up what all tiers observed and sends it to its front end, where the definitions make Prometheus metrics of it.
Several tiers are told apart by the label `url`, in which stands no option and no credential.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.tiering.breaker import BreakerState
from kvstore.vllm._compat import OffloadingConnectorStats, OffloadingCounterMetadata, OffloadingGaugeMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.archive.warming import Warming
    from kvstore.tiering.counters import TierStats
    from kvstore.url import TierURL
    from kvstore.vllm._compat import OffloadingMetricMetadata

__all__ = ["COUNTERS", "GAUGES", "LABELS", "Metrics", "definitions", "of_archives"]

LABELS = ("url",)

COUNTERS: Mapping[str, tuple[str, str]] = {
    "bytes_loaded": ("load_bytes", "Bytes loaded from the tier into primary memory."),
    "load_seconds": ("load_seconds", "Time that transfer threads spent in loads, in seconds."),
    "loads": ("loaded_blocks", "Blocks loaded from the tier."),
    "bytes_stored": ("store_bytes", "Bytes stored in the tier."),
    "store_seconds": ("store_seconds", "Time that transfer threads spent in stores, in seconds."),
    "stores": ("stored_blocks", "Blocks stored in the tier."),
    "exists": ("existing_blocks", "Stores of blocks that the tier had already."),
    "hits": ("lookup_hits", "Lookups that found their block in the tier."),
    "misses": ("lookup_misses", "Lookups that did not, late answers and failures included."),
    "corrupt": ("corrupt_blocks", "Blocks that failed their checks and are computed again."),
    "failed_loads": ("failed_load_blocks", "Blocks that a lookup had promised and no load delivered."),
    "failed_stores": ("failed_store_blocks", "Blocks that the tier could not write."),
    "shed": ("shed_blocks", "Blocks not stored because the tier fell behind or was left alone."),
    "full": ("full_blocks", "Blocks not stored for want of room in the tier."),
    "refused": ("purged_blocks", "Blocks not stored because they were purged from the tier a short while ago."),
    "failed_calls": ("failed_calls", "Calls that the tier's backend ended with an error."),
    "overdue_calls": ("overdue_calls", "Calls given up after their time-out."),
    "trips": ("breaker_trips", "Times that the tier was left alone because it failed or hung."),
    "pins_refused": ("refused_pins", "Pins refused because no more of the capacity may be pinned."),
    "refused_params": ("refused_params", "Requests whose kv_transfer_params for the tier cannot be understood."),
    "archives_restored": ("restored_archives", "Archives of the option `archives` that the tier has all blocks of."),
    "archives_failed": ("failed_archives", "Archives of the option `archives` that could not be restored entirely."),
    "archive_blocks": ("archive_blocks", "Blocks that were written into the tier from archives."),
}
"""Fields of `TierStats`, and what the tier adds to them: the metric's name and its documentation."""

GAUGES: Mapping[str, tuple[str, str]] = {
    "backlog_bytes": ("backlog_bytes", "Bytes accepted for storing and not stored yet."),
    "breaker": ("breaker_state", "0: in use; 1: being tried again; 2: left alone because it failed or hung."),
    "blocks_in_flight": ("blocks_in_flight", "Blocks on their way between primary memory and the tier."),
    "archives_waiting": ("waiting_archives", "Archives of the option `archives` that are still to be restored."),
}
"""The same, of this moment."""


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """All metrics of every kvstore tier, by name."""
    declared: dict[str, OffloadingMetricMetadata] = {}
    for kind, metrics in ((OffloadingCounterMetadata, COUNTERS), (OffloadingGaugeMetadata, GAUGES)):
        declared.update({_name(name): kind(text, LABELS) for name, text in metrics.values()})
    return declared


def of_archives(warmings: Sequence[Warming]) -> dict[str, float]:
    """What the metrics say of a tier's archives: zeros where it has none.

    All but the last of `warmings` were stopped. What they did still counts, for a counter may never go back.
    """
    warmed = [warming.warmed for warming in warmings]
    return {
        "archives_restored": sum(each.restored for each in warmed),
        "archives_failed": sum(each.failed for each in warmed),
        "archives_waiting": warmed[-1].waiting if warmed else 0,
        "archive_blocks": sum(each.blocks for each in warmed),
    }


_BREAKER = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


class Metrics:
    """Of the tier at `url`. Threads: one at a time makes all calls."""

    def __init__(self, url: TierURL) -> None:
        form = f"{url.format}+" if url.format else ""
        self._labels = (f"{form}{url.scheme}://{url.location}",)
        self._counted: dict[str, float] = {}
        self._shown: dict[str, float] = {}

    def observe(self, stats: TierStats, **more: float) -> OffloadingConnectorStats | None:
        """What was added since the last call, None for nothing. `more` are what `TierStats` does not have.

        The first call has everything, zeros as well, so that every metric is there from the start.
        """
        now: dict[str, Any] = {name: getattr(stats, name, None) for name in (*COUNTERS, *GAUGES)} | more
        now["breaker"] = _BREAKER[stats.breaker]
        observed = OffloadingConnectorStats()
        for name, (metric, _) in COUNTERS.items():
            more_of_it = now[name] - self._counted.get(name, 0)
            if more_of_it or name not in self._counted:
                observed.increase_counter(_name(metric), more_of_it, self._labels)
                self._counted[name] = now[name]
        for name, (metric, _) in GAUGES.items():
            if now[name] != self._shown.get(name):
                observed.set_gauge(_name(metric), now[name], self._labels)
                self._shown[name] = now[name]
        return None if observed.is_empty() else observed


def _name(metric: str) -> str:
    return f"vllm:kvstore_{metric}"
