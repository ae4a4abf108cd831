"""One process reads prompts, another answers them, and all they share is a place: no prefix is computed twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch", reason="pip install torch 'transformers>=5'")
pytest.importorskip("transformers", reason="pip install torch 'transformers>=5'")

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 16
PROMPTS = [[(7 * i * i + i + start) % 256 for i in range(length)] for start, length in ((0, 200), (1, 161), (2, 40))]

ROLE = """
import json, sys
import torch, transformers
from kvstore.hf import PrefixCache

role, urls, prompts = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.2,
)
model = transformers.LlamaForCausalLM(config).eval()
computed = []
model.model.register_forward_pre_hook(
    lambda module, args, words: computed.append(words["input_ids"].shape[1]), with_kwargs=True
)
found = {}
for url in urls:
    with PrefixCache(model, url) as cache:
        found[url] = []
        for prompt in prompts:
            computed.clear()
            read = cache.prefill(prompt)
            if role == "prefill":
                cache.store(prompt, read.cache)
            token = int(read.logits.argmax())
            rows = [layer.keys.sum().item() for layer in read.cache.layers]
            found[url].append({"computed": sum(computed), "hits": read.hit_tokens, "token": token, "rows": rows})
        assert cache.drain()
print(json.dumps(found))
"""


def process(role: str, urls: list[str]) -> dict[str, list[dict[str, float]]]:
    """What a process of that role found: per place and prompt, the tokens that the model was given."""
    done = subprocess.run(
        [sys.executable, "-c", ROLE, role, json.dumps(urls), json.dumps(PROMPTS)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_what_one_process_prefilled_another_decodes_without_computing_any_of_it(place: str, tmp_path: Path) -> None:
    urls = [place, f"file://{tmp_path}/shared?remote=true"]
    first, second = process("prefill", urls), process("decode", urls)
    for url in urls:
        for prompt, one, other in zip(PROMPTS, first[url], second[url], strict=True):
            whole_blocks = (len(prompt) - 1) // BLOCK * BLOCK  # the last token owes its logits
            assert (one["computed"], one["hits"]) == (len(prompt), 0)
            assert (other["computed"], other["hits"]) == (len(prompt) - whole_blocks, whole_blocks)
            assert (other["token"], other["rows"]) == (one["token"], pytest.approx(one["rows"], rel=1e-4))
