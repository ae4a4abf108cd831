"""`kvstore verify URL`: read every block through its checks, changing nothing, and say which are not intact."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli import EXIT_NOT_INTACT
from kvstore.cli._common import emit_json, json_option, open_to_inspect, print_table, progress
from kvstore.cli._names import address_json
from kvstore.reading import ThreadMemory, batches
from kvstore.types import BlockRead, GetOutcome
from kvstore.url import TierURL, format_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.types import BlockKey

__all__ = ["verify"]


@click.command(epilog="\b\nExample:\n  kvstore verify file:///mnt/nvme/kv && echo intact")
@click.argument("url")
@click.option("--threads", type=click.IntRange(min=1), default=4, show_default=True, help="Reads side by side.")
@json_option
@click.pass_context
def verify(ctx: click.Context, url: str, threads: int, as_json: bool) -> None:
    """Read every block of the tier at URL and check it: checksum, key, namespace, size.

    The tier is opened read-only: a damaged block is reported and stays where it is. Exit code 0 when every block is
    intact, 1 when one is corrupt or is listed but cannot be found.
    """
    tier = TierURL.parse(url)
    with open_to_inspect(tier) as store:
        with progress("verifying", store.usage().blocks) as advance:
            reports = [_check_namespace(store, space, threads, advance) for space in store.namespaces()]
        if as_json:
            emit_json(_as_json(tier, reports))
        else:
            _show(tier, reports)
        if not all(report.is_intact for report in reports):
            ctx.exit(EXIT_NOT_INTACT)


@dataclass(slots=True)
class _Report:
    """What was found in one namespace. `gone` blocks were removed by others while we read: nothing is wrong."""

    namespace: Namespace
    intact: int = 0
    gone: int = 0
    bytes: int = 0
    corrupt: list[BlockKey] = field(default_factory=list["BlockKey"])
    missing: list[BlockKey] = field(default_factory=list["BlockKey"])

    @property
    def is_intact(self) -> bool:
        return not self.corrupt and not self.missing

    @property
    def blocks(self) -> int:
        return self.intact + len(self.corrupt) + len(self.missing)


def _check_namespace(store: BlockStore, space: Namespace, threads: int, advance: Callable[[int], object]) -> _Report:
    """Check the blocks on `threads` threads; the scan stays on this one, a few batches ahead."""
    report = _Report(space)
    reader = _Reader(store, space)
    pending: deque[Future[list[tuple[BlockKey, GetOutcome]]]] = deque()

    def settle() -> None:
        results = pending.popleft().result()
        _record(store, report, results)
        advance(len(results))

    with ThreadPoolExecutor(threads) as pool:
        for infos in batches(space, store.scan(space), store.capabilities.batch_bytes):
            pending.append(pool.submit(reader.read, [info.key for info in infos]))
            if len(pending) > 2 * threads:
                settle()
        while pending:
            settle()
    return report


class _Reader:
    """Reads batches into memory that each thread keeps for its next batch."""

    def __init__(self, store: BlockStore, space: Namespace) -> None:
        self._store, self._space = store, space
        self._memory = ThreadMemory()

    def read(self, keys: list[BlockKey]) -> list[tuple[BlockKey, GetOutcome]]:
        buffers = self._memory.lend([self._space.block_bytes(key.group) for key in keys])
        reads = [BlockRead(key, into) for key, into in zip(keys, buffers, strict=True)]
        return list(zip(keys, self._store.get_many_into(self._space, reads), strict=True))


def _record(store: BlockStore, report: _Report, results: list[tuple[BlockKey, GetOutcome]]) -> None:
    unread = [key for key, outcome in results if outcome is GetOutcome.MISS]
    listed = store.contains_many(report.namespace, unread) if unread else []
    report.missing += [key for key, there in zip(unread, listed, strict=True) if there]
    report.gone += listed.count(False)
    report.corrupt += [key for key, outcome in results if outcome is GetOutcome.CORRUPT]
    hits = [key for key, outcome in results if outcome is GetOutcome.HIT]
    report.intact += len(hits)
    report.bytes += sum(report.namespace.block_bytes(key.group) for key in hits)


def _as_json(tier: TierURL, reports: list[_Report]) -> dict[str, Any]:
    return {
        "url": str(tier),
        "ok": all(report.is_intact for report in reports),
        "blocks": sum(report.blocks for report in reports),
        "intact": sum(report.intact for report in reports),
        "bytes": sum(report.bytes for report in reports),
        "removed_meanwhile": sum(report.gone for report in reports),
        "corrupt": [address_json(report.namespace, key) for report in reports for key in report.corrupt],
        "missing": [address_json(report.namespace, key) for report in reports for key in report.missing],
    }


def _show(tier: TierURL, reports: list[_Report]) -> None:
    print_table(
        str(tier),
        ("namespace", "model", ">blocks", ">intact", ">corrupt", ">missing", ">bytes checked"),
        (
            (
                report.namespace.name,
                report.namespace.model,
                str(report.blocks),
                str(report.intact),
                str(len(report.corrupt)),
                str(len(report.missing)),
                format_size(report.bytes),
            )
            for report in reports
        ),
    )
    for report in reports:
        for what, keys in (("corrupt", report.corrupt), ("missing", report.missing)):
            for key in keys:
                click.echo(f"{what}: {report.namespace.name} group {key.group} digest {key.digest.hex()}")
