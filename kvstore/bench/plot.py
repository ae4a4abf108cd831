"""`kvstore bench --plot`: throughput against block size, a panel for each operation, a line for each contestant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.bench.runner import Figure

__all__ = ["SUFFIXES", "block_size", "check_plotting", "plot"]

SUFFIXES = (".png", ".svg")


def check_plotting() -> Any:
    """The class of matplotlib's figures. Raises `MissingDependencyError` where there is none."""
    try:
        from matplotlib.figure import Figure as Sheet
    except ImportError as error:
        raise MissingDependencyError(
            f'--plot needs matplotlib ({error}): pip install "kvstore-tiers[inspect]"'
        ) from error
    return Sheet


def plot(figures: Sequence[Figure], title: str, path: Path) -> None:
    """Draw medians, with their range as bars, into `path`, whose suffix says how (`SUFFIXES`)."""
    operations = list(dict.fromkeys(figure.op for figure in figures))
    contestants = list(dict.fromkeys(figure.contestant for figure in figures))
    sizes = sorted({figure.block_bytes for figure in figures})
    sheet: Any = check_plotting()(figsize=(1 + 3 * len(operations), 3.6), layout="constrained")
    panels = sheet.subplots(1, len(operations), sharey=True, squeeze=False)[0]
    for panel, op in zip(panels, operations, strict=True):
        for contestant in contestants:
            own = [figure for figure in figures if (figure.op, figure.contestant) == (op, contestant)]
            speeds = [figure.gb_per_s for figure in own]
            below = [figure.gb_per_s - figure.gb_per_s_min for figure in own]
            above = [figure.gb_per_s_max - figure.gb_per_s for figure in own]
            at = [sizes.index(figure.block_bytes) for figure in own]
            panel.errorbar(at, speeds, yerr=[below, above], marker="o", markersize=4, capsize=2, label=contestant)
        panel.set_title(op.replace("_", " "), fontsize=10)
        panel.set_xticks(range(len(sizes)), [block_size(nbytes) for nbytes in sizes], rotation=45)
        panel.set_xlabel("block")
        panel.set_yscale("log")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("GB/s")
    panels[-1].legend(fontsize=8)
    sheet.suptitle(f"{title}, {figures[0].threads} threads", fontsize=10)
    sheet.savefig(path, dpi=150)


def block_size(nbytes: int) -> str:
    """`2 MiB`, as people call it."""
    for unit, length in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % length == 0:
            return f"{nbytes // length} {unit}"
    return f"{nbytes} B"
