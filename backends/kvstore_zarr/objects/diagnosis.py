"""What `kvstore doctor` says of a tier without a catalogue: whether anything ever bounds it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from kvstore.doctor.finding import Finding, ok, warning
from kvstore.objects.settings import SWEEP, Place
from kvstore.retention import TTL
from kvstore.url import READONLY, format_size
from kvstore_zarr.objects.remains import wanted_capacity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.url import TierURL

__all__ = ["diagnose"]

_RULE = "or leave age to a rule of the bucket (docs/retention.md)"


def diagnose(url: TierURL) -> Iterator[Finding]:
    """For `ObjectZarrStore.diagnose`. Raises `InvalidOptionError` for a capacity that is a share of no disk."""
    capacity, ttl, sweep = wanted_capacity(url), url.option(TTL), url.option(SWEEP)
    if url.option(READONLY) or Place.of(url).is_readonly:
        return
    rules = [
        *([f"ttl of {timedelta(seconds=ttl)}"] if ttl is not None else []),
        *([f"capacity of {format_size(capacity)}"] if capacity is not None else []),
    ]
    if not rules:
        yield warning(
            "space",
            "neither ttl nor capacity: the tier grows without bound, and so does its bill",
            f"add ttl=7d, or capacity=500GB, with sweep=1h; {_RULE}",
        )
    elif sweep is None:
        yield warning(
            "space",
            f"{' and '.join(rules)}, and nobody sweeps: what is over goes only with `kvstore gc`",
            f"add sweep=1h, or run `kvstore gc` from time to time{'' if capacity is not None else f'; {_RULE}'}",
        )
    else:
        yield ok("space", f"{' and '.join(rules)}, swept every {timedelta(seconds=sweep)}")
