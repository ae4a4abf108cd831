"""One process with vLLM's real engine in it: it answers prompts one after another and says how long each took.

    python -P -m kvstore.vllm.demo.engine < job.json      (see `serve` for what a job holds)

The engine's core runs in a process of its own, as in `vllm serve`; or in this one (`in_process`), which starts sooner
and shows what goes wrong in it, but is of no use for times: while a request waits for its blocks, the core then spins
through empty steps in Python, where a server sleeps for a millisecond, and every thread waits for the GIL.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from kvstore.demo import stock
from kvstore.demo.worker import run_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["BLOCK_TOKENS", "answers", "serve"]

BLOCK_TOKENS = 32
"""The least that vLLM's attention on a CPU takes."""
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # Left alone, an engine with a connector sets aside another number of CPUs than one without: twice the speed on two.
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
WARM_UP_TOKENS = BLOCK_TOKENS - 1
"""Too few for a block, so that nothing of them is stored."""


def answers(
    model: Path,
    prompts: Sequence[Sequence[int]],
    tiers: list[dict[str, Any]] | None,
    folder: Path,
    say: Callable[[str], None],
    *,
    command: Sequence[str] = ("-m", "kvstore.vllm.demo.engine"),
    **more: Any,
) -> list[dict[str, Any]]:
    """What a fresh process makes of the prompts: for each, `ttft_s`, `cached_tokens` and `tokens`.

    `more` is what else the job holds. Raises `WorkerFailed`.
    """
    job = {"model": str(model), "prompts": prompts, "tiers": tiers, **more}
    found: list[dict[str, Any]] = run_worker(command, job, folder, say)["answers"]
    return found


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Answer every prompt, greedily.

    The job: `model` (a folder), `prompts` (token ids), `tiers` (what stands in `secondary_tiers`, or None); optional:
    `new_tokens` (64), `primary_bytes` (256 MiB), `pause_s` (0, before each prompt), `params` (what requests say to the
    tiers, `kv_transfer_params`), `in_process` (false), `engine` (more arguments of `LLM`).
    """
    in_process = job.get("in_process", False)
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING=str(int(not in_process)))
    vllm: Any = importlib.import_module("vllm")
    start = time.perf_counter()
    engine = vllm.LLM(**_arguments(job))
    stock.say(f"engine started in {time.perf_counter() - start:.1f} s")
    _answer(vllm, engine, [1] * WARM_UP_TOKENS, {"max_tokens": 2})
    asked: dict[str, Any] = {"max_tokens": job.get("new_tokens", 64)}
    if params := job.get("params"):
        asked["extra_args"] = {"kv_transfer_params": params}
    found: list[dict[str, Any]] = []
    for prompt in job["prompts"]:
        time.sleep(job.get("pause_s", 0))
        found.append(_answer(vllm, engine, prompt, asked))
        stock.say(
            f"{len(prompt)} tokens, {found[-1]['cached_tokens']} of them known,"
            f" first one after {found[-1]['ttft_s']:.3f} s"
        )
    engine.llm_engine.engine_core.shutdown()
    return {"answers": found}


def _arguments(job: dict[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": job["model"],
        # In bfloat16, where a prompt is cut into forwards moves the last bits of its KV, and with them some tokens.
        "dtype": "float32",
        "max_model_len": 4096,
        "block_size": BLOCK_TOKENS,
        "enforce_eager": True,
        "seed": 0,
        "disable_log_stats": False,  # else nobody measures the time to the first token
        **job.get("engine", {}),
    }
    if job["tiers"] is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CPUTieringSpec",
                "spec_module_path": "kvstore.vllm.cpu",
                "cpu_bytes_to_use": job.get("primary_bytes", 256 << 20),
                "secondary_tiers": job["tiers"],
            },
        }
    return arguments


def _answer(vllm: Any, engine: Any, prompt: list[int], asked: dict[str, Any]) -> dict[str, Any]:
    sampling = vllm.SamplingParams(temperature=0, ignore_eos=True, **asked)
    (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    return {
        "ttft_s": output.metrics.first_token_latency,
        "cached_tokens": output.num_cached_tokens,
        "tokens": list(output.outputs[0].token_ids),
        "text": output.outputs[0].text,
    }


if __name__ == "__main__":
    stock.main(serve)
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads may take seconds to end, and the result is written
