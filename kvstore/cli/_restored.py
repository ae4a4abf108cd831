"""For `kvstore archive restore` and `kvstore warm`: what is to hold of restored blocks, and what became of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvstore.cli import EXIT_FULL, EXIT_NOT_INTACT
from kvstore.cli._common import emit_json, print_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.archive import RestoreReport

__all__ = ["exit_as", "marking", "show_reports"]


def marking(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say what is to hold of restored blocks, which archives do not keep."""
    pin = click.option("--pin", is_flag=True, help="Pin the blocks, as far as a tier's pins go, under their label.")
    return click.option("--tenant", default="", help="Say that the blocks are this tenant's.")(pin(command))


def _report_json(report: RestoreReport) -> dict[str, Any]:
    """A report for machines."""
    return {
        "archive": report.archive.url,
        "complete": report.complete,
        "blocks": report.archive.blocks,
        "restored": report.restored,
        "already_there": report.there,
        "corrupt": report.corrupt,
        "refused": report.refused,
        "full": report.full,
        "labelled": report.labelled,
        "pinned": report.pinned,
    }


def show_reports(reports: Sequence[RestoreReport], tier: str, *, as_json: bool, several: bool = True) -> None:
    """What became of archives in a tier, on stdout."""
    if as_json:
        emit_json([_report_json(report) for report in reports] if several else _report_json(reports[0]))
        return
    columns = ("archive", ">blocks", ">restored", ">already there", ">corrupt", ">refused", ">labelled", ">pinned")
    print_table(
        tier,
        columns,
        (
            (
                one.archive.url, str(one.archive.blocks), str(one.restored), str(one.there), str(one.corrupt),
                str(one.refused), *("-" if number is None else str(number) for number in (one.labelled, one.pinned)),
            )
            for one in reports
        ),
    )  # fmt: skip
    for one in reports:
        if one.corrupt:
            click.echo(f"{one.corrupt} blocks of {one.archive.url} are damaged: kvstore archive verify names them")


def exit_as(ctx: click.Context, reports: Sequence[RestoreReport]) -> None:
    """The exit code that says what is missing."""
    if any(report.full for report in reports):
        ctx.exit(EXIT_FULL)
    if not all(report.complete for report in reports):
        ctx.exit(EXIT_NOT_INTACT)
