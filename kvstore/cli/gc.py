"""`kvstore gc URL`: what is too old, too much or left over in a tier, and with `--yes` its removal."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli import EXIT_NOT_INTACT
from kvstore.cli._common import age, emit_json, json_option, open_to_inspect, print_table, print_unseen, progress
from kvstore.cli._names import matching_namespaces
from kvstore.collection import Rules, collect, survey
from kvstore.errors import InvalidOptionError
from kvstore.inspect.opening import capacity_in_bytes
from kvstore.inspect.wording import counted
from kvstore.registry import backend_class, open_store
from kvstore.retention import TTL, TTL_FROM
from kvstore.url import CAPACITY, READONLY, TierURL, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.abc import BlockStore
    from kvstore.collection import Collected, Survey
    from kvstore.namespace import Namespace
    from kvstore.url import Option

__all__ = ["gc"]


def _as(option: Option[Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """A value as the option of a URL takes it."""

    def convert(_: click.Context, __: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else option.parse(value)
        except (ValueError, TypeError) as error:
            raise click.BadParameter(f"{value!r}: {error}") from None

    return convert


@click.command(
    epilog="\b\nExamples:\n  kvstore gc 's3://bucket/kv?ttl=7d&capacity=500GB'\n"
    "  kvstore gc s3://bucket/kv --ttl 7d --yes\n"
    "  kvstore gc file:///mnt/nvme/kv --namespace 3f9a --yes"
)
@click.argument("url")
@click.option("--yes", "--delete", "yes", is_flag=True, help="Remove it. Without this, nothing is changed.")
@click.option("--dry-run", is_flag=True, help="Say what would go; the default.")
@click.option("--ttl", metavar="TIME", callback=_as(TTL), help="Blocks older than this go; instead of the URL's ttl.")
@click.option("--ttl-from", type=click.Choice(["used", "stored"]), help="What it counts from; instead of the URL's.")
@click.option(
    "--capacity",
    metavar="SIZE",
    callback=_as(CAPACITY),
    help="The oldest go until the rest fits; instead of the URL's.",
)
@click.option("--namespace", "prefix", metavar="PREFIX", help="The namespaces whose name starts so go as a whole.")
@json_option
@click.pass_context
def gc(
    ctx: click.Context,
    url: str,
    yes: bool,
    dry_run: bool,
    ttl: float | None,
    ttl_from: str | None,
    capacity: Any,
    prefix: str | None,
    as_json: bool,
) -> None:
    """Say what is to go from the tier at URL, and with --yes remove it.

    That is: blocks that are older than ttl; the oldest, where there are more than capacity; what dead writers left;
    namespaces without blocks; and with --namespace all of a namespace, which is then all that goes. Pinned blocks stay,
    but for those of a namespace that goes as a whole.

    The tier may be in use. What was interrupted is completed by the next call. Exit code 1 when more is left than the
    capacity, because it is pinned or was used meanwhile.
    """
    if yes and dry_run:
        raise click.UsageError("either --yes or --dry-run")
    tier = TierURL.parse(url)
    checked = tier.validated(backend_class(tier).options)
    if yes and checked.option(READONLY):
        raise InvalidOptionError(f"{tier}: what is removed is written: leave out readonly")
    with open_to_inspect(_without(tier, "readonly", "sweep", "capacity")) as store:
        total = store.usage().blocks
        rules = _rules(store, checked, ttl, ttl_from, capacity) if prefix is None else Rules()
        drop = [] if prefix is None else matching_namespaces(store, prefix)
        with progress("looking", total) as advance:
            found = survey(store, rules, drop=drop, advance=advance)
        size = _Size.of(store)
    if prefix is not None:
        found.leftovers, found.spaces = [], [space for space in found.spaces if space.dropped]
    done = None
    if yes:
        done, size = _carry_out(tier, found, drop)
    if as_json:
        emit_json(_as_json(tier, found, done, size))
    else:
        _show(tier, found, done)
        if size.remedy and found.blocks:
            click.echo(
                f"the tier's file stays as large as it is, {format_size(size.bytes)} in all, and blocks to come use"
                f" what is free in it; to give that back to the disk: {size.remedy}"
            )
    if done is not None and (found.excess or (done.kept and found.rules.capacity is not None)):
        ctx.exit(EXIT_NOT_INTACT)


def _without(tier: TierURL, *names: str) -> TierURL:
    return replace(tier, raw_options={name: value for name, value in tier.raw_options.items() if name not in names})


def _rules(store: BlockStore, url: TierURL, ttl: float | None, ttl_from: str | None, capacity: Any) -> Rules:
    """What the command line says; else what the URL says, of a capacity where that is not the one that puts keep."""
    if capacity is not None and capacity.bytes is None:
        raise click.UsageError("--capacity is in bytes here, such as 500GB")
    wanted = capacity or url.option(CAPACITY)
    most = None if wanted is None else capacity_in_bytes(url, wanted)
    if capacity is None and store.capabilities.capacity_is_exact and most == store.usage().capacity:
        most = None  # which every put keeps
    return Rules(
        ttl=url.option(TTL) if ttl is None else ttl,
        from_stored=(ttl_from or url.option(TTL_FROM)) == "stored",
        capacity=most,
    )


@dataclass(frozen=True, slots=True)
class _Size:
    """What a tier occupies, where that does not become less as blocks go, and what makes it less."""

    bytes: int
    remedy: str

    @classmethod
    def of(cls, store: BlockStore) -> _Size:
        if not store.keeps_size:
            return cls(0, "")
        usage = store.usage()
        return cls(usage.used + usage.reserved + usage.overhead, store.keeps_size)


def _carry_out(tier: TierURL, found: Survey, drop: Sequence[Namespace]) -> tuple[Collected, _Size]:
    # A sweep of its own would come in between, and a capacity of its own would stay: the rules have both.
    with open_store(_without(tier, "sweep", "capacity")) as store, progress("removing", found.blocks) as advance:
        done = collect(store, found, drop=drop, advance=advance)
        if found.rules.capacity is not None and found.blocks:
            _collect_the_rest(store, found, found.rules.capacity, done)
        return done, _Size.of(store)


def _collect_the_rest(store: BlockStore, found: Survey, capacity: int, done: Collected) -> None:
    """What was written down of the removals takes room, too, for which more go. Fewer each time, or it ends there: they
    cannot be removed, or others store as fast as they go.
    """
    kept = done.kept
    went, rest = done.expired + done.over + done.dropped, found
    while went and store.excess(capacity) > rest.excess:
        rest, before = survey(store, found.rules), done.over
        collect(store, rest, done=done)
        done.kept = kept  # these are most of what is left over now: counted once
        last, went = went, done.over - before
        if went >= last:
            return


def _as_json(tier: TierURL, found: Survey, done: Collected | None, size: _Size) -> dict[str, Any]:
    return {
        "url": str(tier),
        "dry_run": done is None,
        "ttl": found.rules.ttl,
        "ttl_from": "stored" if found.rules.from_stored else "used",
        "capacity": found.rules.capacity,
        "to_go": {"blocks": found.blocks, "bytes": found.bytes, "leftovers": len(found.leftovers)},
        "left_over_capacity": found.excess,
        "file_keeps_its_size": {"bytes": size.bytes, "smaller": size.remedy} if size.remedy else None,
        "namespaces": found.spaces,
        "leftovers": found.leftovers,
        "not_looked_into": found.unseen,
        "removed": None if done is None else asdict(done),
    }


def _show(tier: TierURL, found: Survey, done: Collected | None) -> None:
    print_table(
        str(tier),
        ("namespace", "model", ">blocks", ">bytes", ">oldest", ">pinned", ">expired", ">over capacity", "goes"),
        (
            (
                space.namespace,
                space.model,
                str(space.blocks),
                format_size(space.bytes),
                age(space.oldest),
                str(space.pinned),
                str(space.expired),
                str(space.over),
                "as a whole" if space.dropped else "if empty for long" if space.empty else "",
            )
            for space in found.spaces
        ),
    )
    for leftover in found.leftovers:
        since = f", {age(leftover.modified)} old" if leftover.modified else ""
        click.echo(f"left over: {leftover.place}, {format_size(leftover.nbytes)}{since}")
    print_unseen(found.unseen)
    if found.excess:
        click.echo(
            f"{format_size(found.excess)} over the capacity would be left: it is pinned, or the tier's own records"
        )
    if done is None:
        click.echo(f"{counted(found.blocks, 'block')}, {format_size(found.bytes)} would go; --yes removes them")
        return
    went = done.expired + done.over + done.dropped
    click.echo(
        f"{counted(went, 'block')}, {format_size(done.bytes)} gone ({done.expired} expired, {done.over} over the"
        f" capacity, {done.dropped} with their namespace), {counted(done.leftovers, 'leftover')},"
        f" {counted(done.namespaces, 'namespace')}"
    )
    if done.kept:
        click.echo(f"{counted(done.kept, 'block')} left alone: used, pinned or removed meanwhile")
