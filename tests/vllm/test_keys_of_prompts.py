"""Keys derived from tokens alone are those that vLLM's own functions give a request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import vllm.v1.core.kv_cache_utils as utils
from engines import BLOCK_TOKENS, make_model, namespace_of_engine
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import Request

from kvstore import Namespace
from kvstore.errors import ConfigurationError
from kvstore.vllm._compat import hash_seed, salt_form
from kvstore.vllm.keys import block_keys, seed_digest
from kvstore.vllm.lookups import block_key

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.types import BlockKey

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
PROMPT = [0, 23, 24, 255, 256, 65_535, 65_536, 151_643, *range(1_000, 1_130)]
STEP = 16


def namespace(algorithm: str = "sha256", **extra: str) -> Namespace:
    """As an engine with two KV-cache groups has it: blocks of 32 and 64 tokens, hashes of 16."""
    function = get_hash_fn_by_name(algorithm)
    groups = [{"id": 0, "tokens_per_block": 32}, {"id": 1, "tokens_per_block": 64}]
    manifest = {
        "model": "m",
        "revision": "r",
        "layouts": [{"dtype": "uint8", "axes": ["byte"], "shape": [4096]}] * 2,
        "block_tokens": 32,
        "key_scheme": f"vllm-{algorithm}",
        "digest_bytes": len(function(b"")),
        "extra": {
            "engine": "vllm",
            "tokens_per_hash": str(STEP),
            "blocks_per_chunk": "1",
            "groups": json.dumps(groups),
            "hash_seed": str(seed_digest(seed) if (seed := hash_seed(function)) else None),
            "salts": salt_form(),
            **extra,
        },
    }
    return Namespace.from_manifest(manifest)


def vllm_keys(
    algorithm: str, prompt: list[int], salt: str | None, tokens: tuple[int, ...] = (32, 64), step: int = STEP
) -> list[BlockKey]:
    """By end and group, as the connector's scheduler makes them from a request's hashes."""
    function = get_hash_fn_by_name(algorithm)
    utils.init_none_hash(function)
    hasher = utils.get_request_block_hasher(step, function)
    request = Request("r", prompt, SamplingParams(max_tokens=1), None, cache_salt=salt, block_hasher=hasher)
    found = [
        (end, group, make_offload_key(request.block_hashes[end // step - 1], group))
        for group, each in enumerate(tokens)
        for end in range(each, len(prompt) + 1, each)
    ]
    return [block_key(key) for _, _, key in sorted(found)]


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "77")


def installed(algorithm: str) -> None:
    if algorithm.startswith("xxhash"):
        pytest.importorskip("xxhash")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("salt", [None, "", "acme-5f0c", "ß" * 300])
def test_they_are_those_of_vllm(algorithm: str, salt: str | None) -> None:
    installed(algorithm)
    expected = vllm_keys(algorithm, PROMPT, salt)
    assert [key.group for key in expected] == [0, 0, 1, 0, 0, 1]
    assert block_keys(namespace(algorithm), PROMPT, salt=salt) == expected


def test_blocks_of_several_to_a_row_are_named_by_their_last_hash() -> None:
    expected = vllm_keys("sha256", PROMPT, None, (64, 128))
    assert block_keys(namespace(blocks_per_chunk="2"), PROMPT) == expected


def test_the_seed_that_vllm_takes_by_itself_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED")
    space = namespace()
    if space.extra["hash_seed"] == "None":  # up to 0.28
        with pytest.raises(ConfigurationError, match=r"random in each process.*--label"):
            block_keys(space, PROMPT)
    else:
        assert block_keys(space, PROMPT) == vllm_keys("sha256", PROMPT, None)


def test_a_seed_of_this_process_or_given_or_small_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "3000000000")
    far, expected = namespace(), vllm_keys("sha256", PROMPT, None)
    assert block_keys(far, PROMPT) == expected
    monkeypatch.delenv("PYTHONHASHSEED")
    assert block_keys(far, PROMPT, seed="3000000000") == expected
    with pytest.raises(ConfigurationError, match="run this with the PYTHONHASHSEED that the engines have"):
        block_keys(far, PROMPT)
    with pytest.raises(ConfigurationError, match="another PYTHONHASHSEED than '1'"):
        block_keys(far, PROMPT, seed="1")


def test_the_identity_of_an_engine_says_all_that_is_needed(tmp_path: Path) -> None:
    space = namespace_of_engine(make_model(tmp_path / "model"))
    assert space.extra["tokens_per_hash"] == str(BLOCK_TOKENS)
    assert block_keys(space, PROMPT, salt="acme") == vllm_keys("sha256", PROMPT, "acme", (BLOCK_TOKENS,), BLOCK_TOKENS)


REFUSED = {
    "an unknown hash": ({"key_scheme": "vllm-md5"}, {}, "'md5', which this kvstore does not know"),
    "a hash that nobody saw": ({"key_scheme": "vllm-unknown"}, {}, "did not load kvstore's plugin"),
    "no vLLM": ({"key_scheme": "kvstore-sha256-1"}, {}, "no vLLM wrote it"),
    "a random seed": ({}, {"hash_seed": "None"}, "random in each process"),
    "no groups": ({}, {"groups": "none"}, "how blocks are cut"),
    "no step": ({}, {"tokens_per_hash": "no"}, "tokens_per_hash='no'"),
    "steps that blocks do not have": ({}, {"tokens_per_hash": "48"}, "no multiple of 48"),
    "a salt of an unknown form": ({}, {"salts": "as vLLM 9.0 does"}, "how vLLM hashes a salt"),
}


@pytest.mark.parametrize(("fields", "extra", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_derived_says_why_and_names_the_other_way(
    fields: dict[str, str], extra: dict[str, str], message: str
) -> None:
    space = Namespace.from_manifest(namespace(**extra).to_manifest() | fields)
    with pytest.raises(ConfigurationError, match=f"{message}.*--label"):
        block_keys(space, PROMPT, salt="acme")


@pytest.mark.parametrize("tokens", [[-1], [1.5], ["a"]])
def test_what_are_no_token_ids_is_an_error(tokens: list[Any]) -> None:
    with pytest.raises(ValueError, match="token id"):
        block_keys(namespace(), tokens * STEP)
