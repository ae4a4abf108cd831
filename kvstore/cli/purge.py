"""`kvstore purge URL…`: blocks that are to be gone for good, and a receipt of what went and what remains."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.abc import REFUSE_S
from kvstore.cli import EXIT_NOT_INTACT
from kvstore.cli._common import as_it_is, emit_json, json_option, print_table, print_unseen, progress
from kvstore.cli._names import marks_of, no_block_has
from kvstore.cli._output import OutputError, printable
from kvstore.cli._receipt import ReceiptFile
from kvstore.errors import InvalidOptionError, KVStoreError
from kvstore.inspect.wording import counted
from kvstore.marks import Mark
from kvstore.purging import Keys, Receipt, Request, TierReceipt
from kvstore.purging import purge as purge_tiers
from kvstore.registry import backend_class, open_store
from kvstore.tombs import MOST_REFUSED_S
from kvstore.url import READONLY, TierURL, format_size, parse_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.types import Residue

__all__ = ["purge", "receipt_json"]


class _Time(click.ParamType[float]):
    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


@click.command(
    epilog="\b\nExamples:\n  kvstore purge file:///mnt/nvme/kv s3://bucket/kv --tenant acme\n"
    "  kvstore purge file:///mnt/nvme/kv --tenant acme --yes --receipt acme.json\n"
    "  kvstore purge lmdb:///mnt/nvme/kv.lmdb --all --yes"
)
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@click.option("--namespace", "prefix", metavar="PREFIX", help="Blocks of the namespaces whose names start so.")
@click.option("--label", default="", help="Blocks that have this label.")
@click.option("--tenant", default="", help="Blocks that this tenant used, shared ones included.")
@click.option("--older-than", type=_Time(), help="Blocks that were stored longer ago than this, such as 7d.")
@click.option("--all", "everything", is_flag=True, help="Every block.")
@click.option("--yes", is_flag=True, help="Remove them. Without this, nothing is changed.")
@click.option(
    "--refuse",
    type=_Time(),
    default=REFUSE_S,
    show_default="10min",
    help="How long they are not stored again, while engines still have them in memory; 0: not at all.",
)
@click.option(
    "--keys",
    type=click.Choice([choice.value for choice in Keys]),
    default=Keys.AUTO.value,
    show_default=True,
    help="Data keys of an encrypted tier; auto destroys those of a --tenant that goes as a whole; destroy is for --all"
    " or --tenant alone.",
)
@click.option("--keep-bytes", is_flag=True, help="Do not overwrite what removed blocks leave on a local disk.")
@click.option(
    "--receipt",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the receipt, as JSON, to FILE; its room is taken before anything is removed.",
)
@json_option
@click.pass_context
def purge(
    ctx: click.Context,
    urls: Sequence[str],
    prefix: str | None,
    label: str,
    tenant: str,
    older_than: float | None,
    everything: bool,
    yes: bool,
    refuse: float,
    keys: str,
    keep_bytes: bool,
    file: Path | None,
    as_json: bool,
) -> None:
    """Say which blocks of the tiers at URL... a purge would remove, and with --yes remove them for good.

    Blocks to which all that is given applies: --namespace, --label, --tenant, --older-than; or --all. Pinned ones go as
    well. No get finds them any more, and for ten minutes nobody stores them again. The receipt says what went, what
    failed, and what remains that no removal reaches. Engines may go on; reset their own caches afterwards.

    Exit code 1 when a tier failed or something is left: run the same command again. Also when no block has the label or
    the tenant, and when the receipt could not be written in the end: it goes to stdout then, or to stderr.
    """
    if everything and (prefix or label or tenant or older_than is not None):
        raise click.UsageError("--all is every block: leave out what narrows it down")
    if not (everything or prefix or label or tenant or older_than is not None):
        raise click.UsageError("which blocks? Give --namespace, --label, --tenant, --older-than or --all")
    if keys == Keys.DESTROY.value and (prefix or label or older_than is not None):
        raise click.UsageError("--keys destroy goes with --all or --tenant alone: a key opens more than these blocks")
    if refuse > MOST_REFUSED_S:
        raise click.UsageError(f"--refuse: at most {MOST_REFUSED_S / 86400:.0f}d")
    tiers = [_checked(TierURL.parse(url)) for url in urls]
    names, failed = (None, dict[int, str]()) if prefix is None else _matching(tiers, prefix)
    asked = Request(names, label, tenant, older_than, everything)
    work = partial(purge_tiers, dry_run=not yes, refuse_s=refuse, overwrite=not keep_bytes, keys=Keys(keys))
    written = True
    with nullcontext() if file is None else ReceiptFile(file) as receipt:  # before anything is removed
        with progress("purging" if yes else "looking", None) as advance:
            done = work([tier for place, tier in enumerate(tiers) if place not in failed], asked, advance=advance)
        for place, why in failed.items():
            done.tiers.insert(place, TierReceipt(str(tiers[place]), done.began, failed=[why]))
        if receipt is not None:
            written = _write(receipt, done)
    written &= _print(done, as_json=as_json or not written)
    if unknown := _unknown(tiers, done):
        click.echo(printable(unknown), err=True)
    if unknown or not (done.complete and written):
        ctx.exit(EXIT_NOT_INTACT)


def _unknown(tiers: Sequence[TierURL], done: Receipt) -> str:
    """What to say where blocks were asked for by a label or a tenant, and none has it."""
    mark = done.asked.mark
    if mark == Mark() or not done.nothing_found or any(tier.failed for tier in done.tiers):
        return ""
    there, kept = set[Mark](), False
    for tier in tiers:
        with open_store(tier, readonly=True) as store:
            there |= marks_of(store) if store.capabilities.marks else set()
            kept |= store.capabilities.marks
    known = any(mark.names(one) for one in there)  # by blocks that are younger, or in another namespace
    return "" if known else no_block_has(mark, ", ".join(map(str, tiers)), there if kept else None)


def _print(receipt: Receipt, *, as_json: bool) -> bool:
    """Whether it is on stdout; if not, what was removed is told on stderr, as nothing else knows it any more."""
    try:
        emit_json(receipt_json(receipt)) if as_json else _show(receipt)
        sys.stdout.flush()
    except OutputError as error:
        if receipt.dry_run:
            raise
        click.echo(f"kvstore: {error.message}; the purge is over, and this is its receipt:", err=True)
        click.echo(json.dumps(receipt_json(receipt), indent=2), err=True)
        return False
    return True


def _write(file: ReceiptFile, receipt: Receipt) -> bool:
    """Whether the receipt is in the file; if not, why is said."""
    try:
        file.write(json.dumps(receipt_json(receipt), indent=2) + "\n")
    except OSError as error:
        click.echo(
            f"kvstore: the purge is over, and its receipt could not be written to {file.path} ({error.strerror}): it"
            " stands on stdout, keep it from there",
            err=True,
        )
        return False
    return True


def _checked(tier: TierURL) -> TierURL:
    """Without what is another's work, such as a sweep. What cannot be purged at all is an error before anything is."""
    if tier.validated(backend_class(tier).options).option(READONLY):
        raise InvalidOptionError(f"{tier}: what is removed is written: leave out readonly")
    return as_it_is(tier)


def _matching(tiers: Sequence[TierURL], prefix: str) -> tuple[tuple[str, ...], dict[int, str]]:
    """The names of all namespaces that start so, in any tier; and which tiers could not tell, with why."""
    known, failed = set[str](), dict[int, str]()
    for place, tier in enumerate(tiers):
        try:
            with open_store(tier, readonly=True) as store:
                known |= {space.name for space in store.namespaces()} | {one.namespace for one in store.unseen()}
        except KVStoreError as error:
            if len(tiers) == 1:
                raise
            failed[place] = str(error)
    matching = sorted(name for name in known if name.startswith(prefix.lower()))
    if not matching:
        raise click.UsageError(f"no namespace starts with {prefix!r}. There are: {', '.join(sorted(known)) or 'none'}")
    return tuple(matching), failed


def receipt_json(receipt: Receipt) -> dict[str, Any]:
    """A receipt for machines, and for the file of who answers for it."""
    return {
        "kvstore_purge_receipt": 1,
        "asked": asdict(receipt.asked),
        "dry_run": receipt.dry_run,
        "complete": receipt.complete,
        "nothing_found": receipt.nothing_found,
        "began": _when(receipt.began),
        "ended": _when(receipt.ended),
        "tiers": [_tier_json(tier) for tier in receipt.tiers],
        "elsewhere": receipt.elsewhere,
    }


def _tier_json(tier: TierReceipt) -> dict[str, Any]:
    facts = asdict(tier)
    until = facts.pop("refused_until")
    return {
        **facts,
        "began": _when(tier.began),
        "seconds": round(tier.seconds, 3),
        "refused_until": None if until is None else _when(until),
        "blocks": tier.blocks,
        "bytes": tier.bytes,
        "complete": tier.complete,
    }


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _show(receipt: Receipt) -> None:
    verb = "would go" if receipt.dry_run else "gone"
    for tier in receipt.tiers:
        print_table(
            tier.url,
            ("namespace", "model", f">blocks {verb}", ">bytes", ">pinned", ">of other tenants too"),
            (
                (
                    space.namespace,
                    space.model,
                    str(space.blocks),
                    format_size(space.bytes),
                    str(space.pinned),
                    str(space.shared),
                )
                for space in tier.spaces
            ),
        )
        for failure in tier.failed:
            click.echo(f"failed: {failure}")
        print_unseen(tier.unseen)
        if tier.left:
            click.echo(f"{counted(tier.left, 'block')} still there: run the same command again")
        if tier.stored_since:
            click.echo(
                f"{tier.stored_since} such blocks were stored since it began: reset the engines, then purge again"
            )
        if not receipt.dry_run:
            _show_rest(tier)
    if receipt.dry_run:
        blocks, nbytes = sum(tier.blocks for tier in receipt.tiers), sum(tier.bytes for tier in receipt.tiers)
        click.echo(f"{counted(blocks, 'block')}, {format_size(nbytes)} would go; --yes removes them")
    else:
        for text in receipt.elsewhere:
            click.echo(text)


def _show_rest(tier: TierReceipt) -> None:
    if not tier.blocks:
        click.echo("nothing like that was found")
    click.echo(f"{counted(tier.blocks, 'block')}, {format_size(tier.bytes)} gone, in {tier.seconds:.1f} s")
    if tier.blocks and tier.refused_until is not None:
        within = f", other processes within {tier.others_know_within:.0f} s" if tier.others_know_within else ""
        click.echo(f"they are not stored again before {_when(tier.refused_until)}{within}")
    if tier.erasable is not None:
        fate = "destroyed: no copy of them can be read" if tier.erasable else "kept: who has it can read what remains"
        click.echo(f"the key that they were encrypted with is {fate}")
    for residue in tier.remains:
        click.echo(f"remains: {_said(residue)}")


def _said(residue: Residue) -> str:
    size = "" if residue.nbytes is None else f", {format_size(residue.nbytes)}"
    return f"{residue.what}{size}" + (f" ({residue.remedy})" if residue.remedy else "")
