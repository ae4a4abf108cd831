"""What the subcommands share: opening a tier to look at it, adding up what is in it, showing numbers to people."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli._output import printable
from kvstore.errors import CapacityMismatchError, InvalidOptionError, StoreFullError, StoreNotFoundError
from kvstore.registry import backend_class, open_store
from kvstore.url import READONLY, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

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
    "progress",
    "stderr_console",
    "summaries",
]

PROGRESS_S = 5.0
"""Seconds between lines of progress where no terminal is."""

json_option: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--json", "as_json", is_flag=True, help="Machine-readable output: one JSON value on stdout, nothing else there."
)


def open_to_inspect(url: TierURL) -> BlockStore:
    """Open a tier so that looking at it changes nothing: a location that does not exist is an error, not created.

    Every option is checked. A `capacity` other than the tier's own is passed over with a note on stderr: it would take
    effect when the tier is opened for writing, and looking depends on none.
    """
    checked = url.validated(backend_class(url).options)
    if "readonly" in url.raw_options and not checked.option(READONLY):
        raise InvalidOptionError(f"{url}: this command only looks and opens every tier read-only: leave out readonly")
    options = {**url.raw_options, "readonly": True}
    try:
        return open_store(replace(url, raw_options=options))
    except (CapacityMismatchError, StoreFullError):
        if options.pop("capacity", None) is None:
            raise
        store = open_store(replace(url, raw_options=options))
        click.echo(f"note: {url}: the capacity asked for is not the tier's, {_capacity(store)}", err=True)
        return store
    except StoreNotFoundError as error:
        if url.scheme != "memory":
            raise
        raise StoreNotFoundError(f"{error}. Blocks in the memory of another process cannot be seen from here") from None


def _capacity(store: BlockStore) -> str:
    capacity = store.usage().capacity
    return "which has none" if capacity is None else format_size(capacity, exact=True)


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
    pinned: int
    """Blocks that are not evicted."""
    labels: dict[str, int]
    """Blocks by label; one with several is counted for each."""


def summaries(store: BlockStore) -> list[NamespaceSummary]:
    """Every namespace of the store with its blocks counted, largest first."""
    return sorted((_summary(store, space) for space in store.namespaces()), key=lambda summary: -summary.bytes)


def _summary(store: BlockStore, namespace: Namespace) -> NamespaceSummary:
    blocks, total, pinned, oldest, newest, used = 0, 0, 0, float("inf"), 0.0, 0.0
    labels: Counter[str] = Counter()
    for info in store.scan(namespace):
        blocks, total = blocks + 1, total + info.stored_bytes
        pinned += info.pinned
        labels.update(info.labels)
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
        pinned=pinned,
        labels=dict(sorted(labels.items())),
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
    # A pipe has no width of its own; 80 columns would break every digest in two, and every list of marks.
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200).print(table)


def stderr_console() -> Console:
    """Where progress goes, so that stdout stays fit for a pipe."""
    from rich.console import Console

    return Console(stderr=True)


@contextmanager
def progress(what: str, total: int | None) -> Generator[Callable[..., object]]:
    """Yields `advance(steps=1)`. On stderr: a bar where a person watches, else a line every few seconds.

    `total=None`: how much there is to do is not known.
    """
    console = stderr_console()
    if not console.is_terminal:
        yield _Lines(what, total).advance
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield partial(bar.advance, bar.add_task("", total=total))


@dataclass(slots=True)
class _Lines:
    """Progress for a log file; what is over within seconds needs none."""

    what: str
    total: int | None
    done: int = 0
    told: float = field(default_factory=time.monotonic)

    def advance(self, steps: int = 1) -> None:
        self.done += steps
        if time.monotonic() - self.told >= PROGRESS_S:
            self.told = time.monotonic()
            of = "" if self.total is None else f" of {self.total}"
            click.echo(f"{self.what}: {self.done}{of}", err=True)


def age(moment: float | None) -> str:
    """How long ago, for people: `5 s`, `3.0 h`, `2.1 d`."""
    if moment is None:
        return "-"
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
