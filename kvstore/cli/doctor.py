"""`kvstore doctor URL`: what a tier needs at its place, and whether it is there."""

from __future__ import annotations

import click

from kvstore.cli import EXIT_NOT_INTACT
from kvstore.cli._common import emit_json, json_option
from kvstore.cli._output import printable
from kvstore.doctor import Finding, Grade, examine
from kvstore.url import TierURL

__all__ = ["doctor"]

_SHOWN = {Grade.OK: ("ok", "green"), Grade.WARNING: ("warning", "yellow"), Grade.PROBLEM: ("PROBLEM", "red")}


@click.command(epilog="\b\nExample:\n  kvstore doctor 'file:///mnt/nvme/kv?capacity=500GB'")
@click.argument("url")
@click.option("--write", is_flag=True, help="Also store, load, time and remove 16 scratch blocks of 1 MiB.")
@json_option
@click.pass_context
def doctor(ctx: click.Context, url: str, write: bool, as_json: bool) -> None:
    """Check what the tier at URL needs here: location, file system, O_DIRECT, room, other users, limits, credentials.

    Run it as the user, and in the container, that the engine runs in. Nothing is created or changed without --write;
    with it, whatever was made is removed again. Exit code 0 when the tier can be used (warnings included), 1 when there
    is a problem.
    """
    tier = TierURL.parse(url)
    findings: list[Finding] = []
    for finding in examine(tier, write=write):
        findings.append(finding)
        if not as_json:
            _show(finding)
    grades = [finding.grade for finding in findings]
    problems = grades.count(Grade.PROBLEM)
    if as_json:
        emit_json({"url": str(tier), "ok": not problems, "findings": findings})
    else:
        click.echo(f"{tier}: {problems} problems, {grades.count(Grade.WARNING)} warnings")
    if problems:
        ctx.exit(EXIT_NOT_INTACT)


def _show(finding: Finding) -> None:
    grade, colour = _SHOWN[finding.grade]
    click.echo(f"{click.style(f'{grade:8}', fg=colour)} {finding.check}: {printable(finding.found)}")
    if finding.remedy:
        click.echo(f"{'':8}   -> {printable(finding.remedy)}")
