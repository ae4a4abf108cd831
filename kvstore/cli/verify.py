"""`kvstore verify URL`: read every block through its checks, say which are not intact, and with `--repair` see to it.

    records looked at without opening ──► salvage ──► repair ──► every block, or a random share, read and checked

The first step is there because LMDB may end the process over a damaged page: while nobody has the tier open, its pages
are looked at with plain reads; while somebody has, all of it is done in a process of its own, whose end is no harm.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvstore.cli import EXIT_NOT_INTACT
from kvstore.cli._common import as_it_is, emit_json, json_option, open_to_inspect, print_table, print_unseen, progress
from kvstore.cli._names import address_json
from kvstore.errors import InvalidOptionError, StoreDamagedError, StoreNotFoundError
from kvstore.inspect.wording import counted
from kvstore.reading import ThreadMemory, batches
from kvstore.registry import backend_class, open_store
from kvstore.types import BlockRead, GetOutcome
from kvstore.url import READONLY, TierURL, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.repairing import Repaired
    from kvstore.types import BlockInfo, BlockKey, Unseen

__all__ = ["verify"]

_GUARDED = "KVSTORE_VERIFY_GUARDED"
"""Set in the environment of the process that does the work while the tier is in use."""


def _share(_: click.Context, __: click.Parameter, text: str) -> float:
    """`1%` or `0.01`."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise click.BadParameter("expected a share of the blocks, such as 1% or 0.01")
    return share


@click.command(epilog="\b\nExample:\n  kvstore verify file:///mnt/nvme/kv && echo intact")
@click.argument("url")
@click.option("--repair", is_flag=True, help="Remove corrupt blocks, and make anew what else can be made anew.")
@click.option("--sample", "share", default="100%", metavar="SHARE", callback=_share, help="Read a random share: 1%.")
@click.option("--threads", type=click.IntRange(min=1), default=4, show_default=True, help="Reads side by side.")
@json_option
@click.pass_context
def verify(ctx: click.Context, url: str, repair: bool, share: float, threads: int, as_json: bool) -> None:
    """Read every block of the tier at URL and check it: checksum, key, namespace, size.

    The tier is opened read-only: a damaged block is reported and stays where it is. With --repair corrupt blocks are
    removed, zarr.json documents that are missing or damaged are written anew, and catalogue and files are brought
    together; an LMDB environment whose pages are damaged is made anew from the blocks that can be trusted (close the
    tier everywhere for that). No block becomes younger for eviction by being verified.

    Exit code 0 when every block that was read is intact, or was not and is repaired; 1 when one is corrupt or is listed
    but cannot be found, or when the tier's own records are damaged, or a namespace has no manifest, so that its
    blocks could not be read; and when blocks were lost with an environment that was made anew. A block that a later
    kvstore wrote is named and left alone: it is no damage. With --sample the rest is not looked at, and how many that
    are is said.
    """
    tier = TierURL.parse(url)
    backend = backend_class(tier)
    checked = tier.validated(backend.options)
    examination = backend.examine(checked)
    if not examination.looked and _GUARDED not in os.environ:
        _in_a_process_of_its_own(ctx, tier)
    verdict = _Verdict(tier, repair, list(examination.problems))
    opened = as_it_is(tier) if repair else tier
    if repair and verdict.problems:
        verdict.repaired += backend.salvage(checked)
    if repair or not verdict.problems:
        with _opened(opened, repair=repair) as store:
            verdict.repaired += store.repair()
            with progress("verifying", store.usage().blocks) as advance:
                look = _Look(store, share, threads, advance)
                verdict.reports = [look.at(space) for space in store.namespaces()]
            verdict.unseen = store.unseen()
    if as_json:
        emit_json(verdict.as_json())
    else:
        _show(verdict)
    if not verdict.ok:
        ctx.exit(EXIT_NOT_INTACT)


def _opened(tier: TierURL, *, repair: bool) -> BlockStore:
    if not repair:
        return open_to_inspect(tier)
    if READONLY.name in tier.raw_options:
        raise InvalidOptionError(f"{tier}: who repairs opens a tier for writing: leave out readonly")
    try:
        open_to_inspect(tier).close()  # where there is no tier none is to be made
    except StoreDamagedError:
        pass
    except StoreNotFoundError:
        if not _has_something(Path(tier.location)):
            raise
    return open_store(tier)


def _has_something(folder: Path) -> bool:
    return folder.is_absolute() and folder.is_dir() and any(folder.iterdir())


def _in_a_process_of_its_own(ctx: click.Context, tier: TierURL) -> NoReturn:
    """Do this command again in a child, and say so if a signal ended it."""
    given = ctx.params
    flags = [name for name, wanted in (("--repair", given["repair"]), ("--json", given["as_json"])) if wanted]
    command = ["verify", *flags, f"--sample={given['share']}", f"--threads={given['threads']}", "--", given["url"]]
    sys.stdout.flush()
    environment = {**os.environ, _GUARDED: "1"}
    done = subprocess.run([sys.executable, "-m", "kvstore", *command], env=environment, check=False)
    if done.returncode < 0:
        raise StoreDamagedError(
            f"{tier} is in use, and its LMDB environment is so damaged that whoever reads all of it ends"
            f" ({Signals(-done.returncode).name}): close it everywhere and run kvstore verify --repair"
        )
    ctx.exit(done.returncode)


@dataclass(slots=True)
class _Report:
    """What was found in one namespace. `gone` blocks were removed by others while we read, `later` ones are a later
    kvstore's: nothing is wrong. `unread` ones were not looked at.
    """

    namespace: Namespace
    intact: int = 0
    gone: int = 0
    unread: int = 0
    bytes: int = 0
    corrupt: list[BlockKey] = field(default_factory=list["BlockKey"])
    missing: list[BlockKey] = field(default_factory=list["BlockKey"])
    later: list[BlockKey] = field(default_factory=list["BlockKey"])

    @property
    def blocks(self) -> int:
        return self.intact + len(self.corrupt) + len(self.missing) + len(self.later)


@dataclass(slots=True)
class _Verdict:
    """All that is to be said of a tier. `problems` are of its own records; after a repair they are no more. `unseen` is
    what was not looked into, also after one.
    """

    tier: TierURL
    repairing: bool
    problems: list[str]
    unseen: list[Unseen] = field(default_factory=list["Unseen"])
    repaired: list[Repaired] = field(default_factory=list["Repaired"])
    reports: list[_Report] = field(default_factory=list[_Report])

    @property
    def aside(self) -> list[str]:
        """What is damaged beside the blocks that were read; neither what another version wrote nor what is only not in
        the catalogue, as after a copy.
        """
        return [one.why for one in self.unseen if one.whole and not one.later]

    @property
    def ok(self) -> bool:
        """Whether everything that was looked at is intact, or was not and is repaired."""
        if self.aside or any(one.lost != 0 for one in self.repaired):
            return False
        if any(report.missing for report in self.reports):  # one that is sealed with a key that we lack
            return False
        return self.repairing or not (self.problems or any(report.corrupt for report in self.reports))

    def as_json(self) -> dict[str, Any]:
        reports = self.reports
        return {
            "url": str(self.tier),
            "ok": self.ok,
            "blocks": sum(report.blocks for report in reports),
            "intact": sum(report.intact for report in reports),
            "bytes": sum(report.bytes for report in reports),
            "removed_meanwhile": sum(report.gone for report in reports),
            "not_read": sum(report.unread for report in reports),
            "corrupt": [address_json(report.namespace, key) for report in reports for key in report.corrupt],
            "missing": [address_json(report.namespace, key) for report in reports for key in report.missing],
            "later": [address_json(report.namespace, key) for report in reports for key in report.later],
            "records": [*self.problems, *self.aside],
            "not_looked_into": self.unseen,
            "repaired": self.repaired,
        }


class _Look:
    """Reads the blocks of a store on several threads; the scan stays on this one, a few batches ahead."""

    def __init__(self, store: BlockStore, share: float, threads: int, advance: Callable[[int], object]) -> None:
        self._store, self._share, self._threads, self._advance = store, share, threads, advance
        self._memory = ThreadMemory()

    def at(self, space: Namespace) -> _Report:
        """Check the blocks of one namespace, or a random share of them."""
        report = _Report(space)
        pending: deque[Future[list[tuple[BlockKey, GetOutcome]]]] = deque()

        def settle() -> None:
            results = pending.popleft().result()
            self._record(report, results)
            self._advance(len(results))

        with ThreadPoolExecutor(self._threads) as pool:
            chosen = self._chosen(report, self._store.scan(space))
            for infos in batches(space, chosen, self._store.capabilities.batch_bytes):
                pending.append(pool.submit(self._read, space, [info.key for info in infos]))
                if len(pending) > 2 * self._threads:
                    settle()
            while pending:
                settle()
        return report

    def _chosen(self, report: _Report, infos: Iterable[BlockInfo]) -> Iterator[BlockInfo]:
        """Each with the same chance, one at least; the others are counted."""
        some, last = False, None
        for last in infos:
            if self._share >= 1 or random.random() < self._share:
                some = True
                yield last
            else:
                report.unread += 1
                self._advance(1)
        if last is not None and not some:
            report.unread -= 1
            yield last

    def _read(self, space: Namespace, keys: list[BlockKey]) -> list[tuple[BlockKey, GetOutcome]]:
        """Into memory that each thread keeps for its next batch."""
        buffers = self._memory.lend([space.block_bytes(key.group) for key in keys])
        reads = [BlockRead(key, into) for key, into in zip(keys, buffers, strict=True)]
        return list(zip(keys, self._store.check_many(space, reads), strict=True))

    def _record(self, report: _Report, results: list[tuple[BlockKey, GetOutcome]]) -> None:
        unread = [key for key, outcome in results if outcome is GetOutcome.MISS]
        listed = self._store.contains_many(report.namespace, unread) if unread else []
        there = [key for key, is_there in zip(unread, listed, strict=True) if is_there]
        later = self._store.of_later_version(report.namespace, there) if there else []
        report.later += [key for key, is_later in zip(there, later, strict=True) if is_later]
        report.missing += [key for key, is_later in zip(there, later, strict=True) if not is_later]
        report.gone += listed.count(False)
        report.corrupt += [key for key, outcome in results if outcome is GetOutcome.CORRUPT]
        hits = [key for key, outcome in results if outcome is GetOutcome.HIT]
        report.intact += len(hits)
        report.bytes += sum(report.namespace.block_bytes(key.group) for key in hits)


def _show(verdict: _Verdict) -> None:
    reports = verdict.reports
    print_table(
        str(verdict.tier),
        ("namespace", "model", ">blocks", ">intact", ">corrupt", ">missing", ">later", ">not read", ">bytes checked"),
        (
            (
                report.namespace.name,
                report.namespace.model,
                str(report.blocks),
                str(report.intact),
                str(len(report.corrupt)),
                str(len(report.missing)),
                str(len(report.later)),
                str(report.unread),
                format_size(report.bytes),
            )
            for report in reports
        ),
    )
    for report in reports:
        named = (("corrupt", report.corrupt), ("missing", report.missing), ("of a later version", report.later))
        for what, keys in named:
            for key in keys:
                removed = ", removed" if verdict.repairing and what == "corrupt" else ""
                click.echo(f"{what}: {report.namespace.name} group {key.group} digest {key.digest.hex()}{removed}")
    for problem in (*verdict.problems, *verdict.aside):
        click.echo(f"records damaged: {problem}")
    print_unseen([one for one in verdict.unseen if one.later or not one.whole])
    if verdict.problems and not verdict.repairing:
        click.echo("no block was read: kvstore verify --repair sees to the records first, and then reads them")
    for one in verdict.repaired:
        click.echo(f"repaired: {one.count} {one.what}")
        if one.lost is None:
            click.echo(
                "lost: how many blocks is not known, and it may be all: what is left of the records does not say"
            )
        elif one.lost:
            blocks = counted(one.lost, "block")
            click.echo(f"lost: {blocks} that the tier had before: to be computed again")
