"""`kvstore rekey URL…`: another operator's key for encrypted tiers, or new data keys for their blocks."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kvstore.cli import EXIT_NOT_INTACT
from kvstore.cli._common import as_it_is, emit_json, json_option, print_table, print_unseen, progress
from kvstore.cli._output import printable
from kvstore.errors import InvalidOptionError
from kvstore.inspect.wording import counted
from kvstore.rekeying import foresee, keyrings_of, reseal, rewrap
from kvstore.sealing import KeySource
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from kvstore.rekeying import Foreseen

__all__ = ["rekey"]


@click.command(
    epilog="\b\nExamples:\n"
    "  kvstore rekey file:///mnt/kv?keyring=/etc/kv.json --encryption env:OLD --new-encryption env:NEW\n"
    "  kvstore rekey 's3://bucket/kv?encryption=env:KEY&keyring=/etc/kv.json' --data --yes"
)
@click.argument("urls", nargs=-1, required=True, metavar="URL…")
@click.option("--encryption", metavar="SOURCE", help="The key now, where the URLs do not say it: env:NAME, file:/path.")
@click.option("--new-encryption", metavar="SOURCE", help="The key from now on: env:NAME or file:/path.")
@click.option("--data", is_flag=True, help="New data keys as well: every block is sealed anew, the old keys dropped.")
@click.option(
    "--yes", is_flag=True, help="With --data: do it. Without this, nothing is changed, and it is said what would be."
)
@json_option
@click.pass_context
def rekey(
    ctx: click.Context,
    urls: tuple[str, ...],
    encryption: str | None,
    new_encryption: str | None,
    data: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Change the keys of the encrypted tiers at URL….

    With --new-encryption each keyring is wrapped by that key, and the old one opens it no more. No block is touched.
    Processes that have a tier open go on; give them the new key when they are started next.

    With --data it is said how many blocks would be sealed anew and which data keys would be dropped; with --yes as well
    each tenant of whom the tiers hold a block gets a new data key, every block is sealed under it, beside readers and
    writers, and then the old data keys are dropped. Name all tiers that share a keyring: a block of another one, sealed
    with a key that is dropped, can be read by nobody from then on. While blocks under an old key can be read and not be
    replaced, the old keys stay, and it is an error. They stay as well, with exit code 1, where a namespace cannot be
    looked into. Interrupted, the same command goes on where it was; --new-encryption is done last.
    """
    if not (new_encryption or data):
        raise click.UsageError("what is to change? Give --new-encryption, --data, or both")
    tiers = [_tier(url, encryption) for url in urls]
    new_key = None if new_encryption is None else _source("--new-encryption", new_encryption).read()
    keyrings = keyrings_of(tiers)
    if data and not yes:
        with progress("blocks", None) as advance:
            found = foresee(tiers, keyrings, advance=advance)
        emit_json(_foreseen_json(keyrings, found)) if as_json else _show_foreseen(found)
        return
    answer: dict[str, Any] = {"keyrings": sorted(keyrings), "rewrapped": new_key is not None}
    if data:
        with progress("blocks", None) as advance:
            done = reseal(tiers, keyrings, advance=advance)
        answer |= asdict(done) | {"unseen": done.unseen, "dry_run": False}
    if new_key is not None:
        rewrap(keyrings, new_key)
    kept = answer.get("kept", 0)
    if as_json:
        emit_json(answer)
    else:
        _show(answer, data=data, new_encryption=new_encryption)
    if kept:
        click.echo(
            f"kvstore: {kept} old data keys were kept, as not all blocks could be looked at: see to what is named"
            " (kvstore verify --repair), then run the same again",
            err=True,
        )
        ctx.exit(EXIT_NOT_INTACT)


def _foreseen_json(keyrings: Iterable[str], found: Foreseen) -> dict[str, Any]:
    return {"keyrings": sorted(keyrings), "rewrapped": False, "dry_run": True, "blocks": found.blocks, **asdict(found)}


def _show_foreseen(found: Foreseen) -> None:
    fates = [*((use, "dropped") for use in found.drop), *((use, "stays") for use in found.keep)]
    print_table(
        "data keys",
        ("keyring", "tenant", "key", ">blocks here", "becomes"),
        ((use.keyring, use.tenant, use.key, str(use.blocks), fate) for use, fate in fates),
    )
    print_unseen(found.unseen)
    if found.unseen:
        click.echo("no data key is dropped while that cannot be looked into: see to it first (kvstore verify --repair)")
    if found.drop:
        click.echo(
            "Every other tier that shares a keyring has to be named in the same command: what it holds under a key that"
            " is dropped can be read by nobody afterwards"
        )
    click.echo(
        f"{counted(found.blocks, 'block')} would be sealed under new data keys, and"
        f" {counted(len(found.drop), 'data key')} be dropped; --yes does it"
    )


def _show(answer: dict[str, Any], *, data: bool, new_encryption: str | None) -> None:
    if data:
        click.echo(
            f"{counted(answer['resealed'], 'block')} sealed under new data keys, {answer['lost']} lost,"
            f" {answer['dropped']} old data keys dropped"
        )
        if answer["unmarked"]:
            click.echo(f"{answer['unmarked']} labels, tenants or pins of those blocks could not be given back")
        print_unseen(answer["unseen"])
        for use in answer["not_here"]:
            click.echo(
                f"kept: the data key {use['key']} of tenant {printable(repr(use['tenant']))} in {use['keyring']}: no"
                " block of that tenant is in the tiers named"
            )
    for path in answer["keyrings"] if answer["rewrapped"] else ():
        click.echo(f"{path}: wrapped by {new_encryption}; the key before opens it no more")


def _tier(url: str, encryption: str | None) -> TierURL:
    tier = TierURL.parse(url)
    if encryption is not None:
        tier = TierURL.parse(tier, encryption=_source("--encryption", encryption))
    return as_it_is(tier)


def _source(option: str, text: str) -> KeySource:
    try:
        return KeySource.parse(text)
    except ValueError as error:
        raise InvalidOptionError(f"{option}: {error}") from None
