"""`kvstore show URL DIGEST`: a block, or with `--label` or `--prefix` a prefix: facts, axes, numbers by layer."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli import EXIT_NOT_INTACT
from kvstore.cli._common import age, emit_json, json_option, open_to_inspect, print_table
from kvstore.cli._names import facts_json
from kvstore.errors import DamagedBlockError, NotStoredError
from kvstore.inspect.block import BlockView
from kvstore.inspect.inspection import Inspection
from kvstore.inspect.wording import moment, short
from kvstore.url import TierURL, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.inspect.namespace import NamespaceView
    from kvstore.inspect.prefix import PrefixView
    from kvstore.inspect.statistics import LayerStatistics

    View = BlockView | PrefixView

__all__ = ["show"]


@click.command(
    epilog="\b\nExamples:\n  kvstore show file:///mnt/nvme/kv 3f9a41c0\n"
    "  kvstore show file:///mnt/nvme/kv 3f9a41c0 --prefix\n  kvstore show file:///mnt/nvme/kv --label handbook"
)
@click.argument("url")
@click.argument("digest", required=False)
@click.option("--label", help="The prefix with this label, in place of a DIGEST.")
@click.option("--prefix", "whole", is_flag=True, help="The whole prefix that ends with the block.")
@click.option("--namespace", "name", metavar="PREFIX", help="The namespace, where several have such a block.")
@click.option("--group", type=click.IntRange(min=0), default=0, show_default=True, help="The KV-cache group.")
@click.option(
    "--model-config",
    type=click.Path(exists=True),
    help="The model's config.json, or its folder, where the namespace alone does not say how rows are made.",
)
@json_option
@click.pass_context
def show(
    ctx: click.Context,
    url: str,
    digest: str | None,
    label: str | None,
    whole: bool,
    name: str | None,
    group: int,
    model_config: str | None,
    as_json: bool,
) -> None:
    """Show one block of the tier at URL, whose digest begins with DIGEST, or a whole prefix: what the tier knows of it,
    its axes, and what the keys and values of each layer are like.

    The tier is opened read-only, and what is read is checked. A block that fails its checks is named and left out, with
    exit code 1.
    """
    if (digest is None) == (label is None):
        raise click.UsageError("give the DIGEST of a block, or --label; `kvstore ls URL --tree` lists both")

    def find(view: NamespaceView) -> View:
        if label is not None:
            return view.prefix(label=label, group=group)
        block = view.block(digest or "", group)
        return view.prefix(block.digest, group=group) if whole else block

    tier = TierURL.parse(url)
    with open_to_inspect(tier) as store, Inspection(store, str(tier), owned=False) as look:
        view = _found(look, find, name, model_config)
        damaged: list[DamagedBlockError] = []
        numbers = view.statistics(damaged.append)
        if as_json:
            layers = {"layers": [_finite(each) for each in numbers], "damaged": list(map(str, damaged))}
            emit_json({"url": str(tier)} | _as_json(view) | layers)
        else:
            _show(tier, view, numbers)
        for error in damaged:
            click.echo(f"kvstore: {error}", err=True)
        if damaged:
            ctx.exit(EXIT_NOT_INTACT)


def _found(look: Inspection, find: Callable[[NamespaceView], View], name: str | None, model_config: str | None) -> View:
    """What `find` finds in the namespace that is named, or in the only one that has it."""
    if name is not None:
        return find(look.namespace(name, model_config=model_config))
    found: list[View] = []
    failures: list[NotStoredError] = []
    for space in look.store.namespaces():
        try:
            found.append(find(look.namespace(space.name, model_config=model_config)))
        except NotStoredError as error:
            failures.append(error)
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(sorted(view.namespace.name for view in found))
        raise NotStoredError(f"{look.source}: several namespaces have one: say which with --namespace: {names}")
    if len(failures) == 1:
        raise failures[0]
    raise NotStoredError("\n".join(map(str, failures)) or f"{look.source}: there are no blocks")


def _as_json(view: View) -> dict[str, Any]:
    common: dict[str, Any] = {
        "namespace": view.namespace.name,
        "model": view.namespace.model,
        "group": view.group,
        "digest": view.digest,
        "dims": view.axes.dims,
        "shape": view.axes.shape,
        "dtype": view.axes.dtype_name,
        "why_opaque": view.why_opaque or None,
    }
    if isinstance(view, BlockView):
        info = view.info
        return common | {
            "kind": "block",
            **facts_json(info),
            "tokens": None if view.tokens is None else [view.tokens.start, view.tokens.stop],
            "bytes": view.namespace.block_bytes(view.group),
            "stored_bytes": info.stored_bytes,
        }
    return common | {
        "kind": "prefix",
        "complete": view.complete,
        "blocks": [info.key.digest.hex() for info in view.infos],
        "tokens": view.tokens,
        "stored_bytes": sum(info.stored_bytes for info in view.infos),
        "hits": sum(info.hits for info in view.infos),
        "labels": view.labels,
    }


def _finite(numbers: LayerStatistics) -> dict[str, Any]:
    """JSON has no NaN."""
    return {name: None if value != value else value for name, value in asdict(numbers).items()}


def _show(tier: TierURL, view: View, numbers: Sequence[LayerStatistics]) -> None:
    facts = _block_facts(view) if isinstance(view, BlockView) else _prefix_facts(view)
    axes = f"{view.axes.words}, {view.axes.dtype_name}"
    space = f"{short(view.namespace.name)} {view.namespace.model}"
    opaque = [("opaque", view.why_opaque)] if view.why_opaque else []
    rows = [("namespace", space), ("group", str(view.group)), *facts, ("axes", axes), *opaque]
    print_table(str(tier), ("fact", "value"), rows)
    if numbers:
        columns = (">layer", "kv", ">absmax", ">mean", ">std", ">not finite")
        print_table("layers", columns, map(_row, numbers))


def _row(each: LayerStatistics) -> tuple[str, ...]:
    return (
        "-" if each.layer is None else str(each.layer),
        each.kv or "-",
        f"{each.absmax:.4g}",
        f"{each.mean:.4g}",
        f"{each.std:.4g}",
        str(each.nonfinite),
    )


def _block_facts(view: BlockView) -> list[tuple[str, str]]:
    info = view.info
    facts = [
        ("block", view.digest),
        ("tokens", "unknown" if view.tokens is None else f"{view.tokens.start} to {view.tokens.stop - 1}"),
        ("parent", info.parent.hex() or "-"),
        ("bytes", f"{format_size(view.namespace.block_bytes(view.group))}, {format_size(info.stored_bytes)} stored"),
        ("created", f"{moment(info.created)}, {age(info.created)} ago"),
        ("last used", f"{moment(info.last_used)}, {age(info.last_used)} ago, {info.hits} hits"),
    ]
    if info.marks:
        pinned = " (pinned)" if info.pinned else ""
        facts.append(("marks", ", ".join((*info.labels, *(f"@{tenant}" for tenant in info.tenants))) + pinned))
    return facts


def _prefix_facts(view: PrefixView) -> list[tuple[str, str]]:
    size = format_size(sum(info.stored_bytes for info in view.infos))
    facts = [
        ("prefix", view.digest),
        ("blocks", f"{len(view)}, {size} stored"),
        ("tokens", str(view.tokens)),
        ("complete", "yes" if view.complete else "no: what came before the first block is not stored"),
    ]
    return [*facts, ("labels", ", ".join(view.labels))] if view.labels else facts
