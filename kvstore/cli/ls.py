"""`kvstore ls URL`: namespaces with their counts, or with `--namespace` the blocks in them."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli._common import age, emit_json, json_option, open_to_inspect, print_table, summaries
from kvstore.types import NO_POSITION
from kvstore.url import TierURL, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo

__all__ = ["ls"]


@click.command(
    epilog="\b\nExamples:\n  kvstore ls file:///mnt/nvme/kv\n  kvstore ls file:///mnt/nvme/kv --namespace 3f9a"
)
@click.argument("url")
@click.option("--namespace", "prefix", metavar="PREFIX", help="List blocks of the namespaces whose name starts so.")
@click.option(
    "--limit", type=click.IntRange(min=0), default=100, show_default=True, help="Most blocks to list; 0 lists all."
)
@json_option
def ls(url: str, prefix: str | None, limit: int, as_json: bool) -> None:
    """List what is in the tier at URL: its namespaces, or with --namespace the blocks of those that match.

    A block's marks are its labels, each with its tenant behind an @, and with a * before it where it pins the block.

    The tier is opened read-only: nothing is created, evicted or removed.
    """
    tier = TierURL.parse(url)
    with open_to_inspect(tier) as store:
        if prefix is None:
            _namespaces(tier, store, as_json)
        else:
            _blocks(tier, store, _matching(store, prefix), limit, as_json)


def _matching(store: BlockStore, prefix: str) -> list[Namespace]:
    spaces = store.namespaces()
    matching = [space for space in spaces if space.name.startswith(prefix.lower())]
    if not matching:
        listing = ", ".join(sorted(space.name for space in spaces)) or "none"
        raise click.UsageError(f"{store.url}: no namespace starts with {prefix!r}. There are: {listing}")
    return matching


def _namespaces(tier: TierURL, store: BlockStore, as_json: bool) -> None:
    found = summaries(store)
    if as_json:
        emit_json({"url": str(tier), "namespaces": found})
        return
    print_table(
        str(tier),
        ("namespace", "model", ">blocks", ">bytes"),
        ((space.namespace, space.model, str(space.blocks), format_size(space.bytes)) for space in found),
    )


def _blocks(tier: TierURL, store: BlockStore, spaces: list[Namespace], limit: int, as_json: bool) -> None:
    listed: Iterator[tuple[Namespace, BlockInfo]] = chain.from_iterable(
        ((space, info) for info in store.scan(space)) for space in spaces
    )
    rows = list(islice(listed, limit) if limit else listed)
    more = bool(limit) and next(listed, None) is not None
    if as_json:
        blocks = [_as_json(space, info) for space, info in rows]
        emit_json({"url": str(tier), "blocks": blocks, "truncated": more})
        return
    marked = any(info.marks for _, info in rows)
    print_table(
        str(tier),
        ("namespace", ">group", "digest", ">position", ">bytes", ">age", ">last used", ">hits") + ("marks",) * marked,
        (_as_row(space, info) + (_said(info),) * marked for space, info in rows),
    )
    if more:
        click.echo(f"and more: --limit 0 lists all, the first {limit} are shown", err=True)


def _as_json(space: Namespace, info: BlockInfo) -> dict[str, Any]:
    return {
        "namespace": space.name,
        "group": info.key.group,
        "digest": info.key.digest.hex(),
        "parent": info.parent.hex() or None,
        "position": None if info.position == NO_POSITION else info.position,
        "bytes": info.stored_bytes,
        "created": info.created,
        "last_used": info.last_used,
        "hits": info.hits,
        "labels": info.labels,
        "tenants": info.tenants,
        "pinned": info.pinned,
    }


def _said(info: BlockInfo) -> str:
    """A block's marks for people: labels, each with its tenant behind an @, pins with a * before them."""
    return ", ".join(f"{'*' * mark.pinned}{mark.label}{'@' * bool(mark.tenant)}{mark.tenant}" for mark in info.marks)


def _as_row(space: Namespace, info: BlockInfo) -> tuple[str, ...]:
    return (
        space.name[:12],
        str(info.key.group),
        info.key.digest.hex(),
        "-" if info.position == NO_POSITION else str(info.position),
        format_size(info.stored_bytes),
        age(info.created),
        age(info.last_used),
        str(info.hits),
    )
