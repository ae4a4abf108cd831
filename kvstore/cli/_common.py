"""What the subcommands share: opening a tier to look at it, adding up what is in it, showing numbers to people."""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli._output import printable
from kvstore.inspect.opening import open_to_look, with_own_capacity
from kvstore.inspect.summary import NamespaceSummary, summaries
from kvstore.inspect.wording import age, counted
from kvstore.registry import open_store
from kvstore.url import MODE, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from rich.console import Console

    from kvstore.abc import BlockStore
    from kvstore.types import Unseen
    from kvstore.url import TierURL

__all__ = [
    "NamespaceSummary",
    "age",
    "as_it_is",
    "emit_json",
    "json_option",
    "open_to_fill",
    "open_to_inspect",
    "print_table",
    "print_unseen",
    "progress",
    "stderr_console",
    "stdout_console",
    "summaries",
]

PROGRESS_S = 5.0
"""Seconds between lines of progress where no terminal is."""

json_option: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--json", "as_json", is_flag=True, help="Machine-readable output: one JSON value on stdout, nothing else there."
)


def open_to_inspect(url: TierURL) -> BlockStore:
    """`open_to_look`, with what there is to say of it on stderr."""
    store, note = open_to_look(url)
    if note:
        click.echo(f"note: {note}", err=True)
    return store


def as_it_is(url: TierURL) -> TierURL:
    """`with_own_capacity`, with what there is to say of it on stderr: for every command that writes into a tier."""
    own, note = with_own_capacity(url)
    if note:
        click.echo(f"note: {note}", err=True)
    return own


@contextmanager
def open_to_fill(url: TierURL) -> Generator[BlockStore]:
    """A tier that a command puts blocks into, made where there is none. Where the body raises before anything came into
    a local tier that was made for it, that is taken away again, unless others have it open.
    """
    from kvstore.bench.footprint import Footprint
    from kvstore.presence import is_presence_file

    tier, path = as_it_is(url), Path(url.location)
    footprint = Footprint.of(path) if path.is_absolute() else None
    store = open_store(tier)
    made = frozenset[str]()
    if footprint is not None and footprint.before <= {"lost+found"} and store.capabilities.capacity_is_exact:
        made = footprint.made()
    try:
        with store:
            yield store
    except Exception:
        if footprint is not None and made:
            now = footprint.made()
            if all(name in made or is_presence_file(name) for name in now):
                footprint.remove(now, store.url.option(MODE))
        raise


def emit_json(value: object) -> None:
    """One JSON value to stdout; dataclasses become objects."""
    click.echo(json.dumps(value, indent=2, default=asdict))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table to stdout; columns whose name starts with `>` are right-aligned. Cells are shown as `printable` text."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left")
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left")
    for row in rows:
        table.add_row(*(escape(printable(cell)) for cell in row))
    stdout_console().print(table)


def print_unseen(unseen: Iterable[Unseen]) -> None:
    """What stands in a tier and was not looked into, to stdout."""
    for one in unseen:
        size = "" if one.bytes is None else f", {format_size(one.bytes)}"
        click.echo(f"not looked into: {counted(one.blocks, 'block')}{size}: {printable(one.why)}")


def stdout_console() -> Console:
    """Where answers for people go. A pipe has no width of its own; 80 columns would break every digest in two."""
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200)


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
