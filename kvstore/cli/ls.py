"""`kvstore ls URL`: namespaces with their counts, with `--namespace` the blocks in them, with `--tree` the prefixes."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli._common import age, emit_json, json_option, open_to_inspect, print_table, stdout_console, summaries
from kvstore.cli._names import address_json, facts_json, matching_namespaces
from kvstore.cli._output import printable
from kvstore.inspect.scanned import Scanned
from kvstore.inspect.tree import PrefixTree
from kvstore.inspect.wording import counted, short
from kvstore.types import NO_POSITION
from kvstore.url import TierURL, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.tree import Tree

    from kvstore.abc import BlockStore
    from kvstore.inspect.tree import Run
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo

__all__ = ["ls"]


@click.command(
    epilog="\b\nExamples:\n  kvstore ls file:///mnt/nvme/kv\n  kvstore ls file:///mnt/nvme/kv --namespace 3f9a\n"
    "  kvstore ls file:///mnt/nvme/kv --tree"
)
@click.argument("url")
@click.option("--namespace", "prefix", metavar="PREFIX", help="List blocks of the namespaces whose name starts so.")
@click.option("--tree", "as_tree", is_flag=True, help="List prefixes as trees, of every namespace or of those.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="Most blocks, or runs of blocks in a tree, to list; 0 lists all.",
)
@json_option
def ls(url: str, prefix: str | None, as_tree: bool, limit: int, as_json: bool) -> None:
    """List what is in the tier at URL: its namespaces, or with --namespace the blocks of those that match.

    With --tree each line is a run of blocks that follow each other: the digest of the last one, which names the prefix
    up to there, their positions, and what they have in common. Where prefixes part, the lines below are further in.

    A block's marks are its labels, each with its tenant behind an @, and with a * before it where it pins the block.

    The tier is opened read-only: nothing is created, evicted or removed.
    """
    tier = TierURL.parse(url)
    with open_to_inspect(tier) as store:
        if as_tree:
            _trees(tier, store, prefix, limit, as_json)
        elif prefix is None:
            _namespaces(tier, store, as_json)
        else:
            _blocks(tier, store, matching_namespaces(store, prefix), limit, as_json)


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
    return {**address_json(space, info.key), "bytes": info.stored_bytes, **facts_json(info)}


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


def _trees(tier: TierURL, store: BlockStore, prefix: str | None, limit: int, as_json: bool) -> None:
    spaces = store.namespaces() if prefix is None else matching_namespaces(store, prefix)
    trees = [PrefixTree.of(Scanned(space, store.scan(space), str(tier))) for space in spaces]
    total = sum(1 for tree in trees for _ in tree.runs())
    runs = ((tree, depth, run) for tree in trees for depth, run in tree.runs())
    shown = list(islice(runs, limit) if limit else runs)
    if as_json:
        rows = [_run_as_json(tree, depth, run) for tree, depth, run in shown]
        loose = {tree.namespace.name: len(tree.loose) for tree in trees}
        emit_json({"url": str(tier), "runs": rows, "loose": loose, "truncated": len(shown) < total})
        return
    console = stdout_console()
    for tree in trees:
        console.print(_drawn(tree, [(depth, run) for of, depth, run in shown if of is tree]))
    if len(shown) < total:
        click.echo(f"and {total - len(shown)} more: --limit 0 lists all, the first {limit} are shown", err=True)


def _drawn(tree: PrefixTree, runs: list[tuple[int, Run]]) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    def text(line: str) -> Text:
        return Text(printable(line))

    drawn = Tree(text(f"{short(tree.namespace.name)} {tree.namespace.model}: {counted(tree.blocks, 'block')}"))
    branches = [drawn]
    for depth, run in runs:
        del branches[depth + 1 :]
        branches.append(branches[-1].add(text((tree.heading(run) if depth == 0 else "") + run.line())))
    if tree.loose:
        drawn.add(text(f"{counted(len(tree.loose), 'block')} without position and parent"))
    return drawn


def _run_as_json(tree: PrefixTree, depth: int, run: Run) -> dict[str, Any]:
    """A flat list in the order of the lines: trees may be deeper than what JSON can be nested."""
    return {
        "namespace": tree.namespace.name,
        "group": run.group,
        "depth": depth,
        "first": run.first,
        "last": run.last,
        "start": None if run.start == NO_POSITION else run.start,
        "blocks": run.blocks,
        "tokens": run.tokens,
        "bytes": run.stored_bytes,
        "hits": run.hits,
        "created": run.created,
        "last_used": run.last_used,
        "labels": run.labels,
        "complete": run.complete,
    }
