"""`kvstore reindex URL`: a local tier learns of blocks that were copied into its folder, and forgets what is gone."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli._common import as_it_is, emit_json, json_option, progress
from kvstore.errors import ConfigurationError
from kvstore.inspect.wording import counted
from kvstore.registry import open_store
from kvstore.url import TierURL

if TYPE_CHECKING:
    from kvstore.abc import BlockStore

__all__ = ["reindex"]


@click.command(epilog="\b\nExample:\n  aws s3 sync s3://bucket/kv /mnt/nvme/kv && kvstore reindex file:///mnt/nvme/kv")
@click.argument("url")
@json_option
def reindex(url: str, as_json: bool) -> None:
    """Make the catalogue of the local tier at URL know the blocks that stand in its folder.

    For blocks that came by a plain copy (cp, rsync, aws s3 sync) of another tier's folder or prefix. The tier may be in
    use meanwhile. Blocks over the tier's capacity are evicted, the least recently used first. What is no whole block is
    left where it is, and counted.
    """
    tier = TierURL.parse(url)
    with open_store(as_it_is(tier)) as store:
        with progress("compared", store.usage().blocks or None) as advance:
            found = asdict(_reindexing(store)(advance))
        del found["erased"]  # which only a repair does
        if as_json:
            emit_json({"url": str(tier), **found})
            return
        click.echo(f"{tier}: {counted(found['added'], 'block')} added, {found['removed']} that were gone taken out")
        if found["unreadable"]:
            click.echo(f"  {found['unreadable']} files have the name of a block and are none: left where they are")


def _reindexing(store: BlockStore) -> Any:
    method = getattr(store, "reindex", None)
    if method is None:
        raise ConfigurationError(f"{store.url} has no catalogue beside its blocks: nothing there needs to be reindexed")
    return method
