"""`kvstore bench URL --against …`: a tier and the bare device, vLLM's own tier, bare clients, in turns, in one run."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import click

from kvstore.bench import (
    BareObstore,
    BareS3fs,
    ChecksumAlone,
    Contestant,
    Figure,
    MemoryCopy,
    RawFiles,
    TierApart,
    TierUnderTest,
    VllmFs,
    Workload,
    race,
)
from kvstore.bench.plot import SUFFIXES, block_size, check_plotting, plot
from kvstore.bench.runner import OPERATIONS
from kvstore.bench.steps import RESTS_S, StepFigure, measure_steps
from kvstore.cli._common import as_it_is, emit_json, json_option, print_table, progress
from kvstore.interrupts import uninterrupted
from kvstore.url import TierURL, parse_size

__all__ = ["bench"]

_AGAINST = ("raw", "vllm-fs", "crc", "copy", "client")


def _bytes(_: click.Context, __: click.Parameter, given: str | tuple[str, ...]) -> int | tuple[int, ...]:
    """`2MiB`, `500MB` or `4096` as a number of bytes."""
    try:
        return parse_size(given) if isinstance(given, str) else tuple(map(parse_size, given))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _plottable(_: click.Context, __: click.Parameter, given: Path | None) -> Path | None:
    if given is not None and given.suffix.lower() not in SUFFIXES:
        raise click.BadParameter(f"{given}: the name ends in none of {', '.join(SUFFIXES)}")
    return given


@click.command(
    epilog="\b\nExample:\n  kvstore bench file:///mnt/nvme/bench --against raw --block-bytes 512KiB --block-bytes 2MiB"
)
@click.argument("url")
@click.option(
    "--against",
    type=click.Choice(_AGAINST),
    multiple=True,
    default=["raw"],
    show_default=True,
    help="What to compare the tier with: the bare device, vLLM's own fs tier, the checksum alone, numpy.copyto alone,"
    " or bare obstore and s3fs. Repeatable; ratios refer to the first.",
)
@click.option(
    "--block-bytes", callback=_bytes, multiple=True, default=["2MiB"], show_default=True, help="Block size; repeatable."
)
@click.option("--total", callback=_bytes, default="512MiB", show_default=True, help="Bytes moved in each step.")
@click.option("--threads", type=click.IntRange(1, 256), default=16, show_default=True, help="Calls side by side.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds; medians are reported.")
@click.option("--namespace", "own_name", metavar="NAME", help="Write beside the blocks of others, under this name.")
@click.option(
    "--scratch",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where the raw files go; default: the file system of a local URL, else the temporary folder.",
)
@click.option(
    "--step", is_flag=True, help="Time a scheduler's step while the contestants move blocks, instead of their speed."
)
@click.option(
    "--io-process", is_flag=True, help="With --step: the tier once more, its bytes moved by a process of its own."
)
@click.option(
    "--plot",
    "plot_to",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_plottable,
    metavar="FILE",
    help="Draw throughput against block size into a .png or .svg file.",
)
@json_option
def bench(
    url: str,
    against: tuple[str, ...],
    block_bytes: tuple[int, ...],
    total: int,
    threads: int,
    rounds: int,
    own_name: str | None,
    scratch: Path | None,
    step: bool,
    io_process: bool,
    plot_to: Path | None,
    as_json: bool,
) -> None:
    """Measure how fast blocks go to and come back from the tier at URL, beside others in the same run.

    The tier is driven through its contract, checks on: calls of the size it asks for, from --threads threads. The
    contestants take turns, with fresh bytes in each round, the page cache dropped before each store and each cold load
    where that is permitted, and kept for the two passes of warm loads. Speeds are medians with their range in 10^9
    bytes a second; ratio is each one's speed over that of the first --against, round by round. The benchmark writes
    --total bytes in a namespace of its own and removes them.

    With --step every contestant has 64 MiB under way, half stores, half loads, the tier and vllm-fs behind what an
    engine drives them by, while one thread does 1 ms of Python and asks what has ended, again and again: with a rest of
    1 ms between, and without one. Idle, contestant alone and both together take turns, --rounds times half a second
    each; kept is the share of a contestant's own speed that is left to it.
    """
    tier = as_it_is(TierURL.parse(url))
    _check_together(block_bytes, total, plot_to, step=step, io_process=io_process)
    against = tuple(dict.fromkeys(against))
    contestants = 1 + len(against) + ("client" in against) + io_process
    laps = len(block_bytes) * rounds * contestants * (len(RESTS_S) if step else len(OPERATIONS))
    found = _Found()
    with progress("measuring", laps) as advance:
        for nbytes in block_bytes:
            with ExitStack() as stack:
                with uninterrupted():
                    store = stack.enter_context(TierUnderTest(tier, nbytes, total, own_name))
                    others: list[Contestant] = []
                    if io_process:
                        others.append(stack.enter_context(TierApart(store)))
                    for name in against:
                        others += map(stack.enter_context, _others(tier, name, scratch, nbytes, found.notes))
                told: list[str] = []
                if step:
                    sizes = {"block_bytes": nbytes, "total": total, "threads": threads, "slices": rounds}
                    found.steps += measure_steps([store, *others], **sizes, advance=advance)
                else:
                    load = Workload.of(
                        block_bytes=nbytes, total=total, threads=threads, batch_bytes=store.batch_bytes, rounds=rounds
                    )
                    figures, told = race([store, *others], others[0].name, load, advance, store.operations)
                    found.figures += figures
            found.notes += [*store.notes, *(note for other in others for note in other.notes), *told]
    _tell(tier, against, rounds, found, as_json=as_json)
    if plot_to is not None:
        plot(found.figures, str(tier), plot_to)


def _check_together(
    block_bytes: tuple[int, ...], total: int, plot_to: Path | None, *, step: bool, io_process: bool
) -> None:
    if max(block_bytes) > total:
        raise click.UsageError(f"--block-bytes {max(block_bytes)} is more than --total {total}")
    if step and plot_to is not None:
        raise click.UsageError("--plot draws throughput: leave out --step")
    if io_process and not step:
        raise click.UsageError("--io-process is about a scheduler's step: give it with --step")
    if plot_to is not None:
        check_plotting()


@dataclass(slots=True)
class _Found:
    """What was measured: speeds, or with `--step` a scheduler's steps, and what is to be known of it."""

    figures: list[Figure] = field(default_factory=list["Figure"])
    steps: list[StepFigure] = field(default_factory=list["StepFigure"])
    notes: list[str] = field(default_factory=list[str])


def _tell(tier: TierURL, against: tuple[str, ...], rounds: int, found: _Found, *, as_json: bool) -> None:
    notes = list(dict.fromkeys(found.notes))
    results = {"steps": found.steps} if found.steps else {"results": found.figures}
    if as_json:
        emit_json({"url": str(tier), "against": against, "rounds": rounds, "notes": notes, **results})
        return
    (_show_steps(tier, found.steps) if found.steps else _show(tier, found.figures))
    for note in notes:
        click.echo(f"note: {note}")


def _others(tier: TierURL, against: str, scratch: Path | None, block_bytes: int, notes: list[str]) -> list[Contestant]:
    """What `against` stands for."""
    if against == "client":
        return [BareObstore(tier), BareS3fs(tier)]
    if against == "crc":
        return [ChecksumAlone()]
    if against == "copy":
        return [MemoryCopy(block_bytes)]
    folder = scratch or _beside(tier, notes)
    return [VllmFs(folder) if against == "vllm-fs" else RawFiles(folder, block_bytes)]


def _beside(tier: TierURL, notes: list[str]) -> Path:
    """A folder on the file system of the tier: beside it, or in it where it is a mount of its own."""
    path = Path(tier.location)
    if not path.is_absolute():
        notes.append(f"{tier.scheme}:// has no folder, files that it is compared with are in {tempfile.gettempdir()}")
        return Path(tempfile.gettempdir())
    same = path.parent.stat().st_dev == path.stat().st_dev
    return path.parent if same or not path.is_dir() else path


def _show(tier: TierURL, figures: list[Figure]) -> None:
    print_table(
        str(tier),
        ("operation", "contestant", ">block", ">threads", ">GB/s", ">min", ">max", ">CPU s/GB", ">ratio"),
        (
            (
                figure.op,
                figure.contestant,
                block_size(figure.block_bytes),
                str(figure.threads),
                f"{figure.gb_per_s:.2f}",
                f"{figure.gb_per_s_min:.2f}",
                f"{figure.gb_per_s_max:.2f}",
                f"{figure.cpu_s_per_gb:.3f}",
                f"{figure.ratio:.2f}",
            )
            for figure in figures
        ),
    )


def _show_steps(tier: TierURL, steps: list[StepFigure]) -> None:
    columns = ("contestant", ">block", ">rest ms", ">idle p50", ">p99 ms", ">busy p50", ">p99 ms", ">p99 / idle")
    print_table(
        f"{tier}: a scheduler's step",
        (*columns, ">solo GB/s", ">busy GB/s", ">kept"),
        (
            (
                figure.contestant,
                block_size(figure.block_bytes),
                f"{figure.rest_ms:.0f}",
                f"{figure.idle_p50_ms:.2f}",
                f"{figure.idle_p99_ms:.2f}",
                f"{figure.busy_p50_ms:.2f}",
                f"{figure.busy_p99_ms:.2f}",
                f"{figure.p99_to_idle:.2f}",
                f"{figure.solo_gb_per_s:.2f}",
                f"{figure.busy_gb_per_s:.2f}",
                f"{figure.share_kept:.0%}",
            )
            for figure in steps
        ),
    )
