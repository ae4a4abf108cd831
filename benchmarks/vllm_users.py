"""Eight users ask about one document, through the real engine of vLLM, with too little memory to keep it.

The document is a prefix of 1,400 tokens that all share; each user asks a question of their own, one after another, and
between two of them the engine does other work of 1,700 tokens, which turns over its KV cache and its primary tier. So
every question finds the prefix on the device or nowhere. A second passes before each prompt: the primary tier has room
for one, and where its rows are still on their way to the device, vLLM takes what could be promoted for a miss.
First-token times of the questions, for each contestant in a fresh process:

    python benchmarks/vllm_users.py [--rounds 1] [--json]      in an environment with vLLM (`make demo-vllm` makes one)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

USERS, OTHER_TOKENS, ANSWER_TOKENS = 8, 1_700, 8
PAUSE_S = 1.0
CACHE_BLOCKS, PRIMARY_ROWS = 58, 60  # of 32 tokens: one request fits, two do not
ROW_BYTES = 30 * 2 * 32 * 3 * 64 * 4  # layers, K and V, tokens, heads, numbers of a head, bytes of one
QUESTIONS = (
    "Who is a Contributor?",
    "What is a Derivative Work?",
    "May I sell it?",
    "What do I owe the authors?",
    "What about patents?",
    "Where does my copy of the license go?",
    "What must a modified file say?",
    "Who gives a warranty?",
)


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds to the first token over all questions; `cached_tokens`: the fewest that any question found."""

    name: str
    questions: int
    p50_s: float
    p90_s: float
    worst_s: float
    cached_tokens: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, also where there is no vLLM and nothing is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="questions per user")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if importlib.util.find_spec("vllm") is None:
        print("vllm_users: skipped, no vLLM in this environment; make demo-vllm has it", file=sys.stderr)
        return 0
    results = measure(given.rounds)
    if given.json:
        json.dump([asdict(result) for result in results], sys.stdout, indent=2)
        return 0
    print(f"{'':16}{'p50':>9}{'p90':>9}{'worst':>9}   first token of {results[0].questions} questions")
    for one in results:
        times = "".join(f"{seconds:7.3f} s" for seconds in (one.p50_s, one.p90_s, one.worst_s))
        print(f"{one.name:16}{times}   at least {one.cached_tokens} tokens known")
    return 0


def measure(rounds: int) -> list[Result]:
    """All contestants, one process after another."""
    from kvstore.demo.model import model_folder
    from kvstore.vllm.demo.engine import answers
    from kvstore.vllm.demo.run import prompts_about
    from kvstore.vllm.demo.tiers import CONTESTANTS, tiers_in

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    model = model_folder(say)
    asked = prompts_about(model, QUESTIONS) * rounds
    prompts = [prompt for number, question in enumerate(asked) for prompt in (other_work(number), question)]
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="kvstore-users-") as scratch:
        for number, name in enumerate(CONTESTANTS):
            folder = Path(scratch, str(number))
            folder.mkdir()
            say(name)
            found = answers(
                model,
                [asked[0], *prompts],
                tiers_in(folder, name),
                Path(scratch),
                say,
                new_tokens=ANSWER_TOKENS,
                pause_s=PAUSE_S,
                primary_bytes=PRIMARY_ROWS * ROW_BYTES,
                engine={"num_gpu_blocks_override": CACHE_BLOCKS, "max_model_len": 1_792},
            )
            results.append(summary(name, found[2::2]))
    return results


def other_work(number: int) -> list[int]:
    """A prompt like no other."""
    choose = random.Random(number)
    return [choose.randrange(100, 40_000) for _ in range(OTHER_TOKENS)]


def summary(name: str, found: Sequence[dict[str, float]]) -> Result:
    """Of the questions alone."""
    times = sorted(answer["ttft_s"] for answer in found)
    return Result(
        name=name,
        questions=len(times),
        p50_s=times[len(times) // 2],
        p90_s=times[(len(times) * 9) // 10],
        worst_s=times[-1],
        cached_tokens=int(min(answer["cached_tokens"] for answer in found)),
    )


if __name__ == "__main__":
    sys.exit(main())
