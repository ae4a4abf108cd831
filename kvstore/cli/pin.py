"""`kvstore pin URL` and `kvstore unpin URL`: blocks that are to stay, and that need no longer."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli import EXIT_NOT_INTACT
from kvstore.cli._common import as_it_is, emit_json, json_option, progress
from kvstore.cli._names import marks_of, matching_namespaces, no_block_has
from kvstore.cli._output import printable
from kvstore.errors import ConfigurationError, InvalidOptionError
from kvstore.marks import PINNABLE, Mark, MarkOutcome
from kvstore.registry import open_store
from kvstore.types import BlockKey
from kvstore.url import TierURL, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace

__all__ = ["pin", "unpin"]

AT_ONCE = 1000
"""Blocks marked in one call."""

OPERATOR = "pinned"
"""The label under which blocks are pinned that are named otherwise than by a label."""


def _which(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.argument("url"),
        click.option("--label", help="The blocks that have this label."),
        click.option("--tenant", help="With --label: those of this tenant alone."),
        click.option("--namespace", "prefix", metavar="PREFIX", help="All blocks of the namespaces that start so."),
        click.option(
            "--keys",
            type=click.File(),
            help="The blocks in FILE (- is stdin): lines of NAMESPACE GROUP DIGEST, or `kvstore ls --json`.",
        ),
        json_option,
        click.pass_context,
    )[::-1]:
        command = option(command)
    return command


@click.command(epilog="\b\nExamples:\n  kvstore pin file:///mnt/nvme/kv --label handbook --tenant acme")
@_which
def pin(ctx: click.Context, url: str, as_json: bool, **which: Any) -> None:
    """Pin blocks of the tier at URL: they are neither evicted nor do they expire, until they are unpinned.

    Under a capacity half of it can be pinned, so that new blocks find room. Exit code 1 when some blocks could not be
    pinned, or are not there, or when no block has the label.
    """
    tier = TierURL.parse(url)
    outcomes: Counter[MarkOutcome] = Counter()
    with _marking(tier) as store:
        chosen = _chosen(store, **which)
        with progress("pinning", None) as advance:
            for space, keys in chosen:
                mark = Mark(which["label"] or OPERATOR, pinned=True, tenant=which["tenant"] or "")
                outcomes.update(store.mark_many(space, keys, mark))
                advance(len(keys))
        usage = store.usage()
        unknown = _unknown(store, outcomes.total(), **which)
    counts = {outcome.value: outcomes[outcome] for outcome in MarkOutcome}
    if as_json:
        emit_json({"url": str(tier), "blocks": outcomes.total(), **counts, "pinned_bytes": usage.pinned})
    else:
        share = f" of {format_size(usage.capacity // PINNABLE)} that may be" if usage.capacity else ""
        click.echo(f"{tier}: {counts['marked']} of {outcomes.total()} blocks are pinned")
        click.echo(f"  {format_size(usage.pinned)} are pinned in all{share}")
        for outcome, why in _WHY.items():
            if outcomes[outcome]:
                click.echo(f"  {outcomes[outcome]} {why}")
    if unknown:
        click.echo(unknown, err=True)
    if unknown or outcomes.total() != outcomes[MarkOutcome.MARKED]:
        ctx.exit(EXIT_NOT_INTACT)


_WHY = {
    MarkOutcome.UNPINNED: f"are not: no more than one part in {PINNABLE} of the capacity can be pinned",
    MarkOutcome.MISSING: "are not there",
    MarkOutcome.FAILED: "cannot be marked: they have too many labels, or the tier cannot be written",
}


@click.command(epilog="\b\nExamples:\n  kvstore unpin file:///mnt/nvme/kv --label handbook")
@_which
def unpin(ctx: click.Context, url: str, as_json: bool, **which: Any) -> None:
    """Take back pins in the tier at URL: with --label those of this label (and tenant), else every pin of the blocks.

    Labels stay. A block without a pin is as old as its last use says. Exit code 1 when no block has the label.
    """
    tier = TierURL.parse(url)
    mark = Mark(which["label"] or "", pinned=True, tenant=which["tenant"] or "")
    blocks = unpinned = 0
    with _marking(tier) as store, progress("unpinning", None) as advance:
        for space, keys in _chosen(store, **which):
            blocks += len(keys)
            unpinned += sum(store.unmark_many(space, keys, mark))
            advance(len(keys))
        unknown = _unknown(store, blocks, **which)
    if as_json:
        emit_json({"url": str(tier), "blocks": blocks, "unpinned": unpinned})
    else:
        click.echo(f"{tier}: the pins of {unpinned} of {blocks} blocks are taken back")
    if unknown:
        click.echo(unknown, err=True)
        ctx.exit(EXIT_NOT_INTACT)


def _unknown(store: BlockStore, blocks: int, **which: Any) -> str:
    """What to say where blocks were asked for by a label that none has."""
    if blocks or which["label"] is None:
        return ""
    return printable(no_block_has(Mark(which["label"], tenant=which["tenant"] or ""), str(store.url), marks_of(store)))


@contextmanager
def _marking(tier: TierURL) -> Generator[BlockStore]:
    if "readonly" in tier.raw_options:
        raise InvalidOptionError(f"{tier}: pins are written: leave out readonly")
    tier = as_it_is(tier)
    with open_store(tier, readonly=True) as there:  # nothing is made where no tier is
        if not there.capabilities.marks:
            raise ConfigurationError(f"{tier} keeps no labels and pins: use a file:// or lmdb:// tier")
        if tier.scheme == "memory":
            raise ConfigurationError(f"{tier}: blocks in the memory of another process cannot be pinned from here")
    with open_store(tier) as store:
        yield store


def _chosen(
    store: BlockStore, label: str | None, tenant: str | None, prefix: str | None, keys: Iterable[str] | None
) -> Iterator[tuple[Namespace, list[BlockKey]]]:
    """The blocks that the command line names, in batches."""
    if (label is not None) + (prefix is not None and label is None) + (keys is not None) != 1:
        raise click.UsageError("which blocks? Give one of --label, --namespace and --keys")
    if tenant is not None and label is None:
        raise click.UsageError("--tenant goes with --label")
    spaces = store.namespaces() if prefix is None else matching_namespaces(store, prefix)
    if keys is not None:
        return _batched(_read_keys(spaces, keys))
    if label is not None:
        mark = Mark(label, tenant=tenant or "")
        return _batched((space, info.key) for space in spaces for info in store.scan_marked(space, mark))
    return _batched((space, info.key) for space in spaces for info in store.scan(space))


def _batched(found: Iterator[tuple[Namespace, BlockKey]]) -> Iterator[tuple[Namespace, list[BlockKey]]]:
    while some := list(islice(found, AT_ONCE)):
        spaces = {space.fingerprint: space for space, _ in some}
        for fingerprint, space in spaces.items():
            yield space, [key for of, key in some if of.fingerprint == fingerprint]


def _read_keys(spaces: Iterable[Namespace], file: Iterable[str]) -> Iterator[tuple[Namespace, BlockKey]]:
    by_name = {space.name: space for space in spaces}
    for place, name, group, digest in _rows("".join(file)):
        try:
            space, key = by_name[name], BlockKey(bytes.fromhex(digest), int(group))
            space.check_key(key)
        except KeyError:
            raise click.UsageError(f"{place}: there is no namespace {name!r} in the tier") from None
        except ValueError as error:  # of which InvalidBlockError is one
            raise click.UsageError(f"{place}: {error}") from None
        yield space, key


def _rows(text: str) -> Iterator[tuple[str, str, str, str]]:
    if text.lstrip().startswith("{"):
        try:
            blocks = json.loads(text)["blocks"]
            for number, block in enumerate(blocks):
                yield f"block {number}", str(block["namespace"]), str(block["group"]), str(block["digest"])
        except (ValueError, KeyError, TypeError) as error:
            raise click.UsageError(f"this is not what `kvstore ls --json --namespace …` prints: {error!r}") from None
        return
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            if len(words) != 3:
                raise click.UsageError(f"line {number}: expected NAMESPACE GROUP DIGEST, not {line.strip()!r}")
            yield f"line {number}", words[0], words[1], words[2]
