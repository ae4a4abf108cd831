"""What transformers does by itself: the cold process, run as a script that imports nothing of kvstore.

    python -P stock.py < job.json      (see `cold` for what a job holds)

The other processes use its parts, so that both sides of every comparison run the same code.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

WARM_UP_TOKENS = 32


def main(task: Any) -> None:
    """Run `task(job)` with the job from stdin; its result goes to the file that the job names."""
    job = json.load(sys.stdin)
    Path(job["result"]).write_text(json.dumps(task(job)), encoding="utf-8")


def say(text: str) -> None:
    """A line of progress, which the parent shows."""
    print(text, flush=True)


def cold(job: dict[str, Any]) -> dict[str, Any]:
    """Answer every question with one stock forward over its whole prompt.

    The job: `model` (a folder or hub id), `gguf` (a file in it, or None), `dtype`, `save_to` (where the weights are
    left for the next processes, if they came from a GGUF file), `document` (a path), `questions`, `new_tokens`,
    `block_tokens`.
    """
    model = load_model(job)
    prompts, tokenizer = read_prompts(job, model)
    questions: list[dict[str, Any]] = []
    for number, prompt in enumerate(prompts, start=1):
        cache = DynamicCache(config=model.config)
        start = time.perf_counter()
        logits = forward(model, prompt, cache)
        first = int(logits.argmax())
        seconds = time.perf_counter() - start
        say(f"question {number}: {len(prompt)} tokens, first one after {seconds:.2f} s")
        digests = block_digests(cache, job["block_tokens"], len(prompt))
        tokens = decode(model, first, cache, job["new_tokens"])
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        questions.append({"prompt": prompt, "ttft_s": seconds, "tokens": tokens, "digests": digests, "answer": text})
    return {
        "questions": questions,
        "threads": torch.get_num_threads(),
        "kvstore_loaded": any(name.partition(".")[0].startswith("kvstore") for name in sys.modules),
    }


def load_model(job: dict[str, Any]) -> Any:
    """The model, warmed up: its weights have been touched and torch's threads started."""
    start = time.perf_counter()
    options: dict[str, Any] = {"dtype": getattr(torch, job["dtype"])}
    if job["gguf"]:
        options |= {"gguf_file": job["gguf"], **_dequantized()}
    try:
        model = cast("Any", AutoModelForCausalLM).from_pretrained(job["model"], **options).eval()
    except (OSError, ValueError, ImportError) as error:  # not there, no network, no causal model, a package missing
        raise SystemExit(f"{job['model']} cannot be loaded: {error}") from None
    if job["gguf"]:
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(job["save_to"])
    forward(model, [1] * WARM_UP_TOKENS, DynamicCache(config=model.config))
    say(f"model loaded in {time.perf_counter() - start:.1f} s")
    return model


def _dequantized() -> dict[str, Any]:
    """Newer versions of transformers keep a GGUF's weights quantised unless told otherwise."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def read_prompts(job: dict[str, Any], model: Any) -> tuple[list[list[int]], Any]:
    """The document followed by each question, as token ids; and the tokenizer."""
    options = {"gguf_file": job["gguf"]} if job["gguf"] else {}
    tokenizer = cast("Any", AutoTokenizer).from_pretrained(job["model"], **options)
    document = Path(job["document"]).read_text(encoding="utf-8")
    prompts = [_prompt(tokenizer, document, question) for question in job["questions"]]
    room = getattr(model.config, "max_position_embeddings", None)
    longest = max(map(len, prompts)) + job["new_tokens"]
    if room is not None and longest > room:
        raise SystemExit(f"the model takes {room} tokens, the document with question and answer has {longest}")
    return prompts, tokenizer


def _prompt(tokenizer: Any, document: str, question: str) -> list[int]:
    if tokenizer.chat_template:
        message = {"role": "user", "content": f"{document}\n\n{question}"}
        encoded = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=True)
    else:
        encoded = tokenizer(f"{document}\n\nQuestion: {question}\nAnswer:")
    return list(encoded["input_ids"])


@torch.inference_mode()
def forward(model: Any, tokens: list[int], cache: DynamicCache) -> torch.Tensor:
    """Extend `cache` by `tokens`; the logits of the last one."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    prompt = torch.tensor([tokens], device=model.device)
    logits: torch.Tensor = model(prompt, use_cache=True, logits_to_keep=1, **{name: cache}).logits[0, -1]
    return logits


def decode(model: Any, first: int, cache: DynamicCache, count: int) -> list[int]:
    """`count` tokens, greedily, the first of which is given."""
    tokens = [first]
    while len(tokens) < count:
        tokens.append(int(forward(model, tokens[-1:], cache).argmax()))
    return tokens


def block_digests(cache: Any, block_tokens: int, tokens: int) -> list[str]:
    """SHA-256 of the KV of every whole block among the first `tokens`, as (layer, kv, token, head, dim)."""
    pairs = [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]
    kv = torch.stack(pairs).transpose(2, 3).cpu()
    blocks = [kv[:, :, start : start + block_tokens] for start in range(0, tokens - block_tokens + 1, block_tokens)]
    return [hashlib.sha256(block.contiguous().view(torch.uint8).numpy().data).hexdigest() for block in blocks]


def same_split(model: Any, job: dict[str, Any]) -> list[dict[str, Any]]:
    """The same work as through a tier, in the same pieces, without one.

    Where a prompt is cut moves the last bits of what a model computes in bfloat16, so there this is the fair
    comparison. `job["splits"]` has, per prompt, `prompt`, `filled_from` (tokens that came from earlier prompts when it
    was stored) and `answered_from` (tokens that came from the tier when it was answered).
    """
    done: list[tuple[list[int], DynamicCache]] = []
    results: list[dict[str, Any]] = []
    for split in job["splits"]:
        prompt, shared = split["prompt"], split["filled_from"]
        donor = next((cache for earlier, cache in done if earlier[:shared] == prompt[:shared]), None)
        stored = _prefix(model, donor, shared) if donor and shared else DynamicCache(config=model.config)
        forward(model, prompt[stored.get_seq_length() :], stored)
        done.append((prompt, stored))
        cache = _prefix(model, stored, split["answered_from"])
        digests = block_digests(cache, job["block_tokens"], split["answered_from"])
        first = int(forward(model, prompt[split["answered_from"] :], cache).argmax())
        results.append({"digests": digests, "tokens": decode(model, first, cache, job["new_tokens"])})
    return results


def _prefix(model: Any, cache: Any, tokens: int) -> DynamicCache:
    """A copy of the first `tokens` of a cache."""
    copy = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers if tokens else ()):
        cast("Any", copy).update(layer.keys[:, :, :tokens], layer.values[:, :, :tokens], index)
    return copy


if __name__ == "__main__":
    main(cold)
