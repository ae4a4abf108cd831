"""A namespace as counted by one scan: what `kvstore stat` and `ls` print, and `Inspection.namespaces` tabulates."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.abc import BlockStore
    from kvstore.namespace import Namespace
    from kvstore.types import BlockInfo

__all__ = ["NamespaceSummary", "counted", "summaries", "summary_of"]


@dataclass(frozen=True, slots=True)
class NamespaceSummary:
    """One namespace as counted by a scan. Times are seconds since the epoch; None where there are no blocks."""

    namespace: str
    model: str
    revision: str
    block_tokens: int
    groups: int
    blocks: int
    bytes: int
    oldest: float | None
    newest: float | None
    last_used: float | None
    pinned: int
    """Blocks that are not evicted."""
    labels: dict[str, int]
    """Blocks by label; one with several is counted for each."""


def counted(store: BlockStore) -> list[tuple[Namespace, NamespaceSummary]]:
    """Every namespace of the store with its blocks counted, largest first.

    A store that keeps no marks is asked for sizes and ages alone: an object store has them in its listing.
    """
    scan = store.scan if store.capabilities.marks else store.scan_ages
    found = [(space, summary_of(space, scan(space))) for space in store.namespaces()]
    return sorted(found, key=lambda entry: -entry[1].bytes)


def summaries(store: BlockStore) -> list[NamespaceSummary]:
    """`counted`, without the namespaces themselves."""
    return [summary for _, summary in counted(store)]


def summary_of(namespace: Namespace, infos: Iterable[BlockInfo]) -> NamespaceSummary:
    """The sums over `infos`, a scan of `namespace`."""
    blocks, total, pinned, oldest, newest, used = 0, 0, 0, float("inf"), 0.0, 0.0
    labels: Counter[str] = Counter()
    for info in infos:
        blocks, total = blocks + 1, total + info.stored_bytes
        oldest, newest, used = min(oldest, info.created), max(newest, info.created), max(used, info.last_used)
        if info.marks:
            pinned += info.pinned
            labels.update(info.labels)
    return NamespaceSummary(
        namespace=namespace.name,
        model=namespace.model,
        revision=namespace.revision,
        block_tokens=namespace.block_tokens,
        groups=len(namespace.layouts),
        blocks=blocks,
        bytes=total,
        oldest=oldest if blocks else None,
        newest=newest if blocks else None,
        last_used=used if blocks else None,
        pinned=pinned,
        labels=dict(sorted(labels.items())),
    )
