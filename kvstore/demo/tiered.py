"""The processes that use kvstore: one fills the tiers, the others answer from one of them.

    python -P -m kvstore.demo.tiered fill < job.json         (or `answer`)

A job is that of `stock.cold`, with `prompts` (token ids), `expected` (what the cold process found) and `urls`.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from kvstore.demo import stock
from kvstore.demo.disk import drop_page_cache
from kvstore.hf import PrefixCache


def fill(job: dict[str, Any]) -> dict[str, Any]:
    """Read every prompt and store its blocks in every tier at once."""
    model = stock.load_model(job)
    hits: list[int] = []
    digests: list[list[str]] = []
    with PrefixCache(model, job["urls"], block_tokens=job["block_tokens"], name=job["name"]) as cache:
        for prompt in job["prompts"]:
            start = time.perf_counter()
            read = cache.prefill(prompt)
            seconds = time.perf_counter() - start
            kept = cache.store(prompt, read.cache, start=read.hit_tokens)
            stock.say(f"{len(prompt)} tokens, {read.hit_tokens} of them known, {seconds:.2f} s; {kept} blocks stored")
            hits.append(read.hit_tokens)
            digests.append(stock.block_digests(read.cache, job["block_tokens"], len(prompt)))
        if not cache.drain():
            raise SystemExit("the tiers did not take the blocks within a minute")
        tiers = cache.manager.stats().tiers
        lost = {tier.url: tier.full + tier.shed + tier.failed_stores for tier in tiers}
        return {"hits": hits, "digests": digests, "namespace": cache.namespace.to_manifest(), "lost": lost}


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Answer every prompt from the tier: each time opened anew, its files dropped from the page cache before."""
    model = stock.load_model(job)
    questions = [_answer(job, model, prompt) for prompt in job["prompts"]]
    for number, question in enumerate(questions, start=1):
        stock.say(
            f"question {number}: {question['hit_tokens']} tokens loaded, first one after {question['ttft_s']:.3f} s"
        )
    result: dict[str, Any] = {
        "questions": questions,
        "threads": torch.get_num_threads(),
        "compared_with": "stock forwards",
        **_compare(questions, job["expected"]),
    }
    if not (result["tokens_equal"] and result["kv_equal"]):
        stock.say("not equal to stock forwards: comparing with the same split without a store")
        splits = zip(job["prompts"], job["filled_from"], questions, strict=True)
        job["splits"] = [
            {"prompt": prompt, "filled_from": filled, "answered_from": question["hit_tokens"]}
            for prompt, filled, question in splits
        ]
        result |= {"compared_with": "the same split without a store"}
        result |= _compare(questions, stock.same_split(model, job))
    return result


def _answer(job: dict[str, Any], model: Any, prompt: list[int]) -> dict[str, Any]:
    dropped = drop_page_cache(job["urls"][0])
    with PrefixCache(model, job["urls"], block_tokens=job["block_tokens"], name=job["name"]) as cache:
        start = time.perf_counter()
        read = cache.prefill(prompt)
        first = int(read.logits.argmax())
        seconds = time.perf_counter() - start
        digests = stock.block_digests(read.cache, job["block_tokens"], read.hit_tokens)
        cache.store(prompt, read.cache, start=read.hit_tokens)
        tokens = stock.decode(model, first, read.cache, job["new_tokens"])
        cache.drain()
        corrupt = sum(tier.corrupt for tier in cache.manager.stats().tiers)
    return {
        "ttft_s": seconds,
        "hit_tokens": read.hit_tokens,
        "tokens": tokens,
        "digests": digests,
        "corrupt": corrupt,
        "page_cache": dropped,
    }


def _compare(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> dict[str, bool]:
    pairs = list(zip(found, expected, strict=True))
    return {
        "tokens_equal": all(one["tokens"] == other["tokens"] for one, other in pairs),
        "kv_equal": all(one["digests"] == other["digests"][: len(one["digests"])] for one, other in pairs),
    }


if __name__ == "__main__":
    stock.main({"fill": fill, "answer": answer}[sys.argv[1]])
