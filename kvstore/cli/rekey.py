"""`kvstore rekey URL…`: another operator's key for encrypted tiers, or new data keys for their blocks."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kvstore.cli import EXIT_NOT_INTACT
from kvstore.cli._common import emit_json, json_option, print_unseen, progress
from kvstore.errors import InvalidOptionError
from kvstore.rekeying import keyrings_of, reseal, rewrap
from kvstore.sealing import KeySource
from kvstore.url import TierURL

if TYPE_CHECKING:
    from typing import Any

__all__ = ["rekey"]


@click.command(
    epilog="\b\nExamples:\n"
    "  kvstore rekey file:///mnt/kv?keyring=/etc/kv.json --encryption env:OLD --new-encryption env:NEW\n"
    "  kvstore rekey 's3://bucket/kv?encryption=env:KEY&keyring=/etc/kv.json' --data"
)
@click.argument("urls", nargs=-1, required=True, metavar="URL…")
@click.option("--encryption", metavar="SOURCE", help="The key now, where the URLs do not say it: env:NAME, file:/path.")
@click.option("--new-encryption", metavar="SOURCE", help="The key from now on: env:NAME or file:/path.")
@click.option("--data", is_flag=True, help="New data keys as well: every block is sealed anew, the old keys dropped.")
@json_option
@click.pass_context
def rekey(
    ctx: click.Context,
    urls: tuple[str, ...],
    encryption: str | None,
    new_encryption: str | None,
    data: bool,
    as_json: bool,
) -> None:
    """Change the keys of the encrypted tiers at URL….

    With --new-encryption each keyring is wrapped by that key, and the old one opens it no more. No block is touched.
    Processes that have a tier open go on; give them the new key when they are started next.

    With --data every tenant gets a new data key and every block is sealed under it, beside readers and writers; then
    the old data keys are dropped. Name all tiers that share a keyring: a block of another one, sealed with an old key,
    is a miss from then on. While blocks under an old key can be read and not be replaced, the old keys stay, and it is
    an error. They stay as well, with exit code 1, where a namespace cannot be looked into. Interrupted, the same
    command goes on where it was; --new-encryption is done last.
    """
    if not (new_encryption or data):
        raise click.UsageError("what is to change? Give --new-encryption, --data, or both")
    tiers = [_tier(url, encryption) for url in urls]
    new_key = None if new_encryption is None else _source("--new-encryption", new_encryption).read()
    keyrings = keyrings_of(tiers)
    answer: dict[str, Any] = {"keyrings": sorted(keyrings), "rewrapped": new_key is not None}
    if data:
        with progress("blocks", None) as advance:
            done = reseal(tiers, keyrings, advance=advance)
        answer |= asdict(done) | {"unseen": done.unseen}
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


def _show(answer: dict[str, Any], *, data: bool, new_encryption: str | None) -> None:
    if data:
        click.echo(
            f"{answer['resealed']} blocks sealed under new data keys, {answer['lost']} lost, {answer['dropped']} old"
            " data keys dropped"
        )
        if answer["unmarked"]:
            click.echo(f"{answer['unmarked']} labels, tenants or pins of those blocks could not be given back")
        print_unseen(answer["unseen"])
    for path in answer["keyrings"] if answer["rewrapped"] else ():
        click.echo(f"{path}: wrapped by {new_encryption}; the key before opens it no more")


def _tier(url: str, encryption: str | None) -> TierURL:
    tier = TierURL.parse(url)
    return tier if encryption is None else TierURL.parse(tier, encryption=_source("--encryption", encryption))


def _source(option: str, text: str) -> KeySource:
    try:
        return KeySource.parse(text)
    except ValueError as error:
        raise InvalidOptionError(f"{option}: {error}") from None
