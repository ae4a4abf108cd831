"""`kvstore cp SOURCE TARGET`: the blocks of one tier into another, checked on the way; what is there is passed over."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from kvstore.archive.overlapping import check_tiers_apart
from kvstore.cli import EXIT_FULL, EXIT_NOT_INTACT
from kvstore.cli._common import (
    emit_json,
    json_option,
    open_to_fill,
    open_to_inspect,
    print_table,
    print_unseen,
    progress,
)
from kvstore.cli._names import address_json, has_mark, marks_of, matching_namespaces, no_block_has
from kvstore.cli._output import printable
from kvstore.copying import THREADS, Fate, copy
from kvstore.errors import ConfigurationError, InvalidOptionError, StoreNotFoundError
from kvstore.marks import Mark, MarkOutcome
from kvstore.registry import backend_class, open_store
from kvstore.url import READONLY, TierURL, format_size

if TYPE_CHECKING:
    from collections.abc import Generator

    from kvstore.abc import BlockStore
    from kvstore.copying import CopyReport

__all__ = ["cp"]


@click.command(
    epilog="\b\nExamples:\n  kvstore cp file:///mnt/nvme/kv s3://bucket/kv\n"
    "  kvstore cp file:///mnt/nvme/kv s3://bucket/kv --label handbook --dry-run"
)
@click.argument("source_url")
@click.argument("target_url")
@click.option("--namespace", "prefix", metavar="PREFIX", help="Only the namespaces whose name starts so.")
@click.option("--label", help="Only the blocks that have this label.")
@click.option(
    "--threads", type=click.IntRange(1, 256), default=THREADS, show_default=True, help="Batches under way at a time."
)
@click.option("--evict", is_flag=True, help="Let a target under a capacity evict what it has to make room.")
@click.option("--plaintext", is_flag=True, help="Let blocks of an encrypted tier stand unencrypted in the target.")
@click.option("--dry-run", is_flag=True, help="Say what would be copied, and change nothing.")
@json_option
@click.pass_context
def cp(
    ctx: click.Context,
    source_url: str,
    target_url: str,
    prefix: str | None,
    label: str | None,
    threads: int,
    evict: bool,
    plaintext: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Copy the blocks of the tier at SOURCE_URL that the tier at TARGET_URL does not have.

    Positions, parents, labels, tenants and pins come along; ages and hits do not. Every block is checked as it is read:
    one that is damaged stays behind, and is named. Both tiers may be in use. A copy that was interrupted goes on where
    it was when it is started again. The source is opened read-only.

    A target under a capacity is filled, and the copy ends where something would have to go for the next block (exit
    code 4): without --evict nothing does, and the same command again copies little more or nothing. Engines that store
    there meanwhile evict as ever, copied blocks, too, and what was counted may be gone then.

    Exit code 1 when a block was damaged, or refused by the target, when some of the source could not be looked into, or
    when no block has the label.
    """
    source, target = TierURL.parse(source_url), TierURL.parse(target_url)
    _check_apart(source, target)
    mark = Mark(label) if label else None
    with open_to_inspect(source) as here:
        if unknown := _unknown(here, prefix, mark):
            click.echo(printable(unknown), err=True)
            ctx.exit(EXIT_NOT_INTACT)
        with _open_target(target, dry_run) as there:
            total = here.usage().blocks if prefix is None and label is None else None
            with progress("copying", total) as advance:
                report = copy(
                    here,
                    there,
                    named=lambda name: name.startswith((prefix or "").lower()),
                    blocks=None if mark is None else lambda space: here.scan_marked(space, mark),
                    threads=threads,
                    evict=evict,
                    dry_run=dry_run,
                    plaintext=plaintext or dry_run,
                    advance=advance,
                )
    if as_json:
        emit_json(_as_json(source, target, report, dry_run))
    else:
        _show(source, target, report, dry_run)
    _warn(target, report, evict=evict)
    if not report.ok:
        ctx.exit(EXIT_FULL if report.full else EXIT_NOT_INTACT)


def _unknown(source: BlockStore, prefix: str | None, mark: Mark | None) -> str:
    """What to say where no block that is asked for has the label; nothing else is made or changed then."""
    spaces = source.namespaces() if prefix is None else matching_namespaces(source, prefix)
    if mark is None or has_mark(source, spaces, mark):
        return ""
    if not source.capabilities.marks:
        raise ConfigurationError(f"{source.url} keeps no labels: leave out --label, or say --namespace")
    return no_block_has(mark, str(source.url), marks_of(source))


def _check_apart(source: TierURL, target: TierURL) -> None:
    checked = target.validated(backend_class(target).options)
    if checked.option(READONLY):
        raise InvalidOptionError(f"{target}: a copy writes into its target: leave out readonly")
    check_tiers_apart(source, target)


@contextmanager
def _open_target(target: TierURL, dry_run: bool) -> Generator[BlockStore]:
    if not dry_run:
        with open_to_fill(target) as store:
            yield store
        return
    options = {name: value for name, value in target.raw_options.items() if name not in ("capacity", "readonly")}
    try:
        store = open_store(replace(target, raw_options={**options, "readonly": True}))
    except StoreNotFoundError:
        store = open_store("memory://kvstore-cp-nothing-there")  # an empty tier, which nobody else opens
    with store:
        yield store


def _as_json(source: TierURL, target: TierURL, report: CopyReport, dry_run: bool) -> dict[str, Any]:
    fates, marks = report.fates, report.marks
    return {
        "source": str(source),
        "target": str(target),
        "dry_run": dry_run,
        "ok": report.ok,
        "full": report.full,
        "blocks": fates.total(),
        "copied": fates[Fate.COPIED],
        "bytes": report.bytes,
        "already_there": fates[Fate.PRESENT],
        "removed_meanwhile": fates[Fate.GONE],
        "without_room": fates[Fate.FULL],
        "marks_kept": marks[MarkOutcome.MARKED],
        "pins_refused": marks[MarkOutcome.UNPINNED],
        "marks_lost": marks[MarkOutcome.MISSING] + marks[MarkOutcome.FAILED],
        "seconds": round(report.seconds, 3),
        "corrupt": [address_json(*address) for address in report.of(Fate.CORRUPT)],
        "missing": [address_json(*address) for address in report.of(Fate.MISSING)],
        "later": [address_json(*address) for address in report.of(Fate.LATER)],
        "failed": [address_json(*address) for address in report.of(Fate.FAILED)],
        "not_looked_into": report.unseen,
        "purged_lately": [address_json(*address) for address in report.of(Fate.REFUSED)],
    }


def _show(source: TierURL, target: TierURL, report: CopyReport, dry_run: bool) -> None:
    print_table(
        f"{source} -> {target}",
        (
            "namespace",
            "model",
            ">blocks",
            ">to copy" if dry_run else ">copied",
            ">bytes",
            ">already there",
            ">corrupt",
            ">missing",
            ">failed",
        ),
        (
            (
                space.namespace.name,
                space.namespace.model,
                str(space.blocks),
                str(space.fates[Fate.COPIED]),
                format_size(space.bytes),
                *(str(space.fates[fate]) for fate in (Fate.PRESENT, Fate.CORRUPT, Fate.MISSING, Fate.FAILED)),
            )
            for space in report.spaces
        ),
    )
    for fate in (Fate.CORRUPT, Fate.MISSING, Fate.LATER, Fate.FAILED):
        for space, key in report.of(fate):
            click.echo(f"{fate.value}: {space.name} group {key.group} digest {key.digest.hex()}")
    print_unseen(report.unseen)
    if not dry_run and report.bytes:
        speed = report.bytes / 1e9 / max(report.seconds, 1e-9)
        click.echo(f"{format_size(report.bytes)} in {report.seconds:.1f} s, {speed:.2f} GB/s")


def _warn(target: TierURL, report: CopyReport, *, evict: bool) -> None:
    """What is to be known besides, on stderr."""
    marks = report.marks
    if gone := report.fates[Fate.GONE]:
        click.echo(
            f"note: {gone} blocks expired, or were evicted or removed from the source, before they were copied",
            err=True,
        )
    if report.full:
        room = "Give it a larger capacity, or make room on its disk"
        remedy = room if evict else f"{room}, or let it evict with --evict"
        click.echo(
            f"kvstore: {target} is full: {report.fates[Fate.COPIED]} blocks were copied before. {remedy},"
            " and run the same command again",
            err=True,
        )
    if refused := report.fates[Fate.REFUSED]:
        click.echo(f"note: {refused} blocks were purged from {target} a short while ago: it refuses them", err=True)
    if marks[MarkOutcome.UNPINNED]:
        click.echo(
            f"note: {marks[MarkOutcome.UNPINNED]} blocks are not pinned in {target}: half of its capacity is", err=True
        )
    if lost := marks[MarkOutcome.MISSING] + marks[MarkOutcome.FAILED]:
        click.echo(f"note: {lost} labels and pins were not kept by {target}", err=True)
