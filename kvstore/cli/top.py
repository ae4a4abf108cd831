"""`kvstore top URL`: what goes on in a tier, again and again: how full, what comes and goes, who uses what."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli._common import age, emit_json, json_option, open_to_inspect
from kvstore.cli._output import printable, reader_left
from kvstore.inspect.wording import counted
from kvstore.url import TierURL, format_size
from kvstore.watching import Watcher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Group
    from rich.table import Table

    from kvstore.watching import Sample

__all__ = ["top"]

SOONEST_S = 0.2
REMOTE_S = 60.0
"""Between samples of a tier whose `usage` asks a server for a listing of everything."""


@click.command(
    epilog="\b\nExamples:\n  kvstore top file:///mnt/nvme/kv\n  kvstore top file:///mnt/nvme/kv --once --json"
)
@click.argument("url")
@click.option(
    "--interval",
    type=click.FloatRange(min=SOONEST_S),
    metavar="SECONDS",
    help=f"Between two samples; default: 2, of an object store {REMOTE_S:.0f}.",
)
@click.option("--once", is_flag=True, help="One sample, and that is all.")
@json_option
def top(url: str, interval: float | None, once: bool, as_json: bool) -> None:
    """Watch the tier at URL until Ctrl-C, or until nobody reads on: how full it is, stores and evictions a second, the
    hottest prefixes, what is pinned, its namespaces.

    An engine that uses the tier feels nothing of it: it is opened read-only, totals come from its records, and a sample
    reads the facts of 10,000 blocks, where it left off. A tier with more blocks is read in several samples, and its
    rates are estimates (a ~ is before them). Stores are those of the last minute that are still there; hits are those
    since a block was stored. Object stores keep no hits, and a sample of one lists the bucket.

    With --json a line for each sample, with --once a single value.
    """
    tier = TierURL.parse(url)
    with open_to_inspect(tier) as store:
        watcher = Watcher(store)
        if once:
            sample = watcher.sample()
            emit_json(_as_json(tier, sample)) if as_json else _print(_view(tier, sample))
            return
        pause = interval or (REMOTE_S if store.capabilities.can_hang else 2.0)
        if as_json:
            for sample in _samples(watcher, pause):
                click.echo(json.dumps(_as_json(tier, sample), default=asdict))
                sys.stdout.flush()
        else:
            _watch(tier, _samples(watcher, pause))


def _samples(watcher: Watcher, pause: float) -> Iterator[Sample]:
    due = time.monotonic()
    while not reader_left():
        yield watcher.sample()
        due = time.monotonic() if reader_left() else max(due + pause, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _watch(tier: TierURL, samples: Iterator[Sample]) -> None:
    """On a terminal in place, else one below the other."""
    if not sys.stdout.isatty():
        for sample in samples:
            _print(_view(tier, sample))
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(file=sys.stdout), screen=True, auto_refresh=False) as live:
        for sample in samples:
            live.update(_view(tier, sample), refresh=True)


def _print(view: Group) -> None:
    from rich.console import Console

    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200).print(view)
    sys.stdout.flush()


def _as_json(tier: TierURL, sample: Sample) -> dict[str, Any]:
    usage = sample.usage
    return {
        "url": str(tier),
        "time": sample.time,
        "usage": asdict(usage),
        "occupancy": sample.taken / usage.capacity if usage.capacity else None,
        "pinned_share": usage.pinned / usage.used if usage.used else 0.0,
        "stores_per_s": sample.stores_per_s,
        "evictions_per_s": sample.evictions_per_s,
        "exact": sample.exact,
        "complete": sample.complete,
        "scanned": sample.scanned,
        "hottest": sample.hottest,
        "namespaces": sample.namespaces,
    }


def _view(tier: TierURL, sample: Sample) -> Group:
    """A sample for people."""
    from rich.console import Group
    from rich.text import Text

    usage, about = sample.usage, "" if sample.exact else "~"
    share = f" of {format_size(usage.capacity)} ({sample.taken / usage.capacity:.0%})" if usage.capacity else ""
    pinned = f", {usage.pinned / usage.used:.0%} of it pinned" if usage.pinned and usage.used else ""
    gone = "" if sample.evictions_per_s is None else f", {about}{sample.evictions_per_s:.1f} evictions/s"
    lines = [
        f"{tier}   {time.strftime('%H:%M:%S', time.localtime(sample.time))}",
        f"  {counted(usage.blocks, 'block')}, {format_size(sample.taken)}{share}{pinned}",
        f"  {about}{sample.stores_per_s:.1f} stores/s{gone}",
    ]
    if not sample.complete:
        lines.append("  the tables are of a part of the blocks as yet")
    return Group(Text("\n".join(lines)), _hottest(sample), _namespaces(sample))


def _hottest(sample: Sample) -> Table:
    from rich.markup import escape

    table = _table("hottest prefixes, by their first block", "namespace", "digest", ">hits", ">last used", "labels")
    for hot in sample.hottest:
        marks = ", ".join([*hot.labels, *["pinned"] * hot.pinned])
        table.add_row(hot.namespace[:12], hot.digest[:16], str(hot.hits), age(hot.last_used), escape(printable(marks)))
    return table


def _namespaces(sample: Sample) -> Table:
    from rich.markup import escape

    table = _table("namespaces", "namespace", "model", ">blocks", ">bytes", ">pinned")
    for space in sample.namespaces:
        counts = (str(space.blocks), format_size(space.bytes), str(space.pinned))
        table.add_row(space.namespace[:12], escape(printable(space.model)), *counts)
    return table


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left")
    return table
