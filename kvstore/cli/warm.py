"""`kvstore warm`: a tier gets the prefixes that its engines will be asked for, before they are."""

from __future__ import annotations

import click

from kvstore.cli._common import json_option, open_to_fill, progress
from kvstore.cli._names import matching_namespaces
from kvstore.cli._restored import exit_as, marking, show_reports
from kvstore.url import TierURL

__all__ = ["warm"]


@click.command(
    epilog="\b\nExample:\n  kvstore warm --to file:///mnt/nvme/kv s3://bucket/archives/handbook s3://bucket/archives/faq"
)
@click.option("--to", "tier_url", required=True, metavar="TIER_URL", help="The tier that is to have the blocks.")
@click.option(
    "--namespace",
    "prefix",
    metavar="PREFIX",
    help="Take archives of the tier's namespace whose name starts so; default: of any namespace that it has.",
)
@marking
@click.argument("archive_urls", metavar="ARCHIVE_URL...", nargs=-1, required=True)
@json_option
@click.pass_context
def warm(
    ctx: click.Context, tier_url: str, prefix: str | None, archive_urls: tuple[str, ...], as_json: bool,
    tenant: str, pin: bool,
) -> None:  # fmt: skip
    """Restore archives into the tier at TIER_URL, in order.

    Before anything is written it is made sure that every archive is of use to engines whose blocks the tier has: one of
    another namespace is refused, with what differs (`kvstore archive restore` takes it all the same). A tier without
    any block takes all. Exit code 1 when not all blocks are in the tier in the end, 4 when it was full.
    """
    from kvstore import archive as archives

    with open_to_fill(TierURL.parse(tier_url)) as store:
        space = None if prefix is None else matching_namespaces(store, prefix)[0]
        total = 0
        for url in archive_urls:
            with archives.open_archive(url) as opened:
                total += opened.info.blocks
        with progress("warming", total) as advance:
            reports = archives.warm(store, space, archive_urls, tenant=tenant, pin=pin, progress=advance)
    show_reports(reports, str(store.url), as_json=as_json)
    exit_as(ctx, reports)
