"""`kvstore archive`: shared prefixes as archives: make them, list them, check them, bring them back, remove them."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli import EXIT_FULL, EXIT_NOT_INTACT
from kvstore.cli._common import age, emit_json, open_to_fill, open_to_inspect, print_table, progress
from kvstore.cli._names import address_json, matching_namespaces
from kvstore.cli._output import printable
from kvstore.cli._restored import exit_as, marking, show_reports
from kvstore.cli._selection import selected, selecting
from kvstore.errors import StoreFullError
from kvstore.inspect.wording import counted
from kvstore.url import TierURL, format_size, parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from kvstore.abc import BlockStore
    from kvstore.archive import ArchiveInfo, Selection
    from kvstore.namespace import Namespace

__all__ = ["archive"]

_HELP = "Machine-readable output: one JSON value on stdout, nothing else there."


def _or_of_group(ctx: click.Context, _: click.Parameter, wanted: bool) -> bool:
    return wanted or bool(ctx.obj)


_json: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--json", "as_json", is_flag=True, callback=_or_of_group, help=_HELP
)


@click.group(
    epilog="\b\nExamples:\n"
    "  kvstore archive create s3://bucket/archives/handbook --from file:///mnt/nvme/kv --label handbook\n"
    "  kvstore archive list s3://bucket/archives\n"
    "  kvstore archive restore s3://bucket/archives/handbook --to lmdb:///mnt/nvme/kv.lmdb"
)
@click.option("--json", "as_json", is_flag=True, help=_HELP)
@click.pass_context
def archive(ctx: click.Context, as_json: bool) -> None:
    """A shared prefix as an archive: a named copy of its blocks on any URL, which stock zarr and xarray read, too.

    An archive is a folder of few large files or objects, complete or not there at all. One that was interrupted, in
    the making or on its way back, is gone on with by the same command.
    """
    ctx.obj = as_json


@archive.command(
    epilog="\b\nExamples:\n"
    "  kvstore archive create s3://bucket/archives/handbook --from file:///mnt/nvme/kv --label handbook\n"
    "  kvstore archive create file:///backup/doc --from lmdb:///mnt/nvme/kv.lmdb --tokens ids.json --keep-until 90d"
)
@click.argument("archive_url")
@click.option("--from", "tier_url", required=True, metavar="TIER_URL", help="The tier that has the blocks.")
@selecting
@click.option(
    "--namespace", "prefix", metavar="PREFIX", help="The namespace whose name starts so, if there are several."
)
@click.option("--salt", default="", help="With --tokens or --text: the salt of the requests.")
@click.option("--compression", metavar="CODEC", help="zstd or blosc, or with a level zstd:9; default: none.")
@click.option("--keep-until", metavar="DATE", help="Refuse to remove it before: 2027-01-31, or from now on: 90d.")
@click.option("--include-tokens", is_flag=True, help="Keep the token ids in it, which are the prompt itself.")
@click.option("--overwrite", is_flag=True, help="Remove an archive that stands there, first.")
@click.option("--plaintext", is_flag=True, help="Let blocks of an encrypted tier stand unencrypted in the archive.")
@_json
@click.pass_context
def create(
    ctx: click.Context, /, archive_url: str, tier_url: str, prefix: str | None, keep_until: str | None,
    compression: str | None, include_tokens: bool, overwrite: bool, plaintext: bool, as_json: bool, **ways: Any,
) -> None:  # fmt: skip
    """Copy one prefix's blocks from a tier into an archive at ARCHIVE_URL.

    Which prefix is said by one of --tokens, --text, --keys, or by --label alone. Every block is checked as it is read.
    The tier is opened read-only. There is no archive before all of it is written; started again after an interruption,
    the command goes on where it was. Exit code 4 when there is no room for it.
    """
    from kvstore import archive as archives

    tokens, keys = selected(ways)
    if include_tokens and tokens is None:
        raise click.UsageError("--include-tokens needs --tokens or --text: other selections do not know them")
    until = None if keep_until is None else _moment(keep_until)
    label: str | None = ways["label"]
    with open_to_inspect(TierURL.parse(tier_url)) as store:
        space = _one_namespace(store, prefix)
        only_label = tokens is None and keys is None
        chosen: Selection = archives.select(
            store, space, label=label if only_label else None, tokens=tokens, keys=keys, salt=ways["salt"]
        )
        with _room(ctx), progress("archiving", len(chosen)) as advance:
            info = archives.create(
                archive_url, store, space, chosen, label=label, compression=compression, keep_until=until,
                tokens=tokens if include_tokens else None, overwrite=overwrite, plaintext=plaintext, progress=advance,
            )  # fmt: skip
    if as_json:
        emit_json(_info_json(info))
    else:
        click.echo(
            f"{info.url}: {counted(info.blocks, 'block')}, {counted(info.tokens, 'token')},"
            f" {format_size(info.stored_bytes)}"
        )


@archive.command(name="list", epilog="\b\nExample:\n  kvstore archive list s3://bucket/archives")
@click.argument("url")
@_json
@click.pass_context
def list_(ctx: click.Context, url: str, as_json: bool) -> None:
    """The archives directly below URL. Exit code 1 when one of them cannot be read; it is named."""
    from kvstore.archive import catalogue

    damaged: dict[str, str] = {}
    found = catalogue(url, damaged=lambda one, error: damaged.update({one: str(error)}))
    if as_json:
        emit_json({"archives": [_info_json(info) for info in found], "damaged": damaged})
    else:
        print_table(
            str(TierURL.parse(url)),
            ("name", "label", "model", ">blocks", ">tokens", ">bytes", "compression", ">age", "kept until"),
            (
                (
                    info.name, info.label, info.namespace.model, str(info.blocks), str(info.tokens),
                    format_size(info.stored_bytes), info.compression, age(info.created), _day(info.keep_until),
                )
                for info in found
            ),
        )  # fmt: skip
        if not (found or damaged):
            click.echo("no archive stands directly below it", err=True)
    for error in damaged.values():
        click.echo(f"damaged: {error}", err=True)
    if damaged:
        ctx.exit(EXIT_NOT_INTACT)


@archive.command(epilog="\b\nExample:\n  kvstore archive show s3://bucket/archives/handbook")
@click.argument("archive_url")
@_json
def show(archive_url: str, as_json: bool) -> None:
    """What the archive at ARCHIVE_URL holds, from which tier and model it is, and until when it is kept."""
    from kvstore.archive import open_archive

    with open_archive(archive_url) as opened:
        facts = _info_json(opened.info)
    if as_json:
        emit_json(facts)
        return
    namespace = facts.pop("namespace")
    rows = [(name, "-" if value in (None, "") else str(value)) for name, value in facts.items()]
    rows += [(f"namespace {name}", json.dumps(value)) for name, value in namespace.items()]
    print_table(opened.info.url, ("", ""), rows)


@archive.command(epilog="\b\nExample:\n  kvstore archive verify s3://bucket/archives/handbook && echo intact")
@click.argument("archive_url")
@_json
@click.pass_context
def verify(ctx: click.Context, archive_url: str, as_json: bool) -> None:
    """Read all of the archive at ARCHIVE_URL and check every byte. Exit code 1 when anything is damaged or missing."""
    from kvstore.archive import open_archive

    with open_archive(archive_url) as opened, progress("verifying", opened.info.blocks) as advance:
        found = opened.verify(progress=advance)
    if as_json:
        emit_json(
            {
                "url": opened.info.url,
                "ok": found.ok,
                "intact": found.intact,
                "bytes": found.nbytes,
                "corrupt": [address_json(opened.namespace, key) for key in found.corrupt],
                "damaged_objects": found.damaged_objects,
            }
        )
    else:
        click.echo(f"{opened.info.url}: {found.intact} of {opened.info.blocks} blocks are intact")
        for path in found.damaged_objects:
            click.echo(f"damaged: {path}")
        for key in found.corrupt:
            click.echo(f"corrupt: {opened.namespace.name} group {key.group} digest {key.digest.hex()}")
    if not found.ok:
        ctx.exit(EXIT_NOT_INTACT)


@archive.command(
    epilog="\b\nExample:\n  kvstore archive restore s3://bucket/archives/handbook --to file:///mnt/nvme/kv"
)
@click.argument("archive_url")
@click.option("--to", "tier_url", required=True, metavar="TIER_URL", help="The tier that is to have the blocks.")
@marking
@_json
@click.pass_context
def restore(
    ctx: click.Context, archive_url: str, tier_url: str, as_json: bool, tenant: str, pin: bool
) -> None:  # fmt: skip
    """Put the blocks of the archive at ARCHIVE_URL into a tier, with their positions and their label.

    What the tier has is not written again, and what is damaged is not written at all. Exit code 1 when not all blocks
    are in the tier in the end (with --pin, pinned), 4 when it was full.
    """
    from kvstore import archive as archives

    with archives.open_archive(archive_url) as opened:
        blocks = opened.info.blocks
    with open_to_fill(TierURL.parse(tier_url)) as store, progress("restoring", blocks) as advance:
        report = archives.restore(archive_url, store, tenant=tenant, pin=pin, progress=advance)
    show_reports([report], str(store.url), as_json=as_json, several=False)
    exit_as(ctx, [report])


@archive.command(epilog="\b\nExample:\n  kvstore archive rm s3://bucket/archives/handbook")
@click.argument("archive_url")
@click.option(
    "--force",
    is_flag=True,
    help="Also one that is to be kept for longer, or whose manifest is damaged, so that this cannot be told.",
)
@_json
def rm(archive_url: str, force: bool, as_json: bool) -> None:
    """Remove the archive at ARCHIVE_URL, or what an interrupted creation left there."""
    from kvstore.archive import remove

    remove(archive_url, force=force)
    shown = str(TierURL.parse(archive_url))
    if as_json:
        emit_json({"removed": shown})
    else:
        click.echo(f"removed {shown}")


@contextmanager
def _room(ctx: click.Context) -> Generator[None]:
    """A disk or a bucket without room has an exit code of its own."""
    from kvstore.archive import ArchiveFullError

    try:
        yield
    except (ArchiveFullError, StoreFullError) as error:
        click.echo("kvstore: " + printable(str(error)), err=True)
        ctx.exit(EXIT_FULL)


def _one_namespace(store: BlockStore, prefix: str | None) -> Namespace:
    found = matching_namespaces(store, prefix or "")
    if len(found) > 1:
        listing = ", ".join(f"{space.name} ({space.model})" for space in found)
        raise click.UsageError(f"{store.url}: say which namespace with --namespace: {listing}")
    return found[0]


def _moment(text: str) -> float:
    """Seconds since the epoch, from a date or a time from now on."""
    try:
        day = datetime.fromisoformat(text)
    except ValueError:
        try:
            return (datetime.now(UTC) + timedelta(seconds=parse_duration(text))).timestamp()
        except (ValueError, OverflowError):
            raise click.UsageError(f"--keep-until {text}: a date such as 2027-01-31, or a time such as 90d") from None
    moment = (day if day.tzinfo else day.replace(tzinfo=UTC)).timestamp()
    if moment <= time.time():
        raise click.UsageError(f"--keep-until {text}: that is past")
    return moment


def _day(moment: float | None) -> str:
    return "" if moment is None else datetime.fromtimestamp(moment, UTC).isoformat(" ", "minutes")


def _info_json(info: ArchiveInfo) -> dict[str, Any]:
    return {
        "url": info.url,
        "name": info.name,
        "label": info.label,
        "blocks": info.blocks,
        "tokens": info.tokens,
        "bytes": info.nbytes,
        "stored_bytes": info.stored_bytes,
        "compression": info.compression,
        "created": datetime.fromtimestamp(info.created, UTC).isoformat(),
        "version": info.version,
        "source": info.source,
        "keep_until": None if info.keep_until is None else datetime.fromtimestamp(info.keep_until, UTC).isoformat(),
        "token_ids": info.has_token_ids,
        "fingerprint": info.namespace.name,
        "namespace": info.namespace.to_manifest(),
    }
