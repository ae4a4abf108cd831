"""What the subcommands share: opening a tier to look at it, adding up what is in it, showing numbers to people."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli._output import printable
from kvstore.registry import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import Console

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.url import TierURL

__all__ = [
    "NamespaceSummary",
    "age",
    "emit_json",
    "json_option",
    "open_to_inspect",
    "print_table",
    "size",
    "stderr_console",
    "summaries",
]

json_option: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--json", "as_json", is_flag=True, help="Machine-readable output: one JSON value on stdout, nothing else there."
)


def open_to_inspect(url: TierURL) -> BlockStore:
    """Open a tier so that looking at it changes nothing: a location that does not exist is an error, not created."""
    return open_store(replace(url, raw_options={**url.raw_options, "readonly": True}))


@dataclass(frozen=True, slots=True)
class NamespaceSummary:
    """One namespace as counted by a scan. Times are seconds since the epoch; None where there are no blocks."""

    namespace: str
    model: str
    revision: str
    block_tokens: int
    groups: int
    blocks: int
    bytes: int
    oldest: float | None
    newest: float | None
    last_used: float | None


def summaries(store: BlockStore) -> list[NamespaceSummary]:
    """Every namespace of the store with its blocks counted, largest first."""
    return sorted((_summary(store, space) for space in store.namespaces()), key=lambda summary: -summary.bytes)


def _summary(store: BlockStore, namespace: Namespace) -> NamespaceSummary:
    blocks, total, oldest, newest, used = 0, 0, float("inf"), 0.0, 0.0
    for info in store.scan(namespace):
        blocks, total = blocks + 1, total + info.stored_bytes
        oldest, newest, used = min(oldest, info.created), max(newest, info.created), max(used, info.last_used)
    return NamespaceSummary(
        namespace=namespace.name,
        model=namespace.model,
        revision=namespace.revision,
        block_tokens=namespace.block_tokens,
        groups=len(namespace.layouts),
        blocks=blocks,
        bytes=total,
        oldest=oldest if blocks else None,
        newest=newest if blocks else None,
        last_used=used if blocks else None,
    )


def emit_json(value: object) -> None:
    """One JSON value to stdout; dataclasses become objects."""
    click.echo(json.dumps(value, indent=2, default=asdict))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table to stdout; columns whose name starts with `>` are right-aligned. Cells are shown as `printable` text."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left")
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left")
    for row in rows:
        table.add_row(*(escape(printable(cell)) for cell in row))
    # A pipe has no width of its own; 80 columns would break every digest in two.
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160).print(table)


def stderr_console() -> Console:
    """Where progress goes, so that stdout stays fit for a pipe."""
    from rich.console import Console

    return Console(stderr=True)


def size(count: float) -> str:
    """Bytes for people: `1.5 GB` (10^9)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PB"


def age(moment: float | None) -> str:
    """How long ago, for people: `5 s`, `3.0 h`, `2.1 d`."""
    if moment is None:
        return "-"
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
