"""`kvstore stat URL`: what is in a tier, how full it is and how its bytes move."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kvstore.cli._common import age, emit_json, json_option, open_to_inspect, print_table, print_unseen, summaries
from kvstore.inspect.wording import counted
from kvstore.url import TierURL, format_size

if TYPE_CHECKING:
    from kvstore.abc import BlockStore
    from kvstore.cli._common import NamespaceSummary

__all__ = ["stat"]


@click.command(epilog="\b\nExample:\n  kvstore stat file:///mnt/nvme/kv")
@click.argument("url")
@json_option
def stat(url: str, as_json: bool) -> None:
    """What is in the tier at URL: namespaces, blocks, bytes, ages, how full it is, how its bytes move.

    The tier is opened read-only: nothing is created, evicted or removed.
    """
    tier = TierURL.parse(url)
    with open_to_inspect(tier) as store:
        found, unseen = summaries(store), store.unseen()
        if as_json:
            emit_json(
                {
                    "url": str(tier),
                    "capabilities": asdict(store.capabilities),
                    "usage": asdict(store.usage()),
                    "scrub": store.scrubbed(),
                    "namespaces": found,
                    "not_looked_into": unseen,
                }
            )
        else:
            _show(tier, store, found)
            print_unseen(unseen)


def _show(tier: TierURL, store: BlockStore, found: list[NamespaceSummary]) -> None:
    usage, can = store.usage(), store.capabilities
    taken = usage.used + usage.reserved + usage.overhead
    share = (
        f" of {format_size(usage.capacity)} ({taken / usage.capacity:.0%})" if usage.capacity else ", no capacity set"
    )
    click.echo(str(tier))
    click.echo(f"  {counted(usage.blocks, 'block')}, {format_size(taken)}{share}")
    click.echo(
        f"  {format_size(usage.used)} in blocks, {format_size(usage.reserved)} reserved,"
        f" {format_size(usage.overhead)} overhead"
    )
    if usage.pinned:
        click.echo(f"  {format_size(usage.pinned)} pinned, which nothing evicts")
    click.echo(f"  I/O: {can.io}; {'shared' if can.shared else 'not shared'} between processes")
    if can.sealed:
        click.echo("  encrypted, with a data key for each tenant")
    for note in can.notes:
        click.echo(f"  note: {note}")
    if (done := store.scrubbed()) is not None:
        last = f"the last whole pass ended {age(done.ended)} ago" if done.passes else "no whole pass yet"
        click.echo(
            f"  scrub: {counted(done.blocks, 'block')}, {format_size(done.bytes)}, {done.corrupt} corrupt; {last}"
        )
    _show_namespaces(found)


def _show_namespaces(found: list[NamespaceSummary]) -> None:
    print_table(
        "namespaces",
        ("namespace", "model", "revision", ">tokens", ">blocks", ">bytes", ">oldest", ">newest", ">last used"),
        (
            (
                space.namespace,
                space.model,
                space.revision,
                str(space.block_tokens),
                str(space.blocks),
                format_size(space.bytes),
                age(space.oldest),
                age(space.newest),
                age(space.last_used),
            )
            for space in found
        ),
    )
    labels = [(space.namespace, label, str(count)) for space in found for label, count in space.labels.items()]
    if labels:
        print_table("labels", ("namespace", "label", ">blocks"), labels)
